"""When a sharded run saves: each process writes its part, all at the same step, and the first makes it count.

At intervals nobody waits: the step's own all-reduce carries the first process' wish to save and how many have written
their parts. Where a run ends or leaves, processes wait for one another. After a loss, and at the last moment before a
deadline, they cannot: each writes its part by itself, and whoever finds that all are there makes it a checkpoint.
That takes one process of each shard, so after a loss only whole replicas of the model (HSDP) can be saved from. At
the last moment all are there: each looks until it finds the others' parts, since one that ends looks lost to them.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ebbflow.infra.errors import StorageError
from ebbflow.infra.training.checkpoints.folder import TIMEOUT, CheckpointFolder, SavedCheckpoint
from ebbflow.infra.training.checkpoints.writer import BackgroundWriter
from ebbflow.infra.training.process.generation import Generation
from ebbflow.infra.training.retrying import retried, shown_alive
from ebbflow.infra.training.saver import RESCUE, Costs, Saver, State
from ebbflow.infra.training.sharded.parallel import Sharding

TOGETHER = 1.0  # seconds that processes wait at most before they tell one another that they still write
LOOK_EVERY = 0.1  # seconds between two looks for the parts of others

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A save at an interval, of which parts are being written."""

    name: str
    step: int
    begun: float  # on the monotonic clock


