"""Peers' memory before a store, for as long as something in this process uses it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory.arrow import AttachedTier
from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.files import MemoryTier
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.memory.session import MemorySession
from ebbflow.infra.query.checkpoints import Durability
from ebbflow.infra.storage import filesystems
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.memory.tiers import Tier, TierDecision, peer_tier_enabled, written_through
from ebbflow.tasks.memory.measuring import PROBE, measure_store, store_tier

MemoryUse = Literal["auto", "always"]


@dataclass(frozen=True, slots=True)
class MeasuredTiers:
    """Whether peers' memory is used before a store, and what was measured; ``None``: it was not.

    Args:
        decision: whether, and why.
        peer: peers' memory.
        behind: the store.
    """

    decision: TierDecision
    peer: Tier | None = None
    behind: Tier | None = None


@dataclass
class OpenTier:
    """Peers' memory before a store in this process.

    Args:
        place: the store.
        measured: why it is used or not.
        session: its connections; ``None``: the store alone is used.
        files: that are in it.
        users: of this process.
    """

    place: StorageLocation
    measured: MeasuredTiers
    session: MemorySession | None = None
    files: MemoryTier | None = None
    users: int = 0
    _watchers: dict[object, Callable[[], None]] = field(default_factory=dict)

    def tier(self, durable: Durability) -> Tier | None:
        """Return where data is kept at the moment, as measured; ``None``: that was not measured.

        Args:
            durable: with ``before-commit`` what is written waits for the store behind.
        """
        peer, behind = self.measured.peer, self.measured.behind
        if peer is None or behind is None or self.session is None or not self.session.lent:
            return behind
        return peer if durable == "behind" else written_through(peer, behind)

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Have ``changed`` called, in any thread, whenever ``tier`` may be another; return what ends that."""
        key = object()
        self._watchers[key] = changed

        def stop() -> None:
            self._watchers.pop(key, None)

        return stop

    def tell(self) -> None:
        """Call all watchers."""
        for changed in list(self._watchers.values()):
            changed()

    @property
    def opening(self) -> str:
        """Return whether it is used, and why, as a sentence."""
        decision = self.measured.decision
        return f"memory tier {'on' if decision.enabled else 'off'}: {decision.reason}"

    def summary(self) -> str:
        """Return what has happened so far, as a sentence; empty where the store alone is used."""
        if self.session is None:
            return ""
        seen = self.session.blocks.metrics
        reads = seen.remote_hits + seen.store_hits
        return (
            f"memory tier: {seen.remote_hits} of {reads} reads and {seen.remote_writes} of {seen.store_writes} "
            f"writes by peers, {seen.fallbacks} fallbacks, {seen.evictions} evictions, "
            f"{seen.lost_hosts} peers lost, {seen.stalls} stalls"
        )

    def flush(self) -> None:
        """Let the store behind have everything. Raises ``StorageError``."""
        if self.files is not None:
            with filesystems.translated(f"write to {self.place.behind}"):
                self.files.flush()

    def close(self) -> None:
        """Let the store behind have everything, and end the connections. Raises ``StorageError``."""
        try:
            self.flush()
        finally:
            if self.session is not None:
                self.session.close()
            if self.files is not None:
                self.files.close()


_open: dict[str, OpenTier] = {}  # by scheme
_lock = threading.Lock()


@contextmanager
def memory_tier(
    place: StorageLocation,
    use: MemoryUse,
    notify: Callable[[str], None] = lambda _: None,
    registry: MemoryRegistry | None = None,
) -> Iterator[OpenTier | None]:
    """Use peers' memory before the store at ``place`` within the block, if its URI begins with ``memory+``.

    At the block's end the store behind has everything. Without daemons, and where they are not faster than the store,
    the store alone is used; the reason is told.

    Args:
        place: the store.
        use: ``auto``: only where it is measured to be faster; ``always``: wherever a daemon is there.
        notify: told whether it is used, and why, where it was not open.
        registry: of the daemons; that of this user by default.

    Raises ``StorageError`` at the end where the store behind has refused what was written.
    """
    if not place.tiered:
        yield None
        return
    with _lock:
        found = _open.get(place.scheme)
        if found is None:
            found = _opened(place, use, registry or MemoryRegistry())
            notify(found.opening)
        if found.session is not None:
            found.users += 1
            _open[place.scheme] = found
    try:
        yield found
    finally:
        if found.session is not None:
            _leave(place.scheme, found)


def _leave(scheme: str, tier: OpenTier) -> None:
    with _lock:
        tier.users -= 1
        last = not tier.users
        if last:
            del _open[scheme]
            filesystems.attach(scheme, None)
    if last:
        tier.close()
    else:
        tier.flush()


def _opened(place: StorageLocation, use: MemoryUse, registry: MemoryRegistry) -> OpenTier:
    """Measure tiers, and attach peers' memory where it is used."""
    settings = _settings(registry)
    if isinstance(settings, TierDecision):
        return OpenTier(place, MeasuredTiers(settings))
    files = MemoryTier(place.scheme, settings)
    try:
        session = MemorySession(registry, files.blocks_behind, settings)
    except MemoryTierError as exc:
        return OpenTier(place, MeasuredTiers(TierDecision(False, str(exc))))
    files.store = session.blocks
    try:
        measured = decide(session, place.behind, use, store_tier)
    except BaseException:
        session.close()
        raise
    if not measured.decision.enabled:
        session.close()
        return OpenTier(place, measured)
    filesystems.attach(place.scheme, AttachedTier(files, settings))
    found = OpenTier(place, measured, session, files)
    session.watch(found.tell)
    return found


def look(place: StorageLocation, registry: MemoryRegistry | None = None) -> MeasuredTiers:
    """Return whether peers' memory would be used before a store, as measured now; a probe is written and removed.

    Args:
        place: the store, with or without ``memory+``.
        registry: of the daemons; that of this user by default.

    Raises ``StorageError`` where the store cannot be measured.
    """
    registry = registry or MemoryRegistry()
    settings = _settings(registry)
    if isinstance(settings, TierDecision):
        return MeasuredTiers(settings)
    files = MemoryTier(f"{filesystems.MEMORY}{place.behind.scheme}", settings)
    try:
        session = MemorySession(registry, files.blocks_behind, settings)
    except MemoryTierError as exc:
        return MeasuredTiers(TierDecision(False, str(exc)))
    try:
        return decide(session, place.behind, "auto")
    finally:
        session.close()


def _settings(registry: MemoryRegistry) -> BlockSettings | TierDecision:
    """Return the layout that most daemons have, or that there are none."""
    sizes = [one.slab_bytes for one in registry.addresses()]
    if not sizes:
        return TierDecision(False, f"no node lends memory ({registry.where}); the store alone is used")
    return BlockSettings(slab_bytes=max(set(sizes), key=sizes.count))


def decide(
    session: MemorySession,
    behind: StorageLocation,
    use: MemoryUse,
    measure: Callable[[StorageLocation], Tier] = measure_store,
) -> MeasuredTiers:
    """Return whether peers' memory is used before ``behind``; ``measure`` tells how fast that is."""
    if not session.peers:
        why = "; ".join(session.problems.values()) or "no daemon answers"
        return MeasuredTiers(TierDecision(False, why))
    peer, store = session.measure(PROBE), measure(behind)
    if use == "always":
        decision = TierDecision(True, f"asked for, with {len(session.peers)} peers")
    elif peer is None:
        decision = TierDecision(False, "no peer has memory to lend at the moment")
    else:
        decision = peer_tier_enabled(peer, store, PROBE)
    return MeasuredTiers(decision, peer, store)
