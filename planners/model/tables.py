"""Tables as planners see them: names, types, versions and statistics."""

from collections.abc import Mapping
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
