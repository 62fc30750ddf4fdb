"""Rows of a table of Delta Lake for tests."""

from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa

SALES = pa.table(
    {
        "id": [1, 2, 3, 4],
        "country": ["de", "f r/%", "de", None],
        "day": [date(2026, 11, 1), date(2026, 11, 2), None, date(2026, 11, 1)],
        "shop": pa.array([1, 2, 1, None], pa.int32()),
        "open": [True, False, True, None],
        "amount": pa.array([Decimal("1.50"), Decimal("2.25"), None, Decimal("-3.00")], pa.decimal128(10, 2)),
        "at": pa.array(
            [datetime(2026, 11, 1, 12, 30, 15, 125000, tzinfo=UTC)] * 4, pa.timestamp("us", "UTC")
        ),
        "tags": [["a"], [], None, ["b", "c"]],
    }
)
