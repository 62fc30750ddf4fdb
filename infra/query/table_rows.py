"""Which rows a table gets of a result, as statements of engines, and which of its files they take the place of."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal
from urllib.parse import quote

from ebbflow.infra.errors import TableError
from ebbflow.infra.protocols import Arm, FileLayout, Relation
from ebbflow.infra.query.duckdbtypes import to_duckdb
from ebbflow.infra.storage import files
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import filefooters, partitions
from ebbflow.infra.tables.filefooters import Bounds
from ebbflow.infra.tables.logs import snapshots
from ebbflow.infra.tables.targets.model import DataFile, TableTarget, TargetState, check_keys

IntoMode = Literal["create", "append", "overwrite", "overwrite-partitions", "merge"]
_TARGET = "ebbflow_target"  # the table's files in a statement
COUNTED = "ebbflow_rows"
_KEY = "ebbflow_key_"  # columns whose directories files are divided into
_WHOLE = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}  # digits
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


@dataclass(frozen=True)
class Shape:
    """How a table's files look."""

    columns: tuple[tuple[str, str], ...]  # (name, Spark SQL type); of directories without types ``""``
    partitions: tuple[str, ...]
    ids: tuple[tuple[str, int], ...]
    keeps_keys: bool

    @cached_property
    def layout(self) -> FileLayout:
        """Return what a job needs to know of it."""
        stored = {name for name, _ in self.stored}
        return FileLayout(
            tuple(f"{_KEY}{number}" for number in range(len(self.partitions))),
            tuple((name, number) for name, number in self.ids if name in stored),
        )

    @property
    def stored(self) -> tuple[tuple[str, str], ...]:
        """Return the columns that files have."""
        return tuple(one for one in self.columns if self.keeps_keys or one[0] not in self.partitions)


@dataclass(frozen=True)
class Merge:
    """The files of a table that may have rows with keys of the source, and the keys."""

    relation: Relation
    keys: tuple[str, ...]  # as the table has them

    @property
    def replaced(self) -> frozenset[str]:
        return frozenset(file.path for file in self.relation.files)


