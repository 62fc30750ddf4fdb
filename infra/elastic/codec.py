"""Messages and states as bytes: pickles whose large buffers stay outside, so that arrays are copied once.

Only for processes of one job on one machine's private sockets and for the job's own folder: unpickling runs code.
"""

import pickle
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from ebbflow.infra.errors import ElasticError

Frames = list[bytes | memoryview]

_MAGIC = b"EBBFLOW1"
_HEAD = struct.Struct("<8sQI")  # magic, number of frames, CRC-32 of all that follows
_LENGTH = struct.Struct("<Q")


def encode(content: Any) -> Frames:
    """Return the pickle and its out-of-band buffers (contiguous arrays); they share memory with ``content``."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    return [head, *(buffer.raw() for buffer in buffers)]


def decode(frames: Sequence[Any]) -> Any:
    """Return what was encoded, with memory of its own, so that arrays can be written to."""
    head, *buffers = frames
    return pickle.loads(head, buffers=[bytearray(buffer) for buffer in buffers])  # noqa: S301


def size(frames: Sequence[Any]) -> int:
    """Return the bytes in ``frames``."""
    return sum(memoryview(frame).nbytes for frame in frames)


def pack(content: Any) -> bytes:
    """Return ``content`` as one checksummed block, for a file."""
    frames = encode(content)
    body = b"".join(part for frame in frames for part in (_LENGTH.pack(memoryview(frame).nbytes), frame))
    return _HEAD.pack(_MAGIC, len(frames), zlib.crc32(body)) + body


def check(data: bytes, name: str) -> int:
    """Return the number of frames in a block. Raises ``ElasticError``, which says ``name``, if it is not whole."""
    if len(data) < _HEAD.size:
        raise ElasticError(f"{name} is no snapshot file: {len(data)} bytes")
    magic, count, checksum = _HEAD.unpack_from(data)
    if magic != _MAGIC or zlib.crc32(memoryview(data)[_HEAD.size :]) != checksum:
        raise ElasticError(f"{name} is damaged: its checksum does not match")
    return int(count)


def unpack(data: bytes, name: str) -> Any:
    """Return what was packed. Raises ``ElasticError``, which says ``name``, if ``data`` is not whole."""
    count, body = check(data, name), memoryview(data)[_HEAD.size :]
    frames, place = [], 0
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(body, place)
        place += _LENGTH.size
        frames.append(body[place : place + length])
        place += length
    return decode(frames)
