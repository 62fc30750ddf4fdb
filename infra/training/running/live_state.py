"""A model and its optimizer seen as blocks: what belongs to some rows, and the small rest that must stay consistent.

What an optimizer keeps in the shape of a parameter (Adam's moments) lives, is lost and comes back with the
parameter's block. Step counts, parameter groups and buffers (batch normalization) are small and saved every time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ebbflow.infra.errors import StorageError
from ebbflow.infra.training.running.blocks import BlockSpec
from ebbflow.infra.training.running.segments import Record
from ebbflow.planners.errors import OptionError

_PARAM = "param"
_KEPT = "state."
_OWNER = "@"  # between a tensor's name and the owner of a shard of it


class LiveState:
    """Reads and writes the blocks of what is being trained.

    Args:
        model: a module (``DistributedDataParallel`` is looked through) or tensors by name.
        optimizer: of these tensors; ``None`` for none.
        owner: number of this process, which the names of sharded tensors (``DTensor``, as of ``fully_shard``) end in.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        owner: int = 0,
    ) -> None:
        self._module: torch.nn.Module | None = None
        if isinstance(model, torch.nn.Module):
            wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
            self._module = model.module if wrapped else model
            self._tensors: dict[str, torch.Tensor] = dict(self._module.named_parameters())
        else:
            self._tensors = dict(model)
        self._held = set(self._tensors)
        self._tied = _tied(self._module)
        self.sharded = any(hasattr(tensor, "to_local") for tensor in self._tensors.values())
        if self.sharded:
            self._tensors = {_shard(name, owner): tensor for name, tensor in self._tensors.items()}
        self._optimizer = optimizer
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters' values, of which this process has all, or its shards; not copied."""
        return {name: _local(tensor) for name, tensor in self._tensors.items()}

    def parts(self, block: BlockSpec) -> list[tuple[str, torch.Tensor]]:
        """Return what belongs to a block: views of its rows and of what the optimizer keeps of them."""
        tensor = self._tensors[block.tensor]
        found = [(_PARAM, block.of(_local(tensor)))]
        return found + [(_KEPT + key, block.of(_local(value))) for key, value in self._moments(tensor)]

    def size(self, blocks: Iterable[BlockSpec]) -> float:
        """Return the bytes of blocks with what the optimizer keeps of them."""
        parts = (value for block in blocks for _, value in self.parts(block))
        return float(sum(value.numel() * value.element_size() for value in parts))

    def put(self, block: BlockSpec, record: Record) -> None:
        """Write a record's values in place. Moments that it lacks start from 0, as at the start of training.

        Raises ``StorageError``.
        """
        tensor = self._tensors[block.tensor]
        given = dict(record.parts)
        target = block.of(_local(tensor))
        if given[_PARAM].shape != target.shape:
            raise StorageError(
                f"block {record.block} has the shape {tuple(given[_PARAM].shape)}, not of {block}"
            )
        target.copy_(given.pop(_PARAM))
        if self._optimizer is None:
            return
        for key, value in self._moments(tensor):
            saved = given.pop(_KEPT + key, None)
            rows = block.of(_local(value))
            rows.zero_() if saved is None else rows.copy_(saved)
        for name, saved in given.items():
            value = torch.zeros_like(tensor, dtype=saved.dtype, requires_grad=False)
            block.of(_local(value)).copy_(saved)
            self._optimizer.state[tensor][name.removeprefix(_KEPT)] = value

    def small(self) -> dict[str, Any]:
        """Return everything but the blocks."""
        found: dict[str, Any] = {"buffers": {}, "optimizer": None, "parameters": self._order()}
        found["tied"] = dict(self._tied)
        if self._module is not None:
            known = self._held | self._tied.keys()
            found["buffers"] = {k: v for k, v in self._module.state_dict().items() if k not in known}
        if self._optimizer is not None:
            whole = self._optimizer.state_dict()
            rest = {
                index: {key: value for key, value in state.items() if not _is_moment(key, value, shape)}
                for (index, state), shape in zip(
                    whole["state"].items(), self._shapes(whole["state"]), strict=True
                )
            }
            found["optimizer"] = {**whole, "state": rest}
        return found

    def put_small(self, small: Mapping[str, Any]) -> None:
        """Write the small state back; the blocks are to follow."""
        if self._module is not None and small["buffers"]:
            self._module.load_state_dict(small["buffers"], strict=False)
        if self._optimizer is not None and small["optimizer"] is not None:
            self._optimizer.load_state_dict(small["optimizer"])

    def complete(self) -> None:
        """Give moments of 0 to parameters that have none while others have: their blocks are those of the start."""
        if self._optimizer is None:
            return
        kinds = {key: value.dtype for t in self._tensors.values() for key, value in self._moments(t)}
        for tensor in self._tensors.values():
            state = self._optimizer.state.get(tensor)
            if state:
                for key, dtype in kinds.items():
                    if key not in state:
                        state[key] = torch.zeros_like(tensor, dtype=dtype, requires_grad=False)

    def _moments(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if self._optimizer is None or tensor not in self._optimizer.state:
            return
        for key, value in self._optimizer.state[tensor].items():
            if _is_moment(key, value, tensor.shape):
                yield key, value

    def _order(self) -> list[str]:
        """Return the parameters' names in the optimizer's numbering."""
        if self._optimizer is None:
            return []
        numbered = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [self._names.get(id(p), "") for p in numbered]

    def _shapes(self, indices: Mapping[int, Any]) -> list[torch.Size]:
        assert self._optimizer is not None
        numbered = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [numbered[index].shape for index in indices]


def whole_state(
    small: Mapping[str, Any],
    records: Mapping[int, Record],
    blocks: Sequence[BlockSpec],
    shapes: Mapping[str, Any],
) -> dict[str, Any]:
    """Return ordinary state dicts, ``{"model": ..., "optimizer": ...}``, made of all blocks and the small state."""
    model = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in shapes.items()}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for number, block in enumerate(blocks):
        shape = shapes[block.tensor][0]
        for name, value in records[number].parts:
            if name == _PARAM:
                target = model[block.tensor]
            else:
                kept = moments.setdefault(block.tensor, {})
                target = kept.setdefault(name.removeprefix(_KEPT), torch.zeros(shape, dtype=value.dtype))
            block.of(target).copy_(value)
    model = _joined(model)
    kept_of: dict[str, dict[str, torch.Tensor]] = {name: {} for name in model}
    dtypes = {
        (_whole(name)[0], key): value.dtype for name, kept in moments.items() for key, value in kept.items()
    }
    for (whole, key), dtype in dtypes.items():
        # a shard whose blocks were never saved after the start has no moments yet
        shards = {
            name: moments.get(name, {}).get(key, torch.zeros(shape, dtype=dtype))
            for name, (shape, _) in shapes.items()
            if _whole(name)[0] == whole
        }
        kept_of[whole][key] = _joined(shards)[whole]
    tied = {name: model[kept] for name, kept in small.get("tied", {}).items()}
    found: dict[str, Any] = {"model": model | tied | dict(small["buffers"])}
    if small["optimizer"] is not None:
        kinds = {key: dtype for (_, key), dtype in dtypes.items()}
        state = {index: dict(rest) for index, rest in small["optimizer"]["state"].items()}
        for index, shard in enumerate(small["parameters"]):
            name = _whole(shard)[0]
            if name and (index in state or kept_of[name]):
                kept = state[index] = {**state.get(index, {}), **kept_of[name]}
                for key, dtype in kinds.items():
                    if key not in kept:
                        kept[key] = torch.zeros(model[name].shape, dtype=dtype)
        found["optimizer"] = {**small["optimizer"], "state": state}
    return found


