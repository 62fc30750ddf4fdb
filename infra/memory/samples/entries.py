"""``EntryClient``: entries in nodes' memory that all processes with the cluster's token share."""

import logging
import os
import socket
import threading
from collections.abc import Sequence
from hashlib import blake2b

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory import protocol
from ebbflow.infra.memory.hosting import PendingAnswer
from ebbflow.infra.memory.links import PeerLinks
from ebbflow.infra.memory.peer import PeerLink
from ebbflow.infra.memory.protocol import KEY_BYTES, MAX_BLOCK, Buffer, Frame, Kind
from ebbflow.infra.memory.registry import MemoryRegistry

CHOICES = 2  # nodes on which an entry may be
MAX_ENTRY = MAX_BLOCK - KEY_BYTES  # bytes
_CONNECT = 1.0  # s between two looks for daemons
_TIMEOUT = 5.0  # s for an answer; then the daemon counts as lost
_KEYS = protocol.MAX_CONTROL // KEY_BYTES  # that are dropped at once
_FULL = 2.0  # s for which a daemon without room gets no entries

log = logging.getLogger(__name__)


class EntryClient:
    """The entries on the daemons of a registry. Safe for several threads; of the process that made it alone.

    Each process finds the nodes of an entry by itself: by rendezvous hashing of its key, the first choice, and the
    second where that has no room. What only a node that has left had is missing from then on.

    Args:
        registry: of the daemons. There need not be any: nothing is found then.
        client: what daemons call this client, for people.
        clock: of time-outs.
    """

    def __init__(self, registry: MemoryRegistry, client: str = "", clock: Clock | None = None) -> None:
        self._registry, self._clock = registry, clock or SystemClock()
        self._client = client or f"samples of process {os.getpid()} on {socket.gethostname()}"
        self._links: PeerLinks | None = None
        self._connecting = threading.Lock()
        self._looked = float("-inf")
        self._full: dict[str, float] = {}  # daemons without room, until when
        self.refused = 0  # entries for which there was no room

    @property
    def peers(self) -> tuple[str, ...]:
        """Return the names of the daemons that are connected."""
        return tuple(sorted(link.name for link in self._current()))

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return entries by keys, all asked for at once; ``None`` where no node has one."""
        found: list[bytes | None] = [None] * len(keys)
        order = [self._order(key) for key in keys]
        for choice in range(CHOICES):
            asked: list[tuple[int, PeerLink, PendingAnswer]] = []
            for number, links in enumerate(order):
                if found[number] is None and choice < len(links):
                    answer = PendingAnswer()
                    links[choice].post(Frame(Kind.GET, payload=keys[number]), answer.set)
                    asked.append((number, links[choice], answer))
            for number, link, answer in asked:
                frame = answer.wait(Kind.DATA, _TIMEOUT)
                if not answer.done.is_set():
                    log.warning("%s has not answered within %g s; it is used no longer", link.name, _TIMEOUT)
                    link.close()
                if frame is not None and frame.payload:
                    found[number] = bytes(frame.payload)
        return found

    def put(self, key: bytes, data: bytes) -> bool:
        """Have a node keep an entry, without waiting for it; tell whether there is one to do so."""
        if len(data) > MAX_ENTRY:
            return False
        now = self._clock.now()
        link = next((one for one in self._order(key) if self._full.get(one.name, 0.0) <= now), None)
        if link is None:
            self.refused += 1
            return False
        name = link.name

        def answered(frame: Frame | None) -> None:
            if frame is None or frame.kind != Kind.KEPT or not frame.size:
                self._full[name] = self._clock.now() + _FULL
                self.refused += 1

        link.post(Frame(Kind.PUT, payload=key + data), answered)
        return True

    def keep(self, entries: Sequence[tuple[bytes, Buffer]], copies: int = CHOICES) -> bool:
        """Have nodes keep entries in place of those of the same keys, and wait; tell whether each is on one at least.

        Args:
            entries: keys and what is kept under them.
            copies: nodes that each is sent to; where one has no room the other may.
        """
        asked: list[list[tuple[PeerLink, PendingAnswer]]] = []
        for key, data in entries:
            posted = []
            links = self._order(key)[:copies] if len(data) <= MAX_ENTRY else []
            payload = b"".join((key, data)) if links else b""
            for link in links:
                answer = PendingAnswer()
                link.post(Frame(Kind.SET, payload=payload), answer.set)
                posted.append((link, answer))
            asked.append(posted)
        return all(self._kept(posted) for posted in asked)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Have nodes forget entries, without waiting for it."""
        found: dict[PeerLink, list[bytes]] = {}
        for key in keys:
            for link in self._order(key):
                found.setdefault(link, []).append(key)
        for link, theirs in found.items():
            for first in range(0, len(theirs), _KEYS):
                link.tell(Frame(Kind.DROP, payload=protocol.pack_keys(theirs[first : first + _KEYS])))

    def close(self) -> None:
        """End all connections."""
        if self._links is not None:
            self._links.close()

    # --- how ----------------------------------------------------------------------------------------------

    def _kept(self, asked: Sequence[tuple[PeerLink, PendingAnswer]]) -> bool:
        found = False
        for link, answer in asked:
            frame = answer.wait(Kind.KEPT, _TIMEOUT)
            if not answer.done.is_set():
                log.warning("%s has not answered within %g s; it is used no longer", link.name, _TIMEOUT)
                link.close()
            found |= frame is not None and bool(frame.size)
        self.refused += not found
        return found

    def _current(self) -> list[PeerLink]:
        """Return the links that there are, after a look for more where one is due."""
        if self._clock.now() - self._looked >= _CONNECT and self._connecting.acquire(blocking=False):
            try:
                self._connect()
            finally:
                self._looked = self._clock.now()
                self._connecting.release()
        return [] if self._links is None else self._links.all

    def _connect(self) -> None:
        try:
            if self._links is None:
                if not self._registry.addresses():
                    return
                self._links = PeerLinks(self._registry, self._registry.token(), self._client, self._clock)
            self._links.connect()
        except MemoryTierError as exc:
            log.warning("nodes' memory is not used: %s", exc)

    def _order(self, key: bytes) -> list[PeerLink]:
        """Return the nodes on which an entry may be, the first choice first."""
        ranked = sorted(self._current(), key=lambda link: _rank(key, link.name), reverse=True)
        return ranked[:CHOICES]


def _rank(key: bytes, name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16, key=key).digest()
