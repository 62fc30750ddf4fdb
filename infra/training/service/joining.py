"""How a process takes part in a training over the aggregation service: it begins with others, or joins them."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ebbflow.infra.aggregation.agent import AggregationAgent
from ebbflow.infra.aggregation.frames import AggregatorAddress
from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.messages import ReportKind
from ebbflow.infra.training.prepared import Options, PreparedTraining
from ebbflow.infra.training.process.leaving import PEER_LOST, RunStopped
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.service import handover
from ebbflow.infra.training.service.optimizer import ServiceOptimizer, trained
from ebbflow.infra.training.service.world import ServiceWorld
from ebbflow.planners.aggregation.assignment import spread_tensors
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.trainings import RunSettings, SyncChoice

AGGREGATORS = "EBBFLOW_AGGREGATORS"  # JSON: name, address and public key of each, which are public


Post = Callable[[ReportKind, int, dict[str, Any]], None]


class ServiceMembers:
    """One process's taking part; see ``infra.training.stepper.Members``.

    A process that joins others waits here for the end of their step.

    Args:
        world: the training's processes.
        asked: what the script asks of the training.
        settings: of the run.
        post: says something to the launcher: kind, step and values; see ``Link.post``.

    Raises ``TrainingError`` where a process asks for something else than the others, and ``RunStopped`` where those
    that could tell it where the training is are lost.
    """

    def __init__(
        self, world: ServiceWorld, asked: dict[str, Any], settings: RunSettings, post: Post | None = None
    ) -> None:
        self._world, self._asked, self._settings, self._post = world, asked, settings, post
        self._prepared: PreparedTraining | None = None
        self._state: dict[str, Any] | None = None
        if world.later:
            world.enter()
        self.begun = world.view.number
        if world.later:
            found = world.from_first_of(lambda: None)
            if not isinstance(found, dict):
                raise RunStopped("those that knew the state of the training are lost", PEER_LOST)
            self._state = found
            handover.check_asked(asked, found)
        else:
            world.check_same(asked)

    @property
    def joins(self) -> bool:
        """Tell whether others train already."""
        return self._world.later

    @property
    def view(self) -> int:
        """Return the number of the view that this process is in."""
        return self._world.view.number

    @property
    def makes(self) -> dict[str, Any]:
        """Return the argument of ``prepare`` by which it takes part."""
        return {"connect": self.connect}

    def connect(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> ServiceOptimizer:
        """Connect to the aggregators. Raises ``OptionError`` for what they cannot train."""
        parameters = trained(model, optimizer)
        where, table, spares = self._aggregators(parameters)
        _, pair = keys.handed_down(os.environ)
        watched: list[ServiceOptimizer] = []

        def watch(others: bool) -> None:
            for one in watched:
                one.watch(others)

        agent = AggregationAgent(pair, where, table, timeout_s=self._settings.collective_timeout, watch=watch,
                                 spares=spares)  # fmt: skip
        made = ServiceOptimizer(self._world, model, optimizer, parameters, agent)
        made.mirror_every = self._settings.mirror_every
        watched.append(made)
        made.without(self._world.view)
        return made

    def _aggregators(
        self, parameters: Mapping[str, torch.nn.Parameter]
    ) -> tuple[dict[str, AggregatorAddress], Mapping[str, Sequence[str]], Mapping[str, Sequence[str]]]:
        """Return where aggregators listen, and which of them each tensor has, and which have earlier copies: those of
        the others where it joins."""
        if self._state is not None:
            return handover.aggregators_of(self._state)
        where = addresses()
        sizes = {name: 4 * parameter.numel() for name, parameter in parameters.items()}
        table = spread_tensors(sizes, list(where), self._settings.mirrors)
        if self._settings.mirror_every == 1:
            return where, table, {}
        return (
            where,
            {name: own[:1] for name, own in table.items()},
            {name: own[1:] for name, own in table.items()},
        )

    def begin(self, prepared: PreparedTraining) -> None:
        """Take up the training, once everything is prepared. Raises ``AggregationError``."""
        self._prepared = prepared
        service = prepared.service
        assert service is not None
        if self._state is not None:
            handover.take_over(prepared, self._state)
            service.number = self._state["number"]
            self._state = None
        else:
            buffers = self._world.from_first_of(self._hand_over)
            handover.take_buffers(prepared.inner, buffers)
        service.pull()

    def stay(self) -> None:
        """Raise ``RunStopped`` where this process was asked to leave."""
        self._world.stay()

    def welcome(self) -> None:
        """Tell those that have entered with the view where the training is."""
        if self._world.view.entered:
            self._world.from_first_of(self._describe)

    def stepped(self) -> None:
        """Take note that all have ended a step: aggregators know. The first one says how old moments were."""
        prepared = self._prepared
        service = prepared.service if prepared is not None else None
        if prepared is not None and service is not None and service.age:
            if self._world.rank == 0 and self._post is not None:
                self._post("moments", prepared.progress.step, {"rounds": service.age})
            service.age = 0

    def _hand_over(self) -> object:
        prepared = self._prepared
        assert prepared is not None
        assert prepared.service is not None
        prepared.service.hand_over()
        return handover.packed(dict(prepared.inner.named_buffers()))

    def _describe(self) -> object:
        prepared = self._prepared
        assert prepared is not None
        assert prepared.service is not None
        prepared.service.settle()  # the step is on all aggregators: who is told can train on alone
        return handover.state_of(prepared, self._asked, prepared.service.number)


def take_part(
    world: World,
    sync: SyncChoice | None,
    options: Options,
    asked: dict[str, Any],
    settings: RunSettings,
    launched: bool,
    post: Post | None = None,
) -> ServiceMembers | None:
    """Take part in a training over the aggregation service; ``None`` where gradients meet otherwise.

    Args:
        world: the training's processes.
        sync: what the script asks for.
        options: the same of other things.
        asked: all of it, in which processes must agree.
        settings: of the run.
        launched: whether there is a launcher.
        post: says something to it.

    Raises ``OptionError`` where the launcher has prepared something else, and ``TrainingError`` where processes ask
    for different things.
    """
    check_choice(world, sync, launched=launched)
    if not isinstance(world, ServiceWorld):
        world.check_same(asked)
        return None
    check_options(options, settings)
    return ServiceMembers(world, asked, settings, post)


def check_choice(world: World, sync: SyncChoice | None, *, launched: bool) -> None:
    """Raise ``OptionError`` where gradients do not meet where the script says."""
    present: SyncChoice = "service" if isinstance(world, ServiceWorld) else "allreduce"
    if sync not in (None, "allreduce", "service"):
        raise OptionError(f"sync must be allreduce or service; got {sync!r}")
    if sync not in (None, present) and (launched or world.size > 1):
        raise OptionError(f"sync={sync!r} must be the launcher's choice, too: ebbflow train --sync {sync}")


def check_options(options: Options, settings: RunSettings) -> None:
    """Raise ``OptionError`` for what a training over the aggregation service does not do."""
    if options.precision == "fp16":
        raise OptionError("with sync='service' precision must be fp32 or bf16; got 'fp16'")
    if settings.partial_checkpoint_interval > 0:
        raise OptionError(
            "partial checkpoints need sync='allreduce': with 'service' moments are on aggregators"
        )


def addresses(environment: Mapping[str, str] = os.environ) -> dict[str, AggregatorAddress]:
    """Return where the aggregators listen that the launcher has named."""
    found = json.loads(environment.get(AGGREGATORS, "[]"))
    return {one["name"]: AggregatorAddress(one["address"], one["public"]) for one in found}
