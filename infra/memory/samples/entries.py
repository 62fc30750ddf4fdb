"""``EntryClient``: entries in nodes' memory that all processes with the cluster's token share."""

import logging
import os
import socket
import threading
from collections.abc import Iterable, Sequence
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
_MAX_OWED = 1 << 16  # keys that are remembered for a node that cannot be reached

log = logging.getLogger(__name__)


class EntryClient:
    """The entries on the daemons of a registry. Safe for several threads; of the process that made it alone.

    Each process finds the nodes of an entry by itself: by rendezvous hashing of its key, the first choice, and the
    second where that has no room. What only a node that has left had is missing from then on; what is kept on others
    than these two, which came later or had no room then, is found where it is looked for everywhere. A node that
    cannot be reached when entries are dropped drops them once it is reached again, before it is used.

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
        self._met: set[str] = set()  # nodes that were connected at any time
        self._owed: dict[str, dict[bytes, None]] = {}  # by node that was not reached: what it has yet to drop
        self._owing = threading.Lock()
        self._problem = ""  # why no daemon can be used
        self.refused = 0  # entries for which there was no room

    @property
    def peers(self) -> tuple[str, ...]:
        """Return the names of the daemons that are connected."""
        return tuple(sorted(link.name for link in self._current()))

    @property
    def problems(self) -> tuple[str, ...]:
        """Return why daemons that have announced themselves cannot be used."""
        links = () if self._links is None else tuple(self._links.problems.values())
        return (self._problem, *links) if self._problem else links

    def get(self, keys: Sequence[bytes], *, everywhere: bool = False) -> list[bytes | None]:
        """Return entries by keys, all asked for at once; ``None`` where no node has one.

        Args:
            keys: of the entries.
            everywhere: ask all other nodes, too, for what is not on those that would keep it now.
        """
        found: list[bytes | None] = [None] * len(keys)
        ranked = [self._ranked(key) for key in keys]
        first = [slice(choice, choice + 1) for choice in range(CHOICES)]
        for choices in [*first, slice(CHOICES, None)] if everywhere else first:
            asked = [
                (number, link, _asked(link, keys[number]))
                for number, links in enumerate(ranked)
                if found[number] is None
                for link in links[choices]
            ]
            for number, link, answer in asked:
                data = _data(link, answer)
                found[number] = data if found[number] is None else found[number]
        return found

    def copies(self, key: bytes) -> list[bytes]:
        """Return what all nodes have under a key: one that could not be reached may have what was replaced."""
        asked = [(link, _asked(link, key)) for link in self._current()]
        return [data for link, answer in asked if (data := _data(link, answer)) is not None]

    def put(self, key: bytes, data: bytes) -> bool:
        """Have a node keep an entry, without waiting for it; tell whether there is one to do so."""
        if len(data) > MAX_ENTRY:
            return False
        now = self._clock.now()
        choices = self._ranked(key)[:CHOICES]
        link = next((one for one in choices if self._full.get(one.name, 0.0) <= now), None)
        if link is None:
            self.refused += 1
            return False
        name = link.name
        self._forgive(link, key)

        def answered(frame: Frame | None) -> None:
            if frame is None or frame.kind != Kind.KEPT or not frame.size:
                self._full[name] = self._clock.now() + _FULL
                self.refused += 1

        link.post(Frame(Kind.PUT, payload=key + data), answered)
        return True

    def keep(
        self, entries: Sequence[tuple[bytes, Buffer]], copies: int = CHOICES, *, alone: bool = False
    ) -> bool:
        """Have nodes keep entries in place of those of the same keys, and wait; tell whether each is on one at least.

        A node that refuses one that another has taken forgets what it had under its key. Where all refuse, what was
        there stays.

        Args:
            entries: keys and what is kept under them.
            copies: nodes that each is sent to; where none of them has room, others are asked, one after another.
            alone: whether all other nodes forget what they have under the keys, too.
        """
        ranked = [self._ranked(key) if len(data) <= MAX_ENTRY else [] for key, data in entries]
        kept: list[set[PeerLink]] = [set() for _ in entries]
        refused: list[set[PeerLink]] = [set() for _ in entries]
        missing, choices = list(range(len(entries))), slice(0, copies)
        while missing and any(ranked[number][choices] for number in missing):
            asked = []
            for number in missing:
                payload = b"".join(entries[number]) if ranked[number][choices] else b""
                for link in ranked[number][choices]:
                    self._forgive(link, entries[number][0])
                    answer = PendingAnswer()
                    link.post(Frame(Kind.SET, payload=payload), answer.set)
                    asked.append((number, link, answer))
            for number, link, answer in asked:
                frame = _answer(link, answer, Kind.KEPT)
                (kept if frame is not None and frame.size else refused)[number].add(link)
            missing = [number for number in missing if not kept[number]]
            choices = slice(choices.stop, choices.stop + 1)
        for (key, _), takers, others in zip(entries, kept, refused, strict=True):
            if takers:
                self._forget([key], (set(self._current()) if alone else others) - takers, everywhere=alone)
        self.refused += len(missing)
        return not missing

    def drop(self, keys: Sequence[bytes]) -> None:
        """Have all nodes forget entries, without waiting for it; those that cannot be reached, when they can."""
        self._forget(keys, self._current(), everywhere=True)

    def close(self) -> None:
        """End all connections."""
        if self._links is not None:
            self._links.close()

    # --- how ----------------------------------------------------------------------------------------------

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
                self._links = PeerLinks(
                    self._registry,
                    self._registry.token(),
                    self._client,
                    self._clock,
                    check=self._settle,
                    joined=self._join,
                )
            self._links.connect()
            self._problem = ""
        except MemoryTierError as exc:
            self._problem = str(exc)
            log.warning("nodes' memory is not used: %s", exc)

    def _forget(self, keys: Sequence[bytes], links: Iterable[PeerLink], *, everywhere: bool) -> None:
        """Have nodes forget entries; ``everywhere``: also nodes that are known and not connected, later."""
        told = list(links)
        there = self._by_name()
        _drop(keys, told)
        lost = {link.name for link in told if link.ended}
        if everywhere and self._links is not None:
            lost |= (self._met | self._links.problems.keys()) - there.keys()
        if not lost:
            return
        with self._owing:
            joined = self._by_name()  # meanwhile, perhaps; what joins later finds what it owes
            for name in lost:
                if name in joined and not joined[name].ended:
                    _drop(keys, [joined[name]])
                    continue
                owed = self._owed.setdefault(name, {})
                owed.update(dict.fromkeys(keys[: _MAX_OWED - len(owed)]))

    def _by_name(self) -> dict[str, PeerLink]:
        return {} if self._links is None else {link.name: link for link in self._links.all}

    def _forgive(self, link: PeerLink, key: bytes) -> None:
        """Have a node not drop an entry later that it is about to keep."""
        if self._owed:
            with self._owing:
                self._owed.get(link.name, {}).pop(key, None)

    def _settle(self, link: PeerLink) -> None:
        """Have a node drop what it could not be told to, before it is used. Raises ``MemoryTierError``."""
        with self._owing:
            keys = list(self._owed.get(link.name, ()))
        if not keys:
            return
        _drop(keys, [link])
        if _answer(link, _asked(link, keys[0]), Kind.DATA) is None:  # requests are answered in their order
            raise MemoryTierError(f"{link.name} has not answered")
        with self._owing:
            owed = self._owed.pop(link.name, {})
            if left := dict.fromkeys(owed.keys() - set(keys)):
                self._owed[link.name] = left

    def _join(self, link: PeerLink) -> None:
        """Have a node that is used from now on drop what has become owed to it since it was checked."""
        self._met.add(link.name)
        with self._owing:
            _drop(list(self._owed.get(link.name, ())), [link])
            if not link.ended:
                self._owed.pop(link.name, None)

    def _ranked(self, key: bytes) -> list[PeerLink]:
        """Return all nodes, those on which an entry should be first."""
        return sorted(self._current(), key=lambda link: _rank(key, link.name), reverse=True)


def _asked(link: PeerLink, key: bytes) -> PendingAnswer:
    answer = PendingAnswer()
    link.post(Frame(Kind.GET, payload=key), answer.set)
    return answer


def _answer(link: PeerLink, answer: PendingAnswer, kind: Kind) -> Frame | None:
    """Return an answer of this kind; a daemon that gives none in time is used no longer."""
    frame = answer.wait(kind, _TIMEOUT)
    if not answer.done.is_set():
        log.warning("%s has not answered within %g s; it is used no longer", link.name, _TIMEOUT)
        link.close()
    return frame


def _data(link: PeerLink, answer: PendingAnswer) -> bytes | None:
    frame = _answer(link, answer, Kind.DATA)
    return bytes(frame.payload) if frame is not None and frame.payload else None


def _drop(keys: Sequence[bytes], links: Iterable[PeerLink]) -> None:
    for link in links:
        for first in range(0, len(keys), _KEYS):
            link.tell(Frame(Kind.DROP, payload=protocol.pack_keys(keys[first : first + _KEYS])))


def _rank(key: bytes, name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16, key=key).digest()
