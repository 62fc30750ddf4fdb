"""How fair a schedule was, and how long things took."""

from collections.abc import Sequence

from ebbflow.planners.errors import OptionError
from ebbflow.planners.query.scheduling.ledger import Job


def jain(shares: Sequence[float]) -> float:
    """Return Jain's fairness index (Σx)²/(n·Σx²): 1 when all x are equal, 1/n when one has everything.

    Nobody having anything is fair: 1. Raises ``OptionError`` for no shares or a negative one (Jain, Chiu and
    Hawe, DEC-TR-301, 1984).
    """
    if not shares or min(shares) < 0:
        raise OptionError(f"Jain's index is over one or more shares >= 0; got {list(shares)}")
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares > 0 else 1.0


class Fairness:
    """Jain's index of jobs that run at the same time, window by window of ``window`` seconds.

    Over the jobs that are there throughout a window, x is the mean dominant share in it per entitlement,
    weight over the sum of the weights of all jobs there. Windows with fewer than two such jobs, and windows
    in which nothing runs, say nothing. All windows are equally long, so that their plain mean is the
    time-weighted one.
    """

    def __init__(self, window: float = 60.0) -> None:
        if not window > 0:
            raise OptionError(f"window must be > 0 seconds; got {window}")
        self._window = window
        self._begin = 0.0
        self._present: dict[str, float] = {}  # seconds there in this window
        self._received: dict[str, float] = {}  # ∫ dominant share dt
        self._entitled: dict[str, float] = {}  # ∫ entitlement dt
        self._sum = 0.0
        self._windows = 0

    def advance(self, before: float, now: float, jobs: Sequence[Job]) -> None:
        """Let ``jobs`` hold what they hold from ``before`` to ``now``, in seconds."""
        while before < now:
            if not jobs and not self._present:  # idle: skip whole windows
                self._begin += (now - self._begin) // self._window * self._window
                return
            until = min(now, self._begin + self._window)
            self._hold(until - before, jobs)
            before = until
            if until >= self._begin + self._window:
                self._close()

    def result(self) -> tuple[float, int]:
        """Return the mean index and the number of windows that it is over; 1 if there were none."""
        return (self._sum / self._windows if self._windows else 1.0), self._windows

    def _hold(self, seconds: float, jobs: Sequence[Job]) -> None:
        weights = sum(job.weight for job in jobs)
        for job in jobs:
            name = job.id
            self._present[name] = self._present.get(name, 0.0) + seconds
            self._received[name] = self._received.get(name, 0.0) + seconds * max(job.used, default=0.0)
            self._entitled[name] = self._entitled.get(name, 0.0) + seconds * job.weight / weights

    def _close(self) -> None:
        throughout = [n for n, seconds in self._present.items() if seconds >= self._window * (1 - 1e-9)]
        if len(throughout) > 1:
            shares = [max(self._received[n], 0.0) / self._entitled[n] for n in throughout]
            if max(shares) > 0:
                self._sum += jain(shares)
                self._windows += 1
        self._begin += self._window
        self._present, self._received, self._entitled = {}, {}, {}


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value at ``fraction`` (0 to 1) of the sorted values, interpolated linearly."""
    ordered = sorted(values)
    if not ordered or not 0 <= fraction <= 1:
        raise OptionError(f"a percentile is of one or more values, at 0 to 1; got {len(ordered)}, {fraction}")
    at = fraction * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
