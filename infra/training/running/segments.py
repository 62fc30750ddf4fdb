"""Records of blocks in append-only segment files; each states what it is and has checksums of its own.

A record is ``EBRC``, the header's length and CRC-32, the header (JSON) and the payload: the block's parts one after
the other, as bytes.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch

from ebbflow.infra.storage.manifest import UnusableError

STATE = -1  # the "block" that holds the small state
_HEAD = struct.Struct("<4sII")
_MAGIC = b"EBRC"


@dataclass(frozen=True, slots=True)
class Record:
    """One block at one iteration: the parameter's rows as ``param``, what an optimizer keeps of them beside it."""

    block: int
    iteration: int
    parts: tuple[tuple[str, torch.Tensor], ...]


def encode(record: Record) -> list[Any]:
    """Return the record as buffers to be written one after the other."""
    payload = [memoryview(_flat(tensor).numpy()) for _, tensor in record.parts]
    checksum = 0
    for piece in payload:
        checksum = crc32(piece, checksum)
    header = json.dumps(
        {
            "block": record.block,
            "iteration": record.iteration,
            "crc32": checksum,
            "parts": [
                [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), len(piece)]
                for (name, tensor), piece in zip(record.parts, payload, strict=True)
            ],
        }
    ).encode()
    return [_HEAD.pack(_MAGIC, len(header), crc32(header)), header, *payload]


def decode(data: bytes | memoryview) -> Record:
    """Read a record. Raises ``UnusableError`` when a single bit of it is not what was written."""
    try:
        magic, length, checksum = _HEAD.unpack_from(data)
        header = bytes(data[_HEAD.size : _HEAD.size + length])
        if magic != _MAGIC or crc32(header) != checksum:
            raise UnusableError("has a record whose header is damaged")
        said = json.loads(header)
    except (struct.error, ValueError) as exc:
        raise UnusableError(f"has a torn record ({exc})") from exc
    payload = memoryview(data)[_HEAD.size + length :]
    if len(payload) != sum(part[3] for part in said["parts"]) or crc32(payload) != said["crc32"]:
        raise UnusableError(f"has a damaged record of block {said['block']}")
    parts, offset = [], 0
    for name, dtype, shape, size in said["parts"]:
        raw = (
            torch.frombuffer(bytearray(payload[offset : offset + size]), dtype=torch.uint8)
            if size
            else _EMPTY
        )
        parts.append((name, raw.view(getattr(torch, dtype)).reshape(shape)))
        offset += size
    return Record(said["block"], said["iteration"], tuple(parts))


def length(buffers: Sequence[Any]) -> int:
    """Return the bytes of all buffers."""
    return sum(len(buffer) for buffer in buffers)


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
