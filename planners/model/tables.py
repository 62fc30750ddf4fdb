"""Tables as planners see them: names, types, versions and statistics; and names for the columns of results."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """Statistics of one column. ``None`` means not known."""

    distinct: float | None = None
    nulls: float = 0.0  # fraction of rows in [0, 1]
    low: float | str | None = None  # numbers as they are, dates as days since 1970, timestamps as seconds
    high: float | str | None = None
    width: float = 8.0  # average bytes in memory
    edges: tuple[float, ...] = ()  # inner borders of cells of equal rows, when ranges can be read alone
    reads: tuple[float, ...] = ()  # times the table is read in 2, 4, 8, 16 slices (infra.tables.clustering)


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """Statistics of one table version."""

    rows: float
    bytes: float  # size as stored
    columns: Mapping[str, ColumnStatistics] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """A base table. ``version`` changes whenever its content may have changed."""

    name: str
    columns: tuple[tuple[str, str], ...]  # (name, Spark SQL type), in order
    version: str
    statistics: TableStatistics | None = None


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The tables that queries may name, by lower-case name."""

    tables: Mapping[str, Table]

    def get(self, name: str) -> Table | None:
        """Return the table called ``name`` in any case, or ``None``."""
        return self.tables.get(name.lower())

    def schema(self) -> dict[str, dict[str, str]]:
        """Return ``{table: {column: type}}`` of tables whose columns are known, as sqlglot's optimiser wants it."""
        return {name: dict(table.columns) for name, table in self.tables.items() if table.columns}


def distinct_names(names: Sequence[str], taken: Collection[str] = ()) -> tuple[str, ...]:
    """Return ``names``, those that are there already with a number behind them that makes no name of ``names`` or of
    ``taken``. Case makes no difference.

    >>> distinct_names(["a", "A", "a_1"])
    ('a', 'A_2', 'a_1')
    """
    kept = {name.lower() for name in (*names, *taken)}
    seen: set[str] = set()
    out = []
    for name in names:
        fresh, number = name, 0
        while fresh.lower() in seen or (number and fresh.lower() in kept):
            number += 1
            fresh = f"{name}_{number}"
        seen.add(fresh.lower())
        out.append(fresh)
    return tuple(out)


def renaming_notes(names: Sequence[str], fresh: Sequence[str]) -> tuple[str, ...]:
    """Return what is told of output columns ``names`` that are called ``fresh``."""
    return tuple(
        f"a second output column {name} is named {other}: Parquet needs distinct names"
        for name, other in zip(names, fresh, strict=True)
        if name != other
    )
