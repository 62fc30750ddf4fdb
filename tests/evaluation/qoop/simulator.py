"""A discrete-event simulator of one query whose capacity follows a profile (QOOP, section 8, micro-benchmarks).

It is a driver of ``Execution``: it reports starts, task counts, ends and shares to the same state machine that
drives a real engine, and carries out the actions that come back. Time is virtual.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.planners.query.plan.state import ExecutionState, StageOutput
from ebbflow.planners.query.running.execution import Action, Cancel, Execution, Finish, Start
from ebbflow.planners.query.running.packing import alignment, lead
from ebbflow.planners.query.running.progress import OVERDUE
from ebbflow.planners.query.running.replanner import Replanner
from tests.evaluation.qoop.profiles import Profile
from tests.evaluation.qoop.workloads import Family, Testbed

_SLACK = 1e-9  # of the capacity: rounding never keeps a task out
_TIE = 1e-12  # alignments closer than this are equal


@dataclass(frozen=True, slots=True)
class Options:
    """How a query is run."""

    policy: str = "qoop"
    hysteresis: float = 0.15
    min_share_delta: float = 0.0  # every change of the share triggers a decision
    switch_cost: float = 0.0  # seconds that a switch is taken to cost
    backtracking: bool = True  # outputs that were consumed and tasks of cancelled stages are kept


@dataclass(frozen=True, slots=True)
class Switch:
    """One change of plans."""

    at: float  # seconds since the query began
    before: str
    after: str
    depth: int  # backtracking depth, hops


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    seconds: float  # completion time
    plan: str  # plan that it ended with
    first: str  # plan that it began with
    switches: list[Switch] = field(default_factory=list)
    decisions: int = 0
    planning: float = 0.0  # seconds spent deciding, by the timer given
    tasks: int = 0  # tasks that completed
    lost: int = 0  # tasks that failed when containers were revoked
    aborted: int = 0  # tasks that were stopped by a switch
    used: float = 0.0  # container-seconds that completed tasks took
    stages: int = 0  # stages that were computed
    bushy: int = 0  # of those, stages that read several stages


class _Checkpointed(Execution):
    """An execution that knows task-level checkpoints, and may forget outputs."""

    def __init__(self, family: Family, options: Options) -> None:
        super().__init__(
            family.plans,
            None,
            options.policy,
            Replanner(family.plans, options.hysteresis, options.switch_cost, options.min_share_delta),
        )
        self.done_tasks: dict[str, int] = {}  # by physical_key
        self._made = {s.physical_key: s.output_fp for p in family.plans for s in p.stages}
        self.ages: dict[str, list[tuple[float, int]]] = {}  # by output_fp: (seconds, tasks) that run

    def state(self, now: float) -> ExecutionState:
        """Return what re-planning is told. An engine knows how long each of its tasks has run, so that the
        time they have left, as estimated, is their mean."""
        seen = super().state(now)
        running = {
            fp: replace(r, task_seconds_left=self._left(r.stage.duration, self.ages.get(fp, [])))
            for fp, r in seen.running.items()
        }
        return replace(seen, running=running, done_tasks=self.done_tasks)

    @staticmethod
    def _left(duration: float, ages: list[tuple[float, int]]) -> float:
        tasks = sum(n for _, n in ages)
        left = sum(n * max(duration - age, OVERDUE * age) for age, n in ages)
        return left / tasks if tasks else 0.0

    def forget(self, stage: Stage) -> None:
        """Lose the outputs that ``stage``, now complete, has read, unless the current plan still reads them."""
        open_ = {i for s in self.plan.stages if s.output_fp not in self._checkpoints for i in s.inputs}
        for fp in stage.inputs:
            if fp not in open_ and self._checkpoints.pop(fp, None) is not None:
                for lost in [k for k, of in self._made.items() if of == fp]:
                    self.done_tasks.pop(lost, None)


@dataclass(slots=True)
class _Batch:
    """Tasks of one stage that started together."""

    start: float
    end: float
    count: int


@dataclass(slots=True)
class _Job:
    """A running stage."""

    stage: Stage  # as it really is
    ready_at: float
    pending: int
    done: int
    rank: float
    index: int
    unit: tuple[float, float]  # cores and memory of a task
    batches: list[_Batch] = field(default_factory=list)

    @property
    def flying(self) -> int:
        return sum(b.count for b in self.batches)


def run(
    family: Family,
    profile: Profile,
    options: Options | None = None,
    *,
    testbed: Testbed | None = None,
    true: Mapping[str, Stage] | None = None,
    timer: Callable[[], float] | None = None,
    limit: float = 1e7,
) -> Outcome:
    """Run one query on ``profile`` (containers over time) and return what it came to.

    When the level rises, containers are granted; when it falls, containers are revoked at once and their
    tasks, the least progressed first, start again later. Completed tasks count for ever, by physical key.
    Waiting tasks start in the estimator's order: Tetris alignment, then upward rank, then topological index.
    ``true`` maps physical keys to stages as they really are, where the planner's ``family`` errs; ``timer``
    measures the seconds spent deciding. Deterministic. Raises ``OptionError`` when the query takes more than
    ``limit`` seconds, as when no plan ever fits.
    """
    return _Simulation(
        family, profile, options or Options(), testbed or Testbed(), true or {}, timer, limit
    ).run()


class _Simulation:
    def __init__(
        self,
        family: Family,
        profile: Profile,
        options: Options,
        testbed: Testbed,
        true: Mapping[str, Stage],
        timer: Callable[[], float] | None,
        limit: float,
    ) -> None:
        self.profile, self.options, self.testbed, self.true = profile, options, testbed, true
        self.timer = timer or (lambda: 0.0)
        self.limit = limit
        self.execution = _Checkpointed(family, options)
        self.jobs: dict[str, _Job] = {}  # by output_fp
        self.now = 0.0
        self.position = 0  # in the profile
        self.share: Share = testbed.share(profile.levels[0])
        self.free = [self.share.total.cores, self.share.total.memory]
        self.outcome = Outcome(inf, "", "")
        self.finished = False
        self.ranks: dict[str, dict[str, int]] = {}

    def run(self) -> Outcome:
        self._act(self._timed(lambda: self.execution.begin(self.share, {}, 0.0)))
        self.outcome.first = self.execution.plan.id
        while not self.finished:
            self._pack()
            self._next()
        self.outcome.plan = self.execution.plan.id
        self.outcome.seconds = self.now
        return self.outcome

    # --- events -------------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Go to the next moment at which something happens, and let it happen."""
        change = self.profile.times[self.position + 1] if self.position + 1 < len(self.profile.times) else inf
        task = min((b.end for j in self.jobs.values() for b in j.batches), default=inf)
        ready = min(
            (
                j.ready_at
                for j in self.jobs.values()
                if not j.batches and (j.ready_at > self.now or not j.pending)
            ),
            default=inf,
        )
        self.now = min(change, task, ready)
        if self.now > self.limit:
            raise OptionError(
                f"limit must be more than {self.limit:g} s, or some plan must fit the profile; "
                f"{self.execution.plan.id} is not done"
            )
        self._end_tasks()
        if self.finished:
            return
        if change <= self.now + _TIE * (1 + self.now):
            self.position += 1
            self._change(self.profile.levels[self.position])

    def _end_tasks(self) -> None:
        horizon = self.now + _TIE * (1 + self.now)
        ended: list[str] = []
        for fp, job in self.jobs.items():
            if any(b.end <= horizon for b in job.batches):
                for batch in job.batches:
                    if batch.end <= horizon:
                        job.done += batch.count
                        self._release(job, batch.count)
                        self.outcome.tasks += batch.count
                        self.outcome.used += batch.count * job.stage.duration * self._width(job)
                job.batches = [b for b in job.batches if b.end > horizon]
                self.execution.done_tasks[job.stage.physical_key] = job.done
            if job.pending == 0 and not job.batches and job.ready_at <= horizon:
                ended.append(fp)
        for fp in ended:
            if fp not in self.jobs or self.finished:  # an end before may have cancelled it
                continue
            job = self.jobs.pop(fp)
            self.outcome.stages += 1
            self.outcome.bushy += len(job.stage.inputs) > 1
            self._tell()
            actions = self.execution.on_finished(StageOutput(fp, 0, 0), self.now)
            if not self.options.backtracking:
                self.execution.forget(job.stage)
            self._act(actions)

    def _width(self, job: _Job) -> float:
        """Return how many containers a task takes: its cores, or those whose memory it needs."""
        return max(job.unit[0], job.unit[1] / self.testbed.memory)

    # --- capacity -----------------------------------------------------------------------------------------

    def _change(self, level: float) -> None:
        self.share = self.testbed.share(level, self.position)
        used = [sum(j.flying * j.unit[d] for j in self.jobs.values()) for d in (0, 1)]
        self.free = [t - u for t, u in zip(self.share.total[:2], used, strict=True)]
        self._revoke()
        self._tell()
        execution = self.execution
        before = execution.state(self.now) if self.options.policy == "qoop" else None
        actions = self._timed(lambda: execution.on_share(self.share, self.now, "the share changed"))
        self.outcome.decisions += 1
        if before is not None and execution.plan.id != before.plan.id:
            # what started just now is not what the new plan takes over
            stopped = {a.stage.output_fp for a in actions if isinstance(a, Cancel)}
            kept = {fp for fp in before.running if fp not in stopped}
            depth = backtracking_depth(before, execution.plan, kept)
            self.outcome.switches.append(Switch(self.now, before.plan.id, execution.plan.id, depth))
        self._act(actions)

    def _revoke(self) -> None:
        """Fail the least progressed tasks until what runs fits the share."""
        while min(self.free[0], self.free[1]) < -_SLACK * max(self.share.total.cores, 1.0):
            job, batch = min(
                ((j, b) for j in self.jobs.values() for b in j.batches),
                key=lambda x: ((self.now - x[1].start) / x[0].stage.duration, -x[0].rank, x[0].index),
            )
            short = max(
                -free / unit for free, unit in zip(self.free, job.unit, strict=True) if unit > 0 and free < 0
            )
            count = min(batch.count, max(int(short + 1 - _SLACK), 1))
            batch.count -= count
            job.pending += count
            self.outcome.lost += count
            self._release(job, count)
            if not batch.count:
                job.batches.remove(batch)

    def _release(self, job: _Job, count: int) -> None:
        self.free[0] += count * job.unit[0]
        self.free[1] += count * job.unit[1]

    def _tell(self) -> None:
        """Report task counts, as an engine would when asked."""
        for fp, job in self.jobs.items():
            self.execution.on_progress(fp, job.stage.tasks, job.done, self.now, job.flying)
        self.execution.ages = {
            fp: [(self.now - b.start, b.count) for b in j.batches] for fp, j in self.jobs.items()
        }

    # --- actions ------------------------------------------------------------------------------------------

    def _timed(self, call: Callable[[], list[Action]]) -> list[Action]:
        began = self.timer()
        actions = call()
        self.outcome.planning += self.timer() - began
        return actions

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(action.stage)
            elif isinstance(action, Cancel):
                job = self.jobs.pop(action.stage.output_fp)
                self.outcome.aborted += job.flying
                self._release(job, job.flying)
                if not self.options.backtracking:
                    self.execution.done_tasks.pop(job.stage.physical_key, None)
            elif isinstance(action, Finish):
                self.finished = True

    def _start(self, stage: Stage) -> None:
        real = self.true.get(stage.physical_key, stage)
        done = min(self.execution.done_tasks.get(stage.physical_key, 0), stage.tasks)
        plan = self.execution.plan
        index = self._positions(plan).get(stage.output_fp, -1)
        self.jobs[stage.output_fp] = _Job(
            real,
            self.now + real.latency,
            real.tasks - done,
            done,
            plan.upward_rank.get(stage.output_fp, 0.0),
            index,
            (real.demand.cores, real.demand.memory),
        )
        self.execution.on_progress(stage.output_fp, real.tasks, done, self.now, 0)

    def _positions(self, plan: QueryExecutionPlan) -> Mapping[str, int]:
        if plan.id not in self.ranks:
            self.ranks[plan.id] = {s.output_fp: i for i, s in enumerate(plan.stages)}
        return self.ranks[plan.id]

    def _pack(self) -> None:
        """Start waiting tasks in the estimator's order until none fits."""
        horizon = self.now + _TIE * (1 + self.now)
        waiting = sorted(
            (j for j in self.jobs.values() if j.pending and j.ready_at <= horizon),
            key=lambda j: (-j.rank, j.index),
        )
        total = self.share.total[:2]
        if not waiting or total[0] <= 0:
            return
        demands = [tuple(u / t for u, t in zip(j.unit, total, strict=True)) for j in waiting]
        room = [self._room(j) for j in waiting]
        while any(room):
            available = [f / t for f, t in zip(self.free, total, strict=True)]
            values = [alignment(d, available) if r else -inf for d, r in zip(demands, room, strict=True)]
            best = 0
            for i, value in enumerate(values):
                if value > values[best] + _TIE or values[best] == -inf:
                    best = i
            count = room[best]
            for i, value in enumerate(values):
                if i != best and value > -inf and count > 1:
                    gap = values[best] - value
                    count = min(count, lead(demands[best], demands[i], gap, first=best < i))
            self._launch(waiting[best], count)
            room = [self._room(j) if r else 0 for j, r in zip(waiting, room, strict=True)]

    def _room(self, job: _Job) -> int:
        """Return how many more tasks of a stage can start."""
        room = job.pending
        largest = self.share.largest
        for unit, free, total, most in zip(job.unit, self.free, self.share.total, largest, strict=False):
            if unit > most * (1 + _SLACK):
                return 0
            if unit > 0:
                room = min(room, max(int((free + _SLACK * total) / unit), 0))
        return room

    def _launch(self, job: _Job, count: int) -> None:
        end = self.now + job.stage.duration
        for batch in job.batches:
            if batch.start == self.now:
                batch.count += count
                break
        else:
            job.batches.append(_Batch(self.now, end, count))
        job.pending -= count
        self._release(job, -count)


