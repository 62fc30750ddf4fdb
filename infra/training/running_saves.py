"""A run's running checkpoint (SCAR), beside its full ones, where the launcher's settings ask for one.

It counts when all processes are lost at once: it is then newer than the last full checkpoint, though its parameters
are of several steps, which training makes good by itself. While one process survives, it rescues the exact state.
"""

import logging
import time
from typing import Any
from zlib import crc32

from ebbflow.infra.errors import StorageError
from ebbflow.infra.training.checkpoints.shards import parts_of_state
from ebbflow.infra.training.checkpoints.states import check_model, signature
from ebbflow.infra.training.prepared import PreparedTraining
from ebbflow.infra.training.process.generation import Generation
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.infra.training.running.folder import RunningFolder, read_whole
from ebbflow.infra.training.running.memory import NodeMemory
from ebbflow.infra.training.running.restoring import Recovery
from ebbflow.infra.training.running.segments import STATE
from ebbflow.infra.training.running.store import DamagedError
from ebbflow.infra.training.sharded.restoring import cut_for, load_parts

CHECKED = 256  # blocks that are in memory at once while all are compared with their checksums

log = logging.getLogger(__name__)


class RunningSaves:
    """The running checkpoint of one run; the first process writes, all can read. Does nothing unless asked for.

    Where parameters are sharded, those that hold the first replica write, each its shards.

    What ``prepare(state=...)`` names is saved whole each time, beside the blocks whose turn it is.
    """

    def __init__(self, generation: Generation) -> None:
        run, settings = generation.place, generation.settings
        wanted = settings.partial_checkpoint_interval > 0 and not generation.trial
        self._place = run.under("running") if run is not None and wanted else None
        self._world, self._settings = generation.world, settings
        self._running: RunningCheckpoint | None = None
        asked = self._place is not None and settings.partial_checkpoint_memory
        self._memory = NodeMemory() if asked else None
        self.recovered: Recovery | None = None
        self.problems: list[str] = []  # running checkpoints that cannot serve, and why

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
            except StorageError as failed:  # a directory that may only be read
                self.problems.append(f"{exc}; {failed}")
            log.warning("%s", self.problems[-1])
            return None
        return newest

    def begin(self, prepared: PreparedTraining, newest: int | None) -> None:
        """Take up the running checkpoint of step ``newest``, if one is given; then begin to save.

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
        fits = newest is None or running.fits()
        if newest is not None:
            found = self.recovered = self._read(prepared, running) if fits else self._recut(prepared)
            prepared.load_run(found.state)
            prepared.load_extra(found.state.get("extra", {}))
            log.warning("parameters of steps %s to %s are taken from %s", found.oldest, newest, running.uri)
        self._world.from_all(None)  # have read, before the first writes
        if self._world.rank == 0 if sharding is None else sharding.division.replica == 0:
            self._running = running
            if newest is None or not fits:
                running.initialize(_small(prepared), prepared.progress.step)

    def _read(self, prepared: PreparedTraining, running: RunningCheckpoint) -> Recovery:
        """Read everything, all processes the same: without nodes' memory where they have found different saves, and
        of a model whose shards could be of different ones."""
        found = running.recover_all(memory=prepared.sharding is None)
        if self._memory is not None and prepared.sharding is None:
            seen = crc32(running.cached.tobytes())
            if len(set(self._world.from_all((found.iteration, seen)))) > 1:
                log.warning("nodes' memory has not given the same save to all processes; the store is read")
                found = running.recover_all(memory=False)
        return found

    def _recut(self, prepared: PreparedTraining) -> Recovery:
        """Take up a running checkpoint of a world that had cut the parameters otherwise; each process reads it whole.

        Raises ``OtherModelError`` and ``StorageError``.
        """
        assert self._place is not None
        begun, model, optimizer = time.monotonic(), prepared.inner, prepared.optimizer
        state, iteration, oldest = read_whole(RunningFolder(self._place))  # the same to all processes
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

    def step(self, prepared: PreparedTraining) -> str:
        """Save the blocks whose turn it is; return why an earlier write has failed, once, else an empty text."""
        if self._running is None:
            return ""
        running, step = self._running, prepared.progress.step
        failed = running.failures
        running.step(step, _small(prepared) if running.due(step) else None)
        return running.last_error if running.failures > failed else ""

    def close(self, timeout: float = 5.0) -> None:
        """Wait for the last write; what it could not save is noted."""
        if self._running is not None:
            running, self._running = self._running, None
            try:
                running.close(timeout)
            except StorageError as exc:
                log.warning("the running checkpoint is not complete: %s", exc)
        if self._memory is not None:
            self._memory.close()


def _small(prepared: PreparedTraining) -> dict[str, Any]:
    """Return what is saved each time; in the form of a full checkpoint's ``run``, which ``read_running`` returns."""
    return prepared.run_state() | {"extra": prepared.extra_state()}
