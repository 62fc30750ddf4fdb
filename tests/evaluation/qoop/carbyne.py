"""Altruistic scheduling: jobs give up what they do not need yet (Grandl et al., Carbyne, OSDI 2016)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from ebbflow.planners.model import Share
from ebbflow.planners.query.running.packing import simulate
from ebbflow.planners.query.running.progress import Remaining, RemainingStage
from tests.evaluation.qoop.intra import aligned, all_of
from tests.evaluation.qoop.ledger import Job, Ledger, Pool
from tests.evaluation.qoop.maxmin import lowest_share_first, resource_feedback


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a stage must end, and how many of its tasks may wait for how long, for the job not to be late."""

    finish: float  # latest end, seconds
    width: int  # tasks at once in the latest schedule


@dataclass(frozen=True, slots=True)
class Outlook:
    """A job's schedule in its fair share."""

    version: int
    jobs: int  # that the share was divided among
    end: float  # of the job, seconds
    deadlines: dict[str, Deadline] = field(default_factory=dict)  # by output_fp


class Carbyne:
    """Fair shares first, but only for tasks that cannot wait; what that leaves goes to jobs closest to their end.

    1. Each job schedules what remains of it in its fair share, forwards to know its end and backwards from
       there to know the latest start of every task. 2. Tasks whose latest start has come get room by dominant
       resource fairness. 3. What is left goes to the job closest to its end, all it can use, then to the next,
       packed by alignment; tasks that could still wait take part. (Carbyne, sections 3.2 and 3.3.)
    """

    def __init__(self) -> None:
        self._outlooks: dict[str, Outlook] = {}

    def assign(self, ledger: Ledger, jobs: Sequence[Job], now: float) -> None:
        """See ``Scheduler``."""
        fair = resource_feedback({job.id: job.weight for job in jobs}, ledger.whole, 0)
        hungry = [job for job in jobs if job.hungry]
        urgent: dict[Pool, int] = {}
        for job in hungry:
            outlook = self._outlook(job, fair[job.id], len(jobs), now)
            urgent.update({pool: must_start(pool, outlook, now) for pool in job.pools})
        lowest_share_first(ledger, hungry, aligned, urgent)
        for job in sorted(hungry, key=lambda j: (round(self._outlooks[j.id].end, 9), j.order)):
            while job.hungry and aligned(ledger, job, all_of):
                pass
        self._outlooks = {job.id: self._outlooks[job.id] for job in jobs if job.id in self._outlooks}

    def _outlook(self, job: Job, share: Share, jobs: int, now: float) -> Outlook:
        known = self._outlooks.get(job.id)
        if known is None or (known.version, known.jobs) != (job.version, jobs):
            known = outlook(job.remaining(), share, now, job.version, jobs)
            self._outlooks[job.id] = known
        return known


def must_start(pool: Pool, outlook: Outlook, now: float) -> int:
    """Return how many of the pool's waiting tasks have no later start: n − width · (starts left after now)."""
    deadline = outlook.deadlines.get(pool.fp)
    if deadline is None or pool.seconds <= 0:
        return pool.pending
    later = max(ceil((deadline.finish - now) / pool.seconds - 1e-9) - 1, 0)
    return min(max(pool.pending - deadline.width * later, 0), pool.pending)


def outlook(remaining: Remaining, share: Share, now: float, version: int = 0, jobs: int = 1) -> Outlook:
    """Return when ``remaining`` ends in ``share`` and by when each of its stages must, in seconds.

    The latest schedule is the list schedule of the DAG with its edges reversed, read backwards from the end.
    """
    end = simulate(remaining, share).seconds
    backwards = reverse(remaining)
    schedule = simulate(backwards, share)
    if inf in (end, schedule.seconds):
        return Outlook(version, jobs, inf)
    deadlines = {}
    for r in backwards.stages:
        fp = r.stage.output_fp
        span = schedule.finish[fp] - schedule.start[fp] - r.latency
        rounds = max(round(span / r.seconds), 1) if r.seconds > 0 else 1
        deadlines[fp] = Deadline(now + end - schedule.start[fp], ceil(r.tasks / rounds))
    return Outlook(version, jobs, now + end, deadlines)


def reverse(remaining: Remaining) -> Remaining:
    """Return ``remaining`` with every edge reversed. Tasks in flight count as tasks that have to run."""
    consumers: dict[str, list[str]] = {r.stage.output_fp: [] for r in remaining.stages}
    for r in remaining.stages:
        for fp in r.waits_for:
            consumers[fp].append(r.stage.output_fp)
    depth: dict[str, float] = {}  # longest time from the sources to the stage's end
    stages: list[RemainingStage] = []
    for r in remaining.stages:
        fp = r.stage.output_fp
        depth[fp] = r.latency + r.seconds + max((depth[i] for i in r.waits_for), default=0.0)
        tasks = r.tasks + r.in_flight
        stages.append(
            replace(
                r,
                index=-r.index,
                rank=depth[fp],
                waits_for=tuple(consumers[fp]),
                tasks=tasks,
                in_flight=0,
                in_flight_seconds=0.0,
                running=False,
            )
        )
    return replace(remaining, stages=tuple(reversed(stages)))
