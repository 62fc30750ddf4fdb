"""``SharedEntries``: what any client with the token may read, in slabs of the daemon's own.

Blocks belong to the client that has mapped their slab and go with its connection; an entry stays for other
processes, such as the next epoch's, or the one that takes up a training. What is put is never replaced: of data that
is read over and over in random order any policy of replacement keeps less. Who keeps state sets it, in place of the
state before, and drops it. A slab is free again when nothing is left in it; entries go with their slab, when the
daemon takes it back.

Source of no replacement: Mohan, Phanishayee, Raniwala, Chidambaram, "Analyzing and Mitigating Data Stalls in DNN
Training", VLDB 2021, section 4.1 (MinIO).
"""

from collections.abc import Iterable

from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory import protocol
from ebbflow.infra.memory.lending.slabs import Buffer, LentMemory
from ebbflow.infra.memory.protocol import Frame, Kind
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
        self._keys: dict[int, set[bytes]] = {}  # by slab
        self._uses: dict[int, int] = {}  # by slab: reads and replacements since the last tick
        self._activity: dict[int, ExponentialMovingAverage] = {}
        self._holes: dict[int, dict[int, int]] = {}  # by slab: offset and bytes of what was dropped
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
        if (hole := self._hole(size)) is not None:
            self._fill(key, *hole, data)
            return True
        if self._slab not in self._keys or self._end + size > self._memory.slab_bytes:
            handle = self._memory.lend(OWNER, 0)
            if handle is None:
                return False
            self._slab, self._end = handle, 0
            self._keys[handle], self._uses[handle] = set(), 0
            self._activity[handle] = ExponentialMovingAverage(_ALPHA, 0.0)
        self._fill(key, self._slab, self._end, data)
        self._end += size
        return True

    def set(self, key: bytes, data: Buffer) -> bool:
        """Keep an entry in place of the one of this key; tell whether it is kept. If not, that one stays."""
        place = self._places.get(key)
        if place is not None and place[2] == len(data):
            self._memory.write(OWNER, place[0], 0, place[1], data)
        else:
            self._places.pop(key, None)
            if not self.put(key, data):
                if place is not None:
                    self._places[key] = place
                return False
            if place is not None:
                self._release(key, *place)
        self._uses[self._places[key][0]] += 1
        return True

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget entries; a slab without any is there for others."""
        for key in keys:
            if (place := self._places.pop(key, None)) is not None:
                self._release(key, *place)

    def get(self, key: bytes) -> bytes:
        """Return an entry; empty without one."""
        place = self._places.get(key)
        if place is None:
            return b""
        slab, offset, size = place
        self._uses[slab] += 1
        return self._memory.read(OWNER, slab, 0, offset, size)

    def tick(self, seconds: float) -> None:
        """End an interval of ``seconds`` in which activity was measured."""
        for slab, uses in self._uses.items():
            self._activity[slab].update(uses / seconds)
            self._uses[slab] = 0

    def activity(self, slabs: Iterable[int]) -> dict[int, float]:
        """Return the activity of slabs, reads and replacements/s."""
        return {slab: self._activity[slab].value for slab in slabs if slab in self._activity}

    def evict(self, slabs: Iterable[int]) -> None:
        """Give slabs back to the system, with what is in them."""
        for slab in slabs:
            for key in self._keys.get(slab, ()):
                del self._places[key]
            self._forget(slab)
            self._memory.take_back(OWNER, slab, 0, keep=False)

    def answer(self, frame: Frame, counts: dict[str, int], *, draining: bool) -> Frame | None:
        """Do what a client asks of entries and return the answer; ``None`` where there is none to give.

        Args:
            frame: what it asks.
            counts: of what was asked, to be continued.
            draining: nothing more is kept.

        Raises ``MemoryTierError`` for what is no key.
        """
        if frame.kind == Kind.DROP:
            self.drop(protocol.unpack_keys(frame.payload))
            return None
        key = bytes(frame.payload[: protocol.KEY_BYTES])
        if len(key) < protocol.KEY_BYTES:
            raise MemoryTierError(f"a key must have {protocol.KEY_BYTES} bytes, not {len(key)}")
        if frame.kind == Kind.GET:
            found = self.get(key)
            counts["gets"] += 1
            counts["get_hits"] += bool(found)
            return Frame(Kind.DATA, frame.request, payload=found)
        keep = self.set if frame.kind == Kind.SET else self.put
        kept = not draining and keep(key, memoryview(frame.payload)[protocol.KEY_BYTES :])
        counts["puts"] += kept
        return Frame(Kind.KEPT, frame.request, size=int(kept))

    def _release(self, key: bytes, slab: int, offset: int, size: int) -> None:
        if self._places.get(key, (-1,))[0] != slab:
            self._keys[slab].discard(key)
        if not self._keys[slab]:
            self._forget(slab)
            self._memory.take_back(OWNER, slab, 0, keep=True)
        else:
            self._holes.setdefault(slab, {})[offset] = size
            self._join(slab)

    def _fill(self, key: bytes, slab: int, offset: int, data: Buffer) -> None:
        self._memory.write(OWNER, slab, 0, offset, data)
        self._places[key] = slab, offset, len(data)
        self._keys[slab].add(key)

    def _hole(self, size: int) -> tuple[int, int] | None:
        """Take room for an entry from the smallest hole that is large enough; return its slab and offset."""
        fits = (
            (length, slab, offset)
            for slab, holes in self._holes.items()
            for offset, length in holes.items()
            if length >= size
        )
        length, slab, offset = min(fits, default=(0, -1, 0))
        if slab < 0:
            return None
        del self._holes[slab][offset]
        if length > size:
            self._holes[slab][offset + size] = length - size
        return slab, offset

    def _join(self, slab: int) -> None:
        """Make one of holes that follow each other."""
        joined: dict[int, int] = {}
        last, end = -1, -1
        for offset, length in sorted(self._holes[slab].items()):
            if offset == end:
                joined[last] += length
            else:
                last, joined[offset] = offset, length
            end = offset + length
        self._holes[slab] = joined

    def _forget(self, slab: int) -> None:
        self._keys.pop(slab, None)
        self._uses.pop(slab, None)
        self._activity.pop(slab, None)
        self._holes.pop(slab, None)
