"""Samples as bytes and back, bit by bit, without code: what comes from other nodes is data whatever it says.

A sample is a tensor, an array, bytes, text, a number, ``None``, or tuples, lists and dictionaries of such. Encoded it
is a magic number, a checksum of all that follows, a JSON header that says how it is made up, and its parts' bytes.
"""

import json
import math
import struct
import sys
from typing import Any
from zlib import crc32

import numpy as np

from ebbflow.infra.errors import DatasetError, MemoryTierError

_MAGIC = b"EBS1"
_HEAD = struct.Struct("<4sII")  # magic, checksum, length of the header
_KINDS = "biufcmMSU"  # of numpy's types: no objects, no structures
_TORCH = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    "complex128",
)  # fmt: skip
_DEPTH = 32  # of containers in containers

WHAT = (
    "tensors of the CPU without gradients, numpy arrays without objects, bytes, text, numbers, None, and tuples, "
    "lists and dictionaries of these"
)


def encode(sample: Any) -> bytes:
    """Return a sample as bytes. Raises ``DatasetError`` for one that holds anything else than is said above."""
    parts: list[bytes] = []
    tree = _encoded(sample, parts, _DEPTH)
    header = json.dumps({"tree": tree, "sizes": [len(part) for part in parts]}).encode()
    rest = b"".join((header, *parts))
    length = struct.pack("<I", len(header))
    return _MAGIC + struct.pack("<I", crc32(rest, crc32(length))) + length + rest


def decode(data: bytes) -> Any:
    """Return the sample that ``encode`` was given. Raises ``MemoryTierError`` for bytes that it has not made."""
    if len(data) < _HEAD.size:
        raise MemoryTierError(f"an encoded sample must have {_HEAD.size} bytes at least, not {len(data)}")
    magic, check, length = _HEAD.unpack_from(data)
    if magic != _MAGIC or crc32(memoryview(data)[8:]) != check:
        raise MemoryTierError("an encoded sample must begin with its magic number and match its checksum")
    try:
        header = json.loads(data[_HEAD.size : _HEAD.size + length])
        parts, at = [], _HEAD.size + length
        for size in header["sizes"]:
            if type(size) is not int or not 0 <= size <= len(data) - at:
                raise ValueError(f"a part of {size!r} bytes")
            parts.append(bytearray(data[at : at + size]))
            at += size
        return _decoded(header["tree"], parts)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, struct.error) as exc:
        raise MemoryTierError(f"the header of an encoded sample must describe its bytes ({exc})") from exc


def _encoded(value: Any, parts: list[bytes], depth: int) -> list[Any]:
    if depth <= 0:
        raise DatasetError(f"a sample must have at most {_DEPTH} containers in each other")
    kind = type(value)
    if value is None:
        return ["none"]
    if kind is bool:
        return ["bool", value]
    if kind is int:
        return ["int", hex(value)]
    if kind is float:
        return ["float", struct.pack("<d", value).hex()]
    if kind is str:
        return ["text", value]
    if kind is bytes:
        return ["bytes", _part(value, parts)]
    if kind is tuple or kind is list:
        return [kind.__name__, [_encoded(one, parts, depth - 1) for one in value]]
    if kind is dict:
        pairs = [[_encoded(one, parts, depth - 1) for one in pair] for pair in value.items()]
        return ["dict", pairs]
    if (kind is np.ndarray or isinstance(value, np.generic)) and _fits(value.dtype):
        name = "array" if kind is np.ndarray else "scalar"
        return [name, _part(value.tobytes(), parts), value.dtype.str, list(value.shape)]
    torch = sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor:
        return _encoded_tensor(torch, value, parts)
    raise DatasetError(
        f"a sample in nodes' memory must consist of {WHAT}; got {kind.__module__}.{kind.__qualname__}"
    )


def _encoded_tensor(torch: Any, value: Any, parts: list[bytes]) -> list[Any]:
    name = str(value.dtype).removeprefix("torch.")
    plain = value.layout is torch.strided and value.device.type == "cpu" and not value.requires_grad
    if not plain or name not in _TORCH:
        raise DatasetError(
            f"a sample in nodes' memory must consist of {WHAT}; got a tensor of {value.dtype} on {value.device}"
            f"{', with gradients' if value.requires_grad else ''}"
        )
    flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return ["tensor", _part(flat.view(torch.uint8).numpy().tobytes(), parts), name, list(value.shape)]


def _fits(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in _KINDS and dtype.itemsize > 0


def _part(data: bytes, parts: list[bytes]) -> int:
    parts.append(data)
    return len(parts) - 1


def _decoded(tree: Any, parts: list[bytearray]) -> Any:
    match tree:
        case ["none"]:
            return None
        case ["bool", bool(value)]:
            return value
        case ["int", str(text)]:
            return int(text, 16)
        case ["float", str(text)]:
            (number,) = struct.unpack("<d", bytes.fromhex(text))
            return number
        case ["text", str(text)]:
            return text
        case ["bytes", int(part)]:
            return bytes(parts[part])
        case ["tuple", list(items)]:
            return tuple(_decoded(one, parts) for one in items)
        case ["list", list(items)]:
            return [_decoded(one, parts) for one in items]
        case ["dict", list(pairs)]:
            return {_decoded(key, parts): _decoded(value, parts) for key, value in pairs}
        case ["array" | "scalar" as name, int(part), str(kind), list(shape)]:
            found = _array(parts[part], kind, shape)
            return found if name == "array" else found[()]
        case ["tensor", int(part), str(kind), list(shape)]:
            return _tensor(parts[part], kind, shape)
    raise ValueError(f"a value of the kind {str(tree)[:40]}")


def _array(data: bytearray, kind: str, shape: list[Any]) -> Any:
    dtype = np.dtype(kind)
    if not _fits(dtype):
        raise ValueError(f"an array of {kind}")
    _check(len(data), dtype.itemsize, shape)
    return np.ndarray(shape, dtype, data) if data else np.empty(shape, dtype)


def _tensor(data: bytearray, kind: str, shape: list[Any]) -> Any:
    import torch

    if kind not in _TORCH:
        raise ValueError(f"a tensor of {kind}")
    dtype = getattr(torch, kind)
    _check(len(data), dtype.itemsize, shape)
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _check(size: int, item: int, shape: list[Any]) -> None:
    if not all(type(one) is int and one >= 0 for one in shape) or math.prod(shape) * item != size:
        raise ValueError(f"a shape of {str(shape)[:40]} for {size} bytes")
