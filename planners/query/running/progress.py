"""Progress propagation: what a candidate plan still has to do, given what others have done (QOOP, 5.5)."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.planners.query.plan.state import ExecutionState, RunningStage


@dataclass(frozen=True, slots=True)
class RemainingStage:
    """A stage that a plan still needs, as list scheduling sees it."""

    stage: Stage  # in the physical form that will run
    index: int  # topological position in the plan
    rank: float  # upward rank in the plan: seconds
    waits_for: tuple[str, ...]  # output_fps of remaining stages that must finish first
    tasks: int  # not yet started
    seconds: float  # of one task
    width: int  # most tasks at once
    latency: float  # seconds left before its first task
    in_flight: int = 0  # tasks that run now
    in_flight_seconds: float = 0.0  # until those end
    running: bool = False


@dataclass(frozen=True)
class Remaining:
    """A plan rewritten by progress: checkpoints are its sources, shared running stages are marked."""

    plan: QueryExecutionPlan
    stages: tuple[RemainingStage, ...]  # topological order; needed and adopted ones
    inputs: tuple[str, ...]  # output_fps taken from checkpoints, in plan order
    refused: frozenset[str] = frozenset()  # running stages treated as aborted although they compute the same

    @cached_property
    def adopted(self) -> frozenset[str]:
        """Return the output_fps of running stages that the plan keeps."""
        return frozenset(r.stage.output_fp for r in self.stages if r.running)

    @cached_property
    def needed(self) -> tuple[RemainingStage, ...]:
        """Return the stages still to be started."""
        return tuple(r for r in self.stages if not r.running)

    @cached_property
    def foreign(self) -> tuple[str, ...]:
        """Return the adopted stages that run in another physical form than the plan's own, in order."""
        own = self.plan.by_fp
        return tuple(
            r.stage.output_fp
            for r in self.stages
            if r.running and own[r.stage.output_fp].physical_key != r.stage.physical_key
        )


def propagate(
    plan: QueryExecutionPlan,
    state: ExecutionState,
    now: float | None = None,
    refuse: frozenset[str] = frozenset(),
) -> Remaining:
    """Return what ``plan`` still has to do, walking back from its sink (QOOP, 5.5).

    A checkpointed stage becomes a source and hides its ancestors. A running stage with the same output_fp
    is adopted as it runs, in its own physical form, unless ``refuse`` names it. Every other stage is
    needed, less its tasks checkpointed under its physical key and less the part that exists in slices.
    ``now`` (seconds since the Unix epoch) tells how much of a running stage's latency has passed; without it,
    all. O(V+E).
    """
    position = {stage.output_fp: i for i, stage in enumerate(plan.stages)}
    found: dict[str, RemainingStage | None] = {}  # None: taken from its checkpoint

    def parents(stage: Stage) -> Iterator[Stage]:
        for fp in stage.inputs:
            parent = plan.by_fp.get(fp) or state.plan.by_fp.get(fp)
            if parent is not None:
                yield parent

    def visit(stage: Stage) -> None:
        fp = stage.output_fp
        if fp in found:
            return
        if fp in state.checkpoints:
            found[fp] = None
            return
        running = None if fp in refuse else state.running.get(fp)
        form = running.stage if running else stage
        for parent in parents(form):
            visit(parent)
        waits_for = tuple(i for i in form.inputs if found.get(i) is not None)
        index, rank = position.get(fp, -1), plan.upward_rank.get(fp, 0.0)
        if running:
            found[fp] = _adopted(running, index, rank, waits_for, now)
        else:
            done = state.done_tasks.get(form.physical_key, 0)
            # slices serve every form of the stage that is divided, whatever its join order
            part = state.sliced.get(fp, 0.0) if form.slicing is not None else 0.0
            found[fp] = _needed(form, index, rank, waits_for, done, part)

    visit(plan.sink)
    return Remaining(
        plan,
        tuple(r for r in found.values() if r is not None),
        tuple(sorted((fp for fp, r in found.items() if r is None), key=lambda fp: position.get(fp, -1))),
        refuse,
    )


def whole(plan: QueryExecutionPlan) -> Remaining:
    """Return ``plan`` with nothing done yet."""
    return propagate(plan, ExecutionState(plan))


OVERDUE = 0.1  # a task that outlives its estimate is expected to take this fraction of its age longer
_EVIDENCE = 2.0  # seconds of running before progress says anything
_YOUTH = 5.0  # seconds that a young executor may lose


def task_seconds(running: RunningStage) -> float:
    """Return the expected seconds of one task as the engine counts tasks.

    An engine may cut a stage into more or fewer tasks than estimated; the stage's work stays the same.
    """
    return running.stage.duration * running.stage.tasks / max(running.tasks_total, 1)


@dataclass(slots=True)
class TrackedStage:
    """A running stage as it is tracked."""

    stage: Stage
    started: float
    total: int
    wave: float  # when the tasks now running began, as far as is known
    done: int = 0
    running: int | None = None
    lost: int = 0  # of the tasks done, until the engine no longer counts them as done
    told: float = 0.0  # when ``running`` was told
    ran: float = 0.0  # task-seconds until then, of tasks that were told of
    native: bool = False  # its tasks are DuckDB's

    def ran_until(self, now: float) -> float:
        """Return for how long tasks have run, all together."""
        return self.ran + (self.running or 0) * max(now - self.told, 0.0)

    def seen(self, now: float) -> RunningStage:
        """Return the stage as it is at ``now``, in seconds of its clock."""
        total = self.total or self.stage.tasks
        ran = self.ran_until(now)
        view = RunningStage(
            self.stage, self.started, total, self.done, 0.0, self.running, self.lost, seconds_seen=ran
        )
        age = now - self.wave
        if age <= 0 or self.done - self.lost >= total:
            return view
        left = task_seconds(view) - age
        left = left if left > 0 else OVERDUE * age
        return replace(view, task_seconds_left=left, task_seconds_spent=age)


