"""``SharedEntries``: what any client with the token may read, in slabs of the daemon's own.

Blocks belong to the client that has mapped their slab and go with its connection; an entry stays for other processes,
such as the next epoch's. Entries are written once and never replaced: of data that is read over and over in random
order any policy of replacement keeps less. They go with their slab, when the daemon takes it back.

Source of no replacement: Mohan, Phanishayee, Raniwala, Chidambaram, "Analyzing and Mitigating Data Stalls in DNN
Training", VLDB 2021, section 4.1 (MinIO).
"""

from collections.abc import Iterable

from ebbflow.infra.memory.lending.slabs import Buffer, LentMemory
from ebbflow.planners.memory.activity import ExponentialMovingAverage

OWNER = "*"  # of their slabs, in the place of a client's key
_ALPHA = 0.2  # weight of the newest measurement of a slab's activity, as clients have it


class SharedEntries:
    """Entries by key. Used by one thread.

    Args:
        memory: that they are in.
    """

    def __init__(self, memory: LentMemory) -> None:
        self._memory = memory
        self._places: dict[bytes, tuple[int, int, int]] = {}  # by key: slab, offset, size
        self._keys: dict[int, list[bytes]] = {}  # by slab
        self._reads: dict[int, int] = {}  # by slab, since the last tick
        self._activity: dict[int, ExponentialMovingAverage] = {}
        self._slab, self._end = -1, 0  # where the next entry goes

    def __len__(self) -> int:
        return len(self._places)

    def put(self, key: bytes, data: Buffer) -> bool:
        """Keep an entry, unless there is one of this key; tell whether there is one then. No empty one is kept."""
        if key in self._places:
            return True
        size = len(data)
        if not 0 < size <= self._memory.slab_bytes:
            return False
        if self._slab not in self._keys or self._end + size > self._memory.slab_bytes:
            handle = self._memory.lend(OWNER, 0)
            if handle is None:
                return False
            self._slab, self._end = handle, 0
            self._keys[handle], self._reads[handle] = [], 0
            self._activity[handle] = ExponentialMovingAverage(_ALPHA, 0.0)
        self._memory.write(OWNER, self._slab, 0, self._end, data)
        self._places[key] = self._slab, self._end, size
        self._keys[self._slab].append(key)
        self._end += size
        return True

    def get(self, key: bytes) -> bytes:
        """Return an entry; empty without one."""
        place = self._places.get(key)
        if place is None:
            return b""
        slab, offset, size = place
        self._reads[slab] += 1
        return self._memory.read(OWNER, slab, 0, offset, size)

    def tick(self, seconds: float) -> None:
        """End an interval of ``seconds`` in which activity was measured."""
        for slab, reads in self._reads.items():
            self._activity[slab].update(reads / seconds)
            self._reads[slab] = 0

    def activity(self, slabs: Iterable[int]) -> dict[int, float]:
        """Return the activity of slabs, reads/s."""
        return {slab: self._activity[slab].value for slab in slabs if slab in self._activity}

    def evict(self, slabs: Iterable[int]) -> None:
        """Give slabs back to the system, with what is in them."""
        for slab in slabs:
            for key in self._keys.pop(slab, ()):
                del self._places[key]
            self._reads.pop(slab, None)
            self._activity.pop(slab, None)
            self._memory.take_back(OWNER, slab, 0, keep=False)
