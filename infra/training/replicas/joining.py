"""How a process takes part in a training whose members change: it begins with others, or takes over their state."""

from collections.abc import Mapping
from typing import Any

import torch

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.prepared import CPU_BUCKET, Options, PreparedTraining
from ebbflow.infra.training.process.leaving import PEER_LOST, RunStopped
from ebbflow.infra.training.process.link import Link
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.replicas import handover, obstacles
from ebbflow.infra.training.replicas.parallel import Replicas
from ebbflow.infra.training.replicas.world import ReplicaWorld
from ebbflow.infra.training.service import joining
from ebbflow.infra.training.service.handover import check_asked
from ebbflow.infra.training.service.joining import ServiceMembers
from ebbflow.planners.model.trainings import RunSettings, SyncChoice


def take_part(
    world: World,
    sync: SyncChoice | None,
    model: torch.nn.Module,
    options: Options,
    asked: dict[str, Any],
    settings: RunSettings,
    link: Link,
    planning: object = None,
) -> "ServiceMembers | ReplicaMembers | None":
    """Take part in a training whose members may change; ``None`` where they do not.

    ``link`` leads to the launcher, if there is one; ``planning`` is how communication is to be planned. See
    ``infra.training.service.joining.take_part``.
    """
    if not isinstance(world, ReplicaWorld):
        return joining.take_part(world, sync, options, asked, settings, link.launched, link.post)
    joining.check_choice(world, sync, launched=link.launched)
    forced = settings.recovery == "in-place"
    if not world.later:  # one that comes later compares with the training's state once it has that
        world.check_same(asked)
        mine = obstacles.obstacle(world, model, options, planned=planning is not None, untested=forced)
        if found := next(filter(None, world.from_all(mine)), ""):  # which may be of one process alone
            world.fix(found)
            return None
    return ReplicaMembers(world, asked, link, forced=forced)


class ReplicaMembers:
    """One process's taking part; see ``infra.training.stepper.Members``.

    Args:
        world: the training's processes.
        asked: what the script asks of the training.
        link: to the launcher.
        forced: whether members change whatever the script does besides.
    """

    def __init__(
        self, world: ReplicaWorld, asked: Mapping[str, Any], link: Link, *, forced: bool = False
    ) -> None:
        self._world, self._asked, self._link, self._forced = world, dict(asked), link, forced
        self._prepared: PreparedTraining | None = None
        self._formed = world.epoch  # group that the model reduces gradients in
        self._first = ""  # why the first process must stay
        self._looked = False  # at what the script has made before its first step
        self._told: str | None = None  # the last word on why members cannot change

    @property
    def joins(self) -> bool:
        """Tell whether others train already."""
        return self._world.later

    @property
    def begun(self) -> int:
        """Return the number of the group that the training was taken up in."""
        return self._formed

    @property
    def view(self) -> int:
        """Return the number of the group that this process is in."""
        return self._world.epoch

    @property
    def makes(self) -> dict[str, Any]:
        """Return the argument of ``prepare`` by which it takes part."""
        return {"replicas": self.wrap}

    def wrap(self, model: torch.nn.Module, options: Mapping[str, Any]) -> Replicas:
        """Return what the script calls, with DDP's options."""
        own: dict[str, Any] = {"gradient_as_bucket_view": True}
        if self._world.device.type == "cuda":
            own["device_ids"] = [self._world.device]
        else:
            own["bucket_cap_mb"] = CPU_BUCKET
        made = Replicas(model, {**own, **options}, self._world.broke)
        if not self.joins:
            made.form(first=True)
            self._formed = self._world.epoch
        self._world.before_end(self._release)
        return made

    def begin(self, prepared: PreparedTraining) -> None:
        """Take up the training, once everything is prepared. Raises ``TrainingError`` and ``RunStopped``."""
        self._prepared = prepared
        if not self.joins:
            mine = ""
            try:
                handover.check(handover.state_of(prepared, self._asked))
            except TrainingError as exc:
                mine = f"a process that joins cannot be given the training's state: {exc}"
            if found := next(filter(None, self._world.from_all(mine)), ""):
                self._world.fix(found)
        else:
            self._world.enter()
            self._world.settle()
            self.welcome()
            while not self._world.knows:
                self._world.settle()
                self.welcome()
            self._told = self._world.fixed  # those that were there have said so
        if not self._forced:
            self._world.watch()

    def stay(self) -> None:
        """Take up who is there. Raises ``RunStopped`` where this process was asked to leave."""
        if self._model is not None and self._formed == self._world.epoch and self._world.whole:
            self._model.prepare_step()
        if not self._forced and self._prepared is not None:
            self._find(self._prepared)
        self._world.stay()
        if self._told != self._world.fixed and self._looked:
            self._tell()
        self._looked = True

    def welcome(self) -> None:
        """Hand the training's state to those that have entered the group, and reduce gradients in it."""
        world, prepared = self._world, self._prepared
        assert prepared is not None
        if world.whole and world.joining:
            self._hand_over(prepared)
        if world.whole and (model := self._model) is not None:
            prepared.optimizer.zero_grad()
            model.form()
            model.share_buffers()
            prepared.meter.follow(model.called)
            self._formed = world.epoch
        world.expect(0)

    def stepped(self) -> None:
        """Take note that a step has ended."""
        if self._model is not None and self._formed == self._world.epoch and self._world.whole:
            self._model.prepare_step()  # else a pass of the script's own between steps would do it
            self._model.share_buffers()

    def _find(self, prepared: PreparedTraining) -> None:
        """Look for what the script does that a change of members would break."""
        if not self._looked and not self.joins:
            self._first = "the script has asked which process is the first" if self._world.asked else ""
            self._world.found(obstacles.later_obstacle(prepared))
        elif obstacles.has_groups():
            self._world.found(obstacles.GROUPS)

    def _tell(self) -> None:
        """Let the launcher know whether members may change; first once a step has ended, which all agree on."""
        self._told = self._world.fixed
        if self._world.rank == 0 and self._prepared is not None:
            said = {"fixed": self._told, "first": self._first}
            self._link.post("members", self._prepared.progress.step, said)

    def _release(self) -> None:
        if self._prepared is not None and (model := self._model) is not None:
            model.release()
            self._prepared.meter.follow(model.module)

    @property
    def _model(self) -> Replicas | None:
        found = self._prepared.model if self._prepared is not None else None
        return found if isinstance(found, Replicas) else None

    def _hand_over(self, prepared: PreparedTraining) -> None:
        world = self._world
        try:
            state = handover.exchange(
                prepared, self._asked, world.joining, knows=world.knows, expect=world.expect
            )
        except RuntimeError as exc:
            world.broke(exc)
            return
        if world.knows:
            return
        if state is None:
            raise RunStopped("those that knew the state of the training are lost", PEER_LOST)
        check_asked(self._asked, state)
        handover.take(prepared, state)
        world.took_over()
