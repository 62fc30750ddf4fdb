"""A running checkpoint's blocks in nodes' memory: files as entries that outlive the process that wrote them.

A ``BlockStore`` keeps the same there as in a store, segments and a manifest, so that a save counts as a whole or not
at all, and whoever reads compares the same checksums. Each entry is on two nodes, where there are two: either may go.
"""

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from ebbflow.infra.errors import StorageError
from ebbflow.infra.memory.protocol import Buffer
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.memory.samples.entries import MAX_ENTRY, EntryClient
from ebbflow.infra.training.running.store import MANIFEST, BlockStore

CHUNK = 1 << 20  # bytes of an entry of a file that is written in pieces
_AT_ONCE = 32  # entries that are asked for at once
_SIZE = struct.Struct("<Q")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A file, as a listing has it."""

    base_name: str


class _Pieces:
    """A file that is being written: whole entries leave as they fill up."""

    def __init__(self, files: "MemoryFiles", name: str) -> None:
        self._files, self._name, self._buffer = files, name, bytearray()
        self.size = 0  # bytes
        self.count = 0  # entries

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._buffer += view
        self.size += len(view)
        self._send(len(self._buffer) // CHUNK * CHUNK)
        return len(view)

    def end(self) -> None:
        self._send(len(self._buffer))

    def _send(self, size: int) -> None:
        """Send the first ``size`` bytes, without a copy of them."""
        if not size:
            return
        with memoryview(self._buffer) as view:
            pieces = [view[start : min(start + CHUNK, size)] for start in range(0, size, CHUNK)]
            self._files.keep(self._name, self.count, pieces)
            self.count += len(pieces)
            for piece in pieces:
                piece.release()
        del self._buffer[:size]


class MemoryFiles:
    """Files in nodes' memory, with as much of ``StorageLocation`` as a ``BlockStore`` needs. One thread writes.

    Args:
        client: of the nodes.
        uri: of the place in the store that they are ahead of.
    """

    def __init__(self, client: EntryClient, uri: str) -> None:
        self._client, self._uri = client, uri
        self.uri = f"nodes' memory of {uri}"
        self._written: dict[str, int] = {}  # entries of each file of this process

    def uri_of(self, name: str) -> str:
        """Return what a file is called in messages."""
        return f"{self.uri}/{name}"

    @contextmanager
    def writing(self, name: str) -> Iterator[_Pieces]:
        """Write a file in pieces. Raises ``StorageError`` where no node keeps one."""
        sink = _Pieces(self, name)
        self._written[name] = 0
        try:
            yield sink
            sink.end()
        finally:
            self._written[name] = sink.count
        self._set([(self._key(name, -1), _SIZE.pack(sink.size))], name)

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a small file as a whole. Raises ``StorageError`` where no node keeps it."""
        if len(data) > MAX_ENTRY - _SIZE.size:
            raise StorageError(
                f"{self.uri_of(name)} must have at most {MAX_ENTRY >> 20} MiB; it has {len(data)} bytes"
            )
        self._written[name] = 0
        self._set([(self._key(name, -1), _SIZE.pack(len(data)) + data)], name)

    def keep(self, name: str, first: int, pieces: Sequence[Buffer]) -> None:
        """Keep pieces of a file from the entry ``first`` on. Raises ``StorageError``."""
        self._set([(self._key(name, first + n), piece) for n, piece in enumerate(pieces)], name)

    def read(self, name: str) -> bytes:
        """Return a file. Raises ``FileNotFoundError`` where any of it is missing."""
        (head,) = self._client.get([self._key(name, -1)])
        if head is None or len(head) < _SIZE.size:
            raise FileNotFoundError(f"{self.uri_of(name)} is not there")
        (size,) = _SIZE.unpack_from(head)
        if len(head) > _SIZE.size or not size:
            return head[_SIZE.size :]
        return self.read_range(name, 0, size)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return a part of a file that was written in pieces. Raises ``FileNotFoundError`` where any is missing."""
        first, last = offset // CHUNK, (offset + max(length, 1) - 1) // CHUNK
        found = bytearray()
        for start in range(first, last + 1, _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, last + 1))
            for piece in self._client.get([self._key(name, number) for number in numbers]):
                if piece is None:
                    raise FileNotFoundError(f"{self.uri_of(name)} is not there, or not all of it")
                found += piece
        skip = offset - first * CHUNK
        return bytes(found[skip : skip + length])

    def have(self, names: Sequence[str]) -> bool:
        """Tell whether nodes have all these files, or their ends at least, which are kept last."""
        return None not in self._client.get([self._key(name, -1) for name in names])

    def remove(self, name: str) -> None:
        """Have nodes forget a file; a missing one is no error."""
        count = self._written.pop(name, None)
        if count is None:
            (head,) = self._client.get([self._key(name, -1)])
            size = _SIZE.unpack_from(head)[0] if head is not None and len(head) == _SIZE.size else 0
            count = -(-size // CHUNK)
        self._client.drop([self._key(name, number) for number in range(-1, count)])

    def entries(self, name: str = "") -> list[MemoryFile]:
        """Return the files that this process has written: nobody else's can be listed."""
        return [MemoryFile(one) for one in sorted(self._written)]

    def sync(self, name: str = "") -> None:
        """Do nothing: what is kept is kept."""

    def _set(self, entries: Sequence[tuple[bytes, Buffer]], name: str) -> None:
        if not self._client.keep(entries):
            raise StorageError(f"no node has room for {self.uri_of(name)}")

    def _key(self, name: str, number: int) -> bytes:
        return sha256(f"{self._uri}\0{name}\0{number}".encode()).digest()


class NodeMemory:
    """The memory that nodes lend, for running checkpoints. Of the process that made it alone.

    Args:
        registry: of the daemons; that of this user by default.
    """

    def __init__(self, registry: MemoryRegistry | None = None) -> None:
        self.client = EntryClient(registry or MemoryRegistry())

    @property
    def there(self) -> bool:
        """Tell whether any node lends memory."""
        return bool(self.client.peers)

    def store(self, uri: str) -> BlockStore | None:
        """Return what there is in memory of the blocks of one owner at ``uri``; ``None`` where it cannot be read."""
        if not self.there:
            return None
        try:
            return BlockStore(MemoryFiles(self.client, uri))
        except StorageError as exc:
            log.warning("%s", exc)
            return None

    def fresh(self, uri: str) -> BlockStore:
        """Return a store for the blocks of one owner; what was there counts no longer. Raises ``StorageError``."""
        found = self.store(uri)
        if found is not None:
            found.clear()
            return found
        files = MemoryFiles(self.client, uri)
        files.remove(MANIFEST)
        return BlockStore(files)

    def close(self) -> None:
        """End all connections; what is kept stays."""
        self.client.close()
