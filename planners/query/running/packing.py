"""Completion time of a plan on a share: list scheduling of its remaining tasks (QOOP, 5.6)."""

import heapq
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, floor, inf

from ebbflow.planners.model import Share
from ebbflow.planners.model.capacity import warming
from ebbflow.planners.query.costs.links import cold_tasks
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.planners.query.running.progress import Remaining, RemainingStage, whole

_SLACK = 1e-9  # of a share's capacity: rounding never keeps a task out
_TIE = 1e-12  # alignments closer than this are equal
_NEVER = 2**31
_NO_STAGE = -1


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a plan's remaining stages would start and finish, in seconds from now."""

    seconds: float  # until the sink finishes; infinite when some task fits no node
    start: Mapping[str, float] = field(default_factory=dict)  # by output_fp; latency included
    finish: Mapping[str, float] = field(default_factory=dict)  # by output_fp
    misfit: str = ""  # output_fp of a stage whose tasks do not fit the share


def simulate(plan: Remaining | QueryExecutionPlan, share: Share, max_parallel_stages: int = 0) -> Schedule:
    """Return the schedule of what remains of ``plan`` on ``share``, which is assumed to persist.

    Tasks are packed as vectors into the share's total. Of the ready tasks that fit, the one with the largest
    Tetris alignment (D/C)·(available/C) starts; ties go to the larger upward rank, then to the topological
    index. A started stage spends its latency before its first task, outside the workers. At most
    ``max_parallel_stages`` stages (0: any number) are started at once, by upward rank.

    A stage's first tasks on cores whose processes are cold take its warm-up longer; with time cores get warm. Which
    tasks meet cold ones cannot be known beforehand: as many as their part of all cores. Cores that are absent take
    tasks when the share says so.

    A task larger than the share's largest node never runs: the time is infinite. Disk and network count
    only where the share offers them; a share without cores runs nothing. Identical tasks that start
    together are one event and whole rounds of a stage are skipped at once, with the same result as task by
    task.
    """
    remaining = whole(plan) if isinstance(plan, QueryExecutionPlan) else plan
    if not remaining.stages:
        return Schedule(0.0)
    if share.total.cores <= 0:
        return Schedule(inf, misfit=remaining.stages[0].stage.output_fp)
    dimensions = [0, 1] + [r for r in (2, 3) if share.total[r] > 0]
    misfit = _misfit(remaining, share, dimensions)
    if misfit:
        return Schedule(inf, misfit=misfit)
    return _ListScheduler(remaining, share, dimensions, max_parallel_stages).run()


def stage_seconds(stage: Stage, cores: float, cold: float = 0.0) -> float:
    """Return how long ``stage`` takes alone on ``cores`` of which ``cold`` have yet to warm up.

    Tasks that meet a cold core end last, and the stage with them.
    """
    warm_up = stage.warm_up * min(cold_tasks(stage.tasks, cold, cores), 1.0)
    return stage.latency + max(stage.duration, stage.core_seconds / max(cores, 1e-9)) + warm_up


def alignment(demand: tuple[float, ...], available: list[float]) -> float:
    """Return the Tetris alignment of two vectors that are normalised by capacity: their dot product."""
    return sum(d * a for d, a in zip(demand, available, strict=True))


def lead(mine: tuple[float, ...], other: tuple[float, ...], gap: float, *, first: bool) -> int:
    """Return after how many starts of tasks that demand ``mine`` a task that demands ``other`` is aligned better.

    ``gap`` is by how much mine is aligned better now; every start lowers both alignments, by mine·mine and
    other·mine. ``first`` says that mine wins ties. At least 1.
    """
    slope = sum(d * (d - e) for d, e in zip(mine, other, strict=True))
    if slope <= 0:
        return _NEVER
    starts = floor((gap + _TIE) / slope) + 1 if first else ceil((gap - _TIE) / slope)
    return max(starts, 1)


def _misfit(remaining: Remaining, share: Share, dimensions: list[int]) -> str:
    for r in remaining.stages:
        if r.tasks + r.in_flight == 0:
            continue
        demand = r.stage.demand
        for dim in dimensions:
            limit = share.total[dim]
            if share.largest[dim] > 0 or dim < 2:
                limit = min(limit, share.largest[dim])
            if demand[dim] > limit * (1 + _SLACK):
                return r.stage.output_fp
    return ""


