"""``BlockStore``: blocks in peers' memory, each written to the store behind as well, asynchronously and in order.

A write is issued to the slab's host and queued for the store behind; its buffer is released when both are done. A
read goes to the host while it holds the newest version, else to the store, behind the writes that are queued there.
So the loss of a host, a daemon or all of them loses nothing.

Source: Infiniswap (NSDI 2017), sections 4.1, 4.2 and 4.4.
"""

import threading
from collections.abc import Callable, Hashable, Iterator

import numpy as np

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory.behind import PendingWrite, WorkQueues, WriteBehind
from ebbflow.infra.memory.blocks import BehindStore, BlockSettings, TierMetrics
from ebbflow.infra.memory.hosting import Defer, HostedSlabs, PendingAnswer
from ebbflow.infra.memory.peer import Peer
from ebbflow.infra.memory.protocol import Frame, Kind
from ebbflow.planners.memory.slab_table import BlockRange, ReadRoute, WriteRoute, split_request


class BlockStore:
    """Blocks on peers and in the store behind. Safe for several threads; one writer a block at a time.

    Args:
        settings: layout and limits.
        behind: the store behind.
        queues: runs what goes to the store behind.
        defer: runs, in order and in another thread, messages that must not be sent where they become due.
        rng: draws hosts.
        clock: of back-offs.
    """

    def __init__(
        self,
        settings: BlockSettings,
        behind: BehindStore,
        queues: WorkQueues,
        defer: Defer,
        rng: np.random.Generator,
        clock: Clock | None = None,
    ) -> None:
        self.settings, self._clock = settings, clock or SystemClock()
        self.metrics = TierMetrics()
        self._changed = threading.Condition(threading.RLock())
        self.slabs = HostedSlabs(settings, self._changed, self.metrics, defer, rng, self._clock)
        self._behind = WriteBehind(settings, behind, queues, self._changed, self.metrics, self._clock)
        self._sent: dict[PendingWrite, tuple[Peer, float]] = {}  # to peers that have not answered: since when

    def write(self, address: int, data: bytes) -> None:
        """Write from the start of a block on. It returns when the write is issued; a read after it returns ``data``.

        Args:
            address: bytes from the start of the address space, a multiple of the block size.
            data: at least one byte; the rest of its last block is undefined.

        Raises ``MemoryTierError`` for an address outside the space, and where no entry becomes free in time.
        """
        size = self.settings.block_bytes
        if address < 0 or address % size or not data:
            raise MemoryTierError(
                f"a write must begin with a block and have a byte; got {len(data)} at {address}"
            )
        for blocks, start in self._requests(address // size, -(-len(data) // size)):
            self._write(blocks, data[start : start + blocks.count * size])

    def read(self, address: int, size: int) -> bytes:
        """Return what was written last.

        Args:
            address: bytes from the start of the address space.
            size: bytes; all of them must have been written.

        Raises ``MemoryTierError`` for an address outside the space, ``StorageError`` where the store behind has lost
        or refused what no peer holds.
        """
        if address < 0 or size < 0:
            raise MemoryTierError(f"address and size must not be negative, not {address} and {size}")
        if not size:
            return b""
        found, parts = bytearray(size), list[_Part]()
        first, last = address // self.settings.block_bytes, (address + size - 1) // self.settings.block_bytes
        for blocks, _ in self._requests(first, last - first + 1):
            with self._changed:
                routes = self.slabs.table.route_read(blocks)
            parts += [self._ask(_Part(route, address, size, self.settings)) for route in routes]
        for part in parts:
            start = part.begin - address
            found[start : start + part.size] = self._answer(part)
        return bytes(found)

    def settle(self, lane: Hashable) -> None:
        """Wait until a peer or the store has each write of a lane. Raises ``StorageError``."""
        self._behind.settle(lane)

    def flush(self, lane: Hashable) -> None:
        """Wait until the store behind has all writes of a lane. Raises ``StorageError``."""
        self._behind.flush(lane)

    def then(self, lane: Hashable, work: Callable[[], None], *, always: bool = False) -> None:
        """Queue ``work`` behind the writes of a lane; what it raises is as if the store had refused a write.

        Args:
            lane: the queue.
            work: what is done.
            always: do it even if a write before it was refused.
        """
        self._behind.then(lane, work, always=always)

    def forget(self, lane: Hashable) -> None:
        """Drop what is known of a lane that is not used again."""
        self._behind.forget(lane)

    def tick(self, seconds: float = 1.0) -> None:
        """End an interval in which activity was measured: map active slabs, give up peers that do not answer.

        Args:
            seconds: length of the interval.
        """
        late = self._clock.now() - self.settings.request_timeout
        with self._changed:
            stuck = {id(peer): peer for peer, since in self._sent.values() if since < late}
        for peer in stuck.values():
            self.slabs.lose(peer)
        self.slabs.tick(seconds)

    # --- how ----------------------------------------------------------------------------------------------

    def _requests(self, first: int, count: int) -> Iterator[tuple[BlockRange, int]]:
        """Return the requests for blocks, each within a slab, with the bytes from the first block to each."""
        if first + count > self.settings.slabs * self.settings.blocks_per_slab:
            raise MemoryTierError(f"block {first + count - 1} is outside the address space")
        most, done = self.settings.request_blocks, 0
        for part in split_request(first, count, self.settings.blocks_per_slab):
            for start in range(0, part.count, most):
                n = min(most, part.count - start)
                yield BlockRange(part.slab, part.first + start, n), done * self.settings.block_bytes
                done += n

    def _write(self, blocks: BlockRange, data: bytes) -> None:
        with self._changed:
            self._behind.take_entry()
            route = self.slabs.table.route_write(blocks)
            # with the lock held: two writes of a block reach the store in the order of their routes
            write = self._behind.begin(blocks, data, remote=route.remote is not None)
            if route.remote is None:
                return
            peer = self.slabs.peer(route.remote)
            assert peer is not None, "the slabs of a peer that is gone are unmapped"
            self._sent[write] = peer, self._clock.now()
        frame = Frame(
            Kind.WRITE,
            slab=route.remote.handle,
            generation=route.remote.generation,
            offset=blocks.first * self.settings.block_bytes,
            payload=data,
        )
        peer.post(frame, lambda answer: self._wrote(write, route, peer, answer))

    def _wrote(self, write: PendingWrite, route: WriteRoute, peer: Peer, answer: Frame | None) -> None:
        assert route.remote is not None
        ok = answer is not None and answer.kind == Kind.ACK
        with self._changed:
            del self._sent[write]
            self.slabs.table.complete_write(route, ok=ok)
            if ok:
                self.metrics.remote_writes += 1
                self.slabs.after(route.remote)
            else:
                self.slabs.lose(peer)  # with the lock held: what it has may be older than what was written
            self._behind.end_part(write, complete=ok)

    def _ask(self, part: "_Part") -> "_Part":
        remote = part.route.remote
        if remote is not None:
            part.peer = self.slabs.peer(remote)
            frame = Frame(
                Kind.READ,
                slab=remote.handle,
                generation=remote.generation,
                offset=part.route.blocks.first * self.settings.block_bytes + part.skip,
                size=part.size,
            )
            if part.peer is None:
                part.answer.set(None)
            else:
                part.peer.post(frame, part.answer.set)
        return part

    def _answer(self, part: "_Part") -> bytes:
        remote = part.route.remote
        if remote is not None:
            frame = part.answer.wait(Kind.DATA, self.settings.request_timeout)
            ok = frame is not None and len(frame.payload) == part.size
            with self._changed:
                valid = self.slabs.table.complete_read(part.route, ok=ok)
                if ok:
                    self.slabs.after(remote)
                elif part.peer is not None:
                    self.slabs.lose(part.peer)
                self.metrics.remote_hits += valid
                self.metrics.fallbacks += not valid
            if valid and frame is not None:
                return bytes(frame.payload)
        return self._behind.read(part.route.blocks, part.skip, part.size)


class _Part:
    """The part of a read of ``size`` bytes from ``address`` on that a route has."""

    def __init__(self, route: ReadRoute, address: int, size: int, settings: BlockSettings) -> None:
        blocks, block = route.blocks, settings.block_bytes
        start = blocks.slab * settings.slab_bytes + blocks.first * block
        self.route = route
        self.begin = max(address, start)
        self.size = min(address + size, start + blocks.count * block) - self.begin
        self.skip = self.begin - start  # bytes after the first block's start
        self.peer: Peer | None = None
        self.answer = PendingAnswer()