def _tied(module: torch.nn.Module | None) -> dict[str, str]:
    """Return the further names of parameters that have several, and the first of each."""
    first: dict[int, str] = {}
    names = module.named_parameters(remove_duplicate=False) if module is not None else ()
    return {name: kept for name, p in names if (kept := first.setdefault(id(p), name)) != name}


def _joined(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole tensors: shards, which lie along the first dimension, in the order of their owners."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        whole, owner = _whole(name)
        parts.setdefault(whole, []).append((owner, tensor))
    return {
        name: found[0][1]
        if len(found) == 1
        else torch.cat([t for _, t in sorted(found, key=lambda part: part[0])])
        for name, found in parts.items()
    }


def _shard(name: str, owner: int) -> str:
    return f"{name}{_OWNER}{owner}"


def _whole(name: str) -> tuple[str, int]:
    whole, mark, owner = name.rpartition(_OWNER)
    return (whole, int(owner)) if mark and owner.isdigit() else (name, 0)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that lie in this process, not copied."""
    value = tensor.detach()
    if not hasattr(value, "to_local"):
        return value
    from torch.distributed.tensor import Shard

    if [place for place in value.placements if not place.is_replicate()] != [Shard(0)]:
        raise OptionError(
            f"a running checkpoint takes tensors that are whole or sharded along dimension 0; got {value.placements}"
        )
    return value.to_local()


def _is_moment(key: str, value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shape and key != "step"
