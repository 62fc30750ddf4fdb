"""What happens to a cluster during a run: when how many workers are there, the same for every system.

Times are in seconds, scaled by ``span``: the median time that plain Spark takes for the query on the
undisturbed cluster.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Literal, get_args

from ebbflow.planners.errors import OptionError

Schedule = Literal["none", "kill", "notice", "volatile", "volatile-notice"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

_NOTICE_SHARE = 0.1  # of the span
_LEAST_NOTICE = 2.0  # seconds
_GAP = (1 / 12, 1 / 4)  # of the span, between two changes; the mean lets a cycle of five end within it
# Seconds: an executor on half a CPU needs about eight for its first task, and one that never works is no capacity.
_LEAST_GAP = (10.0, 20.0)


@dataclass(frozen=True, slots=True)
class Change:
    """``after`` seconds ``workers`` are wanted; who must leave is warned ``notice`` seconds before.

    Time runs from the moment at which the change before had been carried out, the query's hand-over for the first:
    a worker that comes back and its executor take seconds to start, and each level is to be held for as long as the
    schedule says.
    """

    after: float
    workers: int
    notice: float = 0.0


def changes(name: Schedule, span: float, workers: int, seed: str = "") -> Iterator[Change]:
    """Return the changes of schedule ``name`` in order; the volatile ones never end.

    * none: nothing happens.
    * kill: one worker vanishes at half of ``span``. notice: the same, announced a tenth of ``span`` before,
      at least two seconds.
    * volatile: with three workers 3 → 1 → 3 → 2 → 1 → 3, again and again. The times between changes are
      uniform from a twelfth to a quarter of ``span``, drawn from ``seed``, but not from less than ten to twenty
      seconds: a cycle takes five sixths of ``span`` on average, or 75 s, and what workers take to start.
      volatile-notice: the same, with the notice period above for all that leave.

    Raises ``OptionError`` for an unknown name, a span that is not positive, or too few workers to lose one.
    """
    check(name, workers)
    if not span > 0:
        raise OptionError(f"span must be > 0 seconds; got {span}")
    notice = max(_LEAST_NOTICE, _NOTICE_SHARE * span) if name in ("notice", "volatile-notice") else 0.0
    if name in ("kill", "notice"):
        return iter((Change(span / 2, workers - 1, min(notice, span / 2)),))
    if name in ("volatile", "volatile-notice"):
        return _volatile(span, workers, notice, random.Random(seed))
    return iter(())


def hazard(name: Schedule, span: float, workers: int) -> float | None:
    """Return the losses per node-hour that the schedule means, which a user of such a market would state.

    ``None`` for the undisturbed schedule: nothing is known, and Ebbflow's own prior holds.
    """
    check(name, workers)
    if name == "none":
        return None
    if name in ("kill", "notice"):
        return 3600.0 / (workers * span)
    levels = [workers, *_levels(workers)]
    losses = sum(max(0, a - b) for a, b in pairwise(levels))
    gap = sum(_gaps(span)) / 2
    return 3600.0 * losses / (gap * sum(levels[:-1]))


def check(name: str, workers: int) -> None:
    """Raise ``OptionError`` unless ``name`` is a schedule that ``workers`` workers can go through."""
    if name not in SCHEDULES:
        raise OptionError(f"a schedule must be one of {', '.join(SCHEDULES)}; got {name!r}")
    least = 1 if name == "none" else 2
    if workers < least:
        raise OptionError(f"schedule {name} needs at least {least} workers; got {workers}")


def _levels(workers: int) -> tuple[int, ...]:
    return (1, workers, min(2, workers), 1, workers)


def _volatile(span: float, workers: int, notice: float, dice: random.Random) -> Iterator[Change]:
    for level in cycle(_levels(workers)):
        gap = dice.uniform(*_gaps(span))
        yield Change(gap, level, min(notice, gap))


def _gaps(span: float) -> tuple[float, float]:
    """Return the bounds of the time between two changes, in seconds."""
    (least, most), (low, high) = _LEAST_GAP, _GAP
    return max(least, low * span), max(most, high * span)
