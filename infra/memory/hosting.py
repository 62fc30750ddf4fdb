"""``HostedSlabs``: which peers host a client's slabs: placement, eviction, the loss of peers."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ebbflow.infra.clock import Clock
from ebbflow.infra.memory import protocol
from ebbflow.infra.memory.blocks import BlockSettings, TierMetrics
from ebbflow.infra.memory.peer import Peer
from ebbflow.infra.memory.protocol import Frame, Kind
from ebbflow.planners.memory.placement import MapRequest, Offer, PlacementDecision, Probe, place_slab
from ebbflow.planners.memory.slab_table import RemoteTarget, SlabState, SlabTable

Defer = Callable[[Callable[[], None]], None]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PendingAnswer:
    """An answer that is waited for."""

    frame: Frame | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def set(self, frame: Frame | None) -> None:
        """Hand over the answer; ``None``: none will come."""
        self.frame = frame
        self.done.set()

    def wait(self, kind: Kind, timeout: float) -> Frame | None:
        """Return the answer if it comes within ``timeout`` seconds and is of this kind."""
        self.done.wait(timeout)
        return self.frame if self.frame is not None and self.frame.kind == kind else None


def ask(peer: Peer, frame: Frame, timeout: float = 5.0) -> Frame | None:
    """Send a request and return its answer, if one comes within ``timeout`` seconds."""
    answer = PendingAnswer()
    peer.post(frame, answer.set)
    answer.done.wait(timeout)
    return answer.frame


class HostedSlabs:
    """The slabs of a client and the peers that host them. Safe for several threads.

    Args:
        settings: layout and limits.
        changed: the client's lock, notified at each change.
        metrics: where placements, evictions and losses are counted.
        defer: runs, in order and in another thread, what must not be sent where it becomes due.
        rng: draws hosts.
        clock: of back-offs.
    """

    def __init__(
        self,
        settings: BlockSettings,
        changed: threading.Condition,
        metrics: TierMetrics,
        defer: Defer,
        rng: np.random.Generator,
        clock: Clock,
    ) -> None:
        self._settings, self._changed, self._metrics, self._defer, self._rng, self._clock = (
            settings, changed, metrics, defer, rng, clock,
        )  # fmt: skip
        self.table = SlabTable(settings.slabs, settings.blocks_per_slab, hot=settings.hot)
        self._peers: dict[str, Peer] = {}
        self._placed: set[int] = set()  # slabs that have ever been mapped
        self._full = False  # the last search has found no host with a free slab
        self._placing = threading.Lock()  # the generator of random numbers is one thread's at a time

    def peer(self, remote: RemoteTarget) -> Peer | None:
        """Return the peer of a mapping; ``None``: it is gone."""
        return self._peers.get(remote.host)

    @property
    def peers(self) -> tuple[str, ...]:
        """Return the names of the peers that are connected."""
        return tuple(self._peers)

    @property
    def lent(self) -> bool:
        """Tell whether peers are connected, and whoever was asked for a slab last has lent one."""
        return bool(self._peers) and not self._full

    # --- placement ----------------------------------------------------------------------------------------

    def map(self, slab: int) -> bool:
        """Look for a host of a slab without one, whatever its activity; tell whether it has one then."""
        with self._changed:
            if (state := self.table.state(slab)) is not SlabState.UNMAPPED:
                return state is SlabState.MAPPED
            generation = self.table.start_mapping(slab)
            hosts = {n for n, one in self._peers.items() if one.slab_bytes == self._settings.slab_bytes}
            old = hosts & self.table.hosts.keys()
        decision = self._place(sorted(hosts - old), sorted(old), generation)
        with self._changed:
            peer = self._peers.get(decision.host) if decision.host is not None else None
            if peer is None or decision.handle is None:
                self._metrics.unplaced += 1
                self._full = True
                self.table.fail_mapping(slab, generation, self._clock.now())
                return False
            self.table.finish_mapping(slab, generation, peer.name, decision.handle)
            self._metrics.maps += 1
            self._full = False
            self._metrics.remaps += slab in self._placed
            self._placed.add(slab)
            return True

    def unmap(self, slab: int) -> None:
        """Give a slab back to its host, which may lend it to others; its blocks are in the store behind only."""
        with self._changed:
            if self.table.start_eviction(slab):
                self._finish_eviction(slab)

    def tick(self, seconds: float) -> None:
        """End an interval in which activity was measured, and map the slabs that are active enough.

        Args:
            seconds: length of the interval.
        """
        with self._changed:
            hot = self.table.tick(self._clock.now(), seconds)
        for slab in hot:
            if not self.map(slab):
                break  # no host has memory; the next interval tries again

    # --- peers --------------------------------------------------------------------------------------------

    def add(self, peer: Peer) -> None:
        """Use a peer from now on."""
        with self._changed:
            self._peers[peer.name] = peer
            self._full = False

    def lose(self, peer: Peer) -> None:
        """Use a peer no longer, whose connection ends. May be called twice, in any thread."""
        with self._changed:
            if self._peers.get(peer.name) is not peer:
                return
            del self._peers[peer.name]
            self._metrics.lost_hosts += 1
            if lost := self.table.lose_host(peer.name):
                log.info("%s is gone with %d slabs; their blocks come from the store", peer.name, len(lost))
            self._changed.notify_all()
        self._defer(peer.close)

    def receive(self, peer: Peer, frame: Frame) -> None:
        """Handle what a daemon asks, in its link's thread. Raises ``MemoryTierError`` for a broken message."""
        asked = protocol.unpack_slabs(frame.payload)
        with self._changed:
            theirs = {}
            for slab in self.table.mapped_on(peer.name) if self._peers.get(peer.name) is peer else ():
                target = self.table.mapping(slab)
                assert target is not None
                theirs[target.handle, target.generation] = slab
            mine = [key for key in asked if key in theirs]  # of others, DONE is under way
            if frame.kind == Kind.CHECK_ACTIVITY:
                found = {key: self.table.activity(theirs[key]) for key in mine}
                answer = Frame(Kind.ACTIVITY, frame.request, payload=protocol.pack_activity(found))
                self._defer(lambda: peer.tell(answer))
                return
            for slab in (theirs[key] for key in mine):
                if self.table.start_eviction(slab):
                    self._metrics.evictions += 1
                    self._finish_eviction(slab)

    def after(self, remote: RemoteTarget) -> None:
        """Go on, with the lock held, with an eviction whose last operation may have ended."""
        if self.table.mapping(remote.slab) == remote:
            self._finish_eviction(remote.slab)

    # --- how ----------------------------------------------------------------------------------------------

    def _finish_eviction(self, slab: int) -> None:
        if not self.table.is_drained(slab):
            return
        was = self.table.finish_eviction(slab)
        if (peer := self._peers.get(was.host)) is not None:
            done = Frame(Kind.DONE, slab=was.handle, generation=was.generation)
            self._defer(lambda: peer.tell(done))

    def _place(self, new: list[str], old: list[str], generation: int) -> PlacementDecision:
        with self._placing:
            return self._search(new, old, generation)

    def _search(self, new: list[str], old: list[str], generation: int) -> PlacementDecision:
        search = place_slab(new, old, self._rng, self._settings.choices)
        try:
            request = next(search)
            while True:
                match request:
                    case Probe(hosts):
                        request = search.send(self._probe(hosts))
                    case MapRequest(host):
                        request = search.send(self._request_slab(host, generation))
        except StopIteration as end:
            decision: Any = end.value
            assert isinstance(decision, PlacementDecision)
            return decision

    def _probe(self, hosts: Sequence[str]) -> dict[str, Offer]:
        asked = {host: PendingAnswer() for host in hosts}
        for host, answer in asked.items():
            if (peer := self._peers.get(host)) is None:
                answer.set(None)
            else:
                peer.post(Frame(Kind.QUERY_MEM), answer.set)
        found = {host: one.wait(Kind.FREE_MEM, self._settings.probe_timeout) for host, one in asked.items()}
        return {host: Offer(frame.size) for host, frame in found.items() if frame is not None}

    def _request_slab(self, host: str, generation: int) -> int | None:
        peer = self._peers.get(host)
        if peer is None:
            return None
        answer = PendingAnswer()
        peer.post(Frame(Kind.MAP, generation=generation), answer.set)
        frame = answer.wait(Kind.MR_INFO, self._settings.request_timeout)
        if frame is None:  # it may have lent one, which only the connection's end gives back
            self.lose(peer)
            return None
        return frame.slab if frame.size >= self._settings.slab_bytes else None
