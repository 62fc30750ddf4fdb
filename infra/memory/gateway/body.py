"""The body of a request, a piece at a time, whatever length it claims."""

import re
from collections.abc import Iterator
from email.message import Message
from io import BufferedIOBase

from ebbflow.infra.memory.gateway.messages import MAX_BYTES, RefusedError

_PIECE = 1 << 20  # bytes read at a time, at most
_LINE = 1024  # bytes of a chunk's first line, or of a trailer
_TRAILERS = 32
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
_DIGITS = re.compile(r"\d{1,19}")


class CutError(OSError):
    """The connection ended before the body did."""


def pieces(headers: Message, source: BufferedIOBase) -> Iterator[bytes]:
    """Yield a body to its end.

    Args:
        headers: of the request.
        source: what follows them.

    Raises ``RefusedError`` for a body that breaks HTTP's rules or is longer than a file may be, ``CutError`` where it
    is cut, ``OSError`` after a time without a byte.
    """
    codings, lengths = headers.get_all("Transfer-Encoding", []), headers.get_all("Content-Length", [])
    if codings and (lengths or [one.strip().lower() for one in codings] != ["chunked"]):
        raise _refused(f"a body must have one length, or be chunked; got {codings} and {lengths}")
    if codings:
        yield from _chunks(source)
        return
    if len(lengths) > 1 or not _DIGITS.fullmatch((lengths or ["0"])[0].strip()):
        raise _refused(f"Content-Length must be one number; got {lengths!s:.80}")
    yield from _exactly(source, _bounded(int(lengths[0]) if lengths else 0))


def _chunks(source: BufferedIOBase) -> Iterator[bytes]:
    total = 0
    while True:
        size = _line(source).partition(b";")[0].strip()
        if not _SIZE.fullmatch(size):
            raise _refused(f"a chunk must begin with its length; got {size[:40]!r}")
        length = int(size, 16)
        total = _bounded(total + length)
        if not length:
            break
        yield from _exactly(source, length)
        if _line(source).strip():
            raise _refused("a chunk is longer than its length")
    for _ in range(_TRAILERS):
        if not _line(source).strip():
            return
    raise _refused(f"a body must have at most {_TRAILERS} trailers")


def _exactly(source: BufferedIOBase, length: int) -> Iterator[bytes]:
    while length:
        piece = source.read1(min(length, _PIECE))
        if not piece:
            raise CutError(f"the connection ended {length} bytes before the body did")
        length -= len(piece)
        yield piece


def _line(source: BufferedIOBase) -> bytes:
    line = source.readline(_LINE)
    if not line.endswith(b"\n"):
        if len(line) == _LINE:
            raise _refused(f"a line of a chunked body must have at most {_LINE} bytes")
        raise CutError("the connection ended before the body did")
    return line


def _bounded(size: int) -> int:
    if size > MAX_BYTES:
        raise _refused(f"a file must have at most {MAX_BYTES} bytes; got {size}")
    return size


def _refused(rule: str) -> RefusedError:
    return RefusedError("IllegalArgumentException", rule)
