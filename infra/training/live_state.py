"""A model and its optimizer seen as blocks: what belongs to some rows, and the small rest that must stay consistent.

What an optimizer keeps in the shape of a parameter (Adam's moments) lives, is lost and comes back with the
parameter's block. Step counts, parameter groups and buffers (batch normalisation) are small and saved every time.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ebbflow.infra.errors import StorageError
from ebbflow.infra.training.blocks import BlockSpec
from ebbflow.infra.training.segments import Record

_PARAM = "param"
_KEPT = "state."


class LiveState:
    """Reads and writes the blocks of what is being trained.

    Args:
        model: a module (``DistributedDataParallel`` is looked through) or tensors by name.
        optimizer: of these tensors; ``None`` for none.
    """

    def __init__(
        self, model: torch.nn.Module | Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._module: torch.nn.Module | None = None
        if isinstance(model, torch.nn.Module):
            inner = getattr(model, "module", None)
            self._module = inner if isinstance(inner, torch.nn.Module) else model
            self._tensors: dict[str, torch.Tensor] = dict(self._module.named_parameters())
        else:
            self._tensors = dict(model)
        self._optimizer = optimizer
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters' values, not copied."""
        return {name: tensor.detach() for name, tensor in self._tensors.items()}

    def parts(self, block: BlockSpec) -> list[tuple[str, torch.Tensor]]:
        """Return what belongs to a block: views of its rows and of what the optimizer keeps of them."""
        tensor = self._tensors[block.tensor]
        found = [(_PARAM, block.of(tensor.detach()))]
        return found + [(_KEPT + key, block.of(value)) for key, value in self._moments(tensor)]

    def put(self, block: BlockSpec, record: Record) -> None:
        """Write a record's values in place. Moments that it lacks start from 0, as at the start of training."""
        tensor = self._tensors[block.tensor]
        given = dict(record.parts)
        target = block.of(tensor.detach())
        if given[_PARAM].shape != target.shape:
            raise StorageError(
                f"block {record.block} has the shape {tuple(given[_PARAM].shape)}, not of {block}"
            )
        target.copy_(given.pop(_PARAM))
        if self._optimizer is None:
            return
        for key, value in self._moments(tensor):
            saved = given.pop(_KEPT + key, None)
            rows = block.of(value)
            rows.zero_() if saved is None else rows.copy_(saved)
        for name, saved in given.items():
            value = torch.zeros_like(tensor, dtype=saved.dtype, requires_grad=False)
            block.of(value).copy_(saved)
            self._optimizer.state[tensor][name.removeprefix(_KEPT)] = value

    def small(self) -> dict[str, Any]:
        """Return everything but the blocks."""
        found: dict[str, Any] = {"buffers": {}, "optimizer": None, "parameters": self._order()}
        if self._module is not None:
            held = set(self._tensors)
            found["buffers"] = {k: v for k, v in self._module.state_dict().items() if k not in held}
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
    model: dict[str, torch.Tensor] = {}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for number, block in enumerate(blocks):
        shape, dtype = shapes[block.tensor]
        for name, value in records[number].parts:
            if name == _PARAM:
                target = model.setdefault(block.tensor, torch.empty(shape, dtype=getattr(torch, dtype)))
            else:
                kept = moments.setdefault(block.tensor, {})
                target = kept.setdefault(name.removeprefix(_KEPT), torch.zeros(shape, dtype=value.dtype))
            block.of(target).copy_(value)
    found: dict[str, Any] = {"model": model | dict(small["buffers"])}
    if small["optimizer"] is not None:
        kinds = {key: value.dtype for kept in moments.values() for key, value in kept.items()}
        state = {index: dict(rest) for index, rest in small["optimizer"]["state"].items()}
        for index, name in enumerate(small["parameters"]):
            if name and (index in state or name in moments):
                shape = shapes[name][0]
                zeros = {key: torch.zeros(shape, dtype=dtype) for key, dtype in kinds.items()}
                state[index] = {**state.get(index, {}), **zeros, **moments.get(name, {})}
        found["optimizer"] = {**small["optimizer"], "state": state}
    return found


def _is_moment(key: str, value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shape and key != "step"
