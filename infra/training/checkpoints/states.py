"""The state of a training as nested dicts and lists: copied off the device, signed, and read back safely.

Only what ``torch.load(weights_only=True)`` reads back is taken: tensors, numbers, text, bytes, None, NumPy arrays of
numbers, and dicts, lists and tuples of these. Anything else is refused when it is saved, not when it is needed.
"""

import codecs
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import numpy as np
import torch

from ebbflow.infra.errors import OtherModelError, StorageError, UnusableCheckpointError
from ebbflow.planners.errors import OptionError

Signature = dict[str, tuple[tuple[int, ...], str]]  # parameter name -> (shape, dtype)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SHOWN = 8  # differing parameters in a message


class Staging:
    """Copies a state into host memory, into the same buffers each time; pinned ones for what lies on a GPU.

    Tensors that share memory, such as tied weights, share a copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], "torch.cuda.Event | None"]:
        """Return the copy, and an event after which it is complete where the device still works on it.

        The copy is valid until the next one. Raises ``OptionError`` for what could not be read back.
        """
        walk = _Walk(self._buffers)
        copied = {key: walk.take(value, key) for key, value in state.items()}
        if not walk.cuda:
            return copied, None
        event = torch.cuda.Event()
        event.record()
        return copied, event


class _Walk:
    def __init__(self, buffers: dict[str, torch.Tensor]) -> None:
        self._buffers = buffers
        self._seen: dict[tuple[Any, ...], torch.Tensor] = {}
        self.cuda = False

    def take(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach(), path)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biufc":
                raise OptionError(
                    f"{path} is a NumPy array of {value.dtype}; only arrays of numbers are saved"
                )
            return value.copy()
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, list):
            return [self.take(item, f"{path}.{i}") for i, item in enumerate(value)]
        if type(value) is tuple:
            return tuple(self.take(item, f"{path}.{i}") for i, item in enumerate(value))
        if type(value) in _PLAIN:
            return value
        for kind in (int, float, str):  # their subclasses, such as enumerations
            if isinstance(value, kind):
                return kind(value)
        raise OptionError(
            f"{path} is a {type(value).__name__}, which cannot be read back safely; save tensors, numbers, text, "
            f"and dicts, lists and tuples of them"
        )

    def _mapping(self, value: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, item in value.items():
            if type(key) not in (str, int, float, bool, tuple):
                raise OptionError(f"{path} has the key {key!r}; keys are text, numbers or tuples of them")
            made[key] = self.take(item, f"{path}.{key}")
        metadata = getattr(value, "_metadata", None)  # versions of modules, which load_state_dict looks at
        if metadata is not None:
            made._metadata = self._mapping(metadata, f"{path}._metadata")  # type: ignore[attr-defined]
        return made

    def _tensor(self, value: torch.Tensor, path: str) -> torch.Tensor:
        if hasattr(value, "to_local"):
            raise OptionError(f"{path} is sharded over processes; save it with save_sharded, on all of them")
        if value.layout != torch.strided or value.is_quantized:
            return value.cpu().clone()
        known = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and known in self._seen:
            return self._seen[known]
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._buffers[path] = buffer
        self.cuda |= value.is_cuda
        buffer.copy_(value, non_blocking=value.is_cuda)
        self._seen[known] = buffer
        return buffer


def signature(tensors: Any) -> Signature:
    """Return names, shapes and dtypes of a model or of a nested state; names as ``model.state_dict()`` has them.

    The ``module.`` that ``DistributedDataParallel`` puts before every name is ignored.
    """
    if isinstance(tensors, torch.nn.Module):
        tensors = tensors.state_dict()
    found: Signature = {}
    _sign(tensors, "", found)
    if found and all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): kind for name, kind in found.items()}
    return found


def _sign(value: Any, path: str, found: Signature) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = (tuple(value.shape), str(value.dtype).removeprefix("torch."))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _sign(item, f"{path}.{key}" if path else str(key), found)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _sign(item, f"{path}.{i}" if path else str(i), found)


def differences(saved: Signature, model: Any) -> list[str]:
    """Return in what a model, its state dict or signature differs from a saved one; none if nothing does.

    Args:
        saved: of the checkpoint.
        model: a module, a state dict, or a ``Signature``.
    """
    ours = model if _is_signature(model) else signature(model)
    found = []
    for name in sorted(saved.keys() | ours.keys()):
        if name not in ours:
            found.append(f"{name} {_kind(saved[name])} is only in the checkpoint")
        elif name not in saved:
            found.append(f"{name} {_kind(ours[name])} is only in the model")
        elif tuple(saved[name][0]) != tuple(ours[name][0]) or saved[name][1] != ours[name][1]:
            found.append(
                f"{name} is {_kind(saved[name])} in the checkpoint, {_kind(ours[name])} in the model"
            )
    return found


def check_model(saved: Signature, model: Any, where: str) -> None:
    """Raise ``OtherModelError`` with the parameters that differ, unless the model is the saved one's."""
    found = differences(saved, model)
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise OtherModelError(
            f"{where} is a checkpoint of another model: {'; '.join(found[:_SHOWN])}{more}. "
            f"Use the model it was saved from, or another run id"
        )


def read_state(path: str | Path | BinaryIO, map_location: Any = "cpu", *, mapped: bool = False) -> Any:
    """Return what ``torch.save`` wrote, running no code from it.

    Raises ``UnusableCheckpointError`` for anything else, and ``StorageError``.

    ``mapped``: tensors are views of the file, of which only what is used is read.
    """
    try:
        with torch.serialization.safe_globals(_harmless()):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped or None)
    except OSError as exc:
        raise StorageError(f"cannot read {path}: {exc}") from exc
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as exc:
        refused = re.search(r"WeightsUnpickler error: (.*)", str(exc))
        reason = refused.group(1) if refused else (str(exc).splitlines() or [type(exc).__name__])[0]
        raise UnusableCheckpointError(f"cannot read {path}: {reason}") from exc


def _is_signature(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(kind, tuple) for kind in value.values())


def _kind(kind: tuple[tuple[int, ...], str]) -> str:
    return f"{kind[1]}[{', '.join(map(str, kind[0]))}]"


def _harmless() -> list[Any]:
    """Return what NumPy arrays of numbers and bytes are made with, beside what torch allows anyway."""
    kinds = [type(np.dtype(code)) for code in "?bhilqBHILQefdgFDG"]
    rebuild = np.zeros(1).__reduce__()[0]
    return [
        rebuild,
        np.ndarray,
        np.dtype,
        codecs.encode,
        bytes,
        (bytes, "bytes"),
        (bytes, "__builtin__.bytes"),
        *kinds,
    ]
