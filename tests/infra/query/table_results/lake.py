"""Tables of three formats, what is written into them, and rows to write."""

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyiceberg.catalog import Catalog

from ebbflow.infra.protocols import Checkpoint, Relation
from ebbflow.infra.query.table_results import Into
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import parquet
from ebbflow.infra.tables.datatypes import spark_type
from ebbflow.infra.tables.logs import iceberg
from ebbflow.infra.tables.targets.delta import DeltaTarget
from ebbflow.infra.tables.targets.folder import FolderTarget
from ebbflow.infra.tables.targets.iceberg import IcebergTarget
from tests.infra.tables.reading import read

FORMATS = ("delta", "iceberg", "parquet")
TARGETS = {"delta": DeltaTarget, "iceberg": IcebergTarget, "parquet": FolderTarget}
STRANGE = "a/b=%ü 'x'"
AT = datetime(2026, 11, 1, 12, 30, 0, 123457, tzinfo=UTC)
ROWS = pa.table(
    {
        "k": pa.array([1, 2, 3, 4], pa.int32()),
        "day": ["mo", STRANGE, None, "mo"],
        "d": pa.array([date(2026, 11, 1), None, date(2026, 11, 2), date(2026, 11, 1)], pa.date32()),
        "x": pa.array([Decimal("1.50"), None, Decimal("-2.00"), Decimal("9.99")], pa.decimal128(9, 2)),
        "at": pa.array([AT, AT, None, AT], pa.timestamp("us", "UTC")),
        "f": [1.5, float("nan"), None, -0.5],
        "b": [True, None, False, True],
    }
)


class Lake:
    """Tables of the three formats, all named ``t``."""

    def __init__(self, folder: Path, catalog: Catalog) -> None:
        self.folder, self.catalog = folder, catalog
        self.path = folder / "t"

    def into(self, format: str, **options: Any) -> Into:
        chosen = {"mode": "append", "keys": (), "partitions": (), **options}
        address = "iceberg://tests/n/t" if format == "iceberg" else str(self.path)
        return Into.of(address, "parquet" if format == "parquet" else "delta", **chosen)

    def relation(self, format: str) -> Relation:
        if format == "iceberg":
            found = self.catalog.load_table("n.t").metadata_location
            return iceberg.opened(StorageLocation(found), "t").relation
        source = parquet.source_at(StorageLocation(self.path))
        assert source is not None
        place = self.path if source.log else self.path.parent
        return parquet.table_of(StorageLocation(place), source)

    def rows(self, format: str) -> list[dict[str, Any]]:
        """Return the rows as Ebbflow reads them, sorted by ``k``; the format's own library must read the same."""
        relation = self.relation(format)
        table = read(relation)
        rows = table.sort_by(
            [(name, "ascending") for name in ("k", "v") if name in table.column_names]
        ).to_pylist()
        if format == "delta":
            other = DeltaTable(self.path).to_pyarrow_table()
        elif format == "iceberg":
            other = self.catalog.load_table("n.t").scan().to_arrow()
        else:
            return rows
        others = other.select(table.column_names).to_pylist()
        assert sorted(map(repr, others)) == sorted(map(repr, rows))
        return rows

    def files(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*.parquet")
            if "source" not in path.parts
        )


Make = Callable[..., Checkpoint]


def results_in(folder: Path) -> Make:
    """Return what makes a query's result of tables, as files below a folder."""

    def result(*tables: pa.Table) -> Checkpoint:
        source = folder / "source"
        source.mkdir(exist_ok=True)
        entries = []
        for table in tables:
            path = source / f"{len(list(source.iterdir()))}.parquet"
            pq.write_table(table, path)
            entries.append(FileEntry(str(path), path.stat().st_size, path.stat().st_mtime))
        columns = tuple((field.name, str(spark_type(field.type))) for field in tables[0].schema)
        relation = Relation("ckpt_0", "file", tuple(entries), columns)
        return Checkpoint("0", str(source), relation, sum(map(len, tables)), relation.bytes, 0.0, 0.0)

    return result


def same(found: list[dict[str, Any]], *expected: pa.Table) -> None:
    """Compare rows by their columns' names; NaN is NaN."""
    wanted = sorted((row for table in expected for row in table.to_pylist()), key=lambda row: row["k"])
    names = expected[0].column_names
    assert [repr([row[name] for name in names]) for row in found] == [
        repr(list(row.values())) for row in wanted
    ]
