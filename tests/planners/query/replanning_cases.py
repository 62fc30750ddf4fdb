"""Plans, random queries and a discrete-event engine that the re-planning tests share."""

import string
from dataclasses import dataclass, field

from hypothesis import strategies as st

from ebbflow.planners.model import Resources, Share, Work
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage, Text
from ebbflow.planners.query.plan.state import StageOutput
from ebbflow.planners.query.running.execution import Action, Cancel, Execution, Finish, Reuse, Start


def stage(
    fp: str,
    inputs: tuple[str, ...] = (),
    *,
    tasks: int = 1,
    cores: float = 1,
    duration: float = 1,
    memory: float = 0,
    latency: float = 0,
    key: str = "",
    volatile: bool = False,
    network: float = 0,
) -> Stage:
    return Stage(
        name=fp,
        output_fp=fp,
        physical_key=key or f"{fp}({','.join(inputs)})",
        inputs=inputs,
        tables=(),
        statement=Text(""),
        tasks=tasks,
        demand=Resources(cores, memory, 0, network),
        duration=duration,
        latency=latency,
        rows=1,
        bytes=1,
        work=Work(),
        volatile=volatile,
    )


def plan(name: str, *stages: Stage) -> QueryExecutionPlan:
    return QueryExecutionPlan(name, stages)


def share(cores: float, memory: float = 64, *, nodes: int = 1, revision: int = 0) -> Share:
    return Share.uniform(cores, memory, nodes, revision)


def output(fp: str) -> StageOutput:
    return StageOutput(fp, 1, 1)


def fig_2_4() -> tuple[QueryExecutionPlan, ...]:
    """Three plans of A⋈B⋈C⋈D whose best times at 2 and 4 cores are 9/9, 7/7 and 10/5 (QOOP, section 7)."""
    left_deep = plan(
        "((AB)C)D",
        stage("AB", duration=3),
        stage("ABC", ("AB",), duration=3),
        stage("ABCD", ("ABC",), duration=3),
    )
    bushy = plan(
        "(AB)(CD)",
        stage("AB", duration=3),
        stage("CD", duration=3),
        stage("ABCD", ("AB", "CD"), tasks=2, duration=4),
    )
    wide = plan(
        "(AC)(BD)",
        stage("AC", tasks=2, duration=2),
        stage("BD", tasks=2, duration=2),
        stage("ABCD", ("AC", "BD"), tasks=4, duration=3),
    )
    return left_deep, bushy, wide


# all numbers are dyadic and capacities are powers of two, so that floating-point sums are exact
quarters = st.integers(1, 24).map(lambda n: n / 4)


@st.composite
def shares(draw: st.DrawFn, revision: int = 0) -> Share:
    return share(draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([8, 16])), revision=revision)


@st.composite
def queries(draw: st.DrawFn, most_plans: int = 4, latency: bool = True) -> tuple[QueryExecutionPlan, ...]:
    """Random plans of one query: join trees over the same relations, so that they share sub-results."""
    relations = string.ascii_uppercase[: draw(st.integers(2, 6))]
    plans = []
    for number in range(draw(st.integers(1, most_plans))):
        stages: list[Stage] = []
        parts: list[str] = list(relations)
        while len(parts) > 1:
            left = parts.pop(draw(st.integers(0, len(parts) - 1)))
            right = parts.pop(draw(st.integers(0, len(parts) - 1)))
            inputs = tuple(p for p in sorted((left, right)) if len(p) > 1)
            joined = "".join(sorted(left + right))
            variant = draw(st.sampled_from(["shuffle", "broadcast"]))
            stages.append(
                stage(
                    joined,
                    inputs,
                    tasks=draw(st.integers(1, 9)),
                    cores=draw(st.sampled_from([1, 2])),
                    memory=draw(st.sampled_from([0, 1, 2, 4])),
                    duration=draw(quarters),
                    latency=draw(st.sampled_from([0, 0, 0.5])) if latency else 0,
                    key=f"{joined}({left},{right})/{variant}",
                )
            )
            parts.append(joined)
        plans.append(plan(f"q{number}", *stages))
    return tuple(plans)


