"""Whether a generation's communication is planned, and why not."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from ebbflow.infra.communication.control import PlanningSettings
from ebbflow.infra.communication.planned import PlannedCommunication
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.process.world import World
from ebbflow.planners.communication.measured import MeasuredLinks
from ebbflow.planners.communication.placement import profile_of
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.errors import EbbflowError, OptionError

log = logging.getLogger(__name__)

Communication = str | PlanningSettings
"""``ddp``, ``planned``, or how it is planned."""


def settings_of(asked: Communication) -> PlanningSettings | None:
    """Return how communication is planned; ``None`` where it is not. Raises ``OptionError`` for an unknown choice."""
    if isinstance(asked, PlanningSettings):
        return asked
    if asked not in ("ddp", "planned"):
        raise OptionError(f"communication must be ddp, planned or PlanningSettings(...); got {asked!r}")
    return PlanningSettings() if asked == "planned" else None


def plan_communication(
    world: World,
    model: torch.nn.Module,
    settings: PlanningSettings | None,
    timeout: float,
    report: Callable[[dict[str, Any]], None],
    place: StorageLocation | None = None,
) -> PlannedCommunication | None:
    """Begin to plan; ``None`` where DDP's own communication stays, whose reason is reported. Collective.

    Args:
        world: processes of the generation.
        model: as the script made it.
        settings: of planning; ``None``: nobody asks for it.
        timeout: s after which a collective that hangs is an error.
        report: takes what became of it, in any thread.
        place: the run's directory, which keeps what a plan was searched for.
    """
    if settings is None:
        return None
    reason = _obstacle(world, model)
    if not reason:
        made = None
        try:
            made = PlannedCommunication.start(
                settings, lambda said: report(_keep(place, said, world.nodes)), timeout=timeout
            )
        except RuntimeError as error:
            reason = f"channels could not be made: {error}"
        if world.sum([float(made is None)])[0] == 0:
            return made
        if made is not None:
            made.close()
        reason = reason or "channels could not be made in another process"
    log.info("communication is not planned: %s", reason)
    if world.rank == 0:
        report({"state": "ddp", "reason": reason})
    return None


def _keep(place: StorageLocation | None, said: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Write the training and the links that a plan is searched for into the run's directory.

    Args:
        place: the run's directory; nothing is written without.
        said: what is reported.
        nodes: that the processes run on.

    Returns:
        What is left to report: of a training that was profiled, what the scheduler should know of it. A file that
        cannot be written is a warning: the run continues.
    """
    left = {name: value for name, value in said.items() if name not in ("training", "links")}
    if said.get("state") == "profiled":
        try:
            recorded = RecordedTraining.from_json(str(said["training"]))
            links = MeasuredLinks.from_json(str(said["links"]))
            left["profile"] = profile_of(recorded, nodes, links).to_dict()
        except OptionError as error:
            log.warning("the scheduler is not told of the training's communication: %s", error)
    for name in ("training", "links"):
        if place is not None and said.get(name):
            try:
                place.under("communication").write(f"{name}.json", str(said[name]).encode())
            except (EbbflowError, OSError) as error:
                log.warning("%s is not kept: %s", name, error)
    return left


def _obstacle(world: World, model: torch.nn.Module) -> str:
    """Return why communication cannot be planned; the same on all processes."""
    if world.size == 1:
        return "a single process communicates with no other"
    if any(hasattr(one, "device_mesh") for one in model.parameters()):
        return "the model's parameters are sharded: their collectives are not DDP's gradient buckets"
    if world.device.type != "cpu":
        return f"gradients are on {world.device.type} devices; plans carry CPU tensors over gloo"
    return ""
