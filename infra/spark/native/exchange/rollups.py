"""Sets of groups of the same rows, as ROLLUP and CUBE have them: coarser groups are computed of finer ones.

(J. Gray et al., Data Cube: A Relational Aggregation Operator Generalizing Group-By, Cross-Tab, and Sub-Totals,
ICDE 1996.)
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ebbflow.infra.spark.native.aggregates import Groups
from ebbflow.infra.spark.native.catalyst import Attribute, Node
from ebbflow.infra.spark.native.expressions import cast

_MOST = 64  # sets of one statement: DuckDB plans each, and of twice as many for three times as long


class _Set(NamedTuple):
    """A set of groups."""

    number: int
    keys: frozenset[int]  # positions of the columns that it is grouped by
    fixed: tuple[tuple[int, str], ...]  # of the others the positions and values


@dataclass(frozen=True)
class Sets:
    """The rows that an operator makes of each one, a row for every set that it is grouped by."""

    columns: tuple[Attribute, ...]
    rows: Sequence[Sequence[Node]]  # by set, a value for each column...
    texts: Sequence[Sequence[str]]  # ...and the same as SQL

    def every(self, source: str) -> str:
        """Return a query of all rows."""
        listed = []
        for column, *values in zip(self.columns, *self.texts, strict=True):
            null = cast("NULL", column.type)
            cases = " ".join(f"WHEN {n} THEN {value}" for n, value in enumerate(values))
            value = values[0] if len({*values}) == 1 else f"CASE e {cases} ELSE {null} END"
            listed.append(f"{value} AS {column.column}")
        return f"SELECT {', '.join(listed)} FROM {source} CROSS JOIN (SELECT unnest(range({len(self.rows)})) AS e)"

    def rolled_up(self, groups: Groups, source: str) -> str | None:
        """Return the groups of a slice, those of each set computed of the fewest groups that tell them; ``None``: no
        set has all keys, or calls are not of parts that add up alike in any order."""
        places = {column.column: place for place, column in enumerate(self.columns)}
        if not groups.calls.adds_up or not groups.keys.keys() <= places.keys():
            return None
        keys = {places[text]: key.sql for text, key in groups.keys.items()}
        called = self._read((*groups.calls.parts, *groups.calls.values))
        sets = self._sets(keys.keys()) if len(self.rows) <= _MOST else []
        # what calls read of a row must be alike in all sets; they may read which set it is of
        if not sets or any(place in keys or len({row[place] for row in self.texts}) > 1 for place in called):
            return None
        finest = self.texts[sets[0].number]
        rows = ", ".join(
            f"{finest[n]} AS {c.column}" for n, c in enumerate(self.columns) if n in {*keys, *called}
        )
        named, before = list[str](), list[tuple[str, _Set]]()
        for number, one in enumerate(sets):
            parent = next((name for name, other in reversed(before) if one.keys <= other.keys), "")
            fixed = {keys[place]: value for place, value in one.fixed}
            sql = groups.coarser(parent, fixed) if parent else groups.sliced(f"(SELECT {rows} FROM {source})")
            before.append((f"r{number}", one))
            named.append(f"r{number} AS MATERIALIZED {sql}")
        every = " UNION ALL ".join(f"SELECT * FROM {name}" for name, _ in before)
        return f"(SELECT * FROM (WITH {', '.join(named)} {every}))"

    def _read(self, texts: Sequence[str]) -> set[int]:
        """Return the positions of the columns that texts name."""
        names = {name for text in texts for name in re.findall(r"\bc\d+\b", text)}
        return {place for place, column in enumerate(self.columns) if column.column in names}

    def _sets(self, keys: Collection[int]) -> list[_Set]:
        """Return the sets, finer ones first; none where the first has not all keys, or groups of several sets might
        be taken for one."""
        found = list[_Set]()
        for number, row in enumerate(self.rows):
            fixed = {place for place in keys if row[place].kind == "Literal"}
            values = tuple((place, self._value(number, place)) for place in sorted(fixed))
            found.append(_Set(number, frozenset(keys) - fixed, values))
        found.sort(key=lambda one: -len(one.keys))
        finest = found[0]
        for one in found:
            if any(self.texts[one.number][place] != self.texts[finest.number][place] for place in one.keys):
                return []
        every = dict(finest.fixed)
        told = {tuple(value for place, value in one.fixed if place in every) for one in found}
        return found if all(one.keys <= finest.keys for one in found) and len(told) == len(found) else []

    def _value(self, number: int, place: int) -> str:
        null = self.rows[number][place].fields["value"] is None
        return cast("NULL" if null else self.texts[number][place], self.columns[place].type)
