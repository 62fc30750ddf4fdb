"""What Parquet footers say about columns: nulls, ranges, and how row groups share a column's range."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from ebbflow.infra.protocols import Relation
from ebbflow.infra.tables import partitions
from ebbflow.infra.tables.filefooters import Bounds, FileFooter

Range = tuple[float, float]
_EPOCH = date(1970, 1, 1).toordinal()
_WHOLE = ("tinyint", "smallint", "int", "bigint", "date")
_PREFIX = 6  # bytes of a string that tell its place within a range; a float holds 52 bits


@dataclass(frozen=True)
class ColumnFooter:
    """One column over all row groups of a table."""

    nulls: float | None  # fraction of rows; None when a footer does not tell
    low: float | str | None
    high: float | str | None
    ranges: tuple[
        Range | None, ...
    ] = ()  # per row group, as ``place`` gives; None when not known or all null
    rows: tuple[int, ...] = ()  # per row group
    common: str = field(default="", repr=False)  # what all strings of the column start with

    def possible(self, dtype: str) -> float:
        """Return how many values of this type lie in ``low`` to ``high``; infinity when not countable."""
        if dtype == "boolean":
            return 2.0
        if not isinstance(self.low, float) or not isinstance(self.high, float):
            return math.inf
        if dtype in _WHOLE:
            return self.high - self.low + 1
        if dtype.startswith("decimal"):
            scale = int(dtype[:-1].split(",")[1])
            return float(round((self.high - self.low) * 10**scale)) + 1
        return math.inf

    def place(self, value: float | str) -> float:
        """Return where a value lies on a line, so that ranges of strings compare as those of numbers."""
        if isinstance(value, float):
            return value
        tail = value.removeprefix(self.common).encode()[:_PREFIX].ljust(_PREFIX, b"\0")
        return float(int.from_bytes(tail, "big"))

    def coverage(self, sampled: Mapping[int, Range | None]) -> float:
        """Return the part of the column's rows, in (0, 1], whose values the sampled row groups' ranges span.

        ``sampled`` maps row groups (by number) to the range that was read, ``None`` for the footer's. In a
        column stored in order each row group holds values of its own, and this is about the sampled part of
        the table; in one stored in no order every row group spans the same range, and it is 1.
        """
        import numpy as np

        known = [g for g, span in enumerate(self.ranges) if span is not None]
        if not known or not any(g in sampled for g in known):
            return 1.0
        ranges = np.array([self.ranges[g] for g in known], float)
        rows = np.array([self.rows[g] for g in known], float)
        read = [sampled[g] or self.ranges[g] for g in known if g in sampled]
        spans = _merged([span for span in read if span is not None])
        low, high = ranges[:, 0], ranges[:, 1]
        overlap = np.zeros(len(known))
        touched = np.zeros(len(known), bool)
        for start, end in spans:
            overlap += np.clip(np.minimum(high, end) - np.maximum(low, start), 0.0, None)
            touched |= (low >= start) & (high <= end)
        length = high - low
        share = np.where(touched, 1.0, np.divide(overlap, length, out=np.zeros(len(known)), where=length > 0))
        covered = float((rows * share).sum() / rows.sum())
        return min(1.0, max(covered, 1e-6))


def column_footers(
    relation: Relation, told: Sequence[FileFooter], names: Collection[str]
) -> dict[str, ColumnFooter]:
    """Return the columns ``names`` over all files of the relation, of each of which ``told`` has what it says."""
    rows = tuple(count for file in told for count in file.rows)
    given = [partitions.values(relation, file.path) for file in relation.files]
    out = {}
    for name, dtype in relation.columns:
        if name not in names:
            continue
        found: list[Bounds] = []
        for file, values in zip(told, given, strict=True):
            if name in values:
                value = values[name]
                found += [Bounds(count if value is None else 0, value, value) for count in file.rows]
            else:
                found += file.bounds[name]
        out[name] = _summed(found, dtype, rows)
    return out


def _summed(told: Sequence[Bounds], dtype: str, rows: tuple[int, ...]) -> ColumnFooter:
    """Return one column's footers from what is said of its row groups."""
    counts = [bounds.nulls for bounds in told]
    known_counts = [count for count in counts if count is not None]
    nulls = sum(known_counts) / max(1, sum(rows)) if len(known_counts) == len(rows) else None
    bounds: list[tuple[Any, Any] | None] = []
    for found, count, group_rows in zip(told, counts, rows, strict=True):
        if count == group_rows:
            bounds.append(None)  # all null: no range, and none taken away from the others
            continue
        low, high = comparable(found.low, dtype), comparable(found.high, dtype)
        if low is None or high is None:
            return ColumnFooter(nulls, None, None, (None,) * len(rows), rows)
        bounds.append((low, high))
    known = [b for b in bounds if b is not None]
    if not known:
        return ColumnFooter(nulls, None, None, (None,) * len(rows), rows)
    low, high = min(b[0] for b in known), max(b[1] for b in known)
    common = _common(low, high) if isinstance(low, str) else ""
    base = ColumnFooter(nulls, low, high, common=common)
    ranges = tuple(None if b is None else (base.place(b[0]), base.place(b[1])) for b in bounds)
    return ColumnFooter(nulls, low, high, ranges, rows, common)


def comparable(value: Any, dtype: str) -> float | str | None:
    """Return a value as statistics hold it: numbers, days or seconds since 1970, or text; else ``None``."""
    if isinstance(value, str):
        return value
    if isinstance(value, datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        return aware.timestamp()
    if isinstance(value, date):
        return float(value.toordinal() - _EPOCH)
    if isinstance(value, bool | int | float | Decimal):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, bytes) and dtype == "string":
        return value.decode(errors="replace")
    return None


def _common(low: str, high: str) -> str:
    length = 0
    for a, b in zip(low, high, strict=False):
        if a != b:
            break
        length += 1
    return low[:length]


def _merged(spans: Sequence[Range]) -> list[Range]:
    """Return the union of ranges as disjoint ones."""
    merged: list[Range] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
