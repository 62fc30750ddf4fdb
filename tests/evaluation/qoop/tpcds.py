"""Statistics of TPC-DS at other scale factors than the one they were collected at.

Row counts per scale factor are those of the TPC-DS specification (version 3, table 3-2). Fact tables grow
linearly; the others are interpolated between the specification's scale factors, geometrically.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Catalogue, ColumnStatistics, Table

FACTS = (
    "store_sales", "store_returns", "catalog_sales", "catalog_returns", "web_sales", "web_returns",
)  # fmt: skip
SCALES = (1.0, 100.0, 300.0, 1000.0)
ROWS: Mapping[str, tuple[float, ...]] = {
    "call_center": (6, 30, 36, 42),
    "catalog_page": (11_718, 20_400, 26_000, 30_000),
    "customer": (100_000, 2_000_000, 5_000_000, 12_000_000),
    "customer_address": (50_000, 1_000_000, 2_500_000, 6_000_000),
    "inventory": (11_745_000, 399_330_000, 585_684_000, 783_000_000),
    "item": (18_000, 204_000, 264_000, 300_000),
    "promotion": (300, 1_000, 1_300, 1_500),
    "reason": (35, 55, 60, 65),
    "store": (12, 402, 804, 1_002),
    "warehouse": (5, 15, 17, 20),
    "web_page": (60, 2_040, 2_604, 3_000),
    "web_site": (30, 24, 36, 54),
}
# what a foreign key's name ends with -> the table whose size its distinct values follow
_KEYS = {
    "customer_sk": "customer", "addr_sk": "customer_address", "item_sk": "item", "promo_sk": "promotion",
    "reason_sk": "reason", "store_sk": "store", "warehouse_sk": "warehouse", "page_sk": "web_page",
    "site_sk": "web_site", "call_center_sk": "call_center", "ticket_number": "store_sales",
    "order_number": "store_sales", "catalog_page_sk": "catalog_page",
}  # fmt: skip


def growth(table: str, scale: float) -> float:
    """Return how many times more rows ``table`` has at ``scale`` than at scale factor 1."""
    if not SCALES[0] <= scale <= SCALES[-1]:
        raise OptionError(f"scale must be from {SCALES[0]:g} to {SCALES[-1]:g}; got {scale:g}")
    if table in FACTS:
        return scale
    known = ROWS.get(table)
    if known is None:
        return 1.0
    upper = next(i for i, s in enumerate(SCALES) if s >= scale)
    if upper == 0:
        return 1.0
    part = math.log(scale / SCALES[upper - 1]) / math.log(SCALES[upper] / SCALES[upper - 1])
    rows = math.exp(math.log(known[upper - 1]) * (1 - part) + math.log(known[upper]) * part)
    return rows / known[0]


def at_scale(tables: Catalogue, scale: float) -> Catalogue:
    """Return TPC-DS's tables at ``scale``, given them at scale factor 1.

    Distinct values of keys follow the table that they identify, those of columns that are nearly unique
    follow their own table, all others stay.
    """
    return Catalogue({name: _scaled(table, scale) for name, table in tables.tables.items()})


def _scaled(table: Table, scale: float) -> Table:
    known = table.statistics
    if known is None:
        return table
    factor = growth(table.name, scale)
    columns = {
        name: _column(name, column, known.rows, factor, scale) for name, column in known.columns.items()
    }
    grown = replace(known, rows=known.rows * factor, bytes=known.bytes * factor, columns=columns)
    return replace(table, version=f"sf{scale:g}", statistics=grown)


def _column(
    name: str, column: ColumnStatistics, rows: float, factor: float, scale: float
) -> ColumnStatistics:
    source = max((key for key in _KEYS if name.endswith(key)), key=len, default="")
    if source:
        times = growth(_KEYS[source], scale)
    elif column.distinct is not None and column.distinct > 0.5 * rows:
        times = factor
    else:
        return column
    distinct = None if column.distinct is None else column.distinct * times
    high = column.high * times if isinstance(column.high, int | float) else column.high
    return replace(column, distinct=distinct, high=high)
