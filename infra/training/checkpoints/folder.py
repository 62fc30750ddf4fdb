"""Full checkpoints of a training in a directory, local or on S3.

Layout::

    <directory>/step-<steps>-<milliseconds>-<random>/model.pt ...    one file for each key of the state
    <directory>/step-.../manifest.json                               sizes and checksums, written last
    <directory>/corrupt-step-...                                     set aside, with why in reason.txt; not deleted
                                                                  before a whole one has got as far

Without a manifest a checkpoint does not exist. The files are those of ``torch.save``, so that ``torch.load`` alone
reads them too. State that is sharded over processes is saved by all of them, see ``save_sharded``.
"""

import json
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import StorageError, UnusableCheckpointError
from ebbflow.infra.storage.manifest import OtherVersionError, UnusableError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints import sharded_files
from ebbflow.infra.training.checkpoints.files import CheckpointFiles, UnfinishedError, discarded_on_error
from ebbflow.infra.training.checkpoints.manifest import Layout, Manifest, Payload
from ebbflow.infra.training.checkpoints.parts import PartWriter, missing_parts
from ebbflow.infra.training.checkpoints.shards import Cut, parts_of_state
from ebbflow.infra.training.checkpoints.states import Signature, Staging, check_model, read_state, signature
from ebbflow.infra.training.checkpoints.writer import BackgroundWriter
from ebbflow.infra.training.process.agreeing import exchangeable
from ebbflow.infra.training.process.world import World
from ebbflow.planners.errors import OptionError

