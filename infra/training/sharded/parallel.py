"""How a model is spread over the processes: whole in each (DDP), sharded over all (FSDP), or over groups (HSDP).

Sharding is torch's ``fully_shard`` (FSDP2): parameters, gradients and optimizer state are cut along their first
dimension, and gathered block by block while the model is called. With HSDP (Zhao et al., "PyTorch FSDP", VLDB 2023,
section 3.2.2) the processes of a node hold one replica of the model together, and every node has one. A mesh whose
last dimension is tensor parallel has shards within the parts of that (``sharded.tensor``).
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ebbflow.infra.training.checkpoints.shards import Division, cuts, division, is_sharded, local, root_mesh
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.service.world import ServiceWorld
from ebbflow.infra.training.sharded.tensor import (
    Plan,
    check_plan,
    is_tensor_parallel,
    parallelize,
    tensor_size,
)
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.trainings import RunSettings

ParallelName = Literal["ddp", "fsdp", "hsdp"]
Parallel: TypeAlias = ParallelName | DeviceMesh
Wrap = Callable[[str, nn.Module], bool] | Collection[type[nn.Module]]
"""Which modules are gathered as one: a function of a module's name and itself, or classes."""

DEFAULTS = RunSettings()
_NAMES = ("ddp", "fsdp", "hsdp")
_REPEATING = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class Sharding:
    """What a model was sharded over."""

    mesh: DeviceMesh
    own: bool  # whether the script has sharded it
    division: Division  # which part this process holds
    parameters: Mapping[str, Any]  # by name, also where several names are of one
    tensor: int = 1  # processes of a tensor-parallel group

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the processes that hold a replica together with this one."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    def state_of(self, model: nn.Module) -> dict[str, Any]:
        """Return what ``model.state_dict()`` does, without the hooks by which parameters are put away."""
        found: dict[str, Any] = {name: parameter.detach() for name, parameter in self.parameters.items()}
        for path, module in model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found[prefix + name] = buffer
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                found[f"{prefix}_extra_state"] = module.get_extra_state()
        return found


def named(parallel: Parallel | None) -> str:
    """Return a text in which processes can agree on what was asked for."""
    if isinstance(parallel, DeviceMesh):
        return f"mesh {tuple(parallel.shape)}" + (
            " with tensor parallelism" if is_tensor_parallel(parallel) else ""
        )
    return str(parallel or "ddp")


class Asked(Protocol):
    """What a script asks of ``ElasticRun.prepare``, as far as it matters here."""

    @property
    def parallel(self) -> Parallel | None: ...

    @property
    def wrap(self) -> Wrap | None: ...

    @property
    def ddp(self) -> Mapping[str, Any]: ...

    @property
    def tensor_parallel(self) -> Plan | None: ...

    @property
    def precision(self) -> str: ...


def check_parallel(
    asked: Asked,
    model: nn.Module,
    world: World,
    *,
    planned: bool,
    settings: RunSettings = DEFAULTS,
) -> None:
    """Raise ``OptionError`` for what cannot be had, before anything is changed.

    ``planned``: whether communication is to be planned; ``settings``: of the run.
    """
    parallel, wrap = asked.parallel, asked.wrap
    if parallel is not None and not isinstance(parallel, DeviceMesh) and parallel not in _NAMES:
        raise OptionError(f"parallel must be ddp, fsdp, hsdp or a DeviceMesh; got {parallel!r}")
    check_plan(parallel, asked.tensor_parallel, model, asked.precision, settings)
    sharded = any(is_sharded(p) for p in model.parameters())
    if sharded and is_tensor_parallel(parallel) and not _is_fsdp(model):
        sharded = False  # it is spread by tensor parallelism, and will be sharded
    if sharded and (parallel is not None or wrap is not None):
        raise OptionError(
            f"the model is sharded already; leave parallel and wrap out, or give a model that is whole; got "
            f"parallel={named(parallel)!r}"
        )
    if wrap is not None and parallel in (None, "ddp"):
        raise OptionError("wrap says which modules are sharded as one; it needs parallel='fsdp' or 'hsdp'")
    if sharded or parallel not in (None, "ddp"):
        if planned:
            raise OptionError(
                "communication='planned' orders DDP's buckets of gradients; a sharded model has collectives of its "
                "own: leave communication out, or use parallel='ddp'"
            )
        if asked.ddp:
            raise OptionError(
                f"ddp are options of DistributedDataParallel; got {named(parallel)!r} beside them"
            )
        if isinstance(world, ServiceWorld):
            raise OptionError(
                "sync='service' keeps parameters whole in each process; it needs parallel='ddp'"
            )
    if isinstance(parallel, DeviceMesh):
        _check_mesh(parallel, world)