def backtracking_depth(state: ExecutionState, plan: QueryExecutionPlan, kept: set[str] | None = None) -> int:
    """Return how far a switch from ``state.plan`` to ``plan`` goes back: hops (QOOP, fig. 2.12).

    Over the current plan's frontier (stages that run, and complete ones that no started stage reads) it is
    the most hops upstream to the nearest stage whose output or work the new plan uses; base tables count as
    used. ``kept``: running stages that the new plan takes over; ``None`` means all that it contains.
    """
    reused = set(used_by(plan, state, kept))
    current = state.plan
    started = set(state.running) | {fp for fp in state.checkpoints if fp in current.by_fp}
    read = {i for fp in started if fp in current.by_fp for i in current.by_fp[fp].inputs}
    frontier = {fp for fp in started if fp in current.by_fp and (fp in state.running or fp not in read)}

    def hops(fp: str) -> int:
        if fp in reused:
            return 0
        stage = current.by_fp.get(fp)
        if stage is None or not stage.inputs:
            return 1  # to the base tables
        return 1 + min(hops(i) for i in stage.inputs)

    return max((hops(fp) for fp in frontier), default=0)


def used_by(plan: QueryExecutionPlan, state: ExecutionState, kept: set[str] | None = None) -> list[str]:
    """Return the outputs and running stages of ``state`` that ``plan`` goes on from."""
    found: list[str] = []
    stack = [plan.sink.output_fp]
    seen: set[str] = set()
    while stack:
        fp = stack.pop()
        if fp in seen:
            continue
        seen.add(fp)
        if fp in state.checkpoints or (fp in state.running and (kept is None or fp in kept)):
            found.append(fp)
            continue
        stage = plan.by_fp.get(fp)
        stack += stage.inputs if stage else ()
    return found
