"""Many queries on one cluster, in virtual time: arrivals, machines, a scheduler, and a plan policy.

Queries run through the same ``Execution`` as live ones; estimates come from the same list scheduling. The
cluster differs from what estimates assume: tasks are placed on machines, and others want them too.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Resources, Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.planners.query.plan.state import ExecutionState, StageOutput
from ebbflow.planners.query.running.baselines import policy_named
from ebbflow.planners.query.running.execution import Action, Cancel, Execution, Finish, Reuse, Start
from ebbflow.planners.query.running.packing import simulate
from ebbflow.planners.query.running.progress import propagate
from ebbflow.planners.query.running.replanner import Replanner
from tests.evaluation.qoop.fairness import Fairness
from tests.evaluation.qoop.ledger import Job, Ledger, Pool, Scheduler
from tests.evaluation.qoop.maxmin import resource_feedback
from tests.evaluation.qoop.runs import Outcome, Run, Submission

_TIE = 1e-9  # seconds: events closer than this are one moment


class _Checkpointed(Execution):
    """An execution whose tasks are checkpointed one by one, as in QOOP's own engine (4 and 5.5)."""

    def __init__(self, submission: Submission, policy: str, replanner: Replanner) -> None:
        super().__init__(submission.plans, None, policy, replanner)
        self.done_tasks: dict[str, int] = {}  # of stages that were stopped, by physical_key

    def state(self, now: float) -> ExecutionState:
        return replace(super().state(now), done_tasks=dict(self.done_tasks))


@dataclass(slots=True, eq=False)
class _Batch:
    """Identical tasks that started together."""

    query: "_Query"
    pool: Pool
    machines: dict[int, int]
    started: float
    stopped: bool = False


@dataclass(slots=True, eq=False)
class _Query:
    submission: Submission
    execution: _Checkpointed
    job: Job
    pools: dict[str, Pool] = field(default_factory=dict)  # of running stages, by output_fp
    stages: dict[str, Stage] = field(default_factory=dict)  # running, by output_fp
    batches: dict[str, list[_Batch]] = field(default_factory=dict)  # in flight, by output_fp
    finish: float = inf
    aborted: float = 0.0


