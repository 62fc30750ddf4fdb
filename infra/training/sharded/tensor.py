"""Tensor parallelism beside shards: whose examples a process gets, and the norm of gradients in several meshes.

The layers of a model are spread over a group of processes by torch's ``parallelize_module``, whose plan says how
(Megatron-LM, Shoeybi et al. 2019); each such group is one process to data parallelism, which shards what each of its
processes holds over the groups (FSDP2). Processes of a group get the same examples and draw the same random numbers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from ebbflow.infra.training.checkpoints.shards import is_sharded, local
from ebbflow.infra.training.gradients.shard_samples import TENSOR, copies
from ebbflow.infra.training.gradients.squares import SquareSums
from ebbflow.infra.training.process.world import World
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.trainings import RunSettings

Plan = Mapping[str, Any]
"""A module's name, or a pattern of names, -> torch's ``ParallelStyle`` (``parallelize_module``)."""


@dataclass(frozen=True, slots=True)
class TensorWorld(World):
    """A process's place where ``tensor`` processes are one to data parallelism, number ``group`` of them."""

    tensor: int = 1
    group: int = 0

    @classmethod
    def of(cls, world: World, mesh: DeviceMesh) -> Self:
        """Return the place of a process of ``world`` in a mesh whose last dimension is tensor parallel."""
        group = 0
        for dimension, place in enumerate(mesh.get_coordinate()[:-1]):
            group = group * mesh.size(dimension) + place
        tensor = mesh.size(mesh.ndim - 1)
        return cls(world.rank, world.size, world.local_rank, world.nodes, world.device, tensor, group)

    @property
    def data_rank(self) -> int:
        """Return the number of its group."""
        return self.group

    @property
    def data_size(self) -> int:
        """Return how many groups there are."""
        return self.size // self.tensor

    @property
    def data_nodes(self) -> int:
        """Return the nodes, but no more than groups."""
        return min(self.nodes, self.data_size)


def fed(world: World, mesh: DeviceMesh) -> World:
    """Return a process's place among those that get examples of their own; ``mesh`` is what the model lies on."""
    return TensorWorld.of(world, mesh) if is_tensor_parallel(mesh) else world


def is_tensor_parallel(mesh: Any) -> bool:
    """Return whether a mesh's last dimension is named as one of tensor parallelism."""
    return isinstance(mesh, DeviceMesh) and bool(mesh.mesh_dim_names) and mesh.mesh_dim_names[-1] == TENSOR


def tensor_size(mesh: Any, model: torch.nn.Module) -> int:
    """Return the processes of a tensor-parallel group, in the ``mesh`` asked for, or that the model lies on."""
    if is_tensor_parallel(mesh):
        return int(mesh.size(mesh.ndim - 1))
    sizes = [p.device_mesh.size(p.device_mesh.ndim - 1) for p in _parallel(model)]
    return max(sizes, default=1)


def _parallel(model: torch.nn.Module) -> Iterable[Any]:
    """Return the parameters that tensor parallelism has taken."""
    return (p for p in model.parameters() if is_sharded(p) and is_tensor_parallel(p.device_mesh))


def check_plan(
    mesh: Any, plan: Plan | None, model: torch.nn.Module, precision: str, settings: RunSettings
) -> None:
    """Raise ``OptionError`` for tensor parallelism that cannot be had.

    Args:
        mesh: what was asked for.
        plan: how the model is to be spread; ``None``: the script has done it, or nothing is.
        model: of the script.
        precision: of its forward pass.
        settings: of the run.
    """
    spread = any(True for _ in _parallel(model))
    if plan is not None and not is_tensor_parallel(mesh):
        raise OptionError(
            f"tensor_parallel needs a DeviceMesh whose last dimension is named {TENSOR!r}; got parallel={mesh!r}"
        )
    if plan is not None and spread:
        raise OptionError(
            "the model is tensor parallel already; leave tensor_parallel out, or give one that is whole"
        )
    if is_tensor_parallel(mesh) and plan is None and not spread:
        raise OptionError(
            f"the mesh has a dimension {TENSOR!r}, but no parameter of the model is tensor parallel: give "
            "tensor_parallel a plan, or call parallelize_module(model, mesh['tp'], plan) before"
        )
    if not spread and plan is None:
        return
    if precision == "fp16":
        raise OptionError(
            "precision='fp16' is not supported with tensor parallelism: torch's GradScaler takes gradients of one "
            "device mesh only; use 'bf16'"
        )
    if settings.partial_checkpoint_interval:
        raise OptionError(
            "partial checkpoints are of shards in one dimension; leave them out with tensor parallelism"
        )


def parallelize(model: torch.nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Spread the model over the mesh's last dimension, as the plan says. Raises ``OptionError``."""
    from torch.distributed.tensor.parallel import parallelize_module

    try:
        parallelize_module(model, mesh[TENSOR], dict(plan))
    except (ValueError, TypeError, NotImplementedError, RuntimeError, AssertionError) as exc:
        raise OptionError(f"the model cannot be made tensor parallel: {exc}") from exc
    if not any(True for _ in _parallel(model)):
        raise OptionError(
            f"tensor_parallel names none of the model's modules that have parameters: {sorted(plan)}"
        )


def clip(
    parameters: Iterable[torch.nn.Parameter],
    max_norm: float,
    tensor: int,
    replicas: int,
    total: Callable[[float], float],
) -> float:
    """Scale gradients so that their norm is at most ``max_norm``; return what it was. Collective.

    torch's ``clip_grad_norm_`` takes gradients of one device mesh only; those of layers that are not in the plan lie
    on another one.

    Args:
        parameters: of the model.
        max_norm: largest norm.
        tensor: processes of a tensor-parallel group, which have what is not cut alike.
        replicas: of the model.
        total: returns a sum over all processes.
    """
    present = [p for p in parameters if p.grad is not None]
    sums, squares = SquareSums(), 0.0
    for count in {copies(p, tensor) for p in present}:
        alike = [local(p.grad) for p in present if p.grad is not None and copies(p, tensor) == count]
        squares += float(sums.of(alike)) / count
    norm = sqrt(total(squares) / replicas)
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0 and present:
        with torch.no_grad():
            torch._foreach_mul_([local(p.grad) for p in present if p.grad is not None], factor)
    return norm
