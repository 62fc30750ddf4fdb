"""A running checkpoint's blocks in nodes' memory: files as entries that outlive the process that wrote them.

A ``BlockStore`` keeps the same there as in a store, segments and a manifest, so that a save counts as a whole or not
at all, and whoever reads compares the same checksums. Each entry is on two nodes, where there are two: either may go.
Whoever reads asks all nodes: others may have begun to lend since. Of a file that is replaced each copy has a stamp: a
node that could not be reached then may still have an older one, and the newest counts. Pieces have none, so
segments never get a number that another may have had (``BlockStore.renumber``).
"""

import logging
import struct
import time
from collections.abc import Callable, Iterator, Sequence
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
_HEAD = struct.Struct("<QQ")  # size of the file in bytes; stamp, which is higher the later it was written

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
            first, self.count = self.count, self.count + len(pieces)  # if not all are kept, some may be
            self._files.keep(self._name, first, pieces)
            for piece in pieces:
                piece.release()
        del self._buffer[:size]


class MemoryFiles:
    """Files in nodes' memory, with as much of ``StorageLocation`` as a ``BlockStore`` needs. One thread writes.

    Args:
        client: of the nodes.
        uri: of the place in the store that they are ahead of.
        mark: what tells that place from others of its URI, on other machines or deleted.
        refused: called when no node has room.
    """

    def __init__(
        self, client: EntryClient, uri: str, mark: str = "", refused: Callable[[], None] = lambda: None
    ) -> None:
        self._client, self._uri, self._mark, self._refused = client, uri, mark, refused
        self.uri = f"nodes' memory of {uri}"
        self._stamp = 0  # of the newest file that was written or read
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
        self._set([(self._key(name, -1), self._head(sink.size))], name)

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a small file as a whole. Raises ``StorageError`` where no node keeps it."""
        if len(data) > MAX_ENTRY - _HEAD.size:
            raise StorageError(
                f"{self.uri_of(name)} must have at most {MAX_ENTRY >> 20} MiB; it has {len(data)} bytes"
            )
        self._written[name] = 0
        self._set([(self._key(name, -1), self._head(len(data)) + data)], name, alone=True)

    def keep(self, name: str, first: int, pieces: Sequence[Buffer]) -> None:
        """Keep pieces of a file from the entry ``first`` on. Raises ``StorageError``."""
        self._set([(self._key(name, first + n), piece) for n, piece in enumerate(pieces)], name)

    def read(self, name: str) -> bytes:
        """Return a file, as it was written last. Raises ``FileNotFoundError`` where any of it is missing."""
        heads = [one for one in self._client.copies(self._key(name, -1)) if len(one) >= _HEAD.size]
        if not heads:
            raise FileNotFoundError(f"{self.uri_of(name)} is not there")
        head = max(heads, key=lambda one: _HEAD.unpack_from(one)[1])
        size, stamp = _HEAD.unpack_from(head)
        self._stamp = max(self._stamp, stamp)
        if len(head) > _HEAD.size or not size:
            return head[_HEAD.size :]
        return self.read_range(name, 0, size)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return a part of a file that was written in pieces. Raises ``FileNotFoundError`` where any is missing."""
        first, last = offset // CHUNK, (offset + max(length, 1) - 1) // CHUNK
        found = bytearray()
        for start in range(first, last + 1, _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, last + 1))
            for piece in self._get(name, numbers):
                if piece is None:
                    raise FileNotFoundError(f"{self.uri_of(name)} is not there, or not all of it")
                found += piece
        skip = offset - first * CHUNK
        return bytes(found[skip : skip + length])

    def have(self, names: Sequence[str]) -> bool:
        """Tell whether nodes have all these files, or their ends at least, which are kept last."""
        return None not in self._client.get([self._key(name, -1) for name in names], everywhere=True)

    def remove(self, name: str) -> None:
        """Have nodes forget a file; a missing one is no error."""
        count = self._written.pop(name, None)
        if count is None:
            count = self._count(name)
        # backwards: what is left by a process that is killed meanwhile has its size, or its first entries
        self._client.drop([self._key(name, number) for number in reversed(range(-1, count))])

    def entries(self, name: str = "") -> list[MemoryFile]:
        """Return the files that this process has written: nobody else's can be listed."""
        return [MemoryFile(one) for one in sorted(self._written)]

    def sync(self, name: str = "") -> None:
        """Do nothing: what is kept is kept."""

    def _count(self, name: str) -> int:
        """Return how many entries there are of a file that another process has written, or has begun to write."""
        head, piece = self._get(name, (-1, 0))
        if head is not None and len(head) == _HEAD.size:
            return -(-int(_HEAD.unpack(head)[0]) // CHUNK)
        count = 0
        while piece is not None:
            count += 1
            (piece,) = self._get(name, (count,))
        return count

    def _head(self, size: int) -> bytes:
        self._stamp = max(self._stamp + 1, time.time_ns())
        return _HEAD.pack(size, self._stamp)

    def _get(self, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        return self._client.get([self._key(name, number) for number in numbers], everywhere=True)

    def _set(self, entries: Sequence[tuple[bytes, Buffer]], name: str, *, alone: bool = False) -> None:
        if not self._client.keep(entries, alone=alone):
            self._refused()
            raise StorageError(f"no node has room for {self.uri_of(name)}")

    def _key(self, name: str, number: int) -> bytes:
        return sha256(f"{self._uri}\0{self._mark}\0{name}\0{number}".encode()).digest()


class NodeMemory:
    """The memory that nodes lend, for running checkpoints. Of the process that made it alone.

    Args:
        registry: of the daemons; that of this user by default.
        client: of them; one of its own by default.
    """

    def __init__(self, registry: MemoryRegistry | None = None, client: EntryClient | None = None) -> None:
        self._registry = registry or MemoryRegistry()
        self.client = client or EntryClient(self._registry)
        self._told: set[str] = set()  # ways in which it cannot be used that are known
        self._untold: list[tuple[str, str]] = []

    @property
    def there(self) -> bool:
        """Tell whether any node lends memory."""
        return bool(self.client.peers)

    def store(self, uri: str, mark: str = "") -> BlockStore | None:
        """Return what there is in memory of the blocks of one owner at ``uri``; ``None`` where it cannot be read.

        ``mark`` tells that place from others of its URI.
        """
        if not self.there:
            return None
        try:
            return BlockStore(MemoryFiles(self.client, uri, mark, self._refuse))
        except StorageError as exc:
            log.warning("%s", exc)
            return None

    def fresh(self, uri: str, mark: str = "") -> BlockStore | None:
        """Return a store for the blocks of one owner; what was there counts no longer.

        ``None`` where no node lends memory. Raises ``StorageError``.
        """
        if not self.there:
            problems = self.client.problems
            why = f": {'; '.join(problems)}" if problems else ""
            self._tell(
                "none",
                f"no node lends memory in {self._registry.where}{why}; partial checkpoints are kept in the run's "
                f"directory alone until one does (ebbflow memory lend NAME, with the same EBBFLOW_MEMORY_DIR)",
            )
            return None
        found = self.store(uri, mark)
        if found is not None:
            found.clear()
            return found
        files = MemoryFiles(self.client, uri, mark, self._refuse)
        files.remove(MANIFEST)
        return BlockStore(files)

    def problem(self, claim: Callable[[str], bool] = lambda name: True) -> str:
        """Return why memory cannot be used, each reason once; else an empty text.

        ``claim`` tells whether this one of several processes is the first to say it.
        """
        while self._untold:
            what, text = self._untold.pop(0)
            if claim(f"nodes-memory-{what}"):
                return text
        return ""

    def close(self) -> None:
        """End all connections; what is kept stays."""
        self.client.close()

    def _refuse(self) -> None:
        peers = ", ".join(self.client.peers) or "no node"
        self._tell(
            "full",
            f"nodes' memory has no room for a partial checkpoint ({peers}): it is kept in the run's directory alone; "
            "let more nodes lend memory, or these more (ebbflow memory lend NAME --limit SIZE), see ebbflow memory "
            "status",
        )

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._untold.append((what, text))
            log.warning("%s", text)
