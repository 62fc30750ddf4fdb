"""How a column's values are spread over a table's row groups: where to cut its range into slices, and what it costs.

A range predicate on a column that is stored in order skips row groups by their footers; on a column in no order it
reads all of them. ``grid`` measures which of the two a column is.
"""

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ebbflow.infra.tables.footers import ColumnFooter, comparable

Array: TypeAlias = npt.NDArray[np.float64]

CELLS = 16  # a power of two: slices are 2, 4, 8 or 16 runs of cells
_POINTS = 2048  # at which rows below are counted
_TYPES = ("tinyint", "smallint", "int", "bigint", "date")


def grid(footers: ColumnFooter, dtype: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (edges, reads) of a column, both empty when its type, footers or order do not serve.

    ``edges`` are the CELLS - 1 inner borders of cells of about equal rows, rising. ``reads`` tell, for division
    into 2, 4, 8 and 16 slices of equal cells, how many times the table's rows are read in all when each slice
    reads the row groups that its range meets: 1 for a column in order, the number of slices for one in none.
    """
    if dtype not in _TYPES or not isinstance(footers.low, float) or not isinstance(footers.high, float):
        return (), ()
    known = [
        (span, rows) for span, rows in zip(footers.ranges, footers.rows, strict=True) if span is not None
    ]
    if len(known) < 2 or footers.high - footers.low < CELLS:
        return (), ()
    low = np.array([span[0] for span, _ in known])
    high = np.array([span[1] for span, _ in known])
    rows = np.array([float(count) for _, count in known])
    edges = _quantiles(low, high, rows)
    if len(set(edges)) < CELLS - 1:
        return (), ()
    reads = tuple(_reads(edges, parts, low, high, rows) for parts in (2, 4, 8, 16))
    return (edges, reads) if reads[-1] <= CELLS / 2 else ((), ())


def _quantiles(low: Array, high: Array, rows: Array) -> tuple[float, ...]:
    """Return cell borders, each row group's rows taken as even over its range."""
    points = np.unique(np.concatenate([low, high + 1.0]))
    if len(points) > _POINTS:  # of very many row groups, borders need not be exact
        points = points[np.linspace(0, len(points) - 1, _POINTS).astype(int)]
    width = high + 1.0 - low
    below = np.array([((np.clip(point - low, 0.0, width) / width) * rows).sum() for point in points])
    wanted = rows.sum() * np.arange(1, CELLS) / CELLS
    return tuple(float(v) for v in np.ceil(np.interp(wanted, below, points)))


def _reads(edges: Sequence[float], parts: int, low: Array, high: Array, rows: Array) -> float:
    step = CELLS // parts
    borders = [-np.inf, *edges[step - 1 :: step][: parts - 1], np.inf]
    met = sum(float(rows[(high >= start) & (low < end)].sum()) for start, end in itertools.pairwise(borders))
    return met / float(rows.sum())


def outside(metadata: Any, column: str, dtype: str, low: float | None, high: float | None) -> bool:
    """Tell whether no row of a file (``pyarrow.parquet.FileMetaData``) has ``column`` in [low, high).

    With ``low`` missing, rows without a value count as inside. Whatever a footer does not tell may be inside.
    """
    paths = [metadata.schema.column(i).path.lower() for i in range(metadata.num_columns)]
    if column.lower() not in paths:
        return False
    position = paths.index(column.lower())
    for number in range(metadata.num_row_groups):
        told = metadata.row_group(number).column(position).statistics
        if told is None or not told.has_min_max:
            return False
        if low is None and (not told.has_null_count or told.null_count > 0):
            return False
        least, most = comparable(told.min, dtype), comparable(told.max, dtype)
        if not isinstance(least, float) or not isinstance(most, float):
            return False
        if (low is None or most >= low) and (high is None or least < high):
            return False
    return True
