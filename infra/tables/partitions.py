"""Hive's partition directories: columns whose values are in the names of the directories, ``dt=2026-11-01``.

The rules are those of DuckDB's ``hive_partitioning``: a column has one type over all directories, a date, a whole
number or else a text; values are percent-encoded; ``__HIVE_DEFAULT_PARTITION__`` is NULL; the columns come after
those of the files, by name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import unquote

from ebbflow.infra.errors import TableError
from ebbflow.infra.protocols import Relation

_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_DATE = re.compile(r"([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})")

PartitionValue = str | int | float | Decimal | date | None


def is_partition(folder: str) -> bool:
    """Tell whether a directory's name gives a column a value."""
    return folder.find("=") > 0


def columns(table: str, folders: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return (name, Spark SQL type) of the columns that ``folders`` give values of, in the directories' order.

    ``folders`` are paths below the table's directory, one for each that holds files; ``table`` is for messages.
    Raises ``TableError`` where they do not name the same columns in one order.
    """
    levels = [tuple(part.partition("=") for part in folder.split("/")) for folder in folders]
    names = tuple(name for name, _, _ in levels[0])
    for folder, parts in zip(folders, levels, strict=True):
        if tuple(name for name, _, _ in parts) != names or not all(map(is_partition, folder.split("/"))):
            raise TableError(
                f"the partition directories of table {table!r} disagree: {folder} and {folders[0]}; all must name "
                f"the same columns in one order"
            )
        if empty := [name for name, _, value in parts if not value]:
            raise TableError(
                f"the directory {folder} of table {table!r} gives {empty[0]!r} no value; NULL is {_NULL}"
            )
    if len({name.lower() for name in names}) < len(names):
        raise TableError(f"the directories {folders[0]} of table {table!r} name a column twice")
    return tuple(
        (name, _type({_text(parts[level][2]) for parts in levels})) for level, name in enumerate(names)
    )


def root(relation: Relation) -> str:
    """Return the directory of a partitioned table."""
    return relation.files[0].path.rsplit("/", len(relation.partitions) + 1)[0]


def values(relation: Relation, path: str) -> dict[str, PartitionValue]:
    """Return what the directories of the file ``path`` say of the relation's partition columns, by their names."""
    if not relation.partitions:
        return {}
    kinds = dict(relation.columns)
    parts = path.rsplit("/", len(relation.partitions) + 1)[1:-1]
    return {
        name: _value(_text(part.partition("=")[2]), kinds[name])
        for name, part in zip(relation.partitions, parts, strict=True)
    }


def texts(relation: Relation) -> dict[str, set[str]]:
    """Return what directories say of each partition column that is a text, as they have it: percent-encoded."""
    kinds = dict(relation.columns)
    folders = {file.path.rpartition("/")[0] for file in relation.files}
    parts = [folder.rsplit("/", len(relation.partitions))[1:] for folder in folders]
    return {
        name: {part[level].partition("=")[2] for part in parts} - {_NULL}
        for level, name in enumerate(relation.partitions)
        if kinds[name] == "string"
    }


def told(folder: str, kinds: Mapping[str, str]) -> tuple[str, Any]:
    """Return the column and the value that a directory's name tells, as ``kinds`` has its type: the name's own text
    where it is no value of that type."""
    name, _, value = folder.partition("=")
    text = _text(value)
    found = _value(text, kinds.get(name, "string"))
    return name, value if found is None and text is not None else found


def distinct(relation: Relation) -> dict[str, int]:
    """Return how many values each partition column has, NULL left out."""
    found: dict[str, set[PartitionValue]] = {name: set() for name in relation.partitions}
    for file in relation.files:
        for name, value in values(relation, file.path).items():
            found[name].add(value)
    return {name: len(known - {None}) for name, known in found.items()}


def pruned(
    relation: Relation,
    places: Sequence[Sequence[str]],
    keys: Mapping[str, Sequence[PartitionValue]] | None = None,
) -> Relation:
    """Return ``relation`` with the files whose partition values pass what one of ``places`` asks.

    Each place is conjuncts in DuckDB's dialect over the partition columns; NULL does not pass. One that cannot be
    evaluated, such as a cast of a text that is no number, is passed by all. ``keys`` are columns with their value in
    each file, where directories do not tell.
    """
    import duckdb
    import pyarrow as pa

    from ebbflow.infra.tables.confinement import opened_on
    from ebbflow.infra.tables.datatypes import arrow_type

    columns = tuple(relation.partitions if keys is None else keys)
    if not columns or not relation.files:
        return relation
    if keys is None:
        known = [values(relation, file.path) for file in relation.files]
    else:
        known = [dict(zip(columns, row, strict=True)) for row in zip(*keys.values(), strict=True)]
    numbers: dict[tuple[PartitionValue, ...], int] = {}
    of_files = [numbers.setdefault(tuple(one.values()), len(numbers)) for one in known]
    kinds = dict(relation.columns)
    rows = pa.table(
        {
            name: pa.array([value[level] for value in numbers], arrow_type(kinds[name]))
            for level, name in enumerate(columns)
        }
    )
    connection = opened_on("partitions", rows)

    def passed(conjunct: str) -> set[int]:
        try:
            found = connection.execute(f"SELECT rowid FROM partitions WHERE ({conjunct}\n)").fetchall()
        except duckdb.Error:
            return set(range(len(numbers)))
        return {int(number) for (number,) in found}

    with connection:
        kept = set().union(*(set(range(len(numbers))).intersection(*map(passed, place)) for place in places))
    return replace(
        relation, files=tuple(f for f, number in zip(relation.files, of_files, strict=True) if number in kept)
    )


def with_values(table: Any, relation: Relation, path: str) -> Any:
    """Return the ``pyarrow.Table`` of rows of the file ``path`` with the partition columns."""
    import pyarrow as pa

    from ebbflow.infra.tables.datatypes import arrow_type

    kinds = dict(relation.columns)
    for name, value in values(relation, path).items():
        scalar = pa.scalar(value, arrow_type(kinds[name]))
        table = table.append_column(name, pa.repeat(scalar, table.num_rows))
    return table.select([name for name, _ in relation.columns if name in table.column_names])


def _text(encoded: str) -> str | None:
    return None if encoded == _NULL else unquote(encoded)


def _type(texts: set[str | None]) -> str:
    known = [text for text in texts if text is not None]
    if known and all(map(_date, known)):
        return "date"
    if known and all(_WHOLE.fullmatch(text) and -(2**63) <= int(text) < 2**63 for text in known):
        return "bigint"
    return "string"


def _value(text: str | None, kind: str) -> PartitionValue:
    if text is None or kind == "string":
        return text
    try:
        if kind == "date":
            return _date(text)
        if kind == "boolean":
            return {"true": True, "false": False}.get(text)
        if kind in ("timestamp", "timestamp_ntz"):
            found = datetime.fromisoformat(text)
            return found.replace(tzinfo=UTC) if kind == "timestamp" and found.tzinfo is None else found
        if kind.startswith("decimal"):
            return Decimal(text)
        if kind == "double":
            return float(text)
        return int(text) if _WHOLE.fullmatch(text) else None
    except (ValueError, InvalidOperation):
        return None


def _date(text: str) -> date | None:
    found = _DATE.fullmatch(text)
    try:
        return date(*map(int, found.groups())) if found else None
    except ValueError:
        return None
