"""In which ranges the rows of a scan are that pass its own tests: of others no slice is needed.

A table to which rows are added day by day has those of a week in few of its row groups. Cut evenly, one task would
have them all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from itertools import accumulate, pairwise
from typing import NamedTuple

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native.catalyst import Node
from ebbflow.infra.spark.native.narrowing import RANGED, attribute_of, columns
from ebbflow.infra.spark.native.objects import Rows
from ebbflow.infra.spark.native.slices import KeyBounds
from ebbflow.infra.spark.native.types import TIMES
from ebbflow.infra.spark.native.worker import told
from ebbflow.infra.tables.filefooters import Bounds, read_footers

Value = int | date | datetime
_LARGE, _SMALL = 256 << 20, 16 << 20  # bytes of relations of which one is read to cut the other
_NARROW = 0.3  # of all values of a key, those that a row group has
_RUNS = 200  # of row groups that follow each other, each of which a task's statement names
_TURNED = {
    "LessThan": "GreaterThan",
    "LessThanOrEqual": "GreaterThanOrEqual",
    "GreaterThan": "LessThan",
    "GreaterThanOrEqual": "LessThanOrEqual",
}  # comparisons, and what they are from the other side


class Within(NamedTuple):
    """Values of a column outside of which no row is needed; ``None``: there is no bound."""

    column: str
    low: Value | None
    high: Value | None

    def allows(self, bounds: Bounds) -> bool:
        """Tell whether a row group with these bounds may have a row that is needed."""
        kinds = {_kind(bounds.low), _kind(bounds.high)}
        if self.low is not None and kinds == {_kind(self.low)} and bounds.high < self.low:
            return False
        return not (self.high is not None and kinds == {_kind(self.high)} and bounds.low > self.high)


class Learnable(NamedTuple):
    """What gives the least and the greatest value of a column that rows can have which joins leave."""

    column: str
    scan: int  # of a small relation that has passed its own tests
    sql: str  # over that scan


def learned(
    relation: Relation, some: Callable[[], Sequence[Learnable]], scans: Mapping[int, Relation]
) -> tuple[Within, ...]:
    """Return what small relations of a join tell of a large one whose row groups have few values of a key each, as of
    a table to which days are added: they are read for that.

    Raises ``TableError``.
    """
    found = list[Within]()
    for one in some() if relation.bytes >= _LARGE else ():
        small = scans.get(one.scan)
        if small is not None and small.bytes <= _SMALL and KeyBounds(relation, one.column).width() <= _NARROW:
            values = told(one.sql, replace(small, name=f"s{one.scan}"))
            if len(values) == 2 and None not in values:
                found.append(Within(one.column, *values))
    return tuple(found)


def _kind(value: object) -> tuple[type, bool]:
    """Return what values must have in common to be compared."""
    return type(value), isinstance(value, datetime) and value.tzinfo is not None


def within(tests: Sequence[Node], scan: Node) -> tuple[Within, ...]:
    """Return what tests that each needed row of a scan passes say of its columns' values."""
    names = {one.id: one.name for one in columns(scan) if one.type in (*RANGED, *TIMES)}
    return tuple(
        Within(names[column], low, high)
        for test in tests
        for column, low, high in _ranges(test)
        if column in names
    )


def _ranges(test: Node, common: Node | None = None) -> Iterator[tuple[int, Value | None, Value | None]]:
    """Iterate over the columns that a test compares with constants: id, the least and the greatest value. ``common``
    is what a reference to a common expression means."""
    kind = test.kind
    if kind in ("And", "Between"):  # which is two comparisons
        for child in test.children:
            yield from _ranges(child, common)
    elif kind == "With" and len(test.children) == 2:
        yield from _ranges(test.children[0], test.children[1].children[0])
    elif kind == "In":
        column, values = attribute_of(test.children[0]), [_constant(one) for one in test.children[1:]]
        known = [value for value in values if value is not None]
        if column is not None and known and len(known) == len(values) and len({*map(type, known)}) == 1:
            yield column, min(known), max(known)
    elif kind == "EqualTo" or kind in _TURNED:
        for (side, other), sign in ((test.children, kind), (test.children[::-1], _TURNED.get(kind, kind))):
            one = common if side.kind == "CommonExpressionRef" else side
            column, value = attribute_of(one) if one is not None else None, _constant(other)
            if column is not None and value is not None:
                low = None if sign.startswith("Less") else _next(value, 1 if sign == "GreaterThan" else 0)
                high = None if sign.startswith("Greater") else _next(value, -1 if sign == "LessThan" else 0)
                yield column, low, high


def _next(value: Value, by: int) -> Value | None:
    if isinstance(value, int):
        return value + by
    try:
        return value + (timedelta(microseconds=by) if isinstance(value, datetime) else timedelta(by))
    except OverflowError:
        return None


def _constant(node: Node) -> Value | None:
    """Return the value of a constant that is a whole number, a day or a time; ``None``: it is none."""
    kind = str(node.fields.get("dataType"))
    if node.kind == "Cast" and kind in ("long", "date", *TIMES):
        (node,) = node.children
        if node.kind != "Literal" or node.fields["dataType"] not in ("integer", "string", "date"):
            return None
    text = str(node.fields.get("value"))
    if node.kind != "Literal":
        return None
    try:
        if kind in ("integer", "long"):
            return int(text)
        if kind == "date":
            return date.fromisoformat(text)
        if kind in TIMES:
            shown = (
                datetime.fromtimestamp(0, UTC) + timedelta(microseconds=int(text)) if text.isdigit() else None
            )
            shown = shown or datetime.fromisoformat(text)
            return shown.replace(tzinfo=UTC if kind == "timestamp" else None)
    except (ValueError, OverflowError):
        pass
    return None


def needed(relation: Relation, tests: Sequence[Within]) -> list[tuple[Rows, int]] | None:
    """Return the row groups of a relation's files that may have rows which pass, with their numbers of rows; ``None``
    where footers exclude none.

    Raises ``TableError``.
    """
    given = {name.lower() for name in relation.partitions}
    by_number = relation.log is not None and relation.log.ids  # a column may have another one's old name
    asked = [one for one in tests if one.column.lower() not in given]
    if not asked or by_number:
        return None
    footers = read_footers(relation, [relation.stored(one.column) for one in asked])
    kept, total = list[tuple[Rows, int]](), 0
    for file, footer in zip(relation.files, footers, strict=True):
        bounds = [(one, footer.bounds.get(relation.stored(one.column), ())) for one in asked]
        for number, (first, rows) in enumerate(
            zip(accumulate(footer.rows, initial=0), footer.rows, strict=False)
        ):
            total += rows > 0
            if rows and all(number >= len(some) or one.allows(some[number]) for one, some in bounds):
                kept.append((Rows(file.path, first, first + rows - 1), rows))
    runs = sum(one.first != before.last + 1 for (before, _), (one, _) in pairwise(kept))
    return kept if len(kept) < total and runs < _RUNS else None