@dataclass
class _Job:
    stage: Stage
    opens: float
    pending: int
    running: list[float] = field(default_factory=list)  # finish times

    @property
    def done(self) -> int:
        return self.stage.tasks - self.pending - len(self.running)


class Engine:
    """Runs an ``Execution`` task by task in virtual time: an oracle that shares no code with packing."""

    def __init__(self, execution: Execution, capacity: Share) -> None:
        self.execution = execution
        self.capacity = capacity
        self.now = 0.0
        self.jobs: dict[str, _Job] = {}
        self.completed: dict[str, float] = {}  # finish times by output_fp
        self.cancelled: list[str] = []
        self.result: StageOutput | None = None
        self.finished_at = float("inf")

    def begin(self) -> None:
        self.apply(self.execution.begin(self.capacity, {}, self.now))

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(s):
                    assert s.output_fp not in self.jobs
                    assert s.output_fp not in self.completed
                    assert set(s.inputs) <= set(self.completed)
                    self.jobs[s.output_fp] = _Job(s, self.now + s.latency, s.tasks)
                case Cancel(s):
                    del self.jobs[s.output_fp]
                    self.cancelled.append(s.output_fp)
                case Finish(out):
                    self.result, self.finished_at = out, self.now
                case Reuse():
                    pass

    def run(self, until: float = float("inf")) -> None:
        """Run to ``until`` or to the end; tasks that end at ``until`` have ended."""
        self._pack()
        while self.result is None:
            times = [t for j in self.jobs.values() for t in j.running]
            times += [j.opens for j in self.jobs.values() if j.opens > self.now]
            if not times or min(times) > until:
                break
            self.now = min(times)
            self._complete()
            self._pack()
        if until < float("inf") and self.result is None:
            self.now = until
            self._report()

    def resize(self, capacity: Share, trigger: str = "change") -> None:
        """Change the capacity. Tasks that no longer fit die, youngest first, and have to start again."""
        self.capacity = capacity
        while any(a < -1e-9 for a in self._available()):
            job = max((j for j in self.jobs.values() if j.running), key=lambda j: max(j.running))
            job.running.remove(max(job.running))
            job.pending += 1
        self._report()
        self.apply(self.execution.on_share(capacity, self.now, trigger))

    def _available(self) -> list[float]:
        left = list(self.capacity.total[:2])
        for job in self.jobs.values():
            for dim in range(2):
                left[dim] -= len(job.running) * job.stage.demand[dim]
        return left

    def _complete(self) -> None:
        ended = []
        for fp, job in self.jobs.items():
            job.running = [t for t in job.running if t > self.now]
            if job.done == job.stage.tasks:
                ended.append(fp)
        self._report()
        for fp in ended:
            if fp in self.jobs:  # not cancelled by what another one's end led to
                del self.jobs[fp]
                self.completed[fp] = self.now
                self.apply(self.execution.on_finished(output(fp), self.now))

    def _report(self) -> None:
        for fp, job in self.jobs.items():
            self.execution.on_progress(fp, job.stage.tasks, job.done, self.now, len(job.running))

    def _pack(self) -> None:
        rank = self.execution.plan.upward_rank
        order = [s.output_fp for s in self.execution.plan.stages]
        while True:
            room = self._available()
            fitting = []
            for fp, job in self.jobs.items():
                need = job.stage.demand[:2]
                if (
                    job.pending
                    and job.opens <= self.now
                    and all(n <= r for n, r in zip(need, room, strict=True))
                ):
                    total = self.capacity.total
                    score = sum((n / t) * (r / t) for n, r, t in zip(need, room, total[:2], strict=True))
                    fitting.append((-score, -rank.get(fp, 0), order.index(fp) if fp in order else -1, fp))
            if not fitting:
                break
            job = self.jobs[min(fitting)[3]]
            job.pending -= 1
            job.running.append(self.now + job.stage.duration)
        self._report()
