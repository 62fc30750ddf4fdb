"""Intervals of a column's values, and how much of the column they cover."""

from collections.abc import Callable
from typing import NamedTuple

from ebbflow.planners.model import ColumnStatistics


class Interval(NamedTuple):
    """Values of a column between two bounds; ``None`` is unbounded. ``open_*`` excludes the bound."""

    low: float | str | None = None
    high: float | str | None = None
    open_low: bool = False
    open_high: bool = False


def intersect(one: Interval, other: Interval) -> Interval:
    """Return the values in both intervals."""
    low, open_low = one.low, one.open_low
    if other.low is not None and (low is None or (other.low, other.open_low) > (low, open_low)):
        low, open_low = other.low, other.open_low
    high, open_high = one.high, one.open_high
    if other.high is not None and (high is None or (other.high, not other.open_high) < (high, not open_high)):
        high, open_high = other.high, other.open_high
    return Interval(low, high, open_low, open_high)


def covered(interval: Interval, statistics: ColumnStatistics) -> float:
    """Return the fraction of a column's rows inside ``interval``, values taken as evenly spread.

    With ndv distinct values each is given a cell of width (high − low)/(ndv − 1), so that
    ``BETWEEN 0.05 AND 0.07`` over the eleven values 0.00 ... 0.10 keeps 3/11 and not 2/10.
    """
    low, high = statistics.low, statistics.high
    present = 1.0 - statistics.nulls
    if isinstance(low, str) and isinstance(high, str):
        scale = _text_scale(low, high)
        bounds = [None if b is None else scale(str(b)) for b in (interval.low, interval.high)]
        start, end, step = 0.0, 1.0, 0.0
    else:
        assert isinstance(low, int | float)
        assert isinstance(high, int | float)
        bounds = [None if b is None else float(b) for b in (interval.low, interval.high)]
        start, end = float(low), float(high)
        distinct = statistics.distinct or 0.0
        step = (end - start) / (distinct - 1.0) if distinct > 1.0 else 0.0
        if end <= start:
            end, step = start, 1.0
    lower = start if bounds[0] is None else bounds[0] + (step if interval.open_low else 0.0)
    upper = end + step if bounds[1] is None else bounds[1] + (0.0 if interval.open_high else step)
    width = end + step - start
    if width <= 0.0:
        return present
    inside = min(upper, end + step) - max(lower, start)
    return present * min(max(inside / width, 0.0), 1.0)


def _text_scale(low: str, high: str) -> Callable[[str], float]:
    """Map strings to [0, 1] between ``low`` and ``high`` by the bytes after their common prefix."""
    shared = 0
    while shared < min(len(low), len(high)) and low[shared] == high[shared]:
        shared += 1

    def position(text: str) -> float:
        raw = text[shared:].encode()[:8].ljust(8, b"\0")
        return int.from_bytes(raw, "big") / 2.0**64

    start, end = position(low), position(high)

    def scaled(text: str) -> float:
        if text <= low or end <= start:
            return 0.0 if text <= low else 1.0
        return 1.0 if text >= high else (position(text) - start) / (end - start)

    return scaled
