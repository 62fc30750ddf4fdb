"""A checkpoint taken up by a sharded model and its optimizer: each process reads and keeps its own shards only."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from ebbflow.infra.training.checkpoints.shards import Cut, Path, Region, is_sharded, part_of, region_of

_MODEL, _OPTIMIZER, _STATE = "model", "optimizer", "state"


def cut_for(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Cut:
    """Return which parts of a checkpoint's tensors belong to the shards of this process."""
    parameters = dict(model.state_dict())
    numbered = _numbered(optimizer)

    def cut(path: Path, shape: tuple[int, ...]) -> Region | None:
        like = _like(parameters, numbered, path)
        return region_of(like) if is_sharded(like) and tuple(like.shape) == shape else None

    return cut


def load_parts(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take the model's and the optimizer's part of a checkpoint that was read with ``cut_for``."""
    parameters = model.state_dict()
    with torch.no_grad():
        model.load_state_dict(_wrapped(state[_MODEL], parameters, {}, (_MODEL,)))
    optimizer.load_state_dict(_wrapped(state[_OPTIMIZER], {}, _numbered(optimizer), (_OPTIMIZER,)))


def _numbered(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """Return the parameters by the numbers that an optimizer's state dict has for them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return dict(enumerate(parameters))


def _like(parameters: Mapping[str, Any], numbered: Mapping[int, Any], path: Path) -> Any:
    """Return the parameter that a tensor of the checkpoint belongs to."""
    if path[0] == _MODEL and len(path) == 2:
        return parameters.get(str(path[1]))
    if path[:2] == (_OPTIMIZER, _STATE) and len(path) == 4:
        return numbered.get(path[2])  # type: ignore[arg-type]
    return None


def _wrapped(value: Any, parameters: Mapping[str, Any], numbered: Mapping[int, Any], path: Path) -> Any:
    """Return a state whose parts are sharded tensors again."""
    if isinstance(value, torch.Tensor):
        like = _like(parameters, numbered, path)
        if not is_sharded(like):
            return value
        region = region_of(like)
        if tuple(value.shape) != tuple(part.stop - part.start for part in region) or not value.dim():
            return value
        return part_of(like, value.to(like.device))
    if isinstance(value, Mapping):
        made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        made |= {key: _wrapped(item, parameters, numbered, (*path, key)) for key, item in value.items()}
        if hasattr(value, "_metadata"):
            made._metadata = value._metadata  # type: ignore[attr-defined]
        return made
    return value