def shard(
    world: World,
    model: nn.Module,
    optimizer: Any,
    parallel: Parallel | None,
    wrap: Wrap | None = None,
    environment: Mapping[str, str] = os.environ,
    plan: Plan | None = None,
) -> Sharding | None:
    """Shard the model in place, as ``parallel`` asks; ``None`` where each process keeps it whole. Collective.

    Args:
        world: processes of the generation.
        model: the first process' values count. One that is sharded already stays as it is, with the shards of the
            first replica.
        optimizer: over its parameters, and then over their shards; or what makes one.
        parallel: see ``ElasticRun.prepare``.
        wrap: which modules are gathered as one; each repeated block unless given.
        environment: of torchrun.
        plan: how tensor parallelism spreads it, where the mesh has that and the script has not done so.

    Raises ``OptionError`` for a model that cannot be sharded.
    """
    mesh = _mesh(world, parallel, environment)
    if _is_fsdp(model) or (any(is_sharded(p) for p in model.parameters()) and not is_tensor_parallel(mesh)):
        return _own(world, model)
    if mesh is None:
        return None
    units = list(_units(model, wrap))
    _check_units(model, units)
    model.to(world.device)
    before = dict(model.named_parameters())
    _take_first([*model.parameters(), *model.buffers()], mesh)
    data = mesh
    if is_tensor_parallel(mesh):
        if plan is not None:
            parallelize(model, mesh, plan)
        data = mesh[mesh.mesh_dim_names[:-1]]
    _fully_shard(model, units, data)
    after = dict(model.named_parameters())
    if isinstance(optimizer, torch.optim.Optimizer):
        _follow(optimizer, {before[name]: after[name] for name in before})
    found = division(list(after.values()))
    return Sharding(mesh, False, found, _all_named(model), tensor_size(mesh, model))


