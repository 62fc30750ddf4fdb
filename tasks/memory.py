"""Peers' memory before a store, for as long as something in this process uses it."""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from ebbflow.infra.errors import InfraError, MemoryTierError
from ebbflow.infra.memory.arrow import AttachedTier
from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.files import MemoryTier
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.memory.session import MemorySession
from ebbflow.infra.storage import filesystems
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.memory.tiers import Tier, TierDecision, peer_tier_enabled

MemoryUse = Literal["auto", "always"]
_PROBE = 1 << 20  # bytes of a request that tiers are compared by


@dataclass
class OpenTier:
    """A tier that is attached in this process.

    Args:
        session: its connections.
        tier: its files.
        decision: why it is used.
        users: of this process.
    """

    session: MemorySession
    tier: MemoryTier
    decision: TierDecision
    users: int = 0

    def summary(self) -> str:
        """Return what has happened so far, as a sentence."""
        seen = self.session.blocks.metrics
        reads = seen.remote_hits + seen.store_hits
        return (
            f"memory tier: {seen.remote_hits} of {reads} reads and {seen.remote_writes} of {seen.store_writes} "
            f"writes by peers, {seen.fallbacks} fallbacks, {seen.evictions} evictions, "
            f"{seen.lost_hosts} peers lost, {seen.stalls} stalls"
        )

    def close(self) -> None:
        """Let the store behind have everything, and end the connections. Raises ``StorageError`` or ``OSError``."""
        try:
            self.tier.flush()
        finally:
            self.session.close()


_open: dict[str, OpenTier] = {}  # by scheme
_lock = threading.Lock()


@contextmanager
def memory_tier(
    place: StorageLocation,
    use: MemoryUse,
    notify: Callable[[str], None],
    registry: MemoryRegistry | None = None,
) -> Iterator[OpenTier | None]:
    """Use peers' memory before the store at ``place`` within the block, if its URI begins with ``memory+``.

    At the block's end the store behind has everything. Without daemons, and where they are not faster than the store,
    the store alone is used; the reason is told.

    Args:
        place: the store.
        use: ``auto``: only where it is measured to be faster; ``always``: wherever a daemon is there.
        notify: told what is used, and why.
        registry: of the daemons; that of this user by default.

    Raises ``StorageError`` at the end where the store behind has refused what was written.
    """
    if not place.tiered:
        yield None
        return
    with _lock:
        found = _open.get(place.scheme)
        if found is None:
            found, decision = _opened(place, use, registry or MemoryRegistry())
            notify(f"memory tier {'on' if found else 'off'}: {decision.reason}")
        if found is not None:
            found.users += 1
            _open[place.scheme] = found
    try:
        yield found
    finally:
        if found is not None:
            notify(found.summary())
            with filesystems.translated(f"write to {place.behind}"):
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
        tier.tier.flush()


def _opened(
    place: StorageLocation, use: MemoryUse, registry: MemoryRegistry
) -> tuple[OpenTier | None, TierDecision]:
    sizes = [one.slab_bytes for one in registry.addresses()]
    if not sizes:
        return None, TierDecision(False, f"no node lends memory ({registry.folder}); the store alone is used")
    settings = BlockSettings(slab_bytes=max(set(sizes), key=sizes.count))
    tier = MemoryTier(place.scheme, settings)
    try:
        session = MemorySession(registry, tier.blocks_behind, settings)
    except MemoryTierError as exc:
        return None, TierDecision(False, str(exc))
    tier.store = session.blocks
    try:
        decision = decide(session, place.behind, use)
    except BaseException:
        session.close()
        raise
    if not decision.enabled:
        session.close()
        return None, decision
    filesystems.attach(place.scheme, AttachedTier(tier, settings))
    return OpenTier(session, tier, decision), decision


def decide(session: MemorySession, behind: StorageLocation, use: MemoryUse) -> TierDecision:
    """Return whether peers' memory is used before ``behind``, as measured now."""
    if not session.peers:
        why = "; ".join(session.problems.values()) or "no daemon answers"
        return TierDecision(False, why)
    if use == "always":
        return TierDecision(True, f"asked for, with {len(session.peers)} peers")
    peer = session.measure(_PROBE)
    if peer is None:
        return TierDecision(False, "no peer has memory to lend at the moment")
    return peer_tier_enabled(peer, measure_store(behind), _PROBE)


def measure_store(place: StorageLocation) -> Tier:
    """Return latency and bandwidth of reading from a store. Raises ``StorageError``."""
    name = f"cache/.probe-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    with filesystems.translated(f"measure the store {place}"):
        place.write(name, bytes(_PROBE))
        try:
            small, large = (min(_seconds(place, name, size) for _ in range(3)) for size in (1, _PROBE))
        finally:
            with suppress(OSError, InfraError):
                place.remove(name)
    return Tier("the store", small, _PROBE / max(large - small, 1e-9))


def _seconds(place: StorageLocation, name: str, size: int) -> float:
    began = time.perf_counter()
    place.read_range(name, 0, size)
    return time.perf_counter() - began
