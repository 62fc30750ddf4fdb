"""Full checkpoints of a training in a folder, local or on S3.

Layout::

    <folder>/step-<steps>-<milliseconds>-<random>/model.pt ...    one file for each key of the state
    <folder>/step-.../manifest.json                               sizes and checksums, written last
    <folder>/corrupt-step-...                                     set aside, with why in reason.txt

Without a manifest a checkpoint does not exist. The files are those of ``torch.save``, so that ``torch.load`` alone
reads them too. State that is sharded over processes is saved by all of them, see ``save_sharded``.
"""

import json
import logging
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.filesystems import translated
from ebbflow.infra.manifest import OtherVersionError, UnusableError
from ebbflow.infra.training import sharded_files
from ebbflow.infra.training.checkpoint_manifest import MANIFEST, NAME, Layout, Manifest, Payload, decode
from ebbflow.infra.training.checkpoint_writer import BackgroundWriter
from ebbflow.infra.training.places import Place
from ebbflow.infra.training.states import Signature, Staging, check_model, read_state, signature
from ebbflow.planners.errors import OptionError

TIMEOUT = 120.0  # seconds for one save
ABANDONED_AFTER = 600.0  # seconds after which files without a manifest have no writer any more
SET_ASIDE_KEPT = 2
_CORRUPT = "corrupt-"
_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was written."""

    step: int
    uri: str
    bytes: int
    seconds: float  # from the request until it was durable
    stalled: float  # seconds of it that the caller waited


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint whose files were compared with their checksums."""

    step: int  # optimiser steps done
    name: str
    uri: str
    created: float  # seconds since the Unix epoch
    bytes: int
    note: Any  # as it was saved
    signature: Signature  # of the model
    layout: Layout
    files: tuple[Payload, ...]
    passed_over: tuple[str, ...] = ()  # newer ones that cannot serve, and why

    def check_model(self, model: Any) -> None:
        """Raise ``OtherModelError``, naming the parameters, if this is a checkpoint of another model."""
        check_model(self.signature, model, self.uri)


