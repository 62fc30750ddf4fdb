"""What travels between clients and the daemons that lend memory: length-prefixed binary frames over TCP.

A frame is a header of fixed size and a payload. The payload's length is bounded before anything of it is read, a
checksum covers both, and what is not exactly of this form is an error. A connection begins with a handshake in which
each side proves, by an HMAC over a random number of the other's, that it holds the cluster's token; the token itself
never travels. Contents are not encrypted: the network between nodes has to be trusted with them.

Source: Infiniswap (NSDI 2017), section 4.2: the eight control messages; READ and WRITE stand for its one-sided verbs.
"""

import hmac
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from typing import Any
from zlib import crc32

from ebbflow.infra.errors import MemoryTierError

VERSION = 3
MAX_BLOCK = 16 << 20  # bytes of a payload: the largest block that a READ or WRITE moves
MAX_CONTROL = 64 << 10  # bytes of the payload of every other message
NONCE_BYTES = 32
KEY_BYTES = 32  # of an entry: a SHA-256
_HEADER = struct.Struct("<4sBxHQQQQQQI")
# magic, kind, version, request, slab, generation, offset, size, length of the payload, CRC32
HEADER_BYTES = _HEADER.size
_CHECKED = HEADER_BYTES - 4  # bytes before the checksum
_MAGIC = b"EMEM"
_PAIR = struct.Struct("<QQ")
_ACTIVITY = struct.Struct("<QQd")
_DOMAIN = b"ebbflow-memory-1|"

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1  # client: version and a random number
    CHALLENGE = 2  # daemon: its proof and a random number
    PROOF = 3  # client: its proof
    WELCOME = 4  # daemon: name and slab size
    ERROR = 5  # why a request, or the connection, is refused
    QUERY_MEM = 6  # client: how many slabs are free?
    FREE_MEM = 7  # daemon: ``size`` slabs
    MAP = 8  # client: takes one slab, under ``generation``
    MR_INFO = 9  # daemon: slab, generation, length in ``size``; 0 = refused
    CHECK_ACTIVITY = 10  # daemon: slabs whose activity is wanted
    ACTIVITY = 11  # client: those of them that it holds, with their activity
    EVICT = 12  # daemon: slabs that the client has to give back
    DONE = 13  # client: slab that it uses no longer, asked or unasked
    READ = 14  # client: ``size`` bytes at ``offset`` of a slab
    DATA = 15  # daemon: these bytes
    WRITE = 16  # client: bytes at ``offset`` of a slab
    ACK = 17  # daemon: they are there
    DRAIN = 18  # client: the node leaves in ``size`` milliseconds; evict everything and lend nothing more
    STATUS = 19  # client: what is lent to whom?
    REPORT = 20  # daemon: a JSON object
    METRICS = 21  # client: what has happened to its blocks, a JSON object; for whoever asks for STATUS
    PUT = 22  # client: an entry for all clients: ``KEY_BYTES`` bytes of its key, then what is kept under it
    KEPT = 23  # daemon: ``size`` 1: there is an entry of this key; 0: there is no room for it
    GET = 24  # client: the entry of this key; answered by DATA, empty without one
    SET = 25  # client: as PUT, in place of what was kept under the key; answered by KEPT
    DROP = 26  # client: keys of entries that are not needed any more


_BULKY = frozenset({Kind.DATA, Kind.WRITE, Kind.PUT, Kind.SET})


@dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    Args:
        kind: what it is.
        request: number that the asking side gave it; an answer repeats it, 0 where none is expected.
        slab: handle that the daemon gave a slab.
        generation: of the client's mapping, so that what arrives late is told from what is meant.
        offset: bytes from the slab's start.
        size: bytes asked for or granted, or a count; see ``Kind``.
        payload: what is moved.
        version: of the protocol that the sender speaks.
    """

    kind: Kind
    request: int = 0
    slab: int = 0
    generation: int = 0
    offset: int = 0
    size: int = 0
    payload: Buffer = b""
    version: int = VERSION


def encode(frame: Frame) -> tuple[bytes, Buffer]:
    """Return a frame's header and payload. Raises ``MemoryTierError`` for what exceeds a limit."""
    length = len(frame.payload)
    _check_length(frame.kind, length)
    head = _HEADER.pack(
        _MAGIC, frame.kind, frame.version, frame.request, frame.slab, frame.generation, frame.offset,
        frame.size, length, 0,
    )[:_CHECKED]  # fmt: skip
    return head + crc32(frame.payload, crc32(head)).to_bytes(4, "little"), frame.payload


