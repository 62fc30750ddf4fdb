"""A run's running checkpoint (SCAR), beside its full ones, where the launcher's settings ask for one.

It counts when all processes are lost at once: it is then newer than the last full checkpoint, though its parameters
are of several steps, which training makes good by itself. While one process survives, it rescues the exact state.
"""

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any
from zlib import crc32

from ebbflow.infra.errors import StorageError
from ebbflow.infra.protocols.trainings import NODES_MEMORY
from ebbflow.infra.storage.filesystems import is_denied
from ebbflow.infra.training.checkpoints.shards import parts_of_state
from ebbflow.infra.training.checkpoints.states import check_model, signature
from ebbflow.infra.training.prepared import PreparedTraining
from ebbflow.infra.training.process.generation import Generation
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.infra.training.running.folder import RunningFolder, read_whole
from ebbflow.infra.training.running.memory import NodeMemory
from ebbflow.infra.training.running.restoring import Read, Recovery
from ebbflow.infra.training.running.segments import STATE, Record
from ebbflow.infra.training.running.store import DamagedError
from ebbflow.infra.training.sharded.restoring import cut_for, load_parts

CHECKED = 256  # blocks that are in memory at once while all are compared with their checksums

log = logging.getLogger(__name__)


class _DifferentError(StorageError):
    """Processes have read different saves of one running checkpoint."""


class _BehindError(StorageError):
    """The full checkpoint is newer than what can be read of the running one."""


