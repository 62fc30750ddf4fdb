"""Samples of the join keys of what stages have written, by which the planner sees how joins of them turn out."""

import logging
import math
from collections.abc import Sequence
from typing import Any

from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage import files
from ebbflow.infra.tables.sampling import DECODE_ROWS, MOST_GROUPS, RowGroup, decode, row_groups, some_rows

ROWS = 8192  # of a sample: of a key of half a million values, two samples have some 130 pairs in common
_MOST_FILES = 512  # of a stage's output: each has a share
_CLUSTERED = 0.5  # part of a column's range in a row group on the average, below which rows are in its order
_log = logging.getLogger(__name__)


def samples_of_keys(relation: Relation, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return values of columns from rows that are drawn at random; nulls, which join nothing, are left out.

    Of whole numbers and dates (days since 1970) only, and of columns whose values are spread over the files: row
    groups of rows in the order of a column tell nothing of where two tables meet. All files have a share, because
    files may be parts by a hash of a key. Raises nothing: where the files cannot be read, that is logged, and nothing
    is returned.
    """
    there = {name for name, _ in relation.columns}
    try:
        return _drawn(relation, [name for name in names if name in there])
    except Exception as error:  # a statistic is never worth a stage
        _log.debug("no sample of the keys of %s: %s", relation.name, error)
        return {}


def _drawn(relation: Relation, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    groups = [group for group in row_groups(relation, names) if group.rows] if names else []
    chosen = _chosen(groups)
    limit = max(1, DECODE_ROWS // max(len(chosen), 1))

    def read(number: int) -> Any:
        group, wanted = chosen[number]
        return some_rows(decode(relation, group, min(group.rows, limit), names), wanted, number)

    parts = files.in_parallel(read, range(len(chosen)))
    everywhere = len(chosen) == len(groups) and all(group.rows <= limit for group in groups)
    found = {}
    for name in names if parts else ():
        columns = [whole for part in parts if (whole := _numbers(part.column(name))) is not None]
        if len(columns) == len(parts) and (everywhere or _spread(columns)):
            found[name] = tuple(value for column in columns for value in column.drop_null().to_pylist())
    return found


def _chosen(groups: Sequence[RowGroup]) -> list[tuple[RowGroup, int]]:
    """Return row groups of each file, evenly spaced, with how many rows of each are drawn; none where there are more
    files than may be read."""
    total, by_file = sum(group.rows for group in groups), dict[str, list[RowGroup]]()
    for group in groups:
        by_file.setdefault(group.file.path, []).append(group)
    if len(by_file) > _MOST_FILES:
        return []
    most = max(MOST_GROUPS, len(by_file))
    found = []
    for own in by_file.values():
        rows = sum(group.rows for group in own)
        count = min(len(own), max(1, (most - len(by_file)) * rows // total))
        for i in range(count):
            found.append((own[int((i + 0.5) * len(own) / count)], math.ceil(ROWS * rows / total / count)))
    return found


def _numbers(column: Any) -> Any:
    """Return a column of whole numbers or dates as such numbers, ``None`` for another."""
    import pyarrow as pa

    if pa.types.is_date(column.type):
        return column.cast(pa.date32()).cast(pa.int32())
    return column if pa.types.is_integer(column.type) else None


def _spread(columns: Sequence[Any]) -> bool:
    """Tell whether row groups have values from everywhere in their common range."""
    import pyarrow.compute as pc

    bounds = [pc.min_max(column).as_py() for column in columns]
    known = [(found["min"], found["max"]) for found in bounds if found["min"] is not None]
    if len(columns) < 2 or not known:
        return False
    whole = max(high for _, high in known) - min(low for low, _ in known)
    return bool(sum(high - low for low, high in known) >= _CLUSTERED * whole * len(known))
