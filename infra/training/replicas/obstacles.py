"""What keeps the members of a training from changing while it runs, in what a script asks for and in what it does.

A process that joins runs the script from its first line while the others are in the middle of it. What the script
exchanges among its processes by itself would meet something else there, and what it keeps of a process group is void.
"""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.checkpoints.shards import is_sharded
from ebbflow.infra.training.prepared import Options, PreparedTraining
from ebbflow.infra.training.process.world import backends
from ebbflow.infra.training.replicas import handover
from ebbflow.infra.training.replicas.world import ReplicaWorld
from ebbflow.infra.training.sharded.parallel import named

# options of DDP with which it reduces gradients in a way, or a group, of its own
_OWN_WAYS = (
    "process_group", "device_mesh", "mixed_precision", "static_graph", "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
)  # fmt: skip
GROUPS = "the script has process groups of its own"


def obstacle(
    world: ReplicaWorld, model: torch.nn.Module, options: Options, *, planned: bool, untested: bool = False
) -> str:
    """Return why the members of a training cannot change while it runs; empty where they can.

    ``untested``: whether the user asks for it in any case: on GPUs, too, and whatever the script does besides.
    """
    if named(options.parallel) != "ddp" or any(is_sharded(one) for one in model.parameters()):
        return "the model is sharded over the processes that are there"
    if planned:
        return "communication is planned for the processes that are there"
    if "nccl" in backends(world.device) and not untested:
        return "over NCCL it must be asked for: recovery=in-place"
    if own := next((name for name in _OWN_WAYS if options.ddp.get(name)), ""):
        return f"DDP's option {own} belongs to one process group"
    if kind := _bound(model):
        return f"a {kind} in the model belongs to one process group"
    if not untested and world.exchanged:
        return "the script exchanges values among its processes before it prepares"
    if not untested and has_groups():
        return GROUPS
    try:
        handover.check({name: part.state_dict() for name, part in options.state.items()})
    except TrainingError as exc:
        return f"a process that joins cannot be given the script's state: {exc}"
    return ""


def later_obstacle(prepared: PreparedTraining) -> str:
    """Return why members cannot change, of what the script has made before its first step; empty where they can."""
    if has_groups():
        return GROUPS
    prepares = [] if prepared.schedule is None else [prepared.schedule.scheduler]
    kept = _within([*prepared.extra.values(), *prepares])
    if any(
        getattr(one, "optimizer", None) is prepared.optimizer and id(one) not in kept for one in _schedulers()
    ):
        return "the script has a scheduler of learning rates that is neither prepared nor in state"
    return ""


def has_groups() -> bool:
    """Tell whether there are process groups besides the default one."""
    return len(dist.distributed_c10d._world.pg_map) > 1


def _bound(model: torch.nn.Module) -> str:
    """Return the class of a module that exchanges among processes by itself; empty: there is none."""
    for module in model.modules():
        keeps = any(isinstance(value, dist.ProcessGroup | DeviceMesh) for value in vars(module).values())
        if keeps or isinstance(module, torch.nn.SyncBatchNorm):
            return type(module).__name__
    return ""


def _within(roots: list[Any]) -> set[int]:
    """Return the ids of objects, and of schedulers that they consist of, as a sequence of schedulers does."""
    found: set[int] = set()
    while roots:
        one = roots.pop()
        if id(one) not in found:
            found.add(id(one))
            for value in getattr(one, "__dict__", {}).values():
                parts = value if isinstance(value, list | tuple) else [value]
                roots += [part for part in parts if issubclass(type(part), LRScheduler)]
    return found


def _schedulers() -> list[LRScheduler]:
    # by the type itself: asking proxies for their class may do anything
    return [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