class ClusterSimulator:
    """Runs ``submissions`` to their ends on ``machines``.

    ``policy`` chooses the plans ("volcano", "clarinet", "qoop", ...) when a query arrives, for its fair share
    of the cluster, itself included. With ``feedback`` every query is told its new share at every arrival and
    departure, and a policy that re-plans does so. A share is never told to be smaller than one of the query's
    largest tasks, because a query that has nothing else is always served one task at a time. ``timer`` returns
    seconds; without it decisions take no measurable time. In virtual time, they take none anyway.

    Raises ``OptionError`` for a task that fits no machine.
    """

    def __init__(
        self,
        submissions: Iterable[Submission],
        machines: Sequence[Resources],
        scheduler: Scheduler,
        policy: str,
        *,
        feedback: bool = False,
        hysteresis: float = 0.15,
        window: float = 60.0,
        timer: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._submissions = tuple(submissions)
        self._ledger = Ledger(machines)
        self._whole = self._ledger.whole
        self._scheduler = scheduler
        self._policy = policy_named(policy)
        self._feedback = feedback
        self._hysteresis = hysteresis
        self._timer = timer
        self._fairness = Fairness(len(machines), window)
        self._heap: list[tuple[float, int, object]] = []
        self._number = count()
        self._active: dict[str, _Query] = {}
        self._ended: dict[str, _Query] = {}
        self._now = 0.0
        self._revision = 0
        self._used = self._busy = self._population = 0.0
        self._rounds = self._tasks = 0
        self._planner_seconds = self._scheduler_seconds = 0.0
        for submission in self._submissions:
            submission.check(machines)
            self._at(submission.at, submission)

    def run(self) -> Run:
        """Run until every query has its result."""
        while self._heap:
            self._step()
        if self._active:
            raise OptionError(f"nothing runs any more, yet {', '.join(self._active)} did not finish")
        ended = [self._ended[s.id] for s in self._submissions]
        return Run(
            tuple(_outcome(query) for query in ended),
            self._fairness.jain,
            self._fairness.honoured,
            self._fairness.windows,
            self._used,
            self._population / self._busy if self._busy else 0.0,
            self._rounds,
            self._tasks,
            sum(len(query.execution.decisions) for query in ended),
            self._planner_seconds,
            self._scheduler_seconds,
        )

    # --- events -------------------------------------------------------------------------------------------

    def _at(self, time: float, event: object) -> None:
        heapq.heappush(self._heap, (time, next(self._number), event))

    def _step(self) -> None:
        """Handle all that happens at the next moment, then share out what is free."""
        before, population = self._now, len(self._active)
        self._account(self._heap[0][0])
        arrivals: list[Submission] = []
        complete: list[tuple[_Query, Pool]] = []
        while self._heap and self._heap[0][0] <= self._now + _TIE:
            event = heapq.heappop(self._heap)[2]
            match event:
                case Submission():
                    arrivals.append(event)
                case _Batch() if not event.stopped:
                    if self._end(event):
                        complete.append((event.query, event.pool))
                case (_Query() as query, Pool() as pool):
                    if query.pools.get(pool.fp) is pool:
                        query.job.pools.append(pool)
                        if pool.pending == 0:
                            complete.append((query, pool))
        for query, pool in complete:
            self._complete(query, pool)
        if population:
            self._busy += self._now - before
        changed = len(self._active) != population
        for query in [q for q in self._active.values() if q.execution.finished]:
            changed = True
            del self._active[query.submission.id]
            self._ended[query.submission.id] = query
        self._arrive(arrivals)
        if self._feedback and (arrivals or changed):
            self._tell([s.id for s in arrivals])
        self._assign()

    def _account(self, now: float) -> None:
        """Let time pass: note what was used."""
        jobs = [query.job for query in self._active.values()]
        self._fairness.advance(self._now, now, jobs)
        self._used += (
            (now - self._now)
            * self._whole.total.cores
            / len(self._ledger.machines)
            * sum(job.used[0] for job in jobs)
        )
        self._population += (now - self._now) * len(jobs)
        self._now = now

    def _end(self, batch: _Batch) -> bool:
        """Take a batch's room back; tell whether its stage is complete."""
        query, pool = batch.query, batch.pool
        query.batches[pool.fp].remove(batch)
        tasks = sum(batch.machines.values())
        for machine, number in batch.machines.items():
            self._ledger.release(query.job, pool, machine, number)
        pool.done += tasks
        query.job.work_left -= tasks * pool.work
        self._report(query, pool)
        return pool.pending == 0 and pool.running == 0

    def _complete(self, query: _Query, pool: Pool) -> None:
        if query.pools.get(pool.fp) is not pool:
            return  # cancelled at this very moment
        stage = query.stages[pool.fp]
        self._drop(query, pool.fp)
        output = StageOutput(pool.fp, round(stage.rows), round(stage.bytes))
        self._apply(query, query.execution.on_finished(output, self._now))

    def _arrive(self, arrivals: Sequence[Submission]) -> None:
        if not arrivals:
            return
        for submission in arrivals:
            replanner = Replanner(submission.plans, self._hysteresis, min_share_delta=0.0)
            execution = _Checkpointed(submission, self._policy.name, replanner)
            order = len(self._active) + len(self._ended)
            job = Job(submission.id, order, submission.weight, used=self._ledger.idle())
            query = _Query(submission, execution, job)
            job.remaining = lambda q=query: propagate(  # type: ignore[misc]
                q.execution.plan, q.execution.state(self._now), self._now
            )
            self._active[submission.id] = query
        shares = self._shares()
        for submission in arrivals:
            query = self._active[submission.id]
            begun = self._timer()
            actions = query.execution.begin(shares[submission.id], {}, self._now)
            self._planner_seconds += self._timer() - begun
            query.job.estimate = simulate(query.execution.plan, self._whole).seconds
            query.job.work_left = self._work(query.execution.plan)
            self._apply(query, actions)

    def _tell(self, know: Sequence[str]) -> None:
        """Tell every query its share, except those that have just begun with it."""
        for name, share in self._shares().items():
            if name not in know:
                query = self._active[name]
                begun = self._timer()
                actions = query.execution.on_share(share, self._now, "queries came or went")
                self._planner_seconds += self._timer() - begun
                self._apply(query, actions)
                if query.execution.decisions[-1].kind == "switch":
                    self._follow(query)

    def _shares(self) -> dict[str, Share]:
        self._revision += 1
        weights = {name: query.submission.weight for name, query in self._active.items()}
        shares = resource_feedback(weights, self._whole, self._revision)
        return {name: self._active[name].submission.at_least(share) for name, share in shares.items()}

    def _assign(self) -> None:
        jobs = [query.job for query in self._active.values()]
        if not any(job.hungry for job in jobs) or not self._ledger.open:
            return
        begun = self._timer()
        self._scheduler.assign(self._ledger, jobs, self._now)
        self._scheduler_seconds += self._timer() - begun
        self._rounds += 1
        for job, pool, machines in self._ledger.collect():
            query = self._active[job.id]
            batch = _Batch(query, pool, machines, self._now)
            query.batches[pool.fp].append(batch)
            self._tasks += sum(machines.values())
            self._at(self._now + pool.seconds, batch)
            self._report(query, pool)

    # --- stages -------------------------------------------------------------------------------------------

    def _apply(self, query: _Query, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(stage):
                    self._start(query, stage)
                case Cancel(stage):
                    self._stop(query, stage)
                case Finish():
                    query.finish = self._now
                case Reuse():
                    pass

    def _start(self, query: _Query, stage: Stage) -> None:
        plan, fp = query.execution.plan, stage.output_fp
        done = min(query.execution.done_tasks.get(stage.physical_key, 0), stage.tasks)
        pool = Pool(
            fp,
            self._ledger.vector(stage.demand),
            stage.duration,
            stage.tasks - done,
            plan.upward_rank[fp],
            plan.stages.index(stage),
            done=done,
        )
        query.pools[fp], query.stages[fp], query.batches[fp] = pool, stage, []
        query.job.version += 1
        if done:
            self._report(query, pool)
        if stage.latency > 0 or not pool.pending:
            self._at(self._now + stage.latency, (query, pool))
        else:
            query.job.pools.append(pool)

    def _stop(self, query: _Query, stage: Stage) -> None:
        query.execution.done_tasks[stage.physical_key] = query.pools[stage.output_fp].done
        for batch in query.batches[stage.output_fp]:
            batch.stopped = True
            tasks = sum(batch.machines.values())
            query.aborted += tasks * stage.demand.cores * (self._now - batch.started)
            for machine, number in batch.machines.items():
                self._ledger.release(query.job, batch.pool, machine, number)
        self._drop(query, stage.output_fp)

    def _drop(self, query: _Query, fp: str) -> None:
        pool = query.pools.pop(fp)
        del query.stages[fp], query.batches[fp]
        if pool in query.job.pools:
            query.job.pools.remove(pool)
        query.job.version += 1

    def _report(self, query: _Query, pool: Pool) -> None:
        total = pool.done + pool.running + pool.pending
        query.execution.on_progress(pool.fp, total, pool.done, self._now, pool.running)

    # --- amounts ------------------------------------------------------------------------------------------

    def _work(self, plan: QueryExecutionPlan) -> float:
        return sum(s.tasks * sum(self._ledger.vector(s.demand)) * s.duration for s in plan.stages)

    def _follow(self, query: _Query) -> None:
        """Rank what runs by the plan switched to, and count what is left of it."""
        plan = query.execution.plan
        for pool in query.pools.values():
            pool.rank = plan.upward_rank.get(pool.fp, 0.0)
        query.job.work_left = sum(
            (r.tasks + r.in_flight) * sum(self._ledger.vector(r.stage.demand)) * r.seconds
            for r in query.job.remaining().stages
        )


def _outcome(query: _Query) -> Outcome:
    chosen = [d.chosen for d in query.execution.decisions if d.kind in {"start", "switch"}]
    return Outcome(query.submission.id, query.submission.at, query.finish, tuple(chosen), query.aborted)
