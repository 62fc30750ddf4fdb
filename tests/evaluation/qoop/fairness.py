"""How fair a schedule was, and how long things took."""

from collections.abc import Sequence
from dataclasses import dataclass

from ebbflow.planners.errors import OptionError
from ebbflow.planners.query.shares import jain
from tests.evaluation.qoop.ledger import Job


class Fairness:
    """Jain's index of jobs that run at the same time, window by window of ``window`` seconds.

    Over the jobs that are there throughout a window, with an entitlement of weight over the sum of the weights
    of all jobs there, two indices are taken. ``jain``: x is the mean dominant share per mean entitlement,
    which is uneven also when a job's plan cannot use what it is entitled to. ``honoured``: x is how much of
    the entitlement that its runnable tasks could use a job got, which judges the scheduler alone. Windows with
    fewer than two such jobs, and windows in which nothing runs, say nothing. All windows are equally long, so
    that their plain mean is the time-weighted one.
    """

    def __init__(self, machines: int, window: float = 60.0) -> None:
        if not window > 0:
            raise OptionError(f"window must be > 0 seconds; got {window}")
        self._machines = machines
        self._window = window
        self._begin = 0.0
        self._present: dict[str, _Tally] = {}
        self._jain: list[float] = []
        self._honoured: list[float] = []

    def advance(self, before: float, now: float, jobs: Sequence[Job]) -> None:
        """Let ``jobs`` hold what they hold from ``before`` to ``now``, in seconds."""
        if before >= now:
            return
        weights = sum(job.weight for job in jobs)
        held = [(job.id, *self._shares(job, job.weight / weights)) for job in jobs]
        while before < now:
            if not jobs and not self._present:  # idle: skip whole windows
                self._begin += (now - self._begin) // self._window * self._window
                return
            until = min(now, self._begin + self._window)
            for name, share, entitled, got, usable in held:
                tally = self._present.setdefault(name, _Tally())
                tally.add(until - before, share, entitled, got, usable)
            before = until
            if until >= self._begin + self._window:
                self._close()

    @property
    def windows(self) -> int:
        """Return how many windows the means are over."""
        return len(self._jain)

    @property
    def jain(self) -> float:
        """Return the mean index of what jobs hold per entitlement; 1 if there was no window."""
        return sum(self._jain) / len(self._jain) if self._jain else 1.0

    @property
    def honoured(self) -> float:
        """Return the mean index of what jobs got of the entitlement they could use; 1 if there was no window."""
        return sum(self._honoured) / len(self._honoured) if self._honoured else 1.0

    def _shares(self, job: Job, entitled: float) -> tuple[float, float, float, float]:
        """Return the dominant share, the entitlement, and how much of it is held and could be used."""
        wanted = job.used
        for pool in job.pools:
            if pool.pending:
                wanted = [w + pool.pending * d for w, d in zip(wanted, pool.demand, strict=True)]
        share = max(job.used, default=0.0) / self._machines
        could = max(wanted, default=0.0) / self._machines
        return share, entitled, min(share, entitled), min(could, entitled)

    def _close(self) -> None:
        throughout = [t for t in self._present.values() if t.seconds >= self._window * (1 - 1e-9)]
        if len(throughout) > 1 and any(t.share > 0 for t in throughout):
            self._jain.append(jain([max(t.share, 0.0) / t.entitled for t in throughout]))
            self._honoured.append(
                jain([max(t.got, 0.0) / t.usable if t.usable > 0 else 1.0 for t in throughout])
            )
        self._begin += self._window
        self._present = {}


@dataclass(slots=True)
class _Tally:
    """What a job had in a window: integrals over time."""

    seconds: float = 0.0
    share: float = 0.0
    entitled: float = 0.0
    got: float = 0.0
    usable: float = 0.0

    def add(self, seconds: float, share: float, entitled: float, got: float, usable: float) -> None:
        self.seconds += seconds
        self.share += seconds * share
        self.entitled += seconds * entitled
        self.got += seconds * got
        self.usable += seconds * usable


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value at ``fraction`` (0 to 1) of the sorted values, interpolated linearly."""
    ordered = sorted(values)
    if not ordered or not 0 <= fraction <= 1:
        raise OptionError(f"a percentile is of one or more values, at 0 to 1; got {len(ordered)}, {fraction}")
    at = fraction * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
