"""One training job on spot nodes that come and go: what recovery costs (Oobleck, SOSP 2023, artefact).

Two ways to recover, with the oddities of the public simulator, since its published figures depend on them: restarting
from checkpoints (its Varuna model) and re-forming pipelines in place (its Oobleck model). All times in ms.
"""

import heapq
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import nan
from typing import Literal

from ebbflow.infra.simulation.traces.rows import SpotRow
from tests.benchmarks.spot.models import SpotModel, position

SETUP_MS = 45_000
PIPELINE_NODES = 12
MOST_STEPS = 200_000
HOUR = 3_600_000

ADD, REMOVE, READY, RENDEZVOUS, STEP, CHECKPOINT = 1, 2, 4, 5, 7, 8


class Event:
    """Something that happens at ``at`` (ms). Events of one time and kind are equal in order, as in the artefact."""

    __slots__ = ("at", "kind", "node", "version")

    def __init__(self, at: int, kind: int, node: int = -1, version: int = -1) -> None:
        self.at, self.kind, self.node, self.version = at, kind, node, version

    def __lt__(self, other: "Event") -> bool:
        return self.at < other.at or (self.at == other.at and self.kind < other.kind)


@dataclass(frozen=True, slots=True)
class SpotOutcome:
    """Where the time went, in ms, and what was kept of the work.

    ``effective`` includes steps that were lost later and the step under way at each loss, so the five components
    don't sum to the wall clock. ``kept_share`` counts nothing twice.
    """

    effective: float
    checkpoint: float
    restart: float
    fallback: float
    idle: float
    kept_rate: float  # samples/s over the wall clock, steps that were lost not counted
    kept_share: float  # of the wall clock spent in steps that were kept
    steps: int
    restarts: int
    checkpoints: int

    @property
    def share(self) -> float:
        """Return effective time over the sum of the components (the artefact's figure)."""
        total = self.effective + self.checkpoint + self.restart + self.fallback + self.idle
        return self.effective / total if total else 0.0


