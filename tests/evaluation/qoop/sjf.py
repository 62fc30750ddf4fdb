"""Shortest job first, by estimated time; optionally by what remains of it (SRTF)."""

from collections.abc import Sequence

from ebbflow.planners.query.running.packing import simulate
from tests.evaluation.qoop.intra import aligned, all_of
from tests.evaluation.qoop.ledger import Job, Ledger


class SJF:
    """The shortest job gets all it can use, the next one what is left, and so on.

    A job's length is the time of its plan alone on the whole cluster: as of its arrival, or with
    ``remaining`` that of what is left of it, estimated anew whenever one of its stages starts or ends. Ties go
    by arrival.
    """

    def __init__(self, *, remaining: bool = False) -> None:
        self._remaining = remaining
        self._known: dict[str, tuple[int, float]] = {}  # per job: version, expected end

    def assign(self, ledger: Ledger, jobs: Sequence[Job], now: float) -> None:
        """See ``Scheduler``."""
        for job in sorted(jobs, key=lambda j: (round(self._length(ledger, j, now), 9), j.order)):
            while job.hungry and aligned(ledger, job, all_of):
                pass

    def _length(self, ledger: Ledger, job: Job, now: float) -> float:
        if not self._remaining:
            return job.estimate
        version, end = self._known.get(job.id, (-1, 0.0))
        if version != job.version:
            end = now + simulate(job.remaining(), ledger.whole).seconds
            self._known[job.id] = (job.version, end)
        return max(end - now, 0.0)
