"""What a launcher knows of its run and tells others: where it stands, what happened, and both in the run's folder."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.protocols import TrainingEvent, TrainingJob, TrainingStatus
from ebbflow.infra.training.launcher.journal import Journal

log = logging.getLogger(__name__)


class Record:
    """The run's status and events. Safe for several threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: list[TrainingEvent] = []
        self._status = TrainingStatus("starting", 0, {}, -1)
        self.journal: Journal | None = None
        self.best = -1  # newest step that is saved
        self.saved_here = False  # whether this launcher has heard of a checkpoint
        self.reached = -1  # newest step that earlier launchers had heard of, but for trials
        self.idle = 0  # generations in a row that have won no step

    def take_up(self, journal: Journal, generation: int) -> None:
        """Go on with the record of an earlier launcher, whose last generation was ``generation``."""
        self._events = journal.events()
        last = max([generation, *(event.generation for event in self._events)])
        begun = max((at for at, event in enumerate(self._events) if _restarts(event)), default=-1) + 1
        counted = self._events[begun:]
        self.best = max([-1, *map(_saved, counted)])
        trials = {e.generation for e in counted if e.kind == "generation" and e.content.get("trial")}
        self.reached = max([-1, *(_step(event) for event in counted if event.generation not in trials)])
        self.journal = journal
        self.stand(generation=last, step=self.best)

    def saved(self, step: int) -> None:
        """Take note of a step that was saved; -1: none was."""
        self.best = max(self.best, step)
        self.saved_here |= step >= 0

    def restart(self) -> None:
        """Take note that the run has begun again: what was saved before cannot be used."""
        self.best = -1

    @property
    def status(self) -> TrainingStatus:
        with self._lock:
            return self._status

    def events(self, after: int = 0) -> Sequence[TrainingEvent]:
        """Return the events with numbers above ``after``."""
        with self._lock:
            return [event for event in self._events if event.number > after]

    def note(self, kind: str, /, **content: Any) -> None:
        """Add an event. A folder that cannot be written to costs the entry there, not the training."""
        with self._lock:
            number = self._events[-1].number + 1 if self._events else 1
            event = TrainingEvent(number, self._clock.now(), kind, self._status.generation, content)
            self._events.append(event)
        if self.journal is not None:
            try:
                self.journal.append(event)
            except StorageError as exc:
                log.warning("event %s of the run is not written down: %s", event.kind, exc)

    def stand(self, **changes: Any) -> None:
        """Change where the run stands."""
        with self._lock:
            self._status = replace(self._status, **changes)

    def write(self, job: TrainingJob, pool: str, state: str = "running") -> None:
        """Write ``run.json`` anew. Raises ``StorageError``."""
        if self.journal is not None:
            status = self.status
            self.journal.write_run(job, status.placement, state, status.generation, pool)


def _saved(event: TrainingEvent) -> int:
    step = event.content.get("saved_step", -1)
    return step if isinstance(step, int) else -1


def _step(event: TrainingEvent) -> int:
    """Return the newest step that an event speaks of."""
    said = (event.content.get(name, -1) for name in ("step", "last_step", "saved_step"))
    return max(step if isinstance(step, int) else -1 for step in said)


def _restarts(event: TrainingEvent) -> bool:
    return event.kind == "damaged" and bool(event.content.get("restarted"))