def _is_fsdp(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def _take_first(tensors: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Take the first process's values, of tensors that are cut those of the first with the same part."""
    with torch.no_grad():
        for tensor in tensors:
            if not is_sharded(tensor):
                dist.broadcast(tensor.detach(), 0)
                continue
            for dimension in set(range(mesh.ndim)) - cuts(tensor, mesh):
                dist.broadcast(local(tensor.detach()), group=mesh.get_group(dimension), group_src=0)


def _all_named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks that a model is a sequence of: those that stand beside others of their class.

    Only modules with modules of their own count, in a ``ModuleList``, ``ModuleDict`` or ``Sequential``; what is
    within a block is part of it.
    """
    for child in model.children():
        peers = [c for c in model.children() if type(c) is type(child)]
        block = isinstance(model, _REPEATING) and len(peers) > 1 and any(True for _ in child.children())
        if block and any(p.requires_grad for p in child.parameters()):
            yield child
        else:
            yield from repeated_blocks(child)


def _units(model: nn.Module, wrap: Wrap | None) -> Iterator[nn.Module]:
    """Yield the modules to shard besides the model itself, the inner ones before those that hold them."""
    if wrap is None:
        yield from repeated_blocks(model)
        return
    chosen: Callable[[str, nn.Module], bool]
    if callable(wrap):
        chosen = wrap
    else:
        classes = tuple(wrap)
        if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in classes):
            raise OptionError(
                f"wrap must be classes of modules or a function of a name and a module; got {wrap!r}"
            )

        def chosen(_: str, module: nn.Module) -> bool:
            return isinstance(module, classes)

    found = [module for name, module in model.named_modules() if module is not model and chosen(name, module)]
    if not found:
        raise OptionError(f"wrap chooses none of the {sum(1 for _ in model.modules())} modules of the model")
    yield from reversed(found)


def _check_units(model: nn.Module, units: list[nn.Module]) -> None:
    """Raise ``OptionError`` where parameters have no values, or belong to several units."""
    unit_of = {id(m): number for number, unit in reversed([*enumerate(units)]) for m in unit.modules()}
    first: dict[nn.Parameter, tuple[int, str]] = {}
    for path, module in model.named_modules():
        number = unit_of.get(id(module), len(units))
        for name, parameter in module.named_parameters(path, recurse=False):
            _check_values(name, parameter)
            before, also = first.setdefault(parameter, (number, name))
            if before != number:
                raise OptionError(
                    f"{name} and {also} are one parameter in modules that are sharded apart; let wrap choose one "
                    "module that holds both, or none of them"
                )
    if not any(p.requires_grad for p in model.parameters()):
        raise OptionError("the model has no parameter to train, and nothing to shard")


def _check_values(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise OptionError(f"{name} has no values (device meta); a model is made with them")


def _fully_shard(model: nn.Module, units: list[nn.Module], mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    try:
        for unit in (*units, model):
            fully_shard(unit, mesh=mesh)
    except (ValueError, TypeError, NotImplementedError, RuntimeError, AssertionError) as exc:
        raise OptionError(f"the model cannot be sharded: {exc}") from exc


def _follow(optimizer: torch.optim.Optimizer, shards: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let an optimizer that was made over whole parameters have their shards."""
    if optimizer.state:
        raise OptionError("the optimizer has a state of whole parameters; give a function that makes it")
    for group in optimizer.param_groups:
        group["params"] = [shards.get(parameter, parameter) for parameter in group["params"]]


def _mesh(world: World, parallel: Parallel | None, environment: Mapping[str, str]) -> DeviceMesh | None:
    """Return the mesh to shard over; ``None``: there is nobody to share with."""
    if isinstance(parallel, DeviceMesh):
        return parallel if world.size > 1 else None
    if parallel in (None, "ddp") or world.size == 1:
        return None
    ranks, kind = torch.arange(world.size), world.device.type
    if parallel == "hsdp":
        here = int(environment.get("LOCAL_WORLD_SIZE", world.size))
        shards = gcd(*world.from_all(here))
        if shards == 1:
            return None  # every process is a replica: that is DDP
        if shards < world.size:
            return DeviceMesh(kind, ranks.view(-1, shards), mesh_dim_names=("replicas", "shards"))
    return DeviceMesh(kind, ranks, mesh_dim_names=("shards",))


def _check_mesh(mesh: DeviceMesh, world: World) -> None:
    shards = mesh.ndim - is_tensor_parallel(mesh)
    if not 1 <= shards <= 2:
        raise OptionError(
            f"a mesh has one dimension (shards) or two (replicas, shards), and after these one named 'tp' for tensor "
            f"parallelism if there is some; got {mesh.ndim}, named {mesh.mesh_dim_names}"
        )
    if mesh.size() != world.size or sorted(mesh.mesh.flatten().tolist()) != list(range(world.size)):
        raise OptionError(
            f"a mesh must have each process of the run once; got {mesh.size()} for {world.size} processes"
        )
    if mesh.size(mesh.ndim - 1) == 1 and world.size > 1 and not is_tensor_parallel(mesh):
        raise OptionError("a mesh with one shard a replica is data parallel: use parallel='ddp'")


def _sharded_of(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in model.named_parameters() if is_sharded(p)]


def _own(world: World, model: nn.Module) -> Sharding:
    """Return how the script has sharded its model. Raises ``OptionError`` for what cannot be trained."""
    if not _is_fsdp(model):
        raise OptionError(
            "a model with sharded parameters must be sharded as a whole: call fully_shard(model) last"
        )
    whole = [name for name, p in model.named_parameters() if p.requires_grad and not is_sharded(p)]
    if whole:
        raise OptionError(f"all parameters that are trained must be sharded; {whole[0]} is not")
    named = _sharded_of(model)
    found = division([p for _, p in named])
    mesh = root_mesh([p for _, p in named])
    for name, p in named:
        beside = {mesh.ndim - 1} if is_tensor_parallel(mesh) else set()
        if len(cuts(p, mesh) - beside) != 1:
            raise OptionError(
                f"{name} is sharded as {p.placements}: shards are along one dimension of the mesh, and tensor "
                "parallelism along one after it that is named 'tp'"
            )
    _check_mesh(mesh, world)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in tensors.items():
        _check_values(name, tensor)
    _take_first(tensors.values(), mesh)
    return Sharding(mesh, True, found, _all_named(model), tensor_size(mesh, model))
