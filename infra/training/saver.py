"""When a run saves: at intervals, when asked to stop, when others are lost, at the last moment before a deadline."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.training.channel import RunSettings
from ebbflow.infra.training.checkpoints import CheckpointFolder, Saved
from ebbflow.infra.training.link import Link
from ebbflow.infra.training.world import World
from ebbflow.planners.training.checkpointing import daly_interval

UNKNOWN_HAZARD_EVERY = 600.0  # seconds between checkpoints where no loss was ever seen
LEAST_EVERY = 5.0  # seconds
STALL_SHARE = 0.01  # of the time, at most, that training may wait for checkpoints
WRITE_SHARE = 0.5  # of the time, at most, that a checkpoint is being written

log = logging.getLogger(__name__)

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Costs:
    """What saving was measured to take, seconds; of the last one each."""

    stall: float = 0.0
    write: float = 0.0


class Saver:
    """Saves one run's state. Without a folder nothing is saved.

    ``lock`` is held while the state changes, so that another thread finds it complete.
    """

    def __init__(
        self,
        folder: CheckpointFolder | None,
        world: World,
        link: Link,
        settings: RunSettings,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.saved_step = -1  # steps that the newest checkpoint holds, as far as is known here
        self.costs = Costs()
        self._world, self._link, self._settings = world, link, settings
        self._clock = clock or SystemClock()
        self._last = self._clock.now()

    @property
    def every(self) -> float:
        """Return seconds between checkpoints: as asked for, or Daly's interval for the costs measured."""
        if self._settings.checkpoint_every is not None:
            return self._settings.checkpoint_every
        rate = self._settings.hazard * self._world.nodes / 3600
        wanted = daly_interval(self.costs.stall, 1 / rate) if rate > 0 else UNKNOWN_HAZARD_EVERY
        least = max(LEAST_EVERY, self.costs.stall / STALL_SHARE, self.costs.write / WRITE_SHARE)
        return max(least, wanted) if wanted < inf else UNKNOWN_HAZARD_EVERY

    def maybe(self, state: Callable[[], State], step: int) -> None:
        """Begin a save in the background when one is due. A save that fails is reported and tried again later."""
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
            self._told(saved, "periodic")

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
        self._told(saved, reason)
        return True

    def rescue(self, state: Callable[[], State], step: int, reason: str, timeout: float) -> bool:
        """Save the last complete step, unless another survivor does; return whether this process did."""
        if self.folder is None or step <= self.saved_step or not self._link.claim(f"rescue-{step}"):
            return False
        try:
            return self.now(state, step, reason, timeout)
        except StorageError as exc:
            log.warning("no rescue checkpoint of step %s: %s", step, exc)
            return False

    def _told(self, saved: Saved, reason: str) -> None:
        self.saved_step = max(self.saved_step, saved.step)
        content = {"reason": reason, "uri": saved.uri, "bytes": saved.bytes}
        content |= {"seconds": saved.seconds, "stalled": saved.stalled, "saved_step": saved.step}
        self._link.post("checkpoint", saved.step, content)
