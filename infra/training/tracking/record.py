"""What a training tells its trackers, in its directory: one line for each thing, appended as it happens.

The file is the truth that trackers follow. Its steps strictly increase for each metric whatever happens to processes,
nodes and launchers: what a resumed generation does again is not written again.

On storage that has no appending (S3) the lines are collected in a file of this machine, and pieces of it are written
to the run's directory every few seconds.
"""

import hashlib
import math
import os
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage import checksums, private
from ebbflow.infra.storage.files import home
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation

FILE = "tracking.jsonl"
_PIECES = "tracking"  # folder of the pieces on S3
_PIECE = 256 << 10  # bytes; a piece is written again until it is as large


@dataclass(slots=True)
class Recorded:
    """What a record says so far."""

    key: str = ""  # by which trackers know the run; drawn when the record begins
    step: int = -1  # the highest
    values: dict[str, float] = field(default_factory=dict)  # the latest of each metric
    at_step: set[str] = field(default_factory=set)  # metrics that have a value at the highest step
    time: float = 0.0  # of the last values, s since the Unix epoch
    ids: dict[str, str] = field(default_factory=dict)  # run IDs by target

    def take(self, entry: Mapping[str, Any]) -> None:
        """Take one entry in."""
        match entry.get("kind"):
            case "begun":
                self.key = self.key or str(entry["key"])
            case "id":
                self.ids[str(entry["target"])] = str(entry["id"])
            case "values":
                if (step := int(entry["step"])) > self.step:
                    self.step, self.at_step = step, set()
                self.at_step |= set(entry["values"])
                self.values |= entry["values"]
                self.time = float(entry["time"])


def entry_of(line: bytes) -> dict[str, Any] | None:
    """Return what a line of a record says; ``None`` for one that is torn or damaged."""
    try:
        return checksums.unsealed(line)
    except ValueError:
        return None


def _own_file(place: StorageLocation) -> Path:
    """Return the file of this process for a record on S3: runs in other places may have the same ID."""
    name = hashlib.sha256(place.uri.encode()).hexdigest()[:16]
    return home() / "tracking" / f"{name}-{os.getpid()}.jsonl"


class TrackingRecord:
    """The record of one run. Safe for several threads; one launcher writes it, see ``RunLock``.

    Args:
        place: the run's directory.
        run: its ID.

    Raises ``StorageError`` where it cannot be read or begun.
    """

    def __init__(self, place: StorageLocation, run: str) -> None:
        self._place, self._lock = place, threading.Lock()
        self._shipped = 0  # bytes that the run's directory has, on S3
        self.path = Path(place.root) / FILE if place.local else _own_file(place)
        self.problem = ""  # why the last entry is not in the file
        try:
            private.make_folder(self.path.parent)
            if not place.local:
                self._fetch()
            self.said = self._read()
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror or error}") from error
        if not self.said.key:
            self.add("begun", key=uuid.uuid4().hex[:16], run=run)
        if self.problem:
            raise StorageError(self.problem)

    def values(self, step: int, time: float, values: Mapping[str, float]) -> bool:
        """Write the values of metrics at ``step`` that are new there; return whether there are any.

        Args:
            step: optimizer steps of the whole run.
            time: seconds since the Unix epoch.
            values: by metric; those that are no finite number are left out.
        """
        with self._lock:
            if step < self.said.step:
                return False
            old = self.said.at_step if step == self.said.step else ()
            fresh = {k: float(v) for k, v in values.items() if k not in old and math.isfinite(v)}
        if fresh:
            self.add("values", step=step, time=time, values=fresh)
        return bool(fresh)

    def add(self, kind: str, **content: Any) -> None:
        """Append an entry. What cannot be written is in ``problem``: no training ends for it."""
        entry = {"kind": kind, **content}
        with self._lock:
            self.said.take(entry)
            try:
                with private.open_file(self.path, "a+b") as file:
                    size = file.seek(0, os.SEEK_END)
                    torn = b""
                    if size:
                        file.seek(size - 1)
                        torn = b"" if file.read(1) == b"\n" else b"\n"  # the last writer died in mid-line
                    file.write(torn + checksums.sealed(entry))
                self.problem = ""
            except OSError as error:
                self.problem = f"cannot write {self.path}: {error.strerror or error}"

    def ship(self) -> None:
        """Write what is new to the run's directory where that is on S3. Raises ``StorageError``."""
        if self._place.local:
            return
        with translated(f"write {self._place.uri}/{_PIECES}"):
            with self._lock:
                size = self.path.stat().st_size
            while self._shipped < size:
                begin = self._shipped - self._shipped % _PIECE
                with open(self.path, "rb") as file:
                    file.seek(begin)
                    piece = file.read(_PIECE)
                self._place.write(f"{_PIECES}/{begin:012d}", piece)
                self._shipped = begin + len(piece)

    def close(self) -> None:
        """Remove the file of this machine where the run's directory is on S3. What is not shipped is lost."""
        if not self._place.local:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _fetch(self) -> None:
        """Bring the pieces from the run's directory here, which are the truth wherever the run was before."""
        with translated(f"read {self._place.uri}/{_PIECES}"):
            names = sorted(one.base_name for one in self._place.entries(_PIECES) if one.base_name.isdigit())
            pieces = [self._place.read(f"{_PIECES}/{name}") for name in names]
        with private.open_file(self.path, "wb") as file:
            file.write(b"".join(pieces))
        self._shipped = sum(map(len, pieces))

    def _read(self) -> Recorded:
        said = Recorded()
        if self.path.exists():
            with open(self.path, "rb") as file:
                for line in file:
                    if (entry := entry_of(line)) is not None:
                        said.take(entry)
        return said
