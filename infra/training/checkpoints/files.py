"""The files of full checkpoints: written, verified, fetched, set aside and tidied; ``CheckpointFolder`` says when."""

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError, UnusableCheckpointError
from ebbflow.infra.storage import private
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.manifest import UnusableError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.manifest import Manifest, Payload, decode
from ebbflow.infra.training.checkpoints.names import MANIFEST, NAME
from ebbflow.infra.training.checkpoints.sharded_files import holds_values

ABANDONED_AFTER = 600.0  # seconds after which files without a manifest have no writer any more
SET_ASIDE_KEPT = 2
_CORRUPT = "corrupt-"
_REASON = "reason.txt"

log = logging.getLogger(__name__)


class UnfinishedError(UnusableError):
    """There is no manifest: a writer died, or writes at this moment."""


class CheckpointFiles:
    """Reads and writes a directory's layout; ``check`` raises ``StorageError`` where it is another directory."""

    def __init__(
        self, place: StorageLocation, clock: Clock, check: Callable[[], None] = lambda: None
    ) -> None:
        self.place, self.check = place, check
        self._clock = clock
        self._fetched: tuple[str, tempfile.TemporaryDirectory[str]] | None = None
        self._verified: set[str] = set()  # names, by this object
        self._problems: list[str] = []
        self._lock = threading.Lock()

    # --- writing ------------------------------------------------------------------------------------------

    def write(self, name: str, state: Mapping[str, Any]) -> tuple[Payload, ...]:
        """Write one file for each key; they are durable, but no checkpoint yet."""
        return tuple(self._payload(name, key, value) for key, value in state.items())

    def _payload(self, name: str, key: str, value: Any) -> Payload:
        with self.place.writing(f"{name}/{key}.pt") as sink:
            torch.save(value, sink)
        return Payload(f"{key}.pt", sink.size, sink.digest)

    def commit(self, name: str, manifest: Manifest) -> None:
        """Make the files a checkpoint."""
        self.place.sync(name)
        self.place.write(f"{name}/{MANIFEST}", manifest.encode())
        self.place.sync()

    def discard(self, name: str) -> None:
        """Delete a checkpoint or what there is of one."""
        # the manifest first: half a checkpoint must not look like one
        with suppress(StorageError), translated(f"delete {self.place.uri_of(name)}"):
            self.place.remove(f"{name}/{MANIFEST}")
            self.place.remove_folder(name)

    def copy(self, source: "CheckpointFiles", name: str, manifest: Manifest) -> None:
        """Copy a checkpoint of another directory, comparing what passes with its checksums.

        Raises ``UnusableError``, and the system's errors.
        """
        for file in manifest.files:
            with self.place.writing(f"{name}/{file.name}") as sink:
                for piece in source.place.pieces(f"{name}/{file.name}"):
                    sink.write(piece)
            if (sink.size, sink.digest) != (file.size, file.sha256):
                raise UnusableError(f"has {file.name} with bytes that are not those written")

    # --- reading ------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return all names, finished or not, by step and time."""
        with translated(f"list the checkpoints in {self.place.uri}"):
            return [info.base_name for info in self.place.entries() if NAME.fullmatch(info.base_name)]

    def manifest(self, name: str) -> Manifest:
        """Return the manifest. Raises ``UnfinishedError`` and ``UnusableError``."""
        with translated(f"read the checkpoint {self.place.uri_of(name)}"):
            try:
                data = self.place.read(f"{name}/{MANIFEST}")
            except FileNotFoundError as exc:
                raise UnfinishedError("has no manifest: it was never finished") from exc
        return decode(data)

    def verify(self, name: str, manifest: Manifest) -> None:
        """Compare every file with the manifest; on S3 keep what was fetched for it.

        Raises ``UnusableError``, and ``UnfinishedError`` for one that is being deleted.

        Of a sharded checkpoint the values are left to the processes that read them, each its part, where they lie.
        """
        try:
            self._check_sizes(name, manifest)
        except UnusableError:
            self.manifest(name)  # without it, its run deletes it at this moment
            raise
        with translated(f"read the checkpoint {self.place.uri_of(name)}"):
            if self.place.local or manifest.layout == "sharded":
                for file in manifest.files:
                    if manifest.layout != "sharded" or not holds_values(file.name):
                        self._compare(name, file, None)
                self._verified.add(name)
                return
            self._forget_fetched()
            folder = tempfile.TemporaryDirectory(prefix="ebbflow-checkpoint-")
            try:
                for file in manifest.files:
                    self._compare(name, file, Path(folder.name))
            except BaseException:
                folder.cleanup()
                raise
            self._fetched = (name, folder)

    @contextmanager
    def local(self, name: str) -> Iterator[str]:
        """Give a local directory with the files of a checkpoint; on S3 it is gone afterwards.

        They are compared with their checksums unless this object has done so: what another process has found whole
        need not come whole to this one. Raises ``UnusableCheckpointError`` and ``StorageError``.
        """
        known = name in self._verified if self.place.local else self._fetched and self._fetched[0] == name
        if not known:
            try:
                self.verify(name, self.manifest(name))
            except UnusableError as exc:
                kind = StorageError if isinstance(exc, UnfinishedError) else UnusableCheckpointError
                raise kind(f"{self.place.uri_of(name)} {exc}") from exc
        if self.place.local:
            yield self.place.path(name)
            return
        assert self._fetched is not None
        try:
            yield self._fetched[1].name
        finally:
            self._forget_fetched()

    def _check_sizes(self, name: str, manifest: Manifest) -> None:
        with translated(f"read the checkpoint {self.place.uri_of(name)}"):
            sizes = {info.base_name: info.size for info in self.place.entries(name) if info.is_file}
        for file in manifest.files:
            if sizes.get(file.name) != file.size:
                there = f"{sizes[file.name]} bytes" if file.name in sizes else "nothing"
                raise UnusableError(f"should have {file.size} bytes in {file.name}, there is {there}")

    def _compare(self, name: str, file: Payload, copy: Path | None) -> None:
        digest = sha256()
        with private.open_file(copy / file.name if copy else os.devnull, "wb") as out:
            for piece in self.place.pieces(f"{name}/{file.name}"):
                digest.update(piece)
                if copy:
                    out.write(piece)
        if digest.hexdigest() != file.sha256:
            raise UnusableError(
                f"has {file.name} with bytes that are not those written (its checksum differs)"
            )

    def _forget_fetched(self) -> None:
        if self._fetched is not None:
            self._fetched[1].cleanup()
            self._fetched = None

    # --- housekeeping -------------------------------------------------------------------------------------

    def set_aside(self, name: str, reason: str) -> bool:
        """Rename a checkpoint that cannot serve, so that it never counts again; return whether that was possible."""
        try:
            with translated(f"set {self.place.uri_of(name)} aside"):
                self.place.move_folder(name, _CORRUPT + name, MANIFEST)
                self.place.write(f"{_CORRUPT}{name}/{_REASON}", f"{reason}\n".encode())
        except StorageError as exc:  # a directory that may only be read, or another process was first
            self.note(str(exc))
            return False
        return True

    def aside(self) -> list[str]:
        """Return the addresses of all that was set aside, and why, oldest step first. Raises ``StorageError``."""
        with translated(f"list the checkpoints in {self.place.uri}"):
            names = [i.base_name for i in self.place.entries() if i.base_name.startswith(_CORRUPT)]
        return [f"{self.place.uri_of(name)} {self._reason(name)}" for name in names]

    def _reason(self, name: str) -> str:
        try:
            with translated(f"read {self.place.uri_of(name)}"):
                return self.place.read(f"{name}/{_REASON}").decode(errors="replace").strip()
        except StorageError:  # the rename was all that there was room or time for
            return "was damaged"

    def retain(self, keep: int) -> None:
        """Delete complete checkpoints beyond ``keep``, what writers left behind, and old ones set aside."""
        try:
            with translated(f"tidy the checkpoints in {self.place.uri}"):
                whole = self._whole()
                for name in whole[keep:]:
                    self.discard(name)
                # those of later steps may be all that is left of a run that had to begin again
                reached = f"{_CORRUPT}{whole[0]}" if whole else ""
                aside = [i.base_name for i in self.place.entries() if i.base_name.startswith(_CORRUPT)]
                for name in aside[:-SET_ASIDE_KEPT]:
                    if name < reached:
                        self.place.remove_folder(name)
        except StorageError as exc:
            self.note(str(exc))

    def _whole(self) -> list[str]:
        """Return what has a manifest and files of its sizes, newest first; drop what was abandoned."""
        whole = []
        for name in reversed(self.names()):
            try:
                self._check_sizes(name, self.manifest(name))
            except UnfinishedError:
                if self._abandoned(name):
                    self.discard(name)
            except UnusableError:
                continue  # a search states what is wrong with it
            else:
                whole.append(name)
        return whole

    def _abandoned(self, name: str) -> bool:
        times = [(info.mtime_ns or 0) / 1e9 for info in self.place.entries(name) if info.is_file]
        match = NAME.fullmatch(name)
        begun = int(match.group(2)) / 1000 if match else 0.0
        return self._clock.now() - max([begun, *times]) > ABANDONED_AFTER

    def note(self, *problems: str) -> None:
        """Remember and log what somebody should hear of."""
        for problem in problems:
            log.warning("%s", problem)
        with self._lock:
            self._problems.extend(problems)

    def problems(self) -> list[str]:
        """Return and forget what was noted."""
        with self._lock:
            found, self._problems = self._problems, []
        return found


def discarded_on_error(files: CheckpointFiles, name: str, write: Callable[[], Manifest]) -> Manifest:
    """Write and commit a checkpoint, or leave nothing of it.

    Where the directory cannot be looked at afterwards, the error is raised, and what was committed stays.
    """
    try:
        files.check()
        with translated(f"save the checkpoint {files.place.uri_of(name)}"):
            manifest = write()
            files.commit(name, manifest)
    except BaseException:
        files.discard(name)
        raise
    try:
        files.check()  # a mount may have gone meanwhile
    except StorageError as exc:
        if exc.__cause__ is None:  # it is another directory
            files.discard(name)
        raise
    return manifest