TIMEOUT = 120.0  # seconds for one save
_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that was written."""

    step: int
    uri: str
    bytes: int
    seconds: float  # from the request until it was durable
    stalled: float  # seconds of it that the caller waited


@exchangeable
@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose files were compared with their checksums."""

    step: int  # optimizer steps done
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
        place: the directory.
        keep: how many complete checkpoints stay; the newest always does.
        timeout: seconds that a save may take before the caller hears of it.
        check: raises ``StorageError`` where the directory is not what it was, before and after each save.

    Raises ``OptionError``.
    """

    def __init__(
        self,
        place: StorageLocation,
        keep: int = 2,
        *,
        clock: Clock | None = None,
        timeout: float = TIMEOUT,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if keep < 1:
            raise OptionError(f"keep must be at least 1 checkpoint; got {keep}")
        if not timeout > 0:
            raise OptionError(f"timeout must be > 0 s; got {timeout}")
        self.keep = keep
        self._timeout = timeout
        self._clock = clock or SystemClock()
        self._files = CheckpointFiles(place, self._clock, check)
        self.place, self.uri = place, place.uri
        self._staging = Staging()
        self._writer: BackgroundWriter[SavedCheckpoint] = BackgroundWriter(f"the checkpoint in {self.uri}")
        self._writing = ""  # name of the one that is being written
        self._left: list[str] = []  # unusable ones that ``latest`` left where they are
        self._unusable: dict[str, str] = {}  # names of what was found damaged later, and why
        self.failures = 0  # saves that did not become checkpoints
        self.last: SavedCheckpoint | None = None  # that became durable

    # --- saving -------------------------------------------------------------------------------------------

    def save(
        self, state: Mapping[str, Any], step: int, note: Any = None, *, timeout: float | None = None
    ) -> SavedCheckpoint:
        """Save now and return when it is durable. Needs no other process.

        A save in the background is waited for first; should that one have failed, this one is made all the same.

        Args:
            state: nested state dicts by name, such as ``{"model": ..., "optimizer": ..., "run": ...}``.
            step: optimizer steps done.
            note: JSON that ``VerifiedCheckpoint.note`` gives back.
            timeout: seconds for everything; the directory's unless given.

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
        be written there is a newer state. Raises the error of the save before, see ``save``, if it was not
        raised yet; nothing is begun then, and the next call is free to.
        """
        if self._writer.busy:
            return False
        begun = time.monotonic()
        self._writer.wait(0.0)  # an error that was not raised, before the copy is made
        self._start(state, step, note, begun)
        return True

    def wait(self, timeout: float | None = None) -> SavedCheckpoint | None:
        """Wait for the save in the background; return it once, ``None`` if there is none. Raises its error."""
        return self._writer.wait(self._timeout if timeout is None else timeout)

    @property
    def busy(self) -> bool:
        """Return whether a save is under way."""
        return self._writer.busy

    def _start(self, state: Mapping[str, Any], step: int, note: Any, begun: float) -> None:
        name = self._name(step)
        _check(state, note)
        copied, ready = self._staging.copy(state)
        signed = signature(state.get("model", state))
        stalled = time.monotonic() - begun

        def job() -> SavedCheckpoint:
            if ready is not None:
                ready.synchronize()
            try:
                size = self._write(name, copied, step, note, signed)
            except BaseException:
                self.failures += 1
                raise
            self.last = SavedCheckpoint(
                step, self._files.place.uri_of(name), size, time.monotonic() - begun, stalled
            )
            return self.last

        self._writer.start(job)

    def _name(self, step: int) -> str:
        if not 0 <= step < 10**12:
            raise OptionError(f"step must be from 0 to 10^12 - 1; got {step}")
        return f"step-{step:012d}-{int(self._clock.now() * 1000):013d}-{uuid.uuid4().hex[:8]}"

    def _write(self, name: str, state: Mapping[str, Any], step: int, note: Any, signed: Signature) -> int:
        def write() -> Manifest:
            return Manifest(
                step, self._clock.now(), "replicated", self._files.write(name, state), signed, note
            )

        self._writing = name
        try:
            size = discarded_on_error(self._files, name, write).size
        finally:
            self._writing = ""
        self._files.retain(self.keep)
        return size

    # --- saving state that no process holds whole ---------------------------------------------------------

    def part_writer(self) -> PartWriter:
        """Return what writes this process' part of sharded checkpoints here."""
        return PartWriter(self._files, self._clock)

    def name_of(self, step: int) -> str:
        """Return a name for a checkpoint of ``step`` that no other has; those that save together agree on one."""
        return self._name(step)

    def committed(self, writer: PartWriter, name: str, step: int, note: Any, begun: float) -> SavedCheckpoint:
        """Make a checkpoint of the parts that all processes have written under ``name``; the first one does it.

        ``begun`` is when it was requested, on the monotonic clock. Raises as ``discarded_on_error``.
        """
        uri = self.place.uri_of(name)
        size = writer.commit(name, step, note)
        if size is None:
            self._files.discard(name)
            raise missing_parts(uri)
        self._files.retain(self.keep)
        took = time.monotonic() - begun
        self.last = SavedCheckpoint(step, uri, size, took, took)
        return self.last

    def save_sharded(
        self, state: Mapping[str, Any], step: int, note: Any = None, *, world: World
    ) -> SavedCheckpoint:
        """Save state with sharded tensors (``DTensor``), each process its part. Every process of ``world`` calls it.

        The processes hear of one another's errors. A world of any size can load it, a process alone too.

        Raises ``StorageError`` on all processes where one cannot write, and ``OptionError``.
        """
        begun = time.monotonic()
        _check(state, note)
        name = str(world.from_first(self._name(step)))
        writer = self.part_writer()
        error: Exception | None = None
        try:
            writer.begin(name, state)
        except StorageError as exc:
            error = exc
        end = begun + self._timeout
        while world.sum([float(writer.busy and time.monotonic() < end)])[0]:  # no collective takes long
            writer.join(min(1.0, self._timeout))
        try:
            writer.wait(0.0)
        except StorageError as exc:
            error = error or exc
        error = next((one for one in world.from_all(error) if one is not None), None)
        saved: SavedCheckpoint | None = None
        if world.rank == 0:
            try:
                if error is None:
                    saved = self.committed(writer, name, step, note, begun)
                else:
                    self._files.discard(name)
            except StorageError as exc:
                error = exc
        found: Any = world.from_first((error, saved and saved.bytes))
        if found[0] is not None:
            self.failures += 1
            raise found[0]
        took = time.monotonic() - begun
        self.last = SavedCheckpoint(step, self.place.uri_of(name), int(found[1]), took, took)
        return self.last

    # --- finding and loading ------------------------------------------------------------------------------

    def latest(self) -> VerifiedCheckpoint | None:
        """Return the newest checkpoint that is whole; each file is read and compared with its checksum.

        Of the values of sharded ones only the sizes are compared; ``load`` compares those that it reads.
        Corrupt ones are renamed to ``corrupt-...``; those, and newer ones without a manifest, are named in
        ``passed_over`` and ``problems``. Raises ``StorageError`` when the directory cannot be read.
        """
        passed: list[str] = []
        self._left = []

        def pass_over(problem: str) -> None:
            passed.append(problem)
            self._files.note(problem)  # at once: the search may fail later

        for name in reversed(self._files.names()):
            if name == self._writing:
                continue
            uri = self._files.place.uri_of(name)
            try:
                if name in self._unusable:
                    raise UnusableError(self._unusable[name])
                manifest = self._files.manifest(name)
                self._files.verify(name, manifest)
            except UnfinishedError as exc:
                pass_over(f"{uri} {exc}")
            except OtherVersionError as exc:
                pass_over(f"{uri} {exc}")
                self._left.append(passed[-1])
            except UnusableError as exc:
                aside = self._files.set_aside(name, str(exc))
                pass_over(f"{uri} {exc}" + ("; it is set aside" if aside else ""))
                if not aside:
                    self._left.append(passed[-1])
            else:
                return _found(name, uri, manifest, tuple(passed))
        return None

    def damaged(self) -> list[str]:
        """Return the checkpoints that were finished and cannot serve, and why, where ``latest`` has found none.

        They were set aside, now or earlier, or could not be, or are of another version of Ebbflow.
        Raises ``StorageError``.
        """
        return self._files.aside() + self._left

    def take_over(self, other: "CheckpointFolder", found: VerifiedCheckpoint) -> SavedCheckpoint:
        """Copy a checkpoint of another directory into this one, checked on its way. Raises ``StorageError``."""
        begun = time.monotonic()
        source, target = other._files, self._files
        try:
            manifest = source.manifest(found.name)

            def write() -> Manifest:
                target.copy(source, found.name, manifest)
                return manifest

            discarded_on_error(target, found.name, write)
        except UnusableError as exc:
            raise UnusableCheckpointError(f"{found.uri} {exc}") from exc
        took = time.monotonic() - begun
        self.last = SavedCheckpoint(found.step, target.place.uri_of(found.name), manifest.size, took, took)
        return self.last

    def set_aside(self, found: VerifiedCheckpoint, reason: str) -> None:
        """Let a checkpoint whose values are damaged never count again; ``latest`` says so, and renames it."""
        self._unusable[found.name] = reason.removeprefix(found.uri).strip()

    def discard(self, found: VerifiedCheckpoint) -> None:
        """Delete a checkpoint that is of no use any more; one that cannot be deleted stays."""
        self._files.discard(found.name)

    def load(
        self,
        found: VerifiedCheckpoint,
        *,
        map_location: Any = "cpu",
        only: Collection[str] | None = None,
        cut: Cut | None = None,
    ) -> dict[str, Any]:
        """Return the state. No code from the files is run.

        Raises ``DamagedPartError`` where values of a sharded checkpoint are not those written, and ``StorageError``.

        Args:
            found: from ``latest``.
            map_location: device for the tensors, as in ``torch.load``.
            only: keys to read, all unless given.
            cut: which part of each tensor this process wants, whole ones unless given. Of a sharded checkpoint only
                that is read.
        """
        if found.layout == "sharded":
            return sharded_files.read(self.place, found.name, found.files, map_location, cut, only)
        with self._files.local(found.name) as folder:
            keys = [file.name.removesuffix(".pt") for file in found.files]
            wanted = [key for key in keys if only is None or key in only]
            if cut is None:
                return {key: read_state(f"{folder}/{key}.pt", map_location) for key in wanted}
            return {
                key: parts_of_state(read_state(f"{folder}/{key}.pt", mapped=True), (key,), cut, map_location)
                for key in wanted
            }

    def problems(self) -> list[str]:
        """Return and forget what was passed over or could not be tidied up."""
        return self._files.problems()


def _found(name: str, uri: str, manifest: Manifest, passed: tuple[str, ...]) -> VerifiedCheckpoint:
    return VerifiedCheckpoint(
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
