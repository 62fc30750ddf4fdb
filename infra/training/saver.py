"""When a run saves: at intervals, when asked to stop, when others are lost, at the last moment before a deadline."""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ebbflow.infra.errors import StorageError
from ebbflow.infra.training.checkpoints.folder import (
    TIMEOUT,
    CheckpointFolder,
    SavedCheckpoint,
    VerifiedCheckpoint,
)
from ebbflow.infra.training.process.generation import Generation
from ebbflow.infra.training.retrying import retried, shown_alive
from ebbflow.infra.training.spill import Spill
from ebbflow.planners.training.saving.checkpointing import StateLosses, save_interval, state_losses

SPILL_SHARE = 0.4  # of the time until a deadline that is left for saving elsewhere
RESCUE = "rescue"  # reason of a save by survivors

log = logging.getLogger(__name__)

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Costs:
    """What saving was measured to take, seconds; of the last one each."""

    stall: float = 0.0
    write: float = 0.0


class Saver:
    """Saves one run's state. Without a directory nothing is saved.

    ``lock`` is held while the state changes, so that another thread finds it complete. ``collective``: all processes
    save together, and not the first for all.
    """

    collective = False

    def __init__(
        self,
        folder: CheckpointFolder | None,
        generation: Generation,
        *,
        spill: Spill | None = None,
    ) -> None:
        self.folder = folder
        self._spill = spill
        self.lock = threading.RLock()
        self.saved_step = -1  # steps that the newest checkpoint holds, as far as is known here
        self.costs = Costs()
        self._world, self._link, self._settings = generation.world, generation.link, generation.settings
        self._clock = generation.clock
        self._last = self._clock.now()

    @property
    def every(self) -> float:
        """Return seconds between checkpoints: as asked for, or Daly's interval for the costs measured."""
        if self._settings.checkpoint_interval is not None:
            return self._settings.checkpoint_interval
        return save_interval(self.costs.stall, self.costs.write, self.losses.rate)

    @property
    def losses(self) -> StateLosses:
        """Return how often state is expected to be lost, with the nodes that are there."""
        nodes, window = self._world.nodes, self._settings.collective_timeout + self.costs.write
        return state_losses(self._settings.interruption_rate / 3600, nodes, min(self.replicas, nodes), window)

    @property
    def replicas(self) -> int:
        """Return how many nodes have each part of the state; after a loss any of them can save it."""
        return 1 if self._settings.sync == "service" else self._world.nodes

    def counts(self) -> Sequence[float]:
        """Return what is summed over processes in the next step for ``maybe``."""
        return ()

    def maybe(self, state: Callable[[], State], step: int, counted: Sequence[float] = ()) -> None:
        """Begin a save in the background when one is due. A save that fails is reported and tried again later.

        ``counted`` are the sums of ``counts``.
        """
        if self.folder is None or self._world.rank != 0:
            return
        try:
            with self.lock:
                self._collect()
                begun = self._clock.now()
                if begun - self._last < self.every:
                    return
                if self.folder.save_async(state(), step, {"reason": "periodic"}):
                    self._last = begun
                    self.costs = Costs(self._clock.now() - begun, self.costs.write)
        except StorageError as exc:
            self._last = self._clock.now()
            log.warning("no checkpoint at step %s: %s", step, exc)
            self._link.post("checkpoint", step, {"reason": "periodic", "error": str(exc)})

    def _collect(self) -> None:
        """Take note of the save that has ended in the background."""
        assert self.folder is not None
        saved = None if self.folder.busy else self.folder.wait(0.0)
        if saved is not None:
            self.costs = Costs(self.costs.stall, saved.seconds)
            self._report_saved(saved, "periodic")

    def now(self, state: Callable[[], State], step: int, reason: str, timeout: float | None = None) -> bool:
        """Save and wait until it is durable; return whether there is a checkpoint of ``step``.

        Raises ``StorageError`` (``StorageFullError`` where there is no space).
        """
        if self.folder is None:
            return False
        if self.saved_step >= step:
            return True
        with self.lock:
            saved = self.folder.save(state(), step, {"reason": reason}, timeout=timeout)
        self._last = self._clock.now()
        self.costs = Costs(self.costs.stall or saved.stalled, saved.seconds)
        self._report_saved(saved, reason)
        return True

    def last(self, state: Callable[[], State], step: int, reason: str, deadline: float | None = None) -> None:
        """Save what would be lost otherwise: the end of a run, or where it is when it leaves.

        A save that fails is retried for ``final_save_timeout`` seconds, or as long as ``deadline`` (seconds since the
        Unix epoch) allows. Then the state is *spilled*: saved elsewhere, from where a process that resumes takes it
        over. Raises ``StorageError`` unless the run's own directory has it; the message says where it is instead.
        """
        if self.folder is None or self.saved_step >= step:
            return
        begun = self._clock.now()
        given = self._settings.final_save_timeout if deadline is None else max(0.0, deadline - begun)
        end = begun + (given if deadline is None else (1 - SPILL_SHARE) * given)

        def save() -> None:
            self.now(state, step, reason, None if deadline is None else max(1.0, end - self._clock.now()))

        with shown_alive(self._link.post, self._clock, step):
            try:
                retried(save, self._clock, end, partial(self._say_unsaved, step, reason))
                return
            except StorageError as exc:
                error = exc
            rest = TIMEOUT if deadline is None else max(1.0, deadline - self._clock.now())
            where = self._spilled(state, step, reason, error, rest)
        tried = f"retried for {self._clock.now() - begun:.0f} s"
        raise type(error)(
            f"step {step} of the run is not saved in its directory ({tried}): {error}; {where}"
        ) from None  # why a file could not be written is no fault of the script's data

    def rescue(self, state: Callable[[], State], step: int, reason: str, timeout: float) -> bool:
        """Save the last complete step, unless another survivor does; return whether the run's directory has it.

        What it cannot take is spilled; see ``last``. For a process that is about to end, within ``timeout`` seconds.
        """
        if self.folder is None or step <= self.saved_step or not self._link.claim(f"rescue-{step}"):
            return False
        begun = self._clock.now()
        try:
            return self.now(state, step, reason, (1 - SPILL_SHARE) * timeout)
        except StorageError as exc:
            error = exc
        left = max(1.0, timeout - (self._clock.now() - begun))
        where = self._spilled(state, step, reason, error, left)
        log.warning("no rescue checkpoint of step %s: %s; %s", step, error, where)
        return False

    def _spilled(
        self, state: Callable[[], State], step: int, reason: str, error: StorageError, timeout: float
    ) -> str:
        """Save elsewhere, say so to the launcher, and return in words where the state is."""
        host = socket.gethostname()
        content = {"reason": reason, "error": str(error), "host": host}
        kept = f"step {self.saved_step} is saved" if self.saved_step >= 0 else "none of its steps is saved"
        if self._spill is None:
            self._link.post("checkpoint", step, content)
            return kept
        try:
            with self.lock:
                saved = self._spill.save(state(), step, reason, timeout)
        except StorageError as exc:
            self._link.post("checkpoint", step, content | {"error": f"{error}; nor in another place: {exc}"})
            return f"nor could it be saved in another place: {exc}; {kept}"
        self._link.post("spilled", step, content | {"uri": saved.uri, "bytes": saved.bytes})
        return (
            f"it is in {saved.uri} on {host} instead, from where the run restores it when it is resumed there "
            f"(ebbflow train --resume ID)"
        )

    def _say_unsaved(self, step: int, reason: str, error: StorageError, pause: float) -> None:
        log.warning("step %s is not saved, retrying in %g s: %s", step, pause, error)
        if self._world.rank == 0:
            self._link.post("saving", step, {"reason": reason, "error": str(error), "again_in": pause})

    def took_over(self, found: VerifiedCheckpoint, taken_from: str) -> None:
        """Take note of the checkpoint that the run resumes from, and of one that was taken over for it."""
        self.saved_step = found.step
        if taken_from:
            content = {"reason": f"taken over from {taken_from}", "uri": found.uri, "bytes": found.bytes}
            self._link.post("checkpoint", found.step, content | {"saved_step": found.step})

    @property
    def _counted(self) -> str:
        """Return in words what the interval between checkpoints follows."""
        if self._settings.checkpoint_interval is not None:
            return "the interval is asked for"
        losses = self.losses
        if not losses.rate:
            return "no node is expected to be lost"
        return f"{losses.counted} (once in {1 / losses.rate / 3600:.3g} h)"

    def _report_saved(self, saved: SavedCheckpoint, reason: str) -> None:
        self.saved_step = max(self.saved_step, saved.step)
        content = {"reason": reason, "uri": saved.uri, "bytes": saved.bytes}
        content |= {"seconds": saved.seconds, "stalled": saved.stalled, "saved_step": saved.step}
        if reason == "periodic":
            content |= {"interval": self.every, "hazard": self._counted}
        self._link.post("checkpoint", saved.step, content)
