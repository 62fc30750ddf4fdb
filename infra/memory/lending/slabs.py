"""``LentMemory``: the slabs of a daemon as anonymous memory, zeroed before another client sees it."""

import mmap
import time

from ebbflow.infra.errors import MemoryTierError
from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.headroom import SlabCounts
from ebbflow.planners.memory.slab_pool import SlabPool

_ZEROS = bytes(1 << 20)

Buffer = bytes | bytearray | memoryview


class LentMemory:
    """The memory behind a ``SlabPool``. Used by one thread.

    Args:
        slab_bytes: size of each slab.
    """

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.pool = SlabPool()
        self._memory: dict[int, mmap.mmap] = {}
        self._generations: dict[int, int] = {}  # of mapped slabs: what their clients call the mapping

    @property
    def counts(self) -> SlabCounts:
        """Return how many slabs are in each state."""
        return self.pool.counts

    @property
    def allocated(self) -> int:
        """Return the memory of all slabs."""
        return self.slab_bytes * len(self._memory)

    def allocate(self, n: int) -> None:
        """Make unmapped slabs, as far as the system has the memory."""
        for _ in range(n):
            try:
                memory = mmap.mmap(-1, self.slab_bytes)
                _zero(memory)  # touches every page: a later MAP is fast
            except (OSError, MemoryError):
                return
            (handle,) = self.pool.allocate(1)
            self._memory[handle] = memory

    def release(self, n: int) -> None:
        """Give unmapped slabs back to the system."""
        for handle in self.pool.release(n):
            self._memory.pop(handle).close()

    def lend(self, client: str, generation: int) -> int | None:
        """Map a slab for a client and return its handle; ``None`` without an unmapped one."""
        grant = self.pool.grant(client, time.monotonic())
        if grant is None:
            return None
        if grant.zero:
            _zero(self._memory[grant.handle])
        self._generations[grant.handle] = generation
        return grant.handle

    def generation(self, handle: int) -> int:
        """Return what the client of a mapped slab calls the mapping; 0 where it has ended."""
        return self._generations.get(handle, 0)

    def read(self, client: str, handle: int, generation: int, offset: int, size: int) -> bytes:
        """Return a copy of a part of a slab: it may be zeroed for another client before it is sent.

        Raises ``MemoryTierError`` for a slab that is not this client's, or a part outside it.
        """
        memory = self._find(client, handle, generation, offset, size)
        return memory[offset : offset + size]

    def write(self, client: str, handle: int, generation: int, offset: int, data: Buffer) -> None:
        """Write a part of a slab; raises as ``read`` does."""
        memory = self._find(client, handle, generation, offset, len(data))
        memory[offset : offset + len(data)] = data

    def take_back(self, client: str, handle: int, generation: int, *, keep: bool) -> None:
        """End a client's mapping; of one that has ended nothing is done.

        Args:
            client: that has mapped it.
            handle: of the slab.
            generation: of the mapping.
            keep: whether the memory stays for another client; else it goes back to the system.
        """
        if self.pool.owner(handle) != client or self._generations.get(handle) != generation:
            return
        del self._generations[handle]
        self.pool.unmap(handle, keep=keep)
        if not keep:
            self._memory.pop(handle).close()

    def close(self) -> None:
        """Give all memory back."""
        for memory in self._memory.values():
            memory.close()
        self._memory.clear()

    def _find(self, client: str, handle: int, generation: int, offset: int, size: int) -> mmap.mmap:
        try:
            self.pool.check(handle, client)
        except OptionError as exc:
            raise MemoryTierError(f"slab {handle} is not lent to this client") from exc
        if self._generations[handle] != generation:
            raise MemoryTierError(f"slab {handle} is not lent to this client under generation {generation}")
        if offset + size > self.slab_bytes:
            raise MemoryTierError(
                f"bytes {offset} to {offset + size} are outside a slab of {self.slab_bytes} bytes"
            )
        return self._memory[handle]


def _zero(memory: mmap.mmap) -> None:
    for start in range(0, len(memory), len(_ZEROS)):
        end = min(start + len(_ZEROS), len(memory))
        memory[start:end] = _ZEROS[: end - start]
