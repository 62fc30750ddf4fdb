"""Tables of Iceberg for tests, and what their library reads of them."""

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
from pyiceberg.table import StaticTable, Table

from ebbflow.infra.query.comparison import same_rows
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import statistics
from ebbflow.infra.tables.parquet import discover
from tests.infra.tables.reading import read, sampled

SALES = pa.table(
    {
        "id": pa.array([1, 2, 3, 4], pa.int32()),
        "country": ["de", "f r/%", "", None],
        "day": [date(2026, 11, 1), date(2026, 11, 2), None, date(2026, 11, 1)],
        "amount": pa.array([Decimal("1.50"), Decimal("2.25"), None, Decimal("-3.00")], pa.decimal128(10, 2)),
        "at": pa.array([datetime(2026, 11, 1, 12, 30, 15, 125, tzinfo=UTC)] * 4, pa.timestamp("us", "UTC")),
        "place": [{"city": "Ulm", "zip": 89073}, None, {"city": None, "zip": 1}, {"city": "Paris", "zip": 2}],
    }
)
Make = Callable[..., Table]


def library(table: Table, snapshot: int | None = None) -> pa.Table:
    return StaticTable.from_metadata(table.metadata_location).scan(snapshot_id=snapshot).to_arrow()


def check(table: Table, place: StorageLocation) -> pa.Table:
    """Assert that the newest version is read as the library does; return the rows."""
    (relation,) = discover(place)
    wanted = library(table).select([name for name, _ in relation.columns])
    found = read(relation)
    assert found.column_names == library(table).column_names
    assert same_rows(found, wanted) is None
    flat = [name for name, kind in relation.columns if not kind.startswith(("struct", "array", "map"))]
    assert same_rows(sampled(relation).select(flat), wanted.select(flat)) is None
    assert statistics.collect(relation).rows == wanted.num_rows
    return found
