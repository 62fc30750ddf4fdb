"""State whose tensors are sharded over processes: cut into pieces to save, and the part of it that a process wants.

A leaf of the state that is a ``DTensor`` is saved as pieces, each by the processes that hold it. All else, such as
buffers, counters and parameter groups, is equal on all processes and saved once.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ebbflow.planners.errors import OptionError

Path = tuple[str | int, ...]
"""Keys from the state's root to a leaf."""
Region = tuple[slice, ...]
"""A part of a tensor: rows, columns, ... of it."""
Cut = Callable[[Path, tuple[int, ...]], Region | None]
"""Path and whole shape of a tensor -> the part of it that is wanted, ``None`` for all of it."""


@dataclass(frozen=True, slots=True)
class Division:
    """Which part of the state a process holds: number ``part`` of ``parts``, which ``replicas`` processes have."""

    part: int = 0
    parts: int = 1
    replica: int = 0
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one tensor: ``size`` elements along each dimension from ``start`` on."""

    path: Path
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]
    size: tuple[int, ...]


def is_sharded(value: Any) -> bool:
    """Return whether a tensor's values lie in several processes (``DTensor``)."""
    return hasattr(value, "to_local") and hasattr(value, "device_mesh")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that lie in this process, not copied."""
    found: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return found


def cut_along(placement: Any) -> int | None:
    """Return the dimension that a mesh's dimension cuts a tensor along; ``None``: it does not."""
    # torch's ``_StridedShard`` is no ``Shard``: one that lies within another cut of the same dimension
    return int(placement.dim) if placement.is_shard() or hasattr(placement, "split_factor") else None