def payload_length(header: bytes, *, only: Iterable[Kind] | None = None) -> int:
    """Return how many bytes follow a header. Nothing may be read, or room made for it, before this has passed.

    Args:
        header: ``HEADER_BYTES`` bytes.
        only: kinds that are allowed now; all by default.

    Raises ``MemoryTierError`` for what is no header, of another version, not allowed now, or too long.
    """
    if len(header) != HEADER_BYTES:
        raise MemoryTierError(f"a header must have {HEADER_BYTES} bytes, not {len(header)}")
    magic, number, version, *_, length, _ = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise MemoryTierError(f"a frame must begin with {_MAGIC!r}, not {magic!r}")
    if version != VERSION:
        raise MemoryTierError(
            f"the peer speaks version {version} of the memory protocol, this side {VERSION}"
        )
    if number not in Kind.__members__.values():
        raise MemoryTierError(f"a frame must be of a kind from 1 to {max(Kind)}, not {number}")
    kind = Kind(number)
    if only is not None and kind not in only:
        raise MemoryTierError(f"{kind.name} is not allowed at this point of the connection")
    _check_length(kind, length)
    assert isinstance(length, int)
    return length


def decode(header: bytes, payload: Buffer) -> Frame:
    """Return the frame of a header that ``payload_length`` has passed and the payload that followed it.

    Raises ``MemoryTierError`` where the checksum does not match.
    """
    _, kind, version, request, slab, generation, offset, size, length, check = _HEADER.unpack(header)
    if length != len(payload) or crc32(payload, crc32(header[:_CHECKED])) != check:
        raise MemoryTierError("the checksum of a frame must match its bytes")
    return Frame(Kind(kind), request, slab, generation, offset, size, payload, version)


def _check_length(kind: Kind, length: int) -> None:
    most = MAX_BLOCK if kind in _BULKY else MAX_CONTROL
    if length > most:
        raise MemoryTierError(f"the payload of {kind.name} must be at most {most} bytes, not {length}")


# --- payloads ---------------------------------------------------------------------------------------------


def pack_slabs(slabs: Iterable[tuple[int, int]]) -> bytes:
    """Return the payload that lists slabs as (handle, generation)."""
    return b"".join(_PAIR.pack(*one) for one in slabs)


def unpack_slabs(payload: Buffer) -> list[tuple[int, int]]:
    """Return what ``pack_slabs`` was given. Raises ``MemoryTierError``."""
    return [(slab, generation) for slab, generation in _unpacked(_PAIR, payload)]


def pack_activity(slabs: Mapping[tuple[int, int], float]) -> bytes:
    """Return the payload that lists activities, requests/s, by (handle, generation)."""
    return b"".join(_ACTIVITY.pack(*key, value) for key, value in slabs.items())


def unpack_activity(payload: Buffer) -> dict[tuple[int, int], float]:
    """Return what ``pack_activity`` was given. Raises ``MemoryTierError``."""
    return {(slab, generation): value for slab, generation, value in _unpacked(_ACTIVITY, payload)}


def _unpacked(form: struct.Struct, payload: Buffer) -> Iterable[Sequence[Any]]:
    if len(payload) % form.size:
        raise MemoryTierError(
            f"a list of slabs must have a multiple of {form.size} bytes, not {len(payload)}"
        )
    return form.iter_unpack(payload)


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Return the payload that lists keys of entries, of ``KEY_BYTES`` bytes each."""
    return b"".join(keys)


def unpack_keys(payload: Buffer) -> list[bytes]:
    """Return what ``pack_keys`` was given. Raises ``MemoryTierError``."""
    if len(payload) % KEY_BYTES:
        raise MemoryTierError(f"keys must have {KEY_BYTES} bytes each, not {len(payload)} together")
    return [bytes(payload[at : at + KEY_BYTES]) for at in range(0, len(payload), KEY_BYTES)]


def pack_json(values: Mapping[str, Any]) -> bytes:
    """Return the payload of a plain object."""
    return json.dumps(dict(values)).encode()


def unpack_json(payload: Buffer) -> dict[str, Any]:
    """Return what ``pack_json`` was given. Raises ``MemoryTierError``."""
    try:
        found = json.loads(bytes(payload))
    except (ValueError, RecursionError) as exc:
        raise MemoryTierError("the payload must be a JSON object") from exc
    if not isinstance(found, dict):
        raise MemoryTierError("the payload must be a JSON object")
    return found


# --- handshake --------------------------------------------------------------------------------------------


def proof(token: bytes, side: str, theirs: bytes, own: bytes) -> bytes:
    """Return what proves to the other side that this one holds the token.

    Args:
        token: the cluster's.
        side: ``client`` or ``daemon``: a proof of one cannot be sent back as the other's.
        theirs: random number of the other side.
        own: random number of this side.
    """
    return hmac.digest(token, _DOMAIN + side.encode() + b"|" + theirs + own, sha256)


def check_proof(found: Buffer, token: bytes, side: str, theirs: bytes, own: bytes) -> None:
    """Compare a proof with what it has to be; ``theirs`` and ``own`` as its maker saw them.

    Raises ``MemoryTierError``, which tells nothing of the token.
    """
    if not hmac.compare_digest(bytes(found), proof(token, side, theirs, own)):
        raise MemoryTierError(f"the {side} does not hold this cluster's token for memory")
