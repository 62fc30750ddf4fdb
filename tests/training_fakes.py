"""A launcher that runs no processes: generations go as a test says, and the supervisor decides for real."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.protocols import (
    Continue,
    Decide,
    GenerationEnd,
    Halt,
    RankFailure,
    TrainingEvent,
    TrainingJob,
    TrainingStatus,
)
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"

TRACEBACK = 'Traceback (most recent call last):\n  File "/job/train.py", line 3, in main\n'


@dataclass(frozen=True)
class Act:
    """How one generation goes: ``steps`` steps, a checkpoint after ``saves`` of them, then ``kind``."""

    kind: Any = "finished"
    steps: int = 10
    saves: int = 10
    gone: tuple[str, ...] = ()  # nodes
    noticed: tuple[str, ...] = ()  # of these, before
    failures: tuple[RankFailure, ...] = ()
    suspects: tuple[str, ...] = ()
    seconds: float = 2.0
    batch: int = 64
    wait: bool = False  # runs until somebody asks for something
    metrics: Mapping[str, float] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)  # its report to the scheduler


def failed(text: str, *, node: str = "node-1", code: int | None = 1, rank: int = 0, **act: Any) -> Act:
    """Return a generation that ends with an error of one rank."""
    failure = RankFailure(rank, node, code, "", TRACEBACK + text, "", 0.0)
    return Act("failed", failures=(failure,), **act)


class ScriptedClock(SystemClock):
    """Seconds pass only where a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 1_700_000_000.0

    def now(self) -> float:
        return self.time


