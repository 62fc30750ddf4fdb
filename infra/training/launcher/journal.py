"""What a run records for readers and for its own resumption: ``run.json`` and ``events.jsonl`` in its directory.

What a launcher knows of its run and tells others: where it stands, what happened, and both in the run's directory.
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError, TrainingError
from ebbflow.infra.protocols import TrainingEvent, TrainingJob, TrainingStatus
from ebbflow.infra.storage import checksums, files, private
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.model.trainings import RunSettings

_FORMAT = 2
_RUN = "run.json"
_EVENTS = "events.jsonl"

log = logging.getLogger(__name__)


class Journal:
    """The two files. Locally each event is one synced line; on S3 the file is rewritten with each event."""

    def __init__(self, place: StorageLocation) -> None:
        self._place = place
        self.uri = place.uri
        self._lines: list[str] = []  # of the whole file, on S3

    @property
    def local(self) -> Path | None:
        """Return the directory as a path, if it is one."""
        return Path(self._place.root) if self._place.local else None

    def write_run(
        self, job: TrainingJob, placement: Mapping[str, int], state: str, generation: int, pool: str
    ) -> None:
        """Write ``run.json``. Raises ``StorageError``."""
        fields = asdict(job) | {
            "format": _FORMAT,
            "placement": dict(placement),
            "state": state,
            "generation": generation,
            "pool": pool,
        }
        data = checksums.sealed(fields, indent=1)
        with translated(f"write {self.uri}/{_RUN}"):
            store, scheme = self._place.fs(), self._place.scheme
            private.folder_maker(store, scheme)(self._place.root)
            files.write_atomic(store, scheme, self._place.path(_RUN), data)

    def read_run(self) -> tuple[TrainingJob, dict[str, int], str, int, str]:
        """Return the job, its last placement, state, generation and pool. Raises ``TrainingError``."""
        try:
            with translated(f"read {self.uri}/{_RUN}"):
                fields = checksums.unsealed(self._place.read(_RUN))
            if fields.pop("format") != _FORMAT:
                raise TrainingError(
                    f"{self.uri}/{_RUN} was written by another version of Ebbflow; resume it with that version"
                )
            names = ("placement", "state", "generation", "pool")
            placement, state, generation, pool = (fields.pop(name) for name in names)
            settings = fields.pop("settings")
            fields["arguments"] = tuple(fields["arguments"])
            job = TrainingJob(**fields, settings=RunSettings(**settings) if settings else None)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise TrainingError(
                f"{self.uri}/{_RUN} is damaged ({exc}); restore it from a backup, or start a new run "
                f"under another ID: its checkpoints are in {self.uri}/checkpoints"
            ) from exc
        except StorageError as exc:
            raise TrainingError(f"there is no run in {self.uri} to resume: {exc}") from exc
        return job, placement, state, generation, pool

    def append(self, event: TrainingEvent) -> None:
        """Add an event. Raises ``StorageError``."""
        line = _line(event)
        with translated(f"write {self.uri}/{_EVENTS}"):
            if self.local is not None:
                _append(self.local / _EVENTS, line)
                return
            self._lines.append(line)
            data = "".join(self._lines).encode()
            self._place.write(_EVENTS, data)

    def events(self) -> list[TrainingEvent]:
        """Return the events so far; a line that was torn or damaged is passed over. Raises ``StorageError``."""
        try:
            with translated(f"read {self.uri}/{_EVENTS}"):
                lines = self._place.read(_EVENTS).decode(errors="replace").splitlines()
        except StorageError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                return []
            raise
        found = [event for line in lines if (event := _event(line)) is not None]
        if (bad := len(lines) - len(found)) > 0:
            log.warning("%s of %s lines of %s/%s are damaged", bad, len(lines), self.uri, _EVENTS)
        self._lines = [_line(event) for event in found]
        return found


def _append(path: Path, line: str) -> None:
    private.make_folder(path.parent)
    with private.open_file(path, "a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":  # the last writer died in mid-line
                line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def _line(event: TrainingEvent) -> str:
    return checksums.sealed(asdict(event)).decode()


def _event(line: str) -> TrainingEvent | None:
    try:
        return TrainingEvent(**checksums.unsealed(f"{line}\n".encode()))
    except (ValueError, TypeError):
        return None


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
        """Continue with the record of an earlier launcher, whose last generation was ``generation``."""
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
        """Add an event. A directory that cannot be written to costs the entry there, not the training."""
        with self._lock:
            number = self._events[-1].number + 1 if self._events else 1
            event = TrainingEvent(number, self._clock.now(), kind, self._status.generation, content)
            self._events.append(event)
        if self.journal is not None:
            try:
                self.journal.append(event)
            except StorageError as exc:
                log.warning("event %s of the run is not recorded: %s", event.kind, exc)

    def stand(self, **changes: Any) -> None:
        """Change where the run stands."""
        with self._lock:
            self._status = replace(self._status, **changes)

    def write(self, job: TrainingJob, pool: str, state: str = "running") -> None:
        """Write ``run.json`` from scratch. Raises ``StorageError``."""
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