class _ListScheduler:
    """Event-driven list scheduling. Stages are numbered by priority: upward rank, then topological index."""

    def __init__(
        self, remaining: Remaining, share: Share, dimensions: list[int], max_parallel_stages: int
    ) -> None:
        self.items: list[RemainingStage] = sorted(remaining.stages, key=lambda r: (-r.rank, r.index))
        number = {r.stage.output_fp: i for i, r in enumerate(self.items)}
        self.demand = [
            tuple(r.stage.demand[d] / share.total[d] if r.stage.demand[d] > 0 else 0.0 for d in dimensions)
            for r in self.items
        ]
        # cores that run tasks are there, whatever was told of them
        busy = sum(r.in_flight * r.stage.demand.cores for r in self.items)
        self.absent = min(max(min(share.absent, share.total.cores - busy) / share.total.cores, 0.0), 1.0)
        self.arrival = share.arrival
        self.available = [1.0 - self.absent] * len(dimensions)
        self.pending = [r.tasks for r in self.items]
        self.in_flight = [0] * len(self.items)
        self.blockers = [len(r.waits_for) for r in self.items]
        self.consumers: list[list[int]] = [[] for _ in self.items]
        for i, r in enumerate(self.items):
            for fp in r.waits_for:
                self.consumers[number[fp]].append(i)
        self.slots = max_parallel_stages or len(self.items)
        self.runnable: list[int] = []  # inputs complete, not started; sorted
        self.ready: list[int] = []  # latency over and tasks pending; sorted
        # (time, stage, tasks that end; 0: latency is over); of no stage: absent cores come
        self.heap: list[tuple[float, int, int]] = [(share.arrival, _NO_STAGE, 0)] if self.absent else []
        self.started: dict[int, float] = {}
        self.finished: dict[int, float] = {}
        self.now = 0.0
        self.cold, self.cores = share.cold, share.total.cores
        # stages whose first tasks have started, and whether all cores were there: those that come are cold, too
        self.met: set[tuple[int, bool]] = set()

    def run(self) -> Schedule:
        self._admit()
        self._start_stages()
        while True:
            self._pack()
            if not self.heap:
                break
            self._skip_rounds()
            self._next()
        fps = [r.stage.output_fp for r in self.items]
        if len(self.finished) < len(self.items):
            stuck = next(i for i in range(len(self.items)) if i not in self.finished)
            return Schedule(inf, misfit=fps[stuck])
        return Schedule(
            max(self.finished.values()),
            {fps[i]: t for i, t in self.started.items()},
            {fps[i]: t for i, t in self.finished.items()},
        )

    def _admit(self) -> None:
        """Place what runs now. Tasks in flight that no longer fit have to start again."""
        for i, r in enumerate(self.items):
            if r.running:
                self.slots -= 1
                self.started[i] = 0.0
                kept = min(r.in_flight, self._room(i))
                self.pending[i] += r.in_flight - kept
                if kept:
                    self._place(i, kept, r.in_flight_seconds)
                if r.waits_for:
                    continue
                self._begin(i, r.latency)
            elif not r.waits_for:
                self.runnable.append(i)

    def _start_stages(self) -> None:
        while self.runnable and self.slots > 0:
            i = self.runnable.pop(0)
            self.slots -= 1
            self.started[i] = self.now
            self._begin(i, self.items[i].latency)

    def _begin(self, i: int, latency: float) -> None:
        if latency > 0 or self.pending[i] + self.in_flight[i] == 0:
            heapq.heappush(self.heap, (self.now + latency, i, 0))
        elif self.pending[i]:
            insort(self.ready, i)

    def _next(self) -> None:
        """Go to the next event and handle all that happen at that time."""
        self.now = self.heap[0][0]
        horizon = self.now + _TIE * (1 + self.now)
        while self.heap and self.heap[0][0] <= horizon:
            _, i, tasks = heapq.heappop(self.heap)
            if i == _NO_STAGE:
                self.available = [a + self.absent for a in self.available]
                continue
            if tasks:
                self.in_flight[i] -= tasks
                self.available = [a + tasks * d for a, d in zip(self.available, self.demand[i], strict=True)]
            elif self.pending[i]:
                insort(self.ready, i)
            if self.pending[i] + self.in_flight[i] == 0 and not self.blockers[i]:
                self._finish(i)
        self._start_stages()

    def _finish(self, i: int) -> None:
        self.finished[i] = self.now
        self.slots += 1
        for j in self.consumers[i]:
            self.blockers[j] -= 1
            if self.blockers[j] == 0:
                if self.items[j].running:
                    self._begin(j, self.items[j].latency)
                else:
                    insort(self.runnable, j)

    def _room(self, i: int) -> int:
        """Return how many more tasks of stage ``i`` fit."""
        room = self.items[i].width - self.in_flight[i]
        for d, a in zip(self.demand[i], self.available, strict=True):
            if d > 0 and room > 0:
                room = min(room, int((a + _SLACK) / d)) if a + _SLACK > 0 else 0
        return room

    def _place(self, i: int, tasks: int, seconds: float) -> None:
        self.in_flight[i] += tasks
        self.available = [a - tasks * d for a, d in zip(self.available, self.demand[i], strict=True)]
        heapq.heappush(self.heap, (self.now + seconds, i, tasks))

    def _pack(self) -> None:
        while True:
            fitting: list[tuple[int, int, float]] = []
            best = -1
            for i in self.ready:
                room = self._room(i)
                if room > 0:
                    value = alignment(self.demand[i], self.available)
                    if best < 0 or value > fitting[best][2] + _TIE:
                        best = len(fitting)
                    fitting.append((i, room, value))
            if best < 0:
                return
            i, room, value = fitting[best]
            tasks = min(room, self.pending[i])
            if tasks > 1:
                for j, _, other in fitting:
                    if j != i:
                        tasks = min(tasks, self._lead(i, j, value - other))
            self.pending[i] -= tasks
            if self.pending[i] == 0:
                self.ready.remove(i)
            cold = 0
            if self.cold and (i, self._complete) not in self.met:
                cold = floor(self._cold_tasks(i, tasks) + 0.5)
                self.met.add((i, self._complete))
            if cold:
                self._place(i, cold, self.items[i].seconds + self.items[i].stage.warm_up)
            if tasks > cold:
                self._place(i, tasks - cold, self.items[i].seconds)

    @property
    def _complete(self) -> bool:
        """Tell whether no core is absent any more."""
        return not self.absent or self.now >= self.arrival

    def _cold_tasks(self, i: int, tasks: int) -> float:
        """Return how many of ``tasks`` that stage ``i`` starts now meet a cold core: none that is absent, and those
        that have come where it has met the others before."""
        absent, cold = self.absent * self.cores, self.cold * warming(self.now)
        if not self._complete:
            return cold_tasks(tasks, max(cold - absent, 0.0), self.cores - absent)
        if (i, False) in self.met:
            return cold_tasks(tasks, min(cold, absent), absent)
        return cold_tasks(tasks, cold, self.cores)

    def _lead(self, i: int, j: int, gap: float) -> int:
        """Return after how many starts of stage ``i`` stage ``j`` would be the better choice."""
        return min(lead(self.demand[i], self.demand[j], gap, first=i < j), self.pending[i])

    def _skip_rounds(self) -> None:
        """Skip whole rounds of a stage that takes back every slot it frees until something else happens."""
        i = self.heap[0][1]
        if i == _NO_STAGE:
            return
        per_round, seconds = self.in_flight[i], self.items[i].seconds
        if self.pending[i] < 2 * per_round or not per_round or seconds <= 0:
            return
        if any(not self._outranks(i, j, per_round) for j in self.ready if j != i):
            return
        own = [t for t, j, tasks in self.heap if j == i and tasks]
        other = min((t for t, j, tasks in self.heap if j != i or not tasks), default=inf)
        if max(own) > self.now + seconds * (1 + _TIE):
            return
        rounds = self.pending[i] // per_round
        if other < inf:
            rounds = min(rounds, int((other - self.now) / seconds - _SLACK))
        if rounds < 2:
            return
        self.pending[i] -= rounds * per_round
        if self.pending[i] == 0:
            self.ready.remove(i)
        self.heap = [
            (t + rounds * seconds, j, tasks) if j == i and tasks else (t, j, tasks)
            for t, j, tasks in self.heap
        ]
        heapq.heapify(self.heap)

    def _outranks(self, i: int, j: int, freed: int) -> bool:
        """Tell whether stage ``i`` is chosen before stage ``j`` for each of up to ``freed`` slots of its own.

        The difference of the alignments is linear in the slots that are free, so both ends suffice.
        """
        margin = -_TIE if i < j else _TIE
        return all(
            sum(
                (d - e) * (a + slots * d)
                for d, e, a in zip(self.demand[i], self.demand[j], self.available, strict=True)
            )
            > margin
            for slots in (1, freed)
        )