class RunningSaves:
    """The running checkpoint of one run; the first process writes, all can read. Does nothing unless asked for.

    Where parameters are sharded, those that hold the first replica write, each its shards.

    What ``prepare(state=...)`` names is saved whole each time, beside the blocks whose turn it is.
    """

    def __init__(self, generation: Generation) -> None:
        run, settings = generation.place, generation.settings
        wanted = settings.partial_checkpoint_interval > 0 and not generation.trial
        self._place = run.under("running") if run is not None and wanted else None
        self._world, self._link, self._settings = generation.world, generation.link, settings
        self._running: RunningCheckpoint | None = None
        asked = self._place is not None and settings.partial_checkpoint_memory
        self._memory = NodeMemory() if asked else None
        self.recovered: Recovery | None = None
        self.problems: list[str] = []  # running checkpoints that cannot serve, and why
        self.needed = True  # until a full checkpoint of the run's end is saved

    def newest(self, step: int) -> int | None:
        """Return the step of the running checkpoint where that is above ``step``; for the first process alone.

        Every block is compared with its checksum. One that is damaged is set aside, and named in ``problems``. Raises
        ``StorageError`` where it cannot be read.
        """
        if self._place is None:
            return None
        folder = RunningFolder(self._place, self._memory)
        self.problems = [f"{uri} was damaged" for uri in folder.aside()]
        start = folder.latest()
        if start is None:
            return None
        try:
            newest = folder.newest(start, [STATE])[STATE].iteration
            if newest <= step:
                return None
            for _ in folder.records(start, range(len(folder.table(start).blocks)), CHECKED):
                pass
        except DamagedError as exc:
            try:
                self.problems.append(f"{exc}; it is set aside as {folder.set_aside(start)}")
            except StorageError as failed:
                if not is_denied(failed):  # what was taken for damage may be storage that goes away
                    raise
                self.problems.append(f"{exc}; {failed}")
            log.warning("%s", self.problems[-1])
            return None
        return newest

    def begin(
        self, prepared: PreparedTraining, newest: int | None, full: int = -1, read: Read = lambda work: work()
    ) -> None:
        """Take up the running checkpoint of step ``newest``, if one is given; then begin to save.

        Args:
            prepared: what is trained, as of the full checkpoint.
            newest: what ``newest`` has returned; in nodes' memory it may be gone by now.
            full: step of the full checkpoint, -1 without one. If what is left is not newer, that counts.
            read: does what reads, in all processes together.

        Raises ``StorageError`` where it can be neither read nor begun.
        """
        if self._place is None:
            return
        sharding = prepared.sharding
        running = RunningCheckpoint(
            self._place,
            prepared.inner,
            prepared.optimizer,
            period=self._settings.partial_checkpoint_interval,
            fraction=self._settings.partial_checkpoint_fraction,
            group=sharding.group if sharding is not None and self._world.size > 1 else None,
            owner=sharding.division.part if sharding is not None else None,
            memory=self._memory,
        )
        fits = newest is None or read(running.fits)
        if newest is not None:
            try:
                found = (
                    self._read(prepared, running, full, read) if fits else self._recut(prepared, full, read)
                )
            except _BehindError as exc:
                log.warning("%s", exc)
            else:
                self.recovered = found
                prepared.load_run(found.state)
                prepared.load_extra(found.state.get("extra", {}))
                log.warning(
                    "parameters of steps %s to %s are taken from %s",
                    found.oldest, found.iteration, running.uri,
                )  # fmt: skip
        self._world.from_all(None)  # have read, before the first writes
        if self._world.rank == 0 if sharding is None else sharding.division.replica == 0:
            self._running = running
            if self.recovered is None or not fits:
                running.initialize(_small(prepared), prepared.progress.step)

    def _read(
        self, prepared: PreparedTraining, running: RunningCheckpoint, full: int, read: Read
    ) -> Recovery:
        """Read everything, all processes the same: without nodes' memory where they have found different saves, and
        of a model whose shards could be of different ones.

        Raises ``_BehindError`` before anything is changed, and ``StorageError``.
        """
        whole = prepared.sharding is None

        def check(records: Mapping[int, Record]) -> None:
            iteration = records[STATE].iteration
            blocks = sorted((block, record.iteration) for block, record in records.items()) if whole else []
            if len(set(self._world.from_all((iteration, crc32(repr(blocks).encode()))))) > 1:
                raise _DifferentError(f"processes have read different saves of {running.uri}")
            _check_newer(iteration, full, running.uri)

        if self._memory is not None and whole:
            try:
                return running.recover_all(check=check, read=read)
            except _DifferentError:
                log.warning("nodes' memory has not given the same save to all processes; the store is read")
        return running.recover_all(memory=False, check=check, read=read)

    def _recut(self, prepared: PreparedTraining, full: int, read: Read) -> Recovery:
        """Take up a running checkpoint of a world that had cut the parameters otherwise; each process reads it whole.

        Raises ``_BehindError`` before anything is changed, ``OtherModelError`` and ``StorageError``.
        """
        assert self._place is not None
        begun, model, optimizer = time.monotonic(), prepared.inner, prepared.optimizer
        folder = RunningFolder(self._place)
        state, iteration, oldest = read(partial(read_whole, folder))  # the same to all processes
        _check_newer(iteration, full, self._place.uri)
        check_model(signature(state["model"]), model, self._place.uri)
        tensors = state["model"].values()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if prepared.sharding is None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        else:
            cut = cut_for(model, optimizer)
            parts = {key: parts_of_state(state[key], (key,), cut, "cpu") for key in ("model", "optimizer")}
            load_parts(model, optimizer, parts)
        seconds = time.monotonic() - begun
        return Recovery(len(tensors), size, seconds, iteration, oldest, None, state=state["run"])

    def step(self, prepared: PreparedTraining) -> list[dict[str, Any]]:
        """Save the blocks whose turn it is; return, each once, why a write has failed and memory cannot be used."""
        if self._running is None:
            return []
        running, step = self._running, prepared.progress.step
        failed = running.failures
        running.step(step, _small(prepared) if running.due(step) else None)
        said = []
        if running.failures > failed:
            said.append({"reason": "running checkpoint", "error": running.last_error})
        if self._memory is not None and (problem := self._memory.problem(self._link.claim)):
            said.append({"reason": NODES_MEMORY, "error": problem})
        return said

    def close(self, timeout: float = 5.0) -> None:
        """Wait for the last write; what it could not save is noted."""
        if self._running is not None:
            running, self._running = self._running, None
            try:
                running.close(timeout, needed=self.needed)
            except StorageError as exc:
                log.warning("the running checkpoint is not complete: %s", exc)
        if self._memory is not None:
            self._memory.close()


def _check_newer(iteration: int, full: int, uri: str) -> None:
    if iteration <= full:
        raise _BehindError(
            f"what all processes can read of {uri} is of step {iteration}; training resumes from the full checkpoint "
            f"of step {full}"
        )


def _small(prepared: PreparedTraining) -> dict[str, Any]:
    """Return what is saved each time; in the form of a full checkpoint's ``run``, which ``read_running`` returns."""
    return prepared.run_state() | {"extra": prepared.extra_state()}