def fitted(
    target: TableTarget, state: TargetState, rows: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """Return the columns of the table that rows of the columns ``rows`` are written into.

    Raises ``TableError`` where names differ, or where a value of the rows might not be one of the table's type.
    """
    if state.columns is None:
        return target.kinds(rows)
    given = {name.lower(): kind for name, kind in rows}
    known = {name.lower(): kind for name, kind in state.columns}
    for name, there, missing in (
        *((name, "the table", known) for name, _ in rows),
        *((name, "the rows", given) for name, _ in state.columns),
    ):
        if name.lower() not in missing:
            raise TableError(
                f"cannot write into {target.name}: {there} {'lacks' if there == 'the table' else 'lack'} the column "
                f"{name!r}"
            )
    for name, kind in state.columns:
        if kind and not _widens(given[name.lower()], kind):
            raise TableError(
                f"cannot write into {target.name}: its column {name!r} is {kind}, that of the rows "
                f"{given[name.lower()]}; cast it in the query"
            )
    return state.columns


def _widens(given: str, kind: str) -> bool:
    """Tell whether every value of one type is one of the other."""
    if given in (kind, "void"):
        return True
    if given in _WHOLE:
        if kind in _WHOLE:
            return _WHOLE[given] <= _WHOLE[kind]
        if kind == "double":
            return _WHOLE[given] <= _WHOLE["int"]
    if given == "float":
        return kind == "double"
    wide = _DECIMAL.fullmatch(kind)
    narrow = _DECIMAL.fullmatch(given)
    if wide is None or (narrow is None and given not in _WHOLE):
        return False
    digits, scale = (int(narrow[1]), int(narrow[2])) if narrow else (_WHOLE[given], 0)
    return int(wide[2]) >= scale and int(wide[1]) - int(wide[2]) >= digits - scale


def partitions_of(
    name: str, state: TargetState, columns: Sequence[tuple[str, str]], asked: Sequence[str]
) -> tuple[str, ...]:
    """Return the partition columns of a table, or those that it is made with. Raises ``TableError``."""
    if state.columns is None:
        check_keys(name, columns, asked)
        named = {column.lower(): column for column, _ in columns}
        return tuple(named[key.lower()] for key in asked)
    if asked and [key.lower() for key in asked] != [key.lower() for key in state.partitions]:
        there = ", ".join(state.partitions) or "nothing"
        raise TableError(f"{name} is partitioned by {there}, not by {', '.join(asked)}")
    check_keys(name, [(key, kind or "string") for key, kind in columns], state.partitions)
    return state.partitions


def removed(
    target: TableTarget,
    state: TargetState,
    mode: IntoMode,
    keys: Sequence[str],
    added: Sequence[DataFile],
) -> frozenset[str]:
    """Return the paths of the table's files that rows take the place of in a mode other than merge.

    Raises ``TableError`` where the table, or some of its files, are not partitioned as the mode needs it.
    """
    if mode not in ("overwrite", "overwrite-partitions") or state.columns is None:
        return frozenset()
    relation = target.relation(state)
    if mode == "overwrite":
        return frozenset(file.path for file in relation.files)
    if not keys:
        raise TableError(f"{target.name} has no partitions; --into-mode overwrite replaces all its rows")
    values = _values(relation)
    if relation.files and (missing := [key for key in keys if key not in values]):
        raise TableError(
            f"{target.name} has files that are not partitioned by {missing[0]!r}; write them again"
        )
    kinds = dict(relation.columns)
    wanted = {
        tuple(
            None
            if value is None
            else partitions.told(f"{name}={quote(value, safe='')}", {name: kinds[name]})[1]
            for name, value in file.values
        )
        for file in added
    }
    return frozenset(
        file.path
        for number, file in enumerate(relation.files)
        if tuple(values[key][number] for key in keys) in wanted
    )


def _values(relation: Relation) -> dict[str, tuple[Any, ...]]:
    """Return the columns that have one value in each file, with these."""
    if relation.log is not None:
        return dict(snapshots.keys(relation))
    told = [partitions.values(relation, file.path) for file in relation.files]
    return {name: tuple(one[name] for one in told) for name in relation.partitions}


def merge(
    target: TableTarget, state: TargetState, rows: Relation, keys: Sequence[str], shape: Shape
) -> Merge:
    """Return which files of a table may hold keys of the rows, by bounds. Raises ``TableError``."""
    named = {name.lower(): name for name, _ in shape.columns}
    if unknown := [key for key in keys if key.lower() not in named]:
        raise TableError(f"rows cannot be merged into {target.name} by {unknown[0]!r}: it has no such column")
    found = tuple(named[key.lower()] for key in keys)
    if state.columns is None:
        return Merge(Relation(_TARGET, rows.scheme, (), shape.columns), found)
    relation = target.relation(state)
    kinds, given = dict(relation.columns), {name.lower(): (name, kind) for name, kind in rows.columns}
    # bounds of fractions leave out NaN, which is equal to itself; logs cut those of times to milliseconds
    same = [
        key
        for key in found
        if given[key.lower()][1] == kinds[key] and not kinds[key].startswith(("float", "double", "timestamp"))
    ]
    values = _values(relation)
    here = snapshots.read_footers(relation, same)
    there = filefooters.read_footers(rows, [given[key.lower()][0] for key in same])
    source = [[_span(one.bounds.get(given[key.lower()][0], ())) for key in same] for one in there]

    def touched(number: int) -> bool:
        spans = [
            (values[key][number], values[key][number])
            if key in values
            else _span(here[number].bounds.get(key, ()))
            for key in same
        ]
        return any(all(map(_overlap, spans, one)) for one in source)

    kept = tuple(file for number, file in enumerate(relation.files) if touched(number))
    return Merge(replace(relation, name=_TARGET, files=kept), found)


def _span(bounds: Sequence[Bounds]) -> tuple[Any, Any] | None:
    """Return the least and the greatest value in some row groups; ``None`` where it is not told."""
    if not bounds or any(one.low is None or one.high is None for one in bounds):
        return None
    return min(one.low for one in bounds), max(one.high for one in bounds)


def _overlap(one: tuple[Any, Any] | None, other: tuple[Any, Any] | None) -> bool:
    if one is None or other is None:
        return True
    if one[0] is None:  # a partition of rows without a key
        return False
    try:
        return bool(one[0] <= other[1] and other[0] <= one[1])
    except TypeError:  # times with and without a zone
        return True


def statement(engine: str, shape: Shape, rows: Relation, merge: Merge | None) -> str:
    """Return the statement, in an engine's dialect, of the rows that files of a table are written of."""
    return " UNION ALL ".join(arm.sql for arm in arms(engine, shape, rows, merge))


def arms(engine: str, shape: Shape, rows: Relation, merge: Merge | None) -> tuple[Arm, ...]:
    """Return the same as statements whose rows together they are."""
    say = _Dialect(engine)
    given = {name.lower(): (name, kind) for name, kind in rows.columns}

    def selected(source: str, names: dict[str, tuple[str, str]]) -> str:
        parts = []
        for name, kind in shape.stored:
            there, said = names[name.lower()]
            value = f"{source}.{say.name(there)}"
            parts.append(f"{say.cast(value, kind) if said != kind else value} AS {say.name(name)}")
        kinds = dict(shape.columns)
        for number, key in enumerate(shape.partitions):
            there, said = names[key.lower()]
            value = f"{source}.{say.name(there)}"
            if kinds[key] and kinds[key] != said:
                value = say.cast(value, kinds[key])
            text = say.cast(value, "string")
            parts.append(
                f"CASE WHEN {value} IS NULL THEN 'n' ELSE concat('v', {text}) END AS {say.name(_KEY + str(number))}"
            )
        return ", ".join(parts)

    new = Arm(f"SELECT {selected('s', given)} FROM {say.name(rows.name)} AS s", rows.name)
    if merge is None:
        return (new,)
    kinds = dict(shape.columns)
    matches = []
    for key in merge.keys:
        new_key, old_key = f"s.{say.name(given[key.lower()][0])}", f"t.{say.name(key)}"
        if not kinds[key]:  # of a directory, which tells its text
            old_key = say.cast(old_key, "string")
        matches.append(f"{say.cast(new_key, kinds[key] or 'string')} = {old_key}")
    known = {name.lower(): (name, kind) for name, kind in merge.relation.columns}
    kept = (
        f"SELECT {selected('t', known)} FROM {say.name(_TARGET)} AS t WHERE NOT EXISTS (SELECT 1 FROM "
        f"{say.name(rows.name)} AS s WHERE {' AND '.join(matches)})"
    )
    return Arm(kept, _TARGET), new


def twice(engine: str, rows: Relation, keys: Sequence[str]) -> str:
    """Return the statement of one key that several rows have, or that is NULL, with their number as ``COUNTED``."""
    say = _Dialect(engine)
    given = {name.lower(): name for name, _ in rows.columns}
    names = [say.name(given[key.lower()]) for key in keys]
    listed = ", ".join(f"{there} AS {say.name(key)}" for there, key in zip(names, keys, strict=True))
    without = " OR ".join(f"{name} IS NULL" for name in names)
    return (
        f"SELECT {listed}, count(*) AS {say.name(COUNTED)} FROM {say.name(rows.name)} GROUP BY {', '.join(names)} "
        f"HAVING count(*) > 1 OR {without} LIMIT 1"
    )


def first_row(place: StorageLocation) -> dict[str, Any] | None:
    """Return the first row of the Parquet files in a directory."""
    import pyarrow.parquet as pq

    for info in files.listing(place.fs(), place.root):
        if info.is_file and not files.hidden(info.base_name):
            rows = pq.read_table(info.path, filesystem=place.fs()).to_pylist()
            if rows:
                return dict(rows[0])
    return None


class _Dialect:
    """Names and casts of an engine."""

    def __init__(self, engine: str) -> None:
        self._spark = engine == "spark"

    def name(self, name: str) -> str:
        return f"`{name.replace('`', '``')}`" if self._spark else '"' + name.replace('"', '""') + '"'

    def cast(self, value: str, kind: str) -> str:
        return f"CAST({value} AS {kind if self._spark else to_duckdb(kind)})"
