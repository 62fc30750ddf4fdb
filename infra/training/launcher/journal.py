"""What a run records for readers and for its own resumption: ``run.json`` and ``events.jsonl`` in its directory.

What a launcher knows of its run and tells others: where it stands, what happened, and both in the run's directory.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
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
_AGAIN = 1.0  # seconds after which a write that was refused is tried again while somebody waits for it

log = logging.getLogger(__name__)


class Journal:
    """The two files. Locally each event is one synced line; on S3 the file is rewritten with each event."""

    def __init__(self, place: StorageLocation) -> None:
        self._place = place
        self.uri = place.uri
        self._lines: list[str] = []  # of the whole file, on S3; else those that are not in it yet

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

    def append(self, *events: TrainingEvent) -> None:
        """Add events. Raises ``StorageError``: then the next call adds these, too."""
        self._lines += map(_line, events)
        with translated(f"write {self.uri}/{_EVENTS}"):
            if self.local is not None:
                _append(self.local / _EVENTS, "".join(self._lines))
                self._lines.clear()
                return
            self._place.write(_EVENTS, "".join(self._lines).encode())

    def events(self) -> list[TrainingEvent]:
        """Return the events so far; a line that was torn or damaged is passed over. Raises ``StorageError``."""
        try:
            with translated(f"read {self.uri}/{_EVENTS}"):
                lines = self._place.read(_EVENTS).decode(errors="replace").splitlines()
        except StorageError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                return []
            raise
        sound = [event for line in lines if (event := _event(line)) is not None]
        if (bad := len(lines) - len(sound)) > 0:
            log.warning("%s of %s lines of %s/%s are damaged", bad, len(lines), self.uri, _EVENTS)
        found = list({event.number: event for event in sound}.values())  # some twice after a failed write
        self._lines = [] if self.local is not None else [_line(event) for event in found]
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


class JournalWriter:
    """Writes a journal in the background: a directory that is away holds nobody up. Safe for several threads."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._changed = threading.Condition()
        self._events: list[TrainingEvent] = []  # to be written, as is the run
        self._run: tuple[TrainingJob, Mapping[str, int], str, int, str] | None = None
        self._busy = False
        self._again = False  # what was refused is to be tried again, too
        self._late = False  # events were refused, which the journal keeps
        self._refused: tuple[TrainingJob, Mapping[str, int], str, int, str] | None = None  # the run that was

    def append(self, event: TrainingEvent) -> None:
        """Add an event, as it is now."""
        with self._changed:
            self._events.append(replace(event, content=deepcopy(event.content)))
            self._begin()

    def write_run(
        self, job: TrainingJob, placement: Mapping[str, int], state: str, generation: int, pool: str
    ) -> None:
        """Write ``run.json``."""
        with self._changed:
            self._run = job, placement, state, generation, pool
            self._begin()

    def flush(self, timeout: float) -> None:
        """Wait until all is written, or for ``timeout`` seconds; until then what was refused is tried again.

        Where no thread can be started, this one writes.
        """
        end = time.monotonic() + timeout
        pause = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._busy, max(end - time.monotonic(), 0.0))
                if not (self._busy or self._events or self._run or self._late or self._refused):
                    return
                if self._busy or (pause and time.monotonic() + pause > end):
                    log.warning(
                        "%s has not taken what was to be written within %g s", self.journal.uri, timeout
                    )
                    return
                if pause and self._changed.wait(pause):
                    continue  # another has begun, and ended, meanwhile
                pause, self._again = _AGAIN, True
                alone = not self._begin()
                self._busy = True
            if alone:
                self._write()

    def _begin(self) -> bool:
        """Have a thread write, unless one does; tell whether one does then."""
        if not self._busy:
            try:
                threading.Thread(target=self._write, name="ebbflow-journal", daemon=True).start()
            except RuntimeError as exc:  # as many as there may be: the next call tries again
                log.warning("%s does not get what is to be recorded yet: %s", self.journal.uri, exc)
            else:
                self._busy = True
        return self._busy

    def _write(self) -> None:
        while True:
            with self._changed:
                (events, self._events), (run, self._run) = (self._events, []), (self._run, None)
                again, self._again = self._again, False
                if again:
                    run = run or self._refused
                if not (events or run or (again and self._late)):
                    self._busy = False
                    self._changed.notify_all()
                    return
            if events or (again and self._late):
                count = f"{len(events)} of its" if events else "earlier"
                self._late = not _try(
                    partial(self.journal.append, *events), f"{count} events are not recorded yet"
                )
            if run is not None:
                write = partial(self.journal.write_run, *run)
                self._refused = None if _try(write, "a launcher that resumes the run will lack this") else run


def _try(act: Callable[[], None], without: str) -> bool:
    try:
        act()
    except StorageError as exc:
        log.warning("%s; %s", exc, without)
    except Exception:  # a defect must not keep what comes later from being written
        log.exception("%s", without)
    else:
        return True
    return False


class Record:
    """The run's status and events. Safe for several threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: list[TrainingEvent] = []
        self._status = TrainingStatus("starting", 0, {}, -1)
        self._journal: JournalWriter | None = None
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
        self._journal = JournalWriter(journal)
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
        """Add an event. A directory that is away costs the entry there, or delays it, and not the training."""
        with self._lock:
            number = self._events[-1].number + 1 if self._events else 1
            event = TrainingEvent(number, self._clock.now(), kind, self._status.generation, content)
            self._events.append(event)
            if self._journal is not None:
                self._journal.append(event)

    def stand(self, **changes: Any) -> None:
        """Change where the run stands."""
        with self._lock:
            self._status = replace(self._status, **changes)

    def begin(self, journal: Journal, job: TrainingJob, pool: str) -> None:
        """Keep the record in a journal from now on, which has the run then. Raises ``StorageError``."""
        if self._journal is None:
            self._journal = JournalWriter(journal)
        status = self.status
        self._journal.journal.write_run(job, status.placement, "running", status.generation, pool)

    def write(self, job: TrainingJob, pool: str, state: str) -> None:
        """Have ``run.json`` written from scratch."""
        status = self.status
        if self._journal is not None:
            self._journal.write_run(job, status.placement, state, status.generation, pool)

    def flush(self, timeout: float) -> None:
        """Wait until the journal has everything, or for ``timeout`` seconds."""
        if self._journal is not None:
            self._journal.flush(timeout)


def _saved(event: TrainingEvent) -> int:
    step = event.content.get("saved_step", -1)
    return step if isinstance(step, int) else -1


def _step(event: TrainingEvent) -> int:
    """Return the newest step that an event speaks of."""
    said = (event.content.get(name, -1) for name in ("step", "last_step", "saved_step"))
    return max(step if isinstance(step, int) else -1 for step in said)


def _restarts(event: TrainingEvent) -> bool:
    return event.kind == "damaged" and bool(event.content.get("restarted"))
