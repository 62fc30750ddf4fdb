"""Times of elastic runs: the ideal to compare with, and how long a node takes to drain."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf

from ebbflow.planners.errors import OptionError

# Litz, section 5.2: 4.6 GiB a node took 43 s at 2.0 Gbit/s, where the wire alone needs 19.8 s
TRANSFER_EFFICIENCY = 0.46


def ideal_scale_out_time(trigger: float, done: float, static_after: float) -> float:
    """Return the run time if scaling cost nothing and took effect at once, in the unit of the two times.

    ``trigger`` is when more workers were asked for, ``done`` the fraction of all iterations finished by then and
    ``static_after`` the run time with the larger number from the start: t + (1 - done) * T (Litz, section 5.2).
    """
    if not 0 <= done <= 1:
        raise OptionError(f"done must be in [0, 1]; got {done}")
    return trigger + (1 - done) * static_after


def drain_time(
    size: float, bandwidth: float, efficiency: float = TRANSFER_EFFICIENCY, task: float = 1.0
) -> float:
    """Return the seconds until ``size`` bytes of state have left a node at ``bandwidth`` bytes per second.

    A running micro-task of up to ``task`` seconds ends first.
    """
    if not (bandwidth > 0 and 0 < efficiency <= 1 and size >= 0 and task >= 0):
        raise OptionError(
            f"bandwidth must be > 0, efficiency in (0, 1], size and task >= 0; "
            f"got {bandwidth}, {efficiency}, {size}, {task}"
        )
    return task + size / (bandwidth * efficiency)


def give_back(current: int, used: float, initial: float) -> int:
    """Return how many of ``current`` workers or servers the working set still needs, at least one.

    ``used`` and ``initial`` are its sizes now and at the start, in one unit.
    """
    if current < 1 or not initial > 0 or not used >= 0:
        raise OptionError(f"current must be >= 1, initial > 0, used >= 0; got {current}, {initial}, {used}")
    return min(current, max(1, ceil(current * used / initial)))


def completion_time(work: float, workers: Sequence[tuple[float, int]]) -> float:
    """Return when ``work`` (worker-seconds) ends if speed is proportional to the number of workers.

    ``workers`` are (from second, number) in order, from 0 on; infinite if the last number is 0 and work is left.
    """
    if not workers or workers[0][0] != 0 or any(b[0] < a[0] for a, b in pairwise(workers)):
        raise OptionError(f"workers must start at 0 and be in order of time; got {list(workers)}")
    left = work
    for (start, number), (end, _) in zip(workers, [*workers[1:], (inf, 0)], strict=True):
        if number and left <= number * (end - start):
            return start + left / number
        left -= number * (end - start) if number else 0
    return inf
