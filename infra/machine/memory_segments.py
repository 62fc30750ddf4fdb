"""Memory of a process that others of its user on the same machine can read, and neither write nor shrink.

A segment is an anonymous file (``memfd_create``) that is sealed: it ends with the last process that has it, so a
process that is killed leaves nothing behind. Another process opens it through ``/proc``, for which the kernel asks
the rights that a debugger needs, and cannot write to the file (from Linux 5.1; a debugger still reaches its owner's
memory). It is told the segment's proof, random bytes that stand at its beginning: a process of the same number in
another container, or whoever names somebody else's memory, does not have them.
"""

import contextlib
import fcntl
import hmac
import mmap
import os
import resource
import secrets
import stat
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from ebbflow.infra.errors import InfraError

_NAME = "ebbflow-segment"
_HEAD = 4096  # bytes before what is shared: a page, so that it is aligned
_PROOF = 32  # bytes
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # a reader must never find less than it has mapped
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE: nothing writes but what is mapped already, that is, the owner


class SegmentName(NamedTuple):
    """What another process needs to find a segment.

    Args:
        process: its owner's ID.
        descriptor: of the file in that process.
        proof: hexadecimal digits.
        size: bytes that are shared.
    """

    process: int
    descriptor: int
    proof: str
    size: int

    @classmethod
    def of(cls, values: Any) -> Self:
        """Return the name of its plain values. Raises ``InfraError`` for what is none."""
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(cls._fields):
            raise InfraError("a segment of memory must have process, descriptor, proof and size")
        process, descriptor, proof, size = values
        numbers = (process, descriptor, size)
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in numbers):
            raise InfraError("process, descriptor and size of a segment must be whole numbers from 0")
        if not isinstance(proof, str) or len(proof) != 2 * _PROOF:
            raise InfraError(f"the proof of a segment must have {2 * _PROOF} digits")
        return cls(process, descriptor, proof, size)


class MemorySegment:
    """A segment of this process. What it holds is there until it and all views of it are gone.

    Args:
        size: bytes.

    Raises ``InfraError`` where the system has no such files.
    """

    def __init__(self, size: int) -> None:
        descriptor = -1
        try:
            descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, _HEAD + size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(descriptor, _HEAD + size)
            with contextlib.suppress(OSError):  # before Linux 5.1
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FUTURE_WRITE)
        except (OSError, AttributeError) as exc:
            if descriptor >= 0:
                os.close(descriptor)
            raise InfraError(f"this system has no memory that processes can share: {exc}") from exc
        proof = secrets.token_bytes(_PROOF)
        self._map[:_PROOF] = proof
        self._descriptor = descriptor
        self.name = SegmentName(os.getpid(), descriptor, proof.hex(), size)
        self.view = memoryview(self._map)[_HEAD:]

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", -1)) >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def open_segment(name: SegmentName) -> memoryview:
    """Return what another process shares, read-only. Raises ``InfraError`` where it cannot be had."""
    path = f"/proc/{name.process}/fd/{name.descriptor}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise InfraError(f"{path} must be a segment of memory")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != _HEAD + name.size:
                raise InfraError(f"{path} must be a segment of {name.size} bytes")
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise InfraError(f"{path} must be sealed")
            mapped = mmap.mmap(descriptor, found.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
    except (OSError, ValueError, AttributeError) as exc:
        raise InfraError(f"{path} cannot be read: {exc}") from exc
    if not hmac.compare_digest(mapped[:_PROOF].hex(), name.proof):
        raise InfraError(f"{path} must be the segment of who has named it")
    return memoryview(mapped)[_HEAD:]


def allow_open_segments() -> None:
    """Raise this process's limit of open files as far as it may, for each segment that is read needs one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the system has a limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class MemorySlot:
    """A part of a segment. It is free again when nothing refers to it any more.

    Args:
        segment: that it is in.
        offset: of its first byte.
        size: bytes.
        free: takes its offset back.
    """

    def __init__(self, segment: MemorySegment, offset: int, size: int, free: list[Any]) -> None:
        self._segment, self._offset, self._free = segment, offset, free
        self.view = segment.view[offset : offset + size]
        self.name: tuple[list[Any], list[int]] = list(segment.name), [offset, size]

    def __del__(self) -> None:
        self._free.append((self._segment, self._offset))


class MemoryArena:
    """Gives out slots of segments. Used by one thread.

    Args:
        chunk: bytes of a segment, of which only what is used takes memory; larger slots have one of their own.
    """

    def __init__(self, chunk: int = 1 << 30) -> None:
        self._chunk = chunk
        self._segment: MemorySegment | None = None
        self._used = 0
        self._free: dict[int, list[tuple[MemorySegment, int]]] = {}  # by size

    @property
    def name(self) -> SegmentName:
        """Return a segment of it. Raises ``InfraError`` as ``take`` does."""
        if self._segment is None:
            self._segment, self._used = MemorySegment(self._chunk), 0
        return self._segment.name

    def take(self, size: int) -> MemorySlot:
        """Return a slot. Raises ``InfraError`` where the system has no such memory."""
        free = self._free.setdefault(size, [])
        if free:
            return MemorySlot(*free.pop(), size, free)
        if self._segment is None or self._used + size > self._segment.name.size:
            self._segment, self._used = MemorySegment(max(self._chunk, size)), 0
        offset = self._used
        self._used += -(-size // 64) * 64
        return MemorySlot(self._segment, offset, size, free)
