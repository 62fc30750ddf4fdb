"""Values that the processes of one world exchange, as JSON in byte tensors.

``torch.distributed`` has collectives for objects, which send pickles: a peer that reaches a connection of gloo, which
does not authenticate it, would make them run any code. Here nothing but plain values, the classes that are
registered in this process and errors of the Ebbflow family come out of what others send.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ebbflow.infra.errors import TrainingError
from ebbflow.planners.errors import EbbflowError

Class = TypeVar("Class", bound=type)

_classes: dict[str, type] = {}


def exchangeable(kind: Class) -> Class:
    """Let a data class be exchanged; for a decorator."""
    _classes[kind.__name__] = kind
    return kind


def from_first(value: Any, group: Any = None) -> Any:
    """Return the value of the group's first process, on all of them; collective. Raises ``TrainingError``."""
    device = _device(group)
    first = dist.get_rank(group) == 0
    data = _encoded(value) if first else b""
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, group=group, group_src=0)
    content = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    if first:
        content.copy_(_tensor(data))
    dist.broadcast(content, group=group, group_src=0)
    return value if first else _decoded(content)


def from_all(value: Any, group: Any = None) -> list[Any]:
    """Return the value of each process of the group, by rank; collective. Raises ``TrainingError``."""
    device, members = _device(group), dist.get_world_size(group)
    data = _encoded(value)
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(members)]
    dist.all_gather(sizes, size, group=group)
    largest = int(max(one.item() for one in sizes))
    padded = torch.zeros(largest, dtype=torch.uint8, device=device)
    padded[: len(data)] = _tensor(data).to(device)
    found = [torch.empty_like(padded) for _ in range(members)]
    dist.all_gather(found, padded, group=group)
    gathered = [_decoded(one[: int(size.item())]) for one, size in zip(found, sizes, strict=True)]
    gathered[dist.get_rank(group)] = value
    return gathered


def to_text(value: Any) -> str:
    """Return a value that can be exchanged, as text. Raises ``TrainingError``."""
    return _encoded(value).decode()


def from_text(text: str) -> Any:
    """Return what ``to_text`` wrote. Raises ``TrainingError``."""
    return _parsed(text)


def _device(group: Any) -> torch.device:
    """Return where a group's backend takes tensors from: CPUs where it can."""
    kinds = {str(kind) for kind in (group or dist.group.WORLD)._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device(kinds.pop(), torch.accelerator.current_device_index())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _encoded(value: Any) -> bytes:
    return json.dumps(_plain(value)).encode()


def _decoded(content: torch.Tensor) -> Any:
    return _parsed(content.cpu().numpy().tobytes())


def _parsed(text: str | bytes) -> Any:
    try:
        return _value(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise TrainingError(f"another process sent an invalid value: {type(exc).__name__}") from exc


def _plain(value: Any) -> Any:
    if (
        value is None
        or isinstance(value, bool | int | str)
        or (type(value) is float and math.isfinite(value))
    ):
        return value
    if isinstance(value, float):
        return {"number": repr(float(value))}
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(name), _plain(one)] for name, one in value.items()]}
    if isinstance(value, Exception):
        return {"error": type(value).__name__, "message": str(value)}
    name = type(value).__name__
    if _classes.get(name) is type(value):
        names = [field.name for field in dataclasses.fields(_classes[name])]
        fields = {field: _plain(getattr(value, field)) for field in names}
        return {"class": name, "fields": fields}
    raise TrainingError(f"processes cannot exchange a {name}; plain values, lists, tuples and dicts travel")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if "number" in plain:
        return float(plain["number"])
    if "tuple" in plain:
        return tuple(_value(one) for one in plain["tuple"])
    if "dict" in plain:
        return {_value(name): _value(one) for name, one in plain["dict"]}
    if "error" in plain:
        return _error(str(plain["error"]), str(plain["message"]))
    kind = _classes[plain["class"]]
    return kind(**{str(name): _value(one) for name, one in plain["fields"].items()})


def _error(name: str, message: str) -> Exception:
    """Return an error of the Ebbflow family by its name; of any other kind only the words are taken."""
    for kind in _family(EbbflowError):
        if kind.__name__ == name:
            try:
                make: Callable[[str], EbbflowError] = kind
                return make(message)
            except TypeError:  # it takes more than its words
                break
    return TrainingError(f"{name}: {message}")


def _family(kind: type[EbbflowError]) -> Iterator[type[EbbflowError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _family(below)
