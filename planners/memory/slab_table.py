"""The client's slabs: where each is mapped, which of its blocks peers hold, and where requests go; without I/O.

A client's address space is divided into slabs, and slabs into blocks. A mapped slab has one host. Each write goes to
the store behind, too, and all requests to it for one slab pass one queue in their order: a read from the store gets
what was written before it, complete or not. So forgetting a host never loses a write (Infiniswap).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.activity import ExponentialMovingAverage

FIRST_RETRY_S, MAX_RETRY_S = 1.0, 30.0  # after a placement that found no host


class SlabState(Enum):
    """What a slab of a client is."""

    UNMAPPED = "unmapped"
    MAPPING = "mapping"  # a host is being looked for
    MAPPED = "mapped"
    EVICTING = "evicting"  # requests go to the store; operations on the host may be outstanding


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Consecutive blocks of one slab.

    Args:
        slab: number of the slab.
        first: number of the first block within the slab.
        count: of blocks, at least 1.
    """

    slab: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """A mapping of a slab, to which an operation is issued.

    Args:
        slab: number of the slab.
        generation: of the mapping; a completion with another generation has no effect.
        host: that holds the slab.
        handle: by which the host knows the slab.
    """

    slab: int
    generation: int
    host: str
    handle: int


@dataclass(frozen=True, slots=True)
class WriteRoute:
    """Where a write goes: always to the store, and to the host of a mapped slab, on whose completion it is complete.

    Args:
        blocks: that are written.
        remote: the mapping; ``None``: the write is complete when the store has it.
    """

    blocks: BlockRange
    remote: RemoteTarget | None


@dataclass(frozen=True, slots=True)
class ReadRoute:
    """Where a read goes.

    Args:
        blocks: that are read.
        remote: the mapping that holds the current version of all of them; ``None``: read from the store, behind the
            slab's writes that wait there.
    """

    blocks: BlockRange
    remote: RemoteTarget | None


def split_request(first: int, count: int, blocks_per_slab: int) -> tuple[BlockRange, ...]:
    """Return the parts of a request, one a slab; the request is complete when all parts are.

    Args:
        first: number of the first block in the client's address space.
        count: of blocks.
        blocks_per_slab: at least 1.

    Raises ``OptionError`` for numbers outside their ranges.
    """
    if first < 0 or count < 1 or blocks_per_slab < 1:
        raise OptionError(
            "a request must start at block 0 or later, and have at least one block, as a slab must; "
            f"not first {first}, count {count}, blocks_per_slab {blocks_per_slab}"
        )
    parts = []
    while count:
        slab, offset = divmod(first, blocks_per_slab)
        n = min(count, blocks_per_slab - offset)
        parts.append(BlockRange(slab, offset, n))
        first, count = first + n, count - n
    return tuple(parts)


class _Slab:
    """One slab. ``outstanding`` counts operations of the current generation."""

    __slots__ = (
        "activity", "bits", "generation", "outstanding", "remote", "requests", "retry_at", "retry_s", "state",
    )  # fmt: skip

    def __init__(self, blocks: int, alpha: float) -> None:
        self.state = SlabState.UNMAPPED
        self.remote: RemoteTarget | None = None
        self.generation = 0
        self.bits = bytearray(blocks)
        self.outstanding = 0
        self.requests = 0
        self.activity = ExponentialMovingAverage(alpha, 0.0)
        self.retry_at, self.retry_s = float("-inf"), FIRST_RETRY_S