class Replay(ABC):
    """Replays a spot trace; a subclass says what a loss costs and when to save."""

    def __init__(self, model: SpotModel, rows: list[SpotRow]) -> None:
        self.model = model
        self.end = rows[-1].at
        self.heap: list[Event] = []
        current: dict[str, int] = {}
        for number, row in enumerate(rows):
            if row.kind == "add":
                current[row.node] = number
            kind = ADD if row.kind == "add" else REMOVE
            heapq.heappush(self.heap, Event(row.at, kind, current[row.node]))
        self.creating: set[int] = set()
        self.usable: dict[int, None] = {}  # in order of becoming so
        self.state: Literal["stopped", "restarting", "running"] = "stopped"
        self.listed: list[int] = []  # nodes of the restart under way
        self.version = 0
        self.step_time = 0
        self.nodes = 0  # at the last successful rendezvous
        self.first_start: int | None = None
        self.previous_end = 0
        self.steps = self.restarts = self.checkpoints = 0
        self.times: list[float] = []  # start, end, start, end, … of the steps, h
        self.values: list[float] = []  # samples/s of the step, at its start and its end; 0: lost
        self.spent: list[int] = []  # ms of each step itself
        self.effective = self.checkpoint = self.restart = self.fallback = 0
        self.idle = 0.0

    # What a way to recover decides.

    @abstractmethod
    def restart_delay(self) -> int:
        """Return ms from the decision to restart until training goes on."""

    @abstractmethod
    def speed(self, nodes: int) -> float:
        """Return samples/s on ``nodes``."""

    @abstractmethod
    def book_loss(self, now: int) -> None:
        """Account for a node that left at ``now``."""

    def after_step(self, now: int) -> int:
        """Do what follows a step that ended at ``now``; return when the next one may begin."""
        return now

    # The engine.

    def run(self) -> SpotOutcome:
        """Return what it came to at the trace's last row, which itself is not applied."""
        handlers = {
            ADD: self.on_add,
            REMOVE: self.on_remove,
            READY: self.on_ready,
            RENDEZVOUS: self.on_rendezvous,
            STEP: self.on_step,
            CHECKPOINT: self.on_checkpoint,
        }
        while self.heap and self.steps < MOST_STEPS:
            event = heapq.heappop(self.heap)
            if event.at >= self.end:
                break
            handlers[event.kind](event)
        return self.outcome()

    def push(self, at: int, kind: int, node: int = -1) -> None:
        """Let something happen at ``at``."""
        heapq.heappush(self.heap, Event(at, kind, node, self.version))

    def on_add(self, event: Event) -> None:
        self.creating.add(event.node)
        self.push(event.at + SETUP_MS, READY, event.node)

    def on_ready(self, event: Event) -> None:
        if event.node not in self.creating:
            return
        self.creating.discard(event.node)
        self.usable[event.node] = None
        if self.state == "stopped":
            self.begin_restart(event.at)
        elif self.state == "restarting":
            self.listed.append(event.node)

    def on_remove(self, event: Event) -> None:
        self.creating.discard(event.node)
        self.usable.pop(event.node, None)
        self.book_loss(event.at)
        self.begin_restart(event.at)

    def begin_restart(self, now: int) -> None:
        """Stop training and let all usable nodes meet again."""
        self.state = "restarting"
        self.listed = list(self.usable)
        delay = self.restart_delay()
        self.restart += delay
        self.restarts += 1
        self.push(now + delay, RENDEZVOUS)

    def on_rendezvous(self, event: Event) -> None:
        if any(node not in self.usable for node in self.listed):
            self.begin_restart(event.at)
            return
        self.version += 1
        met, self.listed = len(self.listed), []
        if met < PIPELINE_NODES:
            self.state = "stopped"
            return
        self.start_training(event.at)

    def start_training(self, now: int) -> None:
        """Go on with all nodes that are usable now."""
        self.state = "running"
        self.nodes = len(self.usable)
        rate = self.speed(self.nodes)
        self.step_time = int(self.model.samples / rate * 1000) if rate > 0 else 10**12
        if self.first_start is None:
            self.first_start = self.previous_end = now
        self.begin_step(now)

    def begin_step(self, now: int) -> None:
        """Begin a step; its time counts as effective from the start."""
        self.effective += self.step_time
        self.push(now + self.step_time, STEP)

    def on_step(self, event: Event) -> None:
        if event.version == self.version:
            self.record(event.at)
            self.previous_end = self.after_step(event.at)
            self.begin_step(self.previous_end)

    def on_checkpoint(self, event: Event) -> None:  # noqa: B027 - nothing is to be done
        """Do nothing: the event only marks a time."""

    def record(self, now: int) -> None:
        """Note a step that ended at ``now``, with all the time since the one before."""
        self.steps += 1
        took = now - self.previous_end
        value = self.model.samples / (took / 1000) if took else 0.0
        self.times += [self.previous_end / HOUR, now / HOUR]
        self.values += [value, value]
        self.spent.append(self.step_time)

    def lose_since(self, checkpoint: int | None, now: int) -> None:
        """Take back the steps recorded after ``checkpoint``; the artefact counts each about twice."""
        if checkpoint is None:
            self.values = [0.0] * len(self.values)
            self.fallback += now
            return
        mark = checkpoint / HOUR
        kept = self.times.index(mark) if mark in self.times else len(self.times) - 1
        lost = len(self.values) - 1 - kept
        self.values[kept + 1 :] = [0.0] * lost
        self.fallback += lost * self.step_time

    def outcome(self) -> SpotOutcome:
        starts, ends = self.times[::2], self.times[1::2]
        kept = list(zip(starts, ends, self.values[1::2], self.spent, strict=False))
        wall = ends[-1] - starts[0] if ends else 0.0
        rate = sum((end - start) * value for start, end, value, _ in kept) / wall if wall else 0.0
        useful = sum(spent for *_, value, spent in kept if value > 0)
        total = self.end - self.first_start if self.first_start is not None else 0
        return SpotOutcome(
            self.effective,
            self.checkpoint,
            self.restart,
            self.fallback,
            self.idle,
            rate,
            useful / total if total else nan,
            self.steps,
            self.restarts,
            self.checkpoints,
        )


class CheckpointRestart(Replay):
    """Everyone restarts from the last checkpoint at every loss (their Varuna model).

    A checkpoint every ten steps and after the first step following a loss.
    """

    EVERY = 10

    def __init__(self, model: SpotModel, rows: list[SpotRow]) -> None:
        super().__init__(model, rows)
        self.lost = False
        self.last_checkpoint: int | None = None

    def restart_delay(self) -> int:
        return self.model.restart_on(self.nodes) - self.model.checkpoint

    def speed(self, nodes: int) -> float:
        return self.model.restarting[position(nodes)]

    def book_loss(self, now: int) -> None:
        self.lost = True
        self.lose_since(self.last_checkpoint, now)

    def after_step(self, now: int) -> int:
        self.idle += (now - self.previous_end) * self.model.idle_of(self.nodes) / len(self.usable)
        if self.steps % self.EVERY and not self.lost:
            return now
        self.lost = False
        now += self.model.checkpoint
        self.checkpoint += self.model.checkpoint
        self.checkpoints += 1
        self.push(now + self.model.checkpoint, CHECKPOINT)
        if self._survives():
            self.last_checkpoint = now
        else:
            self.fallback += self.EVERY * self.step_time
            self.steps = max(0, self.steps - self.EVERY)
            self.values[-2 * self.EVERY :] = [0.0] * (2 * self.EVERY)
        return now

    def _survives(self) -> bool:
        """Tell whether the heap's array holds no removal before its first checkpoint (the artefact's test)."""
        for event in self.heap:
            if event.kind == CHECKPOINT:
                return True
            if event.kind == REMOVE:
                return False
        return True


class InPlace(Replay):
    """The survivors re-form pipelines; only the step under way is lost (their Oobleck model)."""

    def restart_delay(self) -> int:
        return self.model.reform

    def speed(self, nodes: int) -> float:
        return self.model.in_place[position(nodes)]

    def book_loss(self, now: int) -> None:
        self.fallback += self.step_time