def region_of(tensor: Any, only: Collection[int] | None = None) -> Region:
    """Return which part of a ``DTensor`` this process holds; ``only``: if these dimensions of its mesh alone cut it.

    Tensor parallelism cuts first, and shards lie within its parts, along the same dimension, too (FSDP2).
    """
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    found = [slice(0, length) for length in tensor.shape]
    outer_first = sorted(
        range(mesh.ndim), key=lambda number: hasattr(tensor.placements[number], "split_factor")
    )
    for number in outer_first:
        along = cut_along(tensor.placements[number])
        if along is None or (only is not None and number not in only):
            continue
        start, stop = found[along].start, found[along].stop
        length = -(-(stop - start) // mesh.size(number))
        start = min(start + place[number] * length, stop)
        found[along] = slice(start, min(start + length, stop))
    return tuple(found)


def part_of(tensor: Any, values: torch.Tensor) -> torch.Tensor:
    """Return the part ``values`` of a tensor as a ``DTensor`` that is sharded as ``tensor`` is."""
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor.from_local(
        values,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return made


def division(tensors: list[Any]) -> Division:
    """Return which part of these ``DTensor`` this process holds.

    Those that tensor parallelism leaves alone lie on a part of the mesh of the others. Raises ``OptionError`` for
    several meshes else.
    """
    if not tensors:
        return Division()
    mesh = root_mesh(tensors)
    part, parts, replica, replicas = 0, 1, 0, 1
    place, cutting = mesh.get_coordinate(), _cutting(tensors, mesh)
    for dimension in range(mesh.ndim):
        size = mesh.size(dimension)
        if dimension in cutting:
            part, parts = part * size + place[dimension], parts * size
        else:
            replica, replicas = replica * size + place[dimension], replicas * size
    return Division(part, parts, replica, replicas)


def root_mesh(tensors: Sequence[Any]) -> Any:
    """Return the device mesh that all of these tensors lie on. Raises ``OptionError`` where there is none."""
    root = max((tensor.device_mesh for tensor in tensors), key=lambda mesh: int(mesh.ndim))
    for mesh in (tensor.device_mesh for tensor in tensors):
        names, of = mesh.mesh_dim_names, root.mesh_dim_names
        if mesh != root and not (names and of and set(names) < set(of)):
            raise OptionError(f"tensors must be sharded over one device mesh; got {root} and {mesh}")
    return root


def cuts(tensor: Any, mesh: Any) -> set[int]:
    """Return the dimensions of ``mesh`` that cut a tensor; it may lie on a part of the mesh."""
    own = tensor.device_mesh
    names = mesh.mesh_dim_names if own != mesh else None
    return {
        number if names is None else names.index(own.mesh_dim_names[number])
        for number, one in enumerate(tensor.placements)
        if cut_along(one) is not None
    }


def _cutting(tensors: Sequence[Any], mesh: Any) -> set[int]:
    """Return the dimensions of ``mesh`` that cut at least one of the tensors; the others count replicas."""
    return set().union(*(cuts(tensor, mesh) for tensor in tensors))


def split(
    state: Mapping[str, Any],
) -> tuple[dict[str, Any], list[tuple[Piece, torch.Tensor]], Division]:
    """Return what all processes have alike, the pieces that lie in this one, and which part of the state they are.

    Raises ``OptionError`` for sharded tensors in lists, or of several meshes.
    """
    found: list[tuple[Path, Any]] = []
    rest = {key: _without(value, (key,), found) for key, value in state.items()}
    tensors = [tensor for _, tensor in found]
    mesh: Any = root_mesh(tensors) if tensors else None
    cutting = _cutting(tensors, mesh) if tensors else set()
    pieces = []
    for path, tensor in found:
        if any(mesh.get_coordinate()[number] for number in cutting - cuts(tensor, mesh)):
            continue  # another process of this replica has the same part
        region = region_of(tensor)
        start, size = tuple(r.start for r in region), tuple(r.stop - r.start for r in region)
        dtype = str(tensor.dtype).removeprefix("torch.")
        pieces.append((Piece(path, dtype, tuple(tensor.shape), start, size), local(tensor).detach()))
    return rest, pieces, division(tensors)


def _without(value: Any, path: Path, found: list[tuple[Path, Any]]) -> Any:
    if isinstance(value, Mapping):
        made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, item in value.items():
            if not is_sharded(item):
                made[key] = _without(item, (*path, key), found)
            elif type(key) in (str, int):
                found.append(((*path, key), item))
            else:
                raise OptionError(
                    f"{_named(path)} has the key {key!r} for a sharded tensor; keys are text or int"
                )
        if hasattr(value, "_metadata"):
            made._metadata = value._metadata  # type: ignore[attr-defined]
        return made
    if isinstance(value, list | tuple) and any(is_sharded(item) for item in value):
        raise OptionError(f"{_named(path)} is a list of sharded tensors; they are saved in dicts only")
    return value


def put(state: dict[Any, Any], path: Path, value: torch.Tensor) -> None:
    """Put a leaf where ``split`` has taken it from."""
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def parts_of_state(value: Any, path: Path, cut: Cut, map_location: Any) -> Any:
    """Return a state with the parts of its tensors that ``cut`` wants, copied."""
    if isinstance(value, torch.Tensor):
        region = cut(path, tuple(value.shape))
        part = value if region is None else value[region]
        # a copy: the rest of the storage must not stay in memory
        return part.clone().to(map_location)
    if isinstance(value, Mapping):
        made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, item in value.items():
            made[key] = parts_of_state(item, (*path, key), cut, map_location)
        if hasattr(value, "_metadata"):
            made._metadata = value._metadata  # type: ignore[attr-defined]
        return made
    if isinstance(value, list | tuple):
        items = [parts_of_state(item, (*path, i), cut, map_location) for i, item in enumerate(value)]
        return type(value)(items)
    return value


def overlap(first: Region, second: Region) -> Region | None:
    """Return what two parts of a tensor have in common; ``None``: nothing."""
    found = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(first, second, strict=True)
    )
    return None if any(part.stop <= part.start for part in found) else found


def within(region: Region, outer: Region) -> Region:
    """Return ``region`` counted from the start of ``outer``."""
    return tuple(
        slice(inner.start - out.start, inner.stop - out.start)
        for inner, out in zip(region, outer, strict=True)
    )


def elements(region: Region) -> int:
    """Return how many elements a part of a tensor has."""
    count = 1
    for part in region:
        count *= part.stop - part.start
    return count


def _named(path: Path) -> str:
    return ".".join(map(str, path))
