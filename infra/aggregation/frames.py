"""What travels between agents and aggregators: a header of fixed form and one payload for each tensor.

A message is any number of such pairs, so that small tensors travel together. Lengths are bounded before anything is
read, a checksum covers header and payload, and what is not exactly of this form is an error. Nothing is unpickled.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any
from zlib import crc32

from ebbflow.infra.aggregation.rules import item_size
from ebbflow.infra.errors import AggregationError

MAX_PAYLOAD = 1 << 30  # bytes of one tensor; larger ones are cut by who sends them
MAX_NAME = 512  # bytes of a tensor's name
MAX_OPTIONS = 4096  # bytes
MAX_TENSORS = 4096  # of a message
_MAGIC = b"EAG2"
_HEADER = struct.Struct("<4sBBHHIQQIHHI")
# magic, kind, dtype, name, options, request, round, payload, view, place, places, CRC32
_CHECKED = _HEADER.size - 4  # bytes before the checksum
_DTYPES = ("float32", "float16", "bfloat16")

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What a frame is."""

    INIT = 1  # an agent: a tensor's first parameters, moments and update rule
    READY = 2  # the answer
    PUSH = 3  # an agent: a gradient
    SUMMED = 4  # the answer, once all workers of the view have pushed: the squared norm of the sum
    PULL = 5  # an agent: the parameters of a round, please
    PARAMETERS = 6  # the answer, once there are any
    ERROR = 7  # an aggregator: why it does not
    PULL_SUM = 8  # an agent: the sum of gradients itself, please
    SUM = 9  # the answer
    COMMIT = 10  # an agent: all workers have agreed on the step; update, or drop the sum
    COMMITTED = 11  # the answer, once it is done
    PULL_STATE = 12  # an agent: moments and step count of a round, please
    STATE = 13  # the answer
    MOVE = 14  # between aggregators: a step of moving a tensor; options: what, of which training, which migration


@dataclass(frozen=True, slots=True)
class TensorFrame:
    """One tensor's part of a message.

    Args:
        kind: what it is.
        tensor: name of the tensor within its training; of an error, possibly empty.
        round: that a gradient or parameters belong to.
        view: of the workers that a gradient is summed over; of an earlier view it does not count.
        place: of a gradient's worker among them.
        places: number of them.
        payload: elements, little-endian.
        dtype: of the elements.
        request: number that its sender gave it, which refusals repeat.
        options: plain values, such as an update rule or the text of an error.
    """

    kind: Kind
    tensor: str
    round: int = 0
    payload: Buffer = b""
    dtype: str = "float32"
    request: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    view: int = 0
    place: int = 0
    places: int = 1


@dataclass(frozen=True, slots=True)
class AggregatorAddress:
    """Where an aggregator listens.

    Args:
        address: host:port.
        public: its key, which no other process can prove.
    """

    address: str
    public: str


def encode(frames: Iterable[TensorFrame]) -> list[Buffer]:
    """Return the parts of a message, a header and a payload for each frame.

    Raises ``AggregationError`` for what exceeds a limit.
    """
    parts: list[Buffer] = []
    for one in frames:
        name = one.tensor.encode()
        options = json.dumps(dict(one.options)).encode() if one.options else b""
        payload = memoryview(one.payload).cast("B")
        _bounded("name", len(name), MAX_NAME)
        _bounded("options", len(options), MAX_OPTIONS)
        _bounded("payload", len(payload), MAX_PAYLOAD)
        item_size(one.dtype)
        head = _HEADER.pack(
            _MAGIC, one.kind, _DTYPES.index(one.dtype), len(name), len(options), one.request, one.round,
            len(payload), one.view, one.place, one.places, 0,
        )[:_CHECKED]  # fmt: skip
        check = crc32(payload, crc32(options, crc32(name, crc32(head))))
        parts += [b"".join((head, check.to_bytes(4, "little"), name, options)), payload]
    _bounded("tensors", len(parts) // 2, MAX_TENSORS)
    return parts


def decode(parts: Sequence[Buffer]) -> list[TensorFrame]:
    """Return the frames of a message.

    Args:
        parts: a header and a payload for each tensor; payloads are not copied.

    Raises ``AggregationError`` for anything that ``encode`` does not make.
    """
    if len(parts) % 2 or not parts:
        raise AggregationError(
            f"a message must have a header and a payload for each tensor, not {len(parts)} parts"
        )
    _bounded("tensors", len(parts) // 2, MAX_TENSORS)
    return [_frame(bytes(head), payload) for head, payload in zip(parts[::2], parts[1::2], strict=True)]


def _frame(head: bytes, payload: Buffer) -> TensorFrame:
    if not _HEADER.size <= len(head) <= _HEADER.size + MAX_NAME + MAX_OPTIONS:
        raise AggregationError(f"a header must not have {len(head)} bytes")
    magic, kind, dtype, name, options, request, number, length, view, place, places, check = (
        _HEADER.unpack_from(head)
    )
    if magic != _MAGIC or dtype >= len(_DTYPES) or kind not in set(Kind):
        raise AggregationError("a header must begin with a known format, kind and dtype")
    if name > MAX_NAME or options > MAX_OPTIONS or _HEADER.size + name + options != len(head):
        raise AggregationError("the lengths in a header must be those of its parts")
    if place >= places:
        raise AggregationError(f"a place must be below the number of places, not {place} of {places}")
    if length != len(payload) or length > MAX_PAYLOAD:
        raise AggregationError(f"a payload must have the {length} bytes of its header, not {len(payload)}")
    if length % item_size(_DTYPES[dtype]):
        raise AggregationError(f"a payload of {_DTYPES[dtype]} must not have {length} bytes")
    rest = memoryview(head)[_HEADER.size :]
    if crc32(payload, crc32(rest, crc32(head[:_CHECKED]))) != check:
        raise AggregationError("the checksum of a frame must match its bytes")
    try:
        tensor = bytes(rest[:name]).decode()
        values = json.loads(bytes(rest[name:])) if options else {}
    except (ValueError, RecursionError) as exc:
        raise AggregationError("name and options of a frame must be UTF-8 and JSON") from exc
    if not isinstance(values, dict):
        raise AggregationError("options of a frame must be a JSON object")
    return TensorFrame(
        Kind(kind), tensor, number, payload, _DTYPES[dtype], request, values, view, place, places
    )


def _bounded(what: str, size: int, most: int) -> None:
    if size > most:
        raise AggregationError(f"{what} of a message must be at most {most}, not {size}")