class SlabTable:
    """The slabs of one client.

    Every route with a mapping must be completed exactly once by ``complete_write`` or ``complete_read``, failures
    too.

    Args:
        slabs: number of slabs.
        blocks_per_slab: number of blocks.
        alpha: weight of the newest measurement of activity.
        hot: blocks read and written per second, smoothed, above which an unmapped slab is to be mapped (HotSlab).

    Raises ``OptionError`` for numbers outside their ranges.
    """

    def __init__(self, slabs: int, blocks_per_slab: int, alpha: float = 0.2, hot: float = 20.0) -> None:
        if slabs < 1 or blocks_per_slab < 1:
            raise OptionError(
                f"slabs and blocks_per_slab must be at least 1, not {slabs} and {blocks_per_slab}"
            )
        self.blocks_per_slab = blocks_per_slab
        self._count, self._alpha, self._hot = slabs, alpha, hot
        self._unused = _Slab(blocks_per_slab, alpha)
        self._slabs: dict[int, _Slab] = {}  # those that were used: few of an address space's thousands

    def __len__(self) -> int:
        return self._count

    @property
    def states(self) -> Counter[SlabState]:
        """Return how many slabs are in each state."""
        found = Counter(one.state for one in self._slabs.values())
        found[SlabState.UNMAPPED] += self._count - len(self._slabs)
        return found

    @property
    def hosts(self) -> Counter[str]:
        """Return the hosts of this client's slabs, and how many each holds."""
        return Counter(one.remote.host for one in self._slabs.values() if one.remote is not None)

    def state(self, slab: int) -> SlabState:
        """Return a slab's state. Raises ``OptionError`` for an unknown slab."""
        return self._seen(slab).state

    def mapping(self, slab: int) -> RemoteTarget | None:
        """Return where a slab is mapped, or was until its eviction is done. Raises ``OptionError``."""
        return self._seen(slab).remote

    def activity(self, slab: int) -> float:
        """Return a slab's smoothed blocks per second. Raises ``OptionError`` for an unknown slab."""
        return self._seen(slab).activity.value

    def held(self, slab: int) -> int:
        """Return how many blocks of a slab its host holds in their current version. Raises ``OptionError``."""
        return sum(self._seen(slab).bits)

    def outstanding(self, slab: int) -> int:
        """Return how many operations on a slab's host have not ended. Raises ``OptionError``."""
        return self._seen(slab).outstanding

    # requests

    def route_write(self, blocks: BlockRange) -> WriteRoute:
        """Return where a write goes, and count it. Raises ``OptionError`` for blocks outside the slabs."""
        one = self._counted(blocks)
        return WriteRoute(blocks, self._issue(one) if one.state is SlabState.MAPPED else None)

    def route_read(self, blocks: BlockRange) -> tuple[ReadRoute, ...]:
        """Return where the parts of a read go, in their order, and count it.

        Raises ``OptionError`` for blocks outside the slabs.
        """
        one = self._counted(blocks)
        return tuple(
            ReadRoute(part, self._issue(one) if remote else None) for part, remote in _runs(one.bits, blocks)
        )

    def complete_write(self, route: WriteRoute, *, ok: bool = True) -> None:
        """Record that an operation on the host ended; what was written counts if the mapping is still the same.

        After a failure the write is complete when the store has it, and the host is lost (``lose_host``).
        """
        one = self._end(route.remote)
        if one is not None and one.state is SlabState.MAPPED:
            part = route.blocks
            one.bits[part.first : part.first + part.count] = (b"\x01" if ok else b"\x00") * part.count

    def complete_read(self, route: ReadRoute, *, ok: bool = True) -> bool:
        """Record that an operation on the host ended, and tell whether what was read is valid; else use the store."""
        return self._end(route.remote) is not None and ok

    # mapping

    def tick(self, now: float, seconds: float = 1.0) -> tuple[int, ...]:
        """End an interval of measuring activity and return the slabs to be placed, the most active first.

        Args:
            now: seconds on the client's clock.
            seconds: length of the interval, above 0.

        Raises ``OptionError`` for an interval that is not positive.
        """
        if not seconds > 0:
            raise OptionError(f"seconds must be positive, not {seconds}")
        for one in self._slabs.values():
            one.activity.update(one.requests / seconds)
            one.requests = 0
        found = [n for n, one in self._slabs.items() if self.is_hot(n) and one.retry_at <= now]
        return tuple(sorted(found, key=lambda n: (-self._slabs[n].activity.value, n)))

    def is_hot(self, slab: int) -> bool:
        """Tell whether a slab is unmapped and active enough to be mapped. Raises ``OptionError``."""
        one = self._seen(slab)
        return one.state is SlabState.UNMAPPED and one.activity.value > self._hot

    def start_mapping(self, slab: int) -> int:
        """Begin to look for a host and return the generation of the mapping to come.

        Raises ``OptionError`` for a slab that is not unmapped.
        """
        one = self._slab(slab)
        if one.state is not SlabState.UNMAPPED:
            raise OptionError(f"slab {slab} must be unmapped to be mapped; it is {one.state.value}")
        one.state = SlabState.MAPPING
        one.generation += 1
        return one.generation

    def finish_mapping(self, slab: int, generation: int, host: str, handle: int = 0) -> bool:
        """Map a slab; false if the mapping was ended meanwhile: then the host is to be told that it is not used."""
        one = self._slab(slab)
        if one.state is not SlabState.MAPPING or one.generation != generation:
            return False
        one.state = SlabState.MAPPED
        one.remote = RemoteTarget(slab, generation, host, handle)
        one.bits = bytearray(self.blocks_per_slab)
        one.outstanding = 0
        one.retry_s = FIRST_RETRY_S
        return True

    def fail_mapping(self, slab: int, generation: int, now: float) -> None:
        """End a search that found no host; the slab is tried again after 1 s, doubling to 30 s."""
        one = self._slab(slab)
        if one.state is SlabState.MAPPING and one.generation == generation:
            one.state = SlabState.UNMAPPED
            one.retry_at = now + one.retry_s
            one.retry_s = min(2 * one.retry_s, MAX_RETRY_S)

    # losing a mapping

    def start_eviction(self, slab: int) -> bool:
        """Send a slab's new requests to the store; true if it is mapped: then ``finish_eviction`` follows."""
        one = self._slab(slab)
        if one.state is not SlabState.MAPPED:
            return False
        one.state = SlabState.EVICTING
        one.bits = bytearray(self.blocks_per_slab)
        return True

    def is_drained(self, slab: int) -> bool:
        """Tell whether a slab is being evicted and has no operation outstanding: the host may have its memory."""
        one = self._seen(slab)
        return one.state is SlabState.EVICTING and one.outstanding == 0

    def finish_eviction(self, slab: int) -> RemoteTarget:
        """End an eviction and return the mapping that was, which is to be answered with DONE.

        Raises ``OptionError`` for a slab that is not drained.
        """
        one = self._slab(slab)
        remote = one.remote
        if remote is None or not self.is_drained(slab):
            raise OptionError(
                f"slab {slab} must be evicting without operations outstanding; it is {one.state.value} with "
                f"{one.outstanding}"
            )
        self._unmap(one)
        return remote

    def lose_host(self, host: str) -> tuple[int, ...]:
        """Unmap all slabs of a host that cannot be reached, and return them; operations on it count no more."""
        lost = self.mapped_on(host)
        for n in lost:
            self._unmap(self._slabs[n])
        return lost

    def mapped_on(self, host: str) -> tuple[int, ...]:
        """Return the slabs that a host holds."""
        return tuple(
            sorted(n for n, one in self._slabs.items() if one.remote is not None and one.remote.host == host)
        )

    # parts

    def _unmap(self, one: _Slab) -> None:
        one.state = SlabState.UNMAPPED
        one.remote = None
        one.generation += 1
        one.bits = bytearray(self.blocks_per_slab)
        one.outstanding = 0

    def _issue(self, one: _Slab) -> RemoteTarget:
        assert one.remote is not None, "only a mapped slab has bits"
        one.outstanding += 1
        return one.remote

    def _end(self, remote: RemoteTarget | None) -> _Slab | None:
        """Return the slab of an operation that ends, if its mapping is still the same."""
        if remote is None:
            return None
        one = self._slabs[remote.slab]
        if one.generation != remote.generation:
            return None
        one.outstanding -= 1
        return one

    def _counted(self, blocks: BlockRange) -> _Slab:
        one = self._slab(blocks.slab)
        if not 0 <= blocks.first < blocks.first + blocks.count <= self.blocks_per_slab:
            raise OptionError(
                f"blocks must be within a slab's {self.blocks_per_slab}; got {blocks.count} from {blocks.first}"
            )
        one.requests += blocks.count
        return one

    def _slab(self, slab: int) -> _Slab:
        """Return a slab to be changed."""
        if (found := self._seen(slab)) is self._unused:
            found = self._slabs[slab] = _Slab(self.blocks_per_slab, self._alpha)
        return found

    def _seen(self, slab: int) -> _Slab:
        """Return a slab to be looked at."""
        if not 0 <= slab < self._count:
            raise OptionError(f"slab must be from 0 to {self._count - 1}, not {slab}")
        return self._slabs.get(slab, self._unused)


def _runs(bits: bytearray, blocks: BlockRange) -> Iterator[tuple[BlockRange, bool]]:
    """Yield the longest parts of a range whose bits are equal, with the bit."""
    start, end = blocks.first, blocks.first + blocks.count
    while start < end:
        stop = _next(bits, start, end)
        yield BlockRange(blocks.slab, start, stop - start), bool(bits[start])
        start = stop


def _next(bits: bytearray, start: int, end: int) -> int:
    other = bits.find(0 if bits[start] else 1, start, end)
    return end if other < 0 else other
