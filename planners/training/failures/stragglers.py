"""Slow workers: which to replace, and when (Optimus, EuroSys 2018, section 5.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from ebbflow.planners.errors import OptionError


def late_workers(arrivals: Sequence[Sequence[float]], step_time: float, share: float = 0.5) -> frozenset[int]:
    """Return the workers whose gradients come late in synchronous training.

    Args:
        arrivals: s at which each worker's gradients reached the server, a row for each step of a window.
        step_time: median s of a step.
        share: of the step time that a worker's median lateness behind the median arrival must exceed.

    Raises ``OptionError``.
    """
    if step_time <= 0 or share <= 0:
        raise OptionError(f"step_time and share must be > 0; got {step_time}, {share}")
    if not arrivals:
        return frozenset()
    times = np.asarray(arrivals, float)
    lateness = np.median(times - np.median(times, axis=1, keepdims=True), axis=0)
    return frozenset(int(worker) for worker in np.flatnonzero(lateness > share * step_time))


def slow_workers(speeds: Mapping[int, float], share: float = 0.5) -> frozenset[int]:
    """Return the workers slower than ``share`` of the median, steps/s each, in asynchronous training."""
    if not speeds:
        return frozenset()
    bound = share * float(np.median(list(speeds.values())))
    return frozenset(worker for worker, speed in speeds.items() if speed < bound)


@dataclass(slots=True)
class StragglerWatch:
    """Turns windows of slow workers into replacements: not at once, and not too often."""

    windows: int = 2  # in a row
    pause: float = 300.0  # s between replacements
    _runs: dict[int, int] = field(default_factory=dict)
    _last: float = -inf

    def look(self, now: float, slow: frozenset[int]) -> int | None:
        """Take the slow workers of one window and return the one to replace now, if any: the longest slow."""
        self._runs = {worker: self._runs.get(worker, 0) + 1 for worker in slow}
        ready = [worker for worker, times in self._runs.items() if times >= self.windows]
        if not ready or now - self._last < self.pause:
            return None
        worst = min(ready, key=lambda worker: (-self._runs[worker], worker))
        self._last = now
        del self._runs[worst]
        return worst
