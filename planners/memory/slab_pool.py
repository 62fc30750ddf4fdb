"""The slabs that a daemon lends: pre-allocated, mapped by one client each, or being evicted; without I/O."""

from collections.abc import Iterable
from dataclasses import dataclass

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.eviction import MappedSlab
from ebbflow.planners.memory.headroom import SlabCounts


@dataclass(frozen=True, slots=True)
class Grant:
    """A slab that a client may use.

    Args:
        handle: of the slab.
        zero: whether another client's data must be overwritten first.
    """

    handle: int
    zero: bool


class SlabPool:
    """The slabs of one daemon. Handles are never used twice."""

    def __init__(self) -> None:
        self._next = 0
        self._free: dict[
            int, str | None
        ] = {}  # unmapped slabs, and the client whose data each may still hold
        self._mapped: dict[int, MappedSlab] = {}
        self._evicting: set[int] = set()

    @property
    def counts(self) -> SlabCounts:
        """Return how many slabs are in each state."""
        return SlabCounts(len(self._free), len(self._mapped), len(self._evicting))

    @property
    def evictable(self) -> tuple[MappedSlab, ...]:
        """Return the mapped slabs of which no eviction is under way."""
        return tuple(one for handle, one in self._mapped.items() if handle not in self._evicting)

    @property
    def evicting(self) -> frozenset[int]:
        """Return the slabs whose eviction is under way."""
        return frozenset(self._evicting)

    def allocate(self, n: int) -> tuple[int, ...]:
        """Add unmapped slabs and return their handles."""
        new = tuple(range(self._next, self._next + n))
        self._next += n
        self._free.update(dict.fromkeys(new))
        return new

    def release(self, n: int) -> tuple[int, ...]:
        """Remove at most that many unmapped slabs and return their handles."""
        gone = tuple(self._free)[-n:] if n > 0 else ()
        for handle in gone:
            del self._free[handle]
        return gone

    def grant(self, client: str, now: float) -> Grant | None:
        """Map an unmapped slab, one that needs no overwriting if there is; ``None``: refused, there is none.

        Args:
            client: that asked.
            now: seconds on the daemon's clock.
        """
        if not self._free:
            return None
        handle = min(self._free, key=lambda one: (self._free[one] not in (None, client), one))
        last = self._free.pop(handle)
        self._mapped[handle] = MappedSlab(handle, client, now)
        return Grant(handle, last not in (None, client))

    def owner(self, handle: int) -> str | None:
        """Return the client that has mapped a slab; ``None`` where nobody has."""
        one = self._mapped.get(handle)
        return None if one is None else one.owner

    def check(self, handle: int, client: str) -> None:
        """Raise ``OptionError`` unless a client has mapped a slab."""
        if self.owner(handle) != client:
            raise OptionError(f"slab {handle} must be mapped by client {client!r} to be used by it")

    def start_eviction(self, handles: Iterable[int]) -> None:
        """Record that the owners of mapped slabs were told to leave them. Raises ``OptionError`` for others."""
        for handle in handles:
            if handle not in self._mapped:
                raise OptionError(f"slab {handle} must be mapped to be evicted")
            self._evicting.add(handle)

    def unmap(self, handle: int, *, keep: bool) -> bool:
        """End a mapping and tell whether there was one.

        Args:
            handle: of the slab.
            keep: whether its memory stays as an unmapped slab, else it is released.
        """
        one = self._mapped.pop(handle, None)
        self._evicting.discard(handle)
        if one is not None and keep:
            self._free[handle] = one.owner
        return one is not None

    def owned(self, client: str) -> tuple[int, ...]:
        """Return the slabs that a client has mapped."""
        return tuple(handle for handle, one in self._mapped.items() if one.owner == client)
