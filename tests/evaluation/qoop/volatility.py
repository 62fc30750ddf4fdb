"""How much a resource profile changes: events, classes, and regions of a class (QOOP, figs. 2.3 and 2.6)."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ebbflow.planners.errors import OptionError
from tests.evaluation.qoop.profiles import MINUTE, Profile

VolatilityClass = Literal["low", "medium", "high"]
CLASSES: tuple[VolatilityClass, ...] = ("low", "medium", "high")
WINDOW = 10  # minutes of a region (QOOP, section 2.6.2.1)
_SLACK = 1e-9

Array: TypeAlias = npt.NDArray[np.float64]
Levels: TypeAlias = Sequence[float] | Sequence[Sequence[float]] | Array


def events(levels: Levels, least: float) -> int:
    """Return how often the level rises or falls by at least the fraction ``least``, events not overlapping.

    Each event is relative to the level at its start, which is the end of the event before (fig. 2.3a). From
    nothing, any increase is an event. Levels may be vectors: any dimension counts.

    >>> events([10, 10.9, 11, 12, 12.1], 0.1)
    2
    """
    if least <= 0:
        raise OptionError(f"least must be a fraction > 0; got {least}")
    rows = _rows(levels)
    count, reference = 0, rows[0]
    for row in rows[1:]:
        if float(_changes(reference, row).max()) >= least - _SLACK:
            count, reference = count + 1, row
    return count


def volatility(levels: Levels) -> float:
    """Return the largest change from any level to any later one, relative to the earlier one."""
    rows = _rows(levels)
    return float(_volatilities(rows[None])[0])


def volatility_class(value: float) -> VolatilityClass:
    """Return "low" below 10 %, "medium" up to 20 %, both included, and "high" above."""
    if value < 0.1 - _SLACK:
        return "low"
    return "medium" if value <= 0.2 + _SLACK else "high"


def regions(profiles: Sequence[Profile], window: int = WINDOW) -> Mapping[VolatilityClass, Array]:
    """Return all stretches of ``window`` minutes of ``profiles``, one a row with its level each minute, by
    class. Stretches begin every minute. A class that no stretch is of is left out.

    Raises ``OptionError`` when a profile is shorter than the window.
    """
    found: dict[VolatilityClass, list[Array]] = {kind: [] for kind in CLASSES}
    for profile in profiles:
        levels = profile.sampled(MINUTE)
        if not 1 <= window <= len(levels):
            raise OptionError(f"window must be from 1 to the profile's {len(levels)} minutes; got {window}")
        rows = np.lib.stride_tricks.sliding_window_view(levels, window)
        values = _volatilities(rows[:, :, None])
        low, high = values < 0.1 - _SLACK, values > 0.2 + _SLACK
        for kind, chosen in zip(CLASSES, (low, ~low & ~high, high), strict=True):
            found[kind].append(rows[chosen])
    joined = {kind: np.concatenate(parts) for kind, parts in found.items()}
    return {kind: rows for kind, rows in joined.items() if len(rows)}


def chain(rng: np.random.Generator, found: Array, minutes: int) -> Profile:
    """Return a profile of at least ``minutes`` made of random rows of ``found``, regions of one class.

    Jobs outlast a region, so that each sees several, one after the other; the joints add jumps to what the
    class has.
    """
    if len(found) == 0 or minutes < 1:
        raise OptionError(f"found must hold a region and minutes be >= 1; got {len(found)} and {minutes}")
    drawn = rng.integers(len(found), size=-(-minutes // found.shape[1]))
    return Profile.every(MINUTE, [float(v) for v in found[drawn].ravel()]).merged()


def _rows(levels: Levels) -> Array:
    rows = np.asarray(levels, dtype=np.float64)
    if rows.size == 0 or rows.ndim > 2:
        raise OptionError(f"levels must be a list of numbers or of equal vectors; got shape {rows.shape}")
    return rows.reshape(len(rows), -1)


def _changes(before: Array, after: Array) -> Array:
    relative = np.abs(after - before) / np.where(before > 0, before, 1.0)
    return np.where(before > 0, relative, np.where(after > 0, np.inf, 0.0))


def _volatilities(windows: Array) -> Array:
    """Return the volatility of each of ``windows``: windows × moments × dimensions."""
    out = np.zeros(len(windows))
    for i in range(windows.shape[1]):
        for j in range(i + 1, windows.shape[1]):
            out = np.maximum(out, _changes(windows[:, i], windows[:, j]).max(axis=1))
    return out
