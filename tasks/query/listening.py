"""Between the driver and whoever runs or watches it: background work, events, listeners."""

import queue
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from ebbflow.infra.protocols import Checkpoint, StageProgress, StageResult
from ebbflow.planners.memory.tiers import Tier
from ebbflow.planners.model import Capacity
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.plan.state import ReplanDecision
from ebbflow.tasks.query.report import StageReport


@dataclass(frozen=True)
class StageOutcome:
    """How one run of a stage ended."""

    stage: Stage
    job_id: str
    checkpoint: Checkpoint | None = None
    result: StageResult | None = None  # None when another process had already finished it
    error: Exception | None = None
    slices: int = 0  # that the stage was computed in; 0 for one statement
    reused_slices: int = 0  # of them, those that an earlier run had left
    mixed: bool = False  # some of them ran natively, and some on Spark SQL
    keys: Mapping[str, Sequence[Hashable]] = field(
        default_factory=dict
    )  # samples of the checkpoint's columns


@dataclass(frozen=True)
class CapacityChanged:
    """The resource-feedback task saw a change."""

    capacity: Capacity
    change: str


@dataclass(frozen=True)
class TierChanged:
    """Stage outputs are kept elsewhere, or take other times there; ``None``: in the store behind all tiers."""

    tier: Tier | None


class Background(Protocol):
    """Puts a stage's run into the background."""

    def submit(self, stage: Stage, work: Callable[[], StageOutcome]) -> None:
        """Start ``work`` soon, in a thread of its own. It never raises: what it returns says how it ended."""
        ...


class Listener(Protocol):
    """Hears what happens, in the driver's thread. Every method may do nothing."""

    def begins(self, capacity: Capacity) -> None: ...
    def stage_started(self, stage: Stage) -> None: ...
    def stage_progress(self, stage: Stage, progress: StageProgress) -> None: ...
    def stage_ended(self, stage: Stage, report: StageReport) -> None: ...
    def capacity_changed(self, capacity: Capacity, change: str) -> None: ...
    def decided(self, decision: ReplanDecision) -> None: ...
    def note(self, text: str) -> None: ...


class NullQueryListener(Listener):
    """A listener that does nothing; others extend it."""


class CompositeQueryListener(NullQueryListener):
    """Passes everything on to several listeners, in order."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def begins(self, capacity: Capacity) -> None:
        for listener in self._listeners:
            listener.begins(capacity)

    def stage_started(self, stage: Stage) -> None:
        for listener in self._listeners:
            listener.stage_started(stage)

    def stage_progress(self, stage: Stage, progress: StageProgress) -> None:
        for listener in self._listeners:
            listener.stage_progress(stage, progress)

    def stage_ended(self, stage: Stage, report: StageReport) -> None:
        for listener in self._listeners:
            listener.stage_ended(stage, report)

    def capacity_changed(self, capacity: Capacity, change: str) -> None:
        for listener in self._listeners:
            listener.capacity_changed(capacity, change)

    def decided(self, decision: ReplanDecision) -> None:
        for listener in self._listeners:
            listener.decided(decision)

    def note(self, text: str) -> None:
        for listener in self._listeners:
            listener.note(text)


class Threads:
    """The plain background: a thread pool."""

    def __init__(self, size: int = 4) -> None:
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="ebbflow-stage")

    def submit(self, stage: Stage, work: Callable[[], StageOutcome]) -> None:
        self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


Inbox = queue.SimpleQueue[object]
