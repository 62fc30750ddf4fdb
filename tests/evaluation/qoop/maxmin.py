"""QOOP's scheduler: max-min fair allocation that tells every job its share (QOOP, 2.3.1 and pseudocode 1)."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, inf

from ebbflow.planners.model import Share
from ebbflow.planners.query.shares import entitlements
from tests.evaluation.qoop.intra import Limit, Packer, aligned
from tests.evaluation.qoop.ledger import Job, Ledger, Pool

_TIE = 1e-9  # of a machine: shares closer than this are equal


class MaxMinFair:
    """The next task goes to the job with the least dominant share per weight; it packs by alignment."""

    def assign(self, ledger: Ledger, jobs: Sequence[Job], now: float) -> None:
        """See ``Scheduler``."""
        lowest_share_first(ledger, jobs, aligned)


def lowest_share_first(
    ledger: Ledger, jobs: Sequence[Job], pack: Packer, allowed: Mapping[Pool, int] | None = None
) -> None:
    """Serve, again and again, the job with the least dominant share per weight of those that something fits.

    Ties go by arrival. ``pack`` picks the tasks; ``allowed`` bounds how many of a pool (0: not named). Tasks
    that a job would get one after the other anyway are placed together. Dominant resource fairness (Ghodsi et
    al., NSDI 2011, algorithm 1), of which QOOP's pseudocode 1 makes the same allocation.
    """
    left = dict(allowed) if allowed is not None else None
    waiting = [job for job in jobs if job.hungry]
    while waiting and ledger.open:
        waiting.sort(key=lambda j: (round(j.load / _TIE), j.order))
        job = waiting[0]
        rival = waiting[1] if len(waiting) > 1 else None
        before = {pool: pool.pending for pool in job.pools}
        if not pack(ledger, job, _until(job, rival, left)):
            waiting.pop(0)  # room only shrinks from here on
            continue
        if left is not None:
            for pool, pending in before.items():
                left[pool] = left.get(pool, 0) - (pending - pool.pending)
        if not job.hungry:
            waiting.pop(0)


def _until(job: Job, rival: Job | None, left: Mapping[Pool, int] | None) -> Limit:
    """Bound how many tasks in a row ``job`` gets before ``rival`` has the lower share."""

    def limit(pool: Pool) -> int:
        most = pool.pending if left is None else min(pool.pending, left.get(pool, 0))
        if rival is None or most <= 1:
            return most
        level, starts = rival.load * job.weight, inf
        for used, d in zip(job.used, pool.demand, strict=True):
            if d > 0:
                gap = (level - used) / d
                # at equal shares the earlier arrival is served
                slack = _TIE / d
                starts = min(starts, floor(gap + slack) + 1 if job.order < rival.order else ceil(gap - slack))
        return int(min(most, max(starts, 1)))

    return limit


def resource_feedback(weights: Mapping[str, float], whole: Share, revision: int) -> dict[str, Share]:
    """Return the share of each active query: ``whole`` · w/Σw (QOOP, RESOURCE_FEEDBACK of pseudocode 1).

    It is what a query may count on whatever the others do; what they leave comes on top of it, unpromised.
    Machines are not divided: a task may be as large as the largest. Raises ``OptionError`` for a weight that is
    not positive and finite.
    """
    return {
        query: Share(revision, whole.total.times(fraction), whole.largest, whole.nodes, whole.hazard)
        for query, fraction in entitlements(weights, 1.0).items()
    }