class FakeTrainer:
    """Implements ``Trainer``: one generation at each ``wait``."""

    def __init__(
        self, acts: Sequence[Act], decide: Decide, hear: Callable[[Report], None], clock: Any
    ) -> None:
        self._acts, self._decide, self._hear, self._clock = list(acts), decide, hear, clock
        self._events: list[TrainingEvent] = []
        self._told = 0  # events that ``decide`` knows of
        self._step = self._saved = 0
        self.launches: list[tuple[dict[str, int], RunSettings]] = []
        self.resizes: list[dict[str, int]] = []
        self.ended_early: list[int] = []  # generations
        self.delays: list[float] = []
        self.closed = self.stopped = False
        self._status = TrainingStatus("starting", 0, {}, -1)
        self._target: dict[str, int] | None = None
        self.then: list[dict[str, int] | None] = []

    def launch(self, job: TrainingJob, placement: Mapping[str, int]) -> None:
        self.job = job
        self._settings = job.settings or RunSettings()
        self._begin(dict(placement))

    def resume(self, folder: str, placement: Mapping[str, int], settings: RunSettings) -> None:
        self._step = self._saved = 100
        self._settings = settings
        self._note("started", restored=None, world=6)  # by an earlier launcher, to which this happened
        self._note("node-notice", node="node-1", deadline=0.0)
        self._told = len(self._events)
        self._note("launched")
        self._begin(dict(placement))

    def _begin(self, placement: dict[str, int]) -> None:
        self.launches.append((placement, self._settings))
        self._status = replace(
            self._status, state="running", generation=self._status.generation + 1, placement=placement
        )
        self._note("generation", placement=placement)

    def wait(self, timeout: float) -> TrainingStatus:
        if self._status.state == "waiting":
            if self._target is not None:
                placement, self._target = self._target, None
                self._begin(placement)
            return self._status
        if self._status.state != "running":
            return self._status
        act = self._acts[0]
        if act.wait and self._target is None and not self.stopped and not self.ended_early:
            self._clock.time += timeout
            return self._status
        self._acts.pop(0)
        self._follow(self._play(act))
        return self._status

    def _play(self, act: Act) -> GenerationEnd:
        placement, number = dict(self._status.placement), self._status.generation
        started, first = self._clock.now(), self._saved if number > 1 else self._step
        gpus, self._step = sum(placement.values()), first
        content: dict[str, Any] = {"world": gpus, "nodes": len(placement), "batch": act.batch, "passes": 1}
        content["restored"] = first if number > 1 else None
        self._say("started", content)
        self._note("started", **content)
        preflight = self._settings.preflight_steps
        for n in range(min(act.steps, preflight) if preflight else act.steps):
            self._step += 1
            self._clock.time += act.seconds / max(act.steps, 1)
            figures = {
                "batch": act.batch,
                "passes": 1,
                "gpus": gpus,
                "nodes": len(placement),
                "loss": 1.0 / (n + 1),
            }
            figures |= {"job": dict(act.job)} if act.job else {}
            self._say(
                "step", figures | {"throughput": 100.0, "goodput": 80.0, "noise_scale": 5.0, "epoch": 0}
            )
        for name, value in act.metrics.items():
            self._say("metrics", {"metrics": {name: value}, "epoch": 0})
        if act.saves and not preflight:
            self._saved = first + act.saves
            self._say("checkpoint", {"reason": "periodic", "stalled": 0.01, "saved_step": self._saved})
        for node in act.noticed:
            self._note("node-notice", node=node, deadline=0.0)
        for node in act.gone:
            if node not in act.noticed:
                self._note("node-lost", node=node, how="killed")
        return GenerationEnd(
            number, "preflight" if preflight and act.kind == "finished" else act.kind,
            f"{act.kind} for a test", placement,
            {n: s for n, s in placement.items() if n not in act.gone}, act.failures, act.suspects, started,
            self._clock.now(), first, self._step, self._saved if act.saves and not preflight else -1,
            sum(placement.values()) * (self._clock.now() - started),
        )  # fmt: skip

    def _follow(self, end: GenerationEnd) -> None:
        self._status = replace(self._status, end=end, step=self._step)
        if end.kind == "finished":
            answer: Continue | Halt = Halt("finished", end.reason)
        elif self.stopped:
            answer = Halt("stopped", end.reason)
        elif self._target is not None and end.kind == "stopped":
            answer, self._target = Continue(self._target, "resize"), None
        else:
            news, self._told = tuple(self._events[self._told :]), len(self._events)
            answer = self._decide(replace(end, events=news))
        if isinstance(answer, Halt):
            self._status = replace(self._status, state=answer.state, reason=answer.reason)
            self._note("waiting" if answer.state == "waiting" else "ended", reason=answer.reason)
            return
        self.delays.append(answer.delay)
        self._clock.time += answer.delay
        self._settings = answer.settings or self._settings
        self.then.append(dict(answer.then) if answer.then is not None else None)
        self._begin(dict(answer.placement))

    def _say(self, kind: Any, content: dict[str, Any]) -> None:
        self._hear(Report(kind, 0, self._clock.now(), self._step, content))

    def _note(self, kind: str, **content: Any) -> None:
        number = len(self._events) + 1
        self._events.append(TrainingEvent(number, self._clock.now(), kind, self._status.generation, content))

    def resize(self, placement: Mapping[str, int], deadline: float | None = None) -> None:
        self.resizes.append(dict(placement))
        self._target = dict(placement)

    def end_generation(self, number: int, reason: str) -> None:
        assert number == self._status.generation
        self.ended_early.append(number)

    def stop(self, deadline: float | None = None) -> None:
        self.stopped = True

    def status(self) -> TrainingStatus:
        return self._status

    def events(self, after: int = 0) -> Sequence[TrainingEvent]:
        return self._events[after:]

    def close(self) -> None:
        self.closed = True


class FakeSite:
    """Where a ``FakeTrainer`` runs; remembers what happened to its nodes."""

    def __init__(self, *acts: Act, clock: ScriptedClock | None = None) -> None:
        self.acts, self.clock = acts, clock or ScriptedClock()
        self.told: list[tuple[str, str]] = []
        self.made: FakeTrainer

    @property
    def nodes(self) -> "FakeSite":
        return self

    def trainer(
        self, request: TrainingRequest, decide: Decide, hear: Callable[[Report], None]
    ) -> FakeTrainer:
        self.made = FakeTrainer(self.acts, decide, hear, self.clock)
        return self.made

    def kill(self, name: str) -> None:
        self.told.append(("kill", name))

    def notice(self, name: str, seconds: float) -> float:
        self.told.append(("notice", name))
        return seconds

    def pause(self, name: str) -> None:
        self.told.append(("pause", name))

    def resume(self, name: str) -> None:
        self.told.append(("resume", name))


def run(script: str, *acts: Act, there: Nodes | None = None, resume: bool = False, **options: Any) -> Any:
    """Return the report and the site of a run of ``script``, whose generations end as ``acts`` say."""
    options = {"preflight": "never", "nodes": "local:3x2", "run_id": "r", **options}
    request = TrainingRequest(script, runs_dir=str(Path(script).parent / "runs"), **options)
    site = FakeSite(*acts)
    report = run_training(request, site=site, clock=site.clock, nodes=there, resume=resume)
    assert site.made.closed
    return report, site
