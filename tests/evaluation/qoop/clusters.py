"""Ledgers, jobs and small queries that the scheduling tests share."""

from collections import Counter

from ebbflow.planners.model import Resources
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.running.progress import whole
from tests.evaluation.qoop.ledger import Job, Ledger, Pool, Scheduler

GHODSI = (Resources(9, 18),)  # the machine of the DRF paper's example


def ledger(*machines: tuple[float, float]) -> Ledger:
    return Ledger([Resources(cores, memory) for cores, memory in machines])


def job(
    books: Ledger,
    name: str,
    *stages: tuple[float, float, int],
    order: int = 0,
    weight: float = 1.0,
    estimate: float = 1.0,
    seconds: float = 1.0,
) -> Job:
    """A job whose stages are (cores, memory, tasks), all runnable."""
    pools = [
        Pool(f"{name}{n}", books.vector(Resources(cores, memory)), seconds, tasks, index=n)
        for n, (cores, memory, tasks) in enumerate(stages)
    ]
    work = sum(p.pending * p.work for p in pools)
    return Job(name, order, weight, pools, books.idle(), estimate, work)


def known(books: Ledger, name: str, plan: QueryExecutionPlan, order: int = 0) -> Job:
    """A job that knows its plan; stages without inputs are runnable."""
    pools = [
        Pool(s.output_fp, books.vector(s.demand), s.duration, s.tasks, plan.upward_rank[s.output_fp], n)
        for n, s in enumerate(plan.stages)
        if not s.inputs
    ]
    return Job(name, order, 1.0, pools, books.idle(), remaining=lambda: whole(plan))


def assigned(scheduler: Scheduler, books: Ledger, *jobs: Job) -> dict[str, int]:
    """Return how many tasks each job was given."""
    scheduler.assign(books, list(jobs), 0.0)
    given = Counter({j.id: 0 for j in jobs})
    for j, _, machines in books.collect():
        given[j.id] += sum(machines.values())
    return dict(given)