def spent(running: RunningStage) -> float:
    """Return the task-seconds that went into a running stage: what its finished tasks were expected to take, and
    for how long those have run that run now; or, where that is more, for how long tasks were seen running: which of
    them has finished, and when the others began, an engine does not tell."""
    left = _left(running)
    flying = left if running.tasks_running is None else min(running.tasks_running, left)
    done = max(running.tasks_done - running.tasks_lost, 0) * task_seconds(running)
    return max(done + min(flying, _width(running)) * running.task_seconds_spent, running.seconds_seen)


def redone(running: Sequence[RunningStage], cores: float) -> float:
    """Return how many seconds it takes ``cores`` to do again what has been done of running stages, side by side.

    >>> redone([], 4)
    0.0
    """
    each = [(spent(r), max(r.stage.demand.cores, 1e-9), _width(r)) for r in running]
    slots = [min(width, max(cores / demand, 1.0)) for _, demand, width in each]
    longest = max((s / n for (s, _, _), n in zip(each, slots, strict=True)), default=0.0)
    return max(longest, sum(s * demand for s, demand, _ in each) / max(cores, 1e-9))


def _left(running: RunningStage) -> int:
    return max(running.tasks_total - running.tasks_done + running.tasks_lost, 0)


def _width(running: RunningStage) -> int:
    """Return how many tasks run at once at most: a statement of several engine stages has more of them than its
    widest wave."""
    return max(min(running.stage.tasks, running.tasks_total), 1)


def _needed(
    stage: Stage, index: int, rank: float, waits_for: tuple[str, ...], done_tasks: int, done_part: float
) -> RemainingStage:
    left = 1.0 - min(max(done_part, 0.0), 1.0)
    tasks = math.ceil(max(stage.tasks - done_tasks, 0) * left)
    return RemainingStage(
        stage, index, rank, waits_for, tasks, stage.duration, max(stage.tasks, 1), stage.latency * left
    )


def _adopted(
    running: RunningStage, index: int, rank: float, waits_for: tuple[str, ...], now: float | None
) -> RemainingStage:
    stage = running.stage
    left = _left(running)
    begun = now is None or running.tasks_done > 0 or bool(running.tasks_running)
    latency = 0.0 if begun or now is None else max(running.started + stage.latency - now, 0.0)
    in_flight = 0
    if running.task_seconds_left > 0 and latency == 0:
        in_flight = left if running.tasks_running is None else min(running.tasks_running, left)
    width = _width(running)
    in_flight = min(in_flight, width)
    return RemainingStage(
        stage,
        index,
        rank,
        waits_for,
        left - in_flight,
        task_seconds(running),
        width,
        latency,
        in_flight,
        running.task_seconds_left if in_flight else 0.0,
        running=True,
    )


def repriced(running: RunningStage, seconds: float) -> RunningStage:
    """Return ``running`` as if its stage's work had been estimated to take ``seconds`` (core-seconds)."""
    stage = running.stage
    if stage.core_seconds <= 0.0 or seconds <= 0.0:
        return running
    factor = seconds / stage.core_seconds
    renewed = replace(stage, duration=stage.duration * factor, latency=stage.latency * factor)
    return replace(running, stage=renewed)


def drift(running: Iterable[RunningStage], cores: float, now: float, warming: float = 0.0) -> float:
    """Return how many times slower the running stages are than estimated, in [1/2, 8]; 1 when nothing tells.

    Stages that run side by side share the cores, so they are judged together: work W of which a fraction f is
    done after e seconds will take about e/f in all, and at least e. Both that and the estimate W/cores are
    lengthened by a few seconds, which a young executor may lose on anything. An estimate that is wrong for these
    stages is wrong for others too: the factor is meant for the whole cost model. ``cores`` are those that the stages
    have had; of more than they have tasks, the rest does not help them. ``warming`` are the seconds that each of them
    is expected to have lost, on average, before it was warm, which later stages do not lose again.
    """
    known = [r for r in running if now - r.started >= _EVIDENCE]
    work = sum(r.stage.core_seconds for r in known)
    if work <= 0:
        return 1.0
    done = sum(r.stage.core_seconds * r.tasks_done / r.tasks_total for r in known if r.tasks_total) / work
    elapsed = max(now - r.started for r in known)
    used = min(cores, sum(r.tasks_total for r in known))
    expected = max(r.stage.latency for r in known) + work / max(used, 1.0) + warming
    if done > 0:
        implied = elapsed / done
    elif elapsed > expected:
        implied = elapsed
    else:
        return 1.0
    return min(max((implied + _YOUTH) / (expected + _YOUTH), 0.5), 8.0)


def mean_cores(seen: Sequence[tuple[float, float]], since: float, now: float) -> float:
    """Return how many cores there were on average from ``since`` to ``now``.

    ``seen`` are times (s) from which on there were so many cores, in order.

    >>> mean_cores([(0.0, 1.0), (8.0, 6.0)], 0.0, 10.0)
    2.0
    """
    total = 0.0
    for (begun, cores), (ended, _) in zip(seen, [*seen[1:], (inf, 0.0)], strict=True):
        total += cores * max(min(ended, now) - max(begun, since), 0.0)
    return total / (now - since) if now > since and total > 0.0 else seen[-1][1]