class CheckpointFolder:
    """Saves and finds the full checkpoints of one run. One thread calls it; see ``RunLock`` for one process.

    Args:
        uri: a folder or ``s3://bucket/folder``.
        keep: how many complete checkpoints stay; the newest always does.
        timeout: seconds that a save may take before the caller hears of it.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        keep: int = 2,
        *,
        clock: Clock | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        if keep < 1:
            raise OptionError(f"keep must be at least 1 checkpoint; got {keep}")
        if not timeout > 0:
            raise OptionError(f"timeout must be > 0 s; got {timeout}")
        self._place = Place(uri)
        self.uri = self._place.uri
        self.keep = keep
        self._timeout = timeout
        self._clock = clock or SystemClock()
        self._staging = Staging()
        self._writer: BackgroundWriter[Saved] = BackgroundWriter(f"the checkpoint in {self.uri}")
        self._writing = ""  # name of the one that is being written
        self._problems: list[str] = []
        self._lock = threading.Lock()
        self._fetched: tuple[str, tempfile.TemporaryDirectory[str]] | None = None
        self.failures = 0  # saves that did not become checkpoints
        self.last: Saved | None = None  # that became durable

    # --- saving -------------------------------------------------------------------------------------------

    def save(
        self, state: Mapping[str, Any], step: int, note: Any = None, *, timeout: float | None = None
    ) -> Saved:
        """Save now and return when it is durable. Needs no other process.

        A save in the background is waited for first; should that one have failed, this one is made all the same.

        Args:
            state: nested state dicts by name, such as ``{"model": ..., "optimizer": ..., "run": ...}``.
            step: optimiser steps done.
            note: JSON that ``Found.note`` gives back.
            timeout: seconds for everything; the folder's unless given.

        Raises:
            StorageFullError: no space left. What was written is deleted, older checkpoints are whole.
            StorageError: it cannot be written, or not within ``timeout``.
            OptionError: the state holds what could not be read back.
        """
        begun = time.monotonic()
        limit = self._timeout if timeout is None else timeout
        try:
            self._writer.wait(limit)
        except StorageError:
            if self._writer.busy:
                raise
        self._start(state, step, note, begun)
        saved = self._writer.wait(max(0.0, limit - (time.monotonic() - begun)))
        assert saved is not None
        return replace(saved, stalled=saved.seconds)

    def save_async(self, state: Mapping[str, Any], step: int, note: Any = None) -> bool:
        """Copy the state and save it in the background; training waits for the copy only.

        Returns whether it was taken: while one save is under way another is not queued, since by the time it could
        be written there is a newer state. Raises the error of the save before, see ``save``, if nobody has heard of
        it yet; nothing is begun then, and the next call is free to.
        """
        if self._writer.busy:
            return False
        begun = time.monotonic()
        self._writer.wait(0.0)  # an error nobody has heard of, before the copy is made
        self._start(state, step, note, begun)
        return True

    def wait(self, timeout: float | None = None) -> Saved | None:
        """Wait for the save in the background; return it once, ``None`` if there is none. Raises its error."""
        return self._writer.wait(self._timeout if timeout is None else timeout)

    @property
    def busy(self) -> bool:
        """Tell whether a save is under way."""
        return self._writer.busy

    def _start(self, state: Mapping[str, Any], step: int, note: Any, begun: float) -> None:
        name = self._name(step)
        _check(state, note)
        copied, ready = self._staging.copy(state)
        signed = signature(state.get("model", state))
        stalled = time.monotonic() - begun

        def job() -> Saved:
            if ready is not None:
                ready.synchronize()
            try:
                size = self._write(name, copied, step, note, signed)
            except BaseException:
                self.failures += 1
                raise
            self.last = Saved(step, self._place.uri_of(name), size, time.monotonic() - begun, stalled)
            return self.last

        self._writer.start(job)

    def _name(self, step: int) -> str:
        if not 0 <= step < 10**12:
            raise OptionError(f"step must be from 0 to 10^12 - 1; got {step}")
        return f"step-{step:012d}-{int(self._clock.now() * 1000):013d}-{uuid.uuid4().hex[:8]}"

    def _write(self, name: str, state: Mapping[str, Any], step: int, note: Any, signed: Signature) -> int:
        self._writing = name
        try:
            with translated(f"save the checkpoint {self._place.uri_of(name)}"):
                files = tuple(self._payload(name, key, value) for key, value in state.items())
                return self._commit(
                    name, Manifest(step, self._clock.now(), "replicated", files, signed, note)
                )
        except BaseException:
            self._discard(name)
            raise
        finally:
            self._writing = ""

    def _payload(self, name: str, key: str, value: Any) -> Payload:
        with self._place.writing(f"{name}/{key}.pt") as sink:
            torch.save(value, sink)
        return Payload(f"{key}.pt", sink.size, sink.digest)

    def _commit(self, name: str, manifest: Manifest) -> int:
        self._place.sync(name)
        self._place.write(f"{name}/{MANIFEST}", manifest.encode())
        self._place.sync()
        self._retain()
        return manifest.size

    def _discard(self, name: str) -> None:
        # the manifest first: half a checkpoint must not look like one
        with suppress(StorageError), translated(f"delete {self._place.uri_of(name)}"):
            self._place.remove(f"{name}/{MANIFEST}")
            self._place.remove_folder(name)

    # --- saving state that no process holds whole ---------------------------------------------------------

    def save_sharded(self, state: dict[str, Any], step: int, note: Any = None, *, group: Any = None) -> Saved:
        """Save state with sharded tensors (``DTensor``), each process its part. Every process of ``group`` calls it.

        It goes through ``torch.distributed.checkpoint``; the processes hear of one another's errors, and waiting for
        them is bounded by the group's own timeout. Any number of processes can load it again, one alone too.
        """
        begun = time.monotonic()
        _check(state, note)
        self._writer.wait(self._timeout)
        first = torch.distributed.get_rank(group) == 0
        name = str(sharded_files.agree(self._name(step), group))
        try:
            files = sharded_files.write(self._place, name, state, group)
            signed = signature(state.get("model", state))

            def commit() -> int:
                manifest = Manifest(step, self._clock.now(), "sharded", files, signed, note)
                with translated(f"save the checkpoint {self._place.uri_of(name)}"):
                    return self._commit(name, manifest)

            size = sharded_files.on_first(commit, group)
        except BaseException:
            self.failures += 1
            if first:
                self._discard(name)
            raise
        took = time.monotonic() - begun
        self.last = Saved(step, self._place.uri_of(name), int(size), took, took)
        return self.last

    def load_sharded(self, found: Found, state: dict[str, Any], *, group: Any = None) -> None:
        """Fill ``state``, of the layout that this world needs, from a sharded checkpoint. Collective."""
        if found.layout != "sharded":
            raise OptionError(f"{found.uri} is not sharded; use load")
        with self._files(found) as folder:
            sharded_files.read_into(folder, state, group)

    # --- finding and loading ------------------------------------------------------------------------------

    def latest(self) -> Found | None:
        """Return the newest checkpoint that is whole; each file is read and compared with its checksum.

        Corrupt ones are renamed to ``corrupt-...``; those, and newer ones without a manifest, are named in
        ``passed_over`` and ``problems``. Raises ``StorageError`` when the folder cannot be read.
        """
        passed = []
        for name in reversed(self._names()):
            if name == self._writing:
                continue
            uri = self._place.uri_of(name)
            try:
                manifest = self._manifest(name)
                self._verify(name, manifest)
            except OtherVersionError as exc:
                passed.append(f"{uri} {exc}")
            except _UnfinishedError as exc:
                passed.append(f"{uri} {exc}")
            except UnusableError as exc:
                passed.append(f"{uri} {exc}; it is set aside")
                self._set_aside(name, str(exc))
            else:
                self._note(*passed)
                return _found(name, uri, manifest, tuple(passed))
        self._note(*passed)
        return None

    def load(
        self, found: Found, *, map_location: Any = "cpu", only: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Return the state, whole. No code from the files is run. Raises ``StorageError``.

        Args:
            found: from ``latest``.
            map_location: device for the tensors, as in ``torch.load``.
            only: keys to read, all unless given.
        """
        with self._files(found) as folder:
            if found.layout == "sharded":
                state = sharded_files.read_whole(folder, map_location)
                return {key: value for key, value in state.items() if only is None or key in only}
            keys = [file.name.removesuffix(".pt") for file in found.files]
            return {
                key: read_state(f"{folder}/{key}.pt", map_location)
                for key in keys
                if only is None or key in only
            }

    def problems(self) -> list[str]:
        """Return and forget what was passed over or could not be tidied up."""
        with self._lock:
            found, self._problems = self._problems, []
        return found

    def _names(self) -> list[str]:
        with translated(f"list the checkpoints in {self.uri}"):
            return [info.base_name for info in self._place.entries() if NAME.fullmatch(info.base_name)]

    def _manifest(self, name: str) -> Manifest:
        with translated(f"read the checkpoint {self._place.uri_of(name)}"):
            try:
                data = self._place.read(f"{name}/{MANIFEST}")
            except FileNotFoundError as exc:
                raise _UnfinishedError("has no manifest: it was never finished") from exc
        return decode(data)

    def _verify(self, name: str, manifest: Manifest) -> None:
        """Compare every file with the manifest; on S3 keep what was fetched for it. Raises ``UnusableError``."""
        self._check_sizes(name, manifest)
        with translated(f"read the checkpoint {self._place.uri_of(name)}"):
            if self._place.local:
                for file in manifest.files:
                    self._compare(name, file, None)
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

    def _check_sizes(self, name: str, manifest: Manifest) -> None:
        with translated(f"read the checkpoint {self._place.uri_of(name)}"):
            sizes = {info.base_name: info.size for info in self._place.entries(name) if info.is_file}
        for file in manifest.files:
            if sizes.get(file.name) != file.size:
                there = f"{sizes[file.name]} bytes" if file.name in sizes else "nothing"
                raise UnusableError(f"should have {file.size} bytes in {file.name}, there is {there}")

    def _compare(self, name: str, file: Payload, copy: Path | None) -> None:
        digest = sha256()
        with open(copy / file.name if copy else os.devnull, "wb") as out:
            for piece in self._place.pieces(f"{name}/{file.name}"):
                digest.update(piece)
                if copy:
                    out.write(piece)
        if digest.hexdigest() != file.sha256:
            raise UnusableError(
                f"has {file.name} with bytes that are not those written (its checksum differs)"
            )

    def _files(self, found: Found) -> Any:
        """Return a context that gives a local folder with the verified files."""
        if self._place.local:
            return _Kept(self._place.path(found.name))
        if self._fetched is None or self._fetched[0] != found.name:
            try:
                self._verify(found.name, self._manifest(found.name))
            except UnusableError as exc:
                raise StorageError(f"{found.uri} {exc}") from exc
        assert self._fetched is not None
        return _Kept(self._fetched[1].name, self._forget_fetched)

    def _forget_fetched(self) -> None:
        if self._fetched is not None:
            self._fetched[1].cleanup()
            self._fetched = None

    # --- housekeeping -------------------------------------------------------------------------------------

    def _set_aside(self, name: str, reason: str) -> None:
        try:
            with translated(f"set {self._place.uri_of(name)} aside"):
                self._place.move_folder(name, _CORRUPT + name, MANIFEST)
                self._place.write(f"{_CORRUPT}{name}/reason.txt", f"{reason}\n".encode())
        except StorageError as exc:  # a folder that may only be read, or another process was first
            self._note(str(exc))

    def _retain(self) -> None:
        """Delete complete checkpoints beyond ``keep``, what writers left behind, and old ones set aside."""
        try:
            with translated(f"tidy the checkpoints in {self.uri}"):
                whole = []
                for name in reversed(self._names()):
                    try:
                        self._check_sizes(name, self._manifest(name))
                    except _UnfinishedError:
                        if self._abandoned(name):
                            self._discard(name)
                    except UnusableError:
                        continue  # latest() says what is wrong with it
                    else:
                        whole.append(name)
                for name in whole[self.keep :]:
                    self._discard(name)
                aside = [i.base_name for i in self._place.entries() if i.base_name.startswith(_CORRUPT)]
                for name in aside[:-SET_ASIDE_KEPT]:
                    self._place.remove_folder(name)
        except StorageError as exc:
            self._note(str(exc))

    def _abandoned(self, name: str) -> bool:
        times = [(info.mtime_ns or 0) / 1e9 for info in self._place.entries(name) if info.is_file]
        match = NAME.fullmatch(name)
        begun = int(match.group(2)) / 1000 if match else 0.0
        return self._clock.now() - max([begun, *times]) > ABANDONED_AFTER

    def _note(self, *problems: str) -> None:
        for problem in problems:
            log.warning("%s", problem)
        with self._lock:
            self._problems.extend(problems)


class _UnfinishedError(UnusableError):
    """There is no manifest: a writer died, or writes at this moment."""


class _Kept:
    def __init__(self, folder: str, after: Any = None) -> None:
        self._folder, self._after = folder, after

    def __enter__(self) -> str:
        return self._folder

    def __exit__(self, *exc: object) -> None:
        if self._after:
            self._after()


def _found(name: str, uri: str, manifest: Manifest, passed: tuple[str, ...]) -> Found:
    return Found(
        manifest.step, name, uri, manifest.created, manifest.size, manifest.note, manifest.signature,
        manifest.layout, manifest.files, passed,
    )  # fmt: skip


def _check(state: Mapping[str, Any], note: Any) -> None:
    if not state:
        raise OptionError("state must hold something to save")
    for key in state:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise OptionError(f"keys of the state are names of letters, digits, _ and -; got {key!r}")
    try:
        json.dumps(note)
    except (TypeError, ValueError) as exc:
        raise OptionError(f"note must be JSON; got {note!r} ({exc})") from exc