class ShardedSaver(Saver):
    """Saves one run whose state is sharded; all its processes call it alike, but for ``rescue``."""

    collective = True

    def __init__(self, folder: CheckpointFolder | None, generation: Generation, sharding: Sharding) -> None:
        super().__init__(folder, generation)
        self._sharding, self._main = sharding, generation.is_main
        self._parts = folder.part_writer() if folder is not None else None
        self._rescue_name = ""
        self._under_way: _UnderWay | None = None
        self._failed: Exception | None = None  # why this process could not begin
        self._commit: BackgroundWriter[SavedCheckpoint] = BackgroundWriter("the manifest of a checkpoint")
        if folder is not None:
            # what is written without asking others needs a name that all know
            self._rescue_name = str(self._world.from_first(folder.name_of(0)))

    @property
    def replicas(self) -> int:
        """Return how many nodes have each part; see ``Saver``. Replicas may share nodes."""
        return min(self._sharding.division.replicas, self._world.nodes)

    def counts(self) -> Sequence[float]:
        """Return whether the first process wants a save, and whether this one has written its part of the last."""
        if self._parts is None:
            return ()
        due = False
        if self._main and not self._commit.busy:
            self._note_committed("periodic")
            due = self._under_way is None and self._clock.now() - self._last >= self.every
        return float(due), float(self._under_way is not None and not self._parts.busy)

    def maybe(self, state: Callable[[], State], step: int, counted: Sequence[float] = ()) -> None:
        """Begin a save where the first process wants one, or end the one whose parts are written.

        A save that fails is reported and tried again later.
        """
        if self._parts is None or not counted:
            return
        try:
            if self._under_way is not None and counted[1] == self._world.size:
                self._conclude("periodic")
            elif self._under_way is None and counted[0]:
                self._begin(state, step)
        except StorageError as exc:
            self._last = self._clock.now()
            log.warning("no checkpoint at step %s: %s", step, exc)
            if self._main:
                self._link.post("checkpoint", step, {"reason": "periodic", "error": str(exc)})

    def last(self, state: Callable[[], State], step: int, reason: str, deadline: float | None = None) -> None:
        """Save the end of a run, or where it is when it leaves; see ``Saver.last``. It is not spilled elsewhere."""
        if self.folder is None:
            return
        begun = self._clock.now()
        with shown_alive(self._link.post, self._clock, step):
            self._end_interval(begun + TIMEOUT if deadline is None else min(deadline, begun + TIMEOUT))
        if self._world.from_first(self.saved_step >= step):
            self.saved_step = max(self.saved_step, step)
            return
        end = begun + self._settings.final_save_timeout if deadline is None else deadline

        def save() -> None:
            self.now(state, step, reason, TIMEOUT if deadline is None else max(1.0, end - self._clock.now()))

        with shown_alive(self._link.post, self._clock, step):
            try:
                say = partial(self._say_unsaved, step, reason)
                retried(save, self._clock, end, say, lambda _, in_time: bool(self._world.from_first(in_time)))
                return
            except StorageError as exc:
                error = exc
        kept = f"step {self.saved_step} is saved" if self.saved_step >= 0 else "none of its steps is saved"
        if self._main:
            self._link.post("checkpoint", step, {"reason": reason, "error": str(error)})
        raise type(error)(
            f"step {step} of the run is not saved in its directory (retried for "
            f"{self._clock.now() - begun:.0f} s): {error}; {kept}"
        ) from None

    def now(self, state: Callable[[], State], step: int, reason: str, timeout: float | None = None) -> bool:
        """Save and wait until it is durable; all processes call it. Raises ``StorageError``, on all of them."""
        if self.folder is None or self._parts is None:
            return False
        end = self._clock.now() + (TIMEOUT if timeout is None else timeout)
        self._begin(state, step)
        self._together(end)
        self._conclude(reason, end)
        return True

    def rescue(self, state: Callable[[], State], step: int, reason: str, timeout: float) -> bool:
        """Write this process' part of the last complete step, unless another survivor does.

        After a loss nobody is waited for; else the other parts are, within ``timeout`` seconds. Returns whether the
        run's directory has the step by that: whether this process was the first to find all parts there.
        """
        folder, parts = self.folder, self._parts
        if folder is None or parts is None or step <= self.saved_step:
            return False
        division = self._sharding.division
        if division.replicas == 1 and reason == RESCUE:
            return False  # a shard is lost with its process
        if not self._link.claim(f"rescue-{step}-{division.part}"):
            return False
        begun, at = time.monotonic(), self._clock.now()
        name = f"step-{step:012d}-{self._rescue_name.split('-', 2)[2]}"
        try:
            parts.wait(timeout)
        except StorageError as exc:  # of a save at an interval, which is given up
            log.warning("a checkpoint at an interval is given up: %s", exc)
        try:
            with self.lock:
                parts.begin(name, state(), spare=True)
            parts.wait(max(1.0, timeout - (self._clock.now() - at)))
            while not parts.complete(name):
                if reason == RESCUE or self._clock.now() - at >= timeout:
                    return False
                self._clock.sleep(LOOK_EVERY)
            if not self._link.claim(f"rescue-{step}"):
                return False
            saved = folder.committed(parts, name, step, {"reason": reason}, begun)
        except StorageError as exc:
            log.warning("no rescue checkpoint of step %s: %s", step, exc)
            return False
        self._report_saved(saved, reason)
        return True

    # --- one save -------------------------------------------------------------------------------------------

    def _begin(self, state: Callable[[], State], step: int) -> None:
        """Begin to write this process' part; the first process names the checkpoint."""
        assert self.folder is not None
        assert self._parts is not None
        begun = time.monotonic()
        name = str(self._world.from_first(self.folder.name_of(step)))
        self._last = self._clock.now()
        self._under_way = _UnderWay(name, step, begun)
        try:
            with self.lock:
                self.costs = Costs(self._parts.begin(name, state()), self.costs.write)
        except StorageError as exc:  # others learn of it where they conclude
            self._failed = exc

    def _together(self, end: float) -> None:
        """Return when all processes have written their parts, or at ``end``, seconds since the Unix epoch."""
        assert self._parts is not None
        while True:
            over = self._main and self._clock.now() >= end
            done, given_up = self._world.sum([float(not self._parts.busy), float(over)])
            if done == self._world.size or given_up:
                return
            self._parts.join(TOGETHER)

    def _conclude(self, reason: str, end: float | None = None) -> None:
        """Make a checkpoint of the parts, or nothing where one could not be written; raises why, on all processes.

        The first process does so in the background; the others wait for it until ``end`` if that is given.
        """
        folder, parts, now = self.folder, self._parts, self._under_way
        assert folder is not None
        assert parts is not None
        assert now is not None
        self._under_way = None
        error, self._failed = self._failed, None
        try:
            parts.wait(0.0)
        except StorageError as exc:
            error = error or exc
        error = next((one for one in self._world.from_all(error) if one is not None), None)
        if error is not None:
            if self._main:
                parts.discard(now.name)
            raise error
        # on all processes: each finds out by itself when the last moment before a deadline is
        self.costs = Costs(self.costs.stall, time.monotonic() - now.begun)
        failed: StorageError | None = None
        if self._main:
            note = {"reason": reason}
            try:
                self._commit.start(lambda: folder.committed(parts, now.name, now.step, note, now.begun))
            except StorageError as exc:  # the manifest before is still being written
                failed = exc
                parts.discard(now.name)
        if end is None and failed is not None:
            raise failed
        if end is None:
            return
        self._settle(end if failed is None else 0.0)
        found: Any = self._world.from_first((failed or self._committed(reason)) if self._main else None)
        if found is not None:
            raise found
        self.saved_step = max(self.saved_step, now.step)

    def _end_interval(self, end: float) -> None:
        """Complete the checkpoint that was begun at an interval, until ``end``; say so where that fails."""
        self._settle(end)
        self._note_committed("periodic")
        if self._under_way is None:
            return
        try:
            self._together(end)
            self._conclude("periodic", end)
        except StorageError as exc:
            log.warning("the last checkpoint at an interval is not complete: %s", exc)

    def _settle(self, end: float) -> None:
        """Return when the first process writes no manifest any more, or at ``end``; no collective takes long."""
        while not self._world.from_first(self._settled(end) if self._main else None):
            pass

    def _settled(self, end: float) -> bool:
        self._commit.join(max(0.0, min(TOGETHER, end - self._clock.now())))
        return not self._commit.busy or self._clock.now() >= end

    def _committed(self, reason: str) -> StorageError | None:
        """Report the checkpoint whose manifest was written last; return why there is none."""
        try:
            saved = self._commit.wait(0.0)
        except StorageError as exc:
            return exc
        if saved is not None:
            self.costs = Costs(self.costs.stall, saved.seconds)
            self._report_saved(saved, reason)
        return None

    def _note_committed(self, reason: str) -> None:
        """Take note of the manifest that was written in the background, and say so where it was not."""
        if self._main and (error := self._committed(reason)) is not None:
            log.warning("a checkpoint is not complete: %s", error)
            self._link.post("checkpoint", self.saved_step, {"reason": reason, "error": str(error)})
