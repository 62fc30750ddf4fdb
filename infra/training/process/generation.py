"""What a process of a run shares with all of its parts: its generation, and the run that this belongs to."""

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.protocols.trainings import SETTINGS, launcher_settings
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.process import channel as names
from ebbflow.infra.training.process.channel import Channel
from ebbflow.infra.training.process.link import LISTEN_EVERY, SERVICE_LISTEN_EVERY, Link
from ebbflow.infra.training.process.world import World
from ebbflow.planners.model.trainings import RunSettings


def _join(channel: Channel | None, settings: RunSettings) -> World:
    """Join the processes that a launcher trains together, or those that torchrun has started."""
    if settings.sync == "service" and channel is not None:
        from ebbflow.infra.training.service.world import ServiceWorld

        return ServiceWorld.join_members(channel)
    if settings.in_place and channel is not None:
        from ebbflow.infra.training.replicas.world import ReplicaWorld

        return ReplicaWorld.join_replicas(
            channel, settings.collective_timeout, forced=settings.recovery == "in-place"
        )
    return World.join(settings.collective_timeout)


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of a run, as one of its processes sees it."""

    world: World
    link: Link
    settings: RunSettings
    place: StorageLocation | None = None  # of the run; nothing is saved without
    lock: RunLock | None = None  # that this process holds
    clock: Clock = field(default_factory=SystemClock)

    @classmethod
    def join(
        cls,
        folder: str | os.PathLike[str] | None,
        run_id: str | None,
        settings: RunSettings | None,
        restart: bool,
    ) -> Self:
        """Join the others of this generation; a launcher's directory and settings go first. See ``ElasticRun.start``.

        Raises ``TrainingError`` when they or the launcher cannot be reached, and ``RunLockedError`` where another
        process runs in the same directory.
        """
        environment = os.environ
        settings = (
            launcher_settings()
            if SETTINGS in environment
            else replace(settings or RunSettings(), restart=restart)
        )
        place = None
        if (given := environment.get(names.RUN_FOLDER)) is not None:
            place = StorageLocation(given)
        elif folder is not None:
            place = StorageLocation(folder).under(run_id or Path(sys.argv[0]).stem or "run")
        try:
            channel = Channel.connect()
        except RuntimeError as exc:
            raise TrainingError(
                f"the launcher at {environment[names.CHANNEL]} cannot be reached: {exc}"
            ) from exc
        lock = None
        if channel is None and place is not None and environment.get("RANK", "0") == "0":
            lock = RunLock(place, Path(place.root).name).acquire()  # a launcher has locked its runs itself
        try:
            world = _join(channel, settings)
            every = SERVICE_LISTEN_EVERY if world.elastic else LISTEN_EVERY
            speaker = int(environment.get("RANK", "0"))
            link = Link(channel, speaker, settings.termination_grace, listen_every=every, heard=world.heard)
            return cls(world, link, settings, place, lock)
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    @property
    def trial(self) -> bool:
        """Return whether this is a preflight, which saves nothing."""
        return self.settings.preflight_steps > 0

    @property
    def is_main(self) -> bool:
        """Return whether this process speaks and writes for all."""
        return self.world.rank == 0

    def close(self, timeout: float) -> None:
        """Report what is left to say, within ``timeout`` seconds, stop listening and free the run."""
        self.link.close(timeout)
        if self.lock is not None:
            self.lock.release()
