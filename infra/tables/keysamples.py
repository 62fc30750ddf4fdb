"""Samples of the join keys of what stages have written, by which the planner sees how joins of them turn out."""

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from ebbflow.infra.errors import TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.tables.sampling import Sample, draw

ROWS = 8192  # of a sample: of a key of half a million values, two samples have some 130 pairs in common
_CLUSTERED = 0.5  # part of a column's range in a row group on the average, below which rows are in its order
_log = logging.getLogger(__name__)


def samples_of_keys(relation: Relation, names: Sequence[str]) -> dict[str, tuple[Hashable, ...]]:
    """Return values of columns from rows that are drawn at random; nulls, which join nothing, are left out.

    Of whole numbers and dates only, and of columns whose values are spread over the files: row groups that were drawn
    of rows in the order of a column tell nothing of where two tables meet. Nothing is returned, and that is logged,
    where the files cannot be read.
    """
    there = {name for name, _ in relation.columns}
    wanted = [name for name in names if name in there]
    try:
        sample = draw(relation, ROWS, names=wanted) if wanted else None
    except TableError as error:
        _log.debug("no sample of the keys of %s: %s", relation.name, error)
        return {}
    found: dict[str, tuple[Hashable, ...]] = {}
    for name in wanted if sample is not None else ():
        assert sample is not None
        column = sample.table.column(name)
        if _is_key(column.type) and _spread(sample, column):
            found[name] = tuple(column.drop_null().to_pylist())
    return found


def _is_key(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_date(kind))


def _spread(sample: Sample, column: Any) -> bool:
    """Tell whether row groups have values from everywhere in the column's range."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if sample.entire or len(sample.blocks) < 2:
        return True
    widths, position = [], 0
    whole = (
        column.cast(pa.int64(), safe=False) if pa.types.is_integer(column.type) else column.cast(pa.int32())
    )
    for block in sample.blocks:
        widths.append(_width(pc.min_max(whole.slice(position, block.sampled)).as_py()))
        position += block.sampled
    return sum(widths) / len(widths) >= _CLUSTERED * _width(pc.min_max(whole).as_py())


def _width(found: dict[str, int | None]) -> float:
    low, high = found["min"], found["max"]
    return 0.0 if low is None or high is None else float(high - low)
