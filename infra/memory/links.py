"""``PeerLinks``: a client's connections to all daemons of a registry, made again after they have ended."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory.peer import PeerAddress, PeerLink
from ebbflow.infra.memory.protocol import Frame
from ebbflow.infra.memory.registry import MemoryRegistry

_BACK_OFF = (1.0, 30.0)  # s before a daemon that did not answer is tried again: the first, the most
_AT_ONCE = 8  # connections that are made at the same time


class PeerLinks:
    """Connections to the daemons of a registry, by name. ``connect`` is called by one thread at a time.

    Args:
        registry: of the daemons.
        token: of the cluster.
        client: what daemons call this client, for people.
        clock: of back-offs.
        received: called with what a daemon asks, in its link's thread; must not block.
        check: called with a new link, in any thread; raises ``MemoryTierError`` for a daemon that cannot be used.
        joined: called with a new link that is used from now on.
        lost: called, in any thread, with a link that has ended; perhaps twice, or before ``joined``.
        exclude: name of a daemon that is not used.
    """

    def __init__(
        self,
        registry: MemoryRegistry,
        token: bytes,
        client: str,
        clock: Clock,
        *,
        received: Callable[[PeerLink, Frame], None] = lambda link, frame: None,
        check: Callable[[PeerLink], None] = lambda link: None,
        joined: Callable[[PeerLink], None] = lambda link: None,
        lost: Callable[[PeerLink], None] = lambda link: None,
        exclude: str = "",
    ) -> None:
        self._registry, self._token, self._client, self._clock = registry, token, client, clock
        self._received, self._check, self._joined, self._lost = received, check, joined, lost
        self._exclude = exclude
        self._links: dict[str, PeerLink] = {}
        self._ending = threading.Lock()  # a link may be found to have ended by two threads
        self._retry: dict[str, tuple[float, float]] = {}  # of daemons: when, and the back-off after that
        self.problems: dict[str, str] = {}  # of daemons that cannot be used: why

    @property
    def all(self) -> list[PeerLink]:
        """Return the links that there are."""
        return list(self._links.values())

    def find(self, name: str) -> PeerLink | None:
        """Return the link to a daemon, if there is one."""
        return self._links.get(name)

    def connect(self) -> None:
        """Connect to the daemons to which there is no link and whose back-off is over.

        Several at a time, each used once it is there: one whose machine is gone takes as long as a connection may.
        """
        known, now = (self._exclude, *self._links), self._clock.now()
        due = [
            one
            for one in self._registry.addresses()
            if one.name not in known and now >= self._retry.get(one.name, (0.0, 0.0))[0]
        ]
        if len(due) < 2:
            for one in due:
                self._take(one, self._try(one))
            return
        with ThreadPoolExecutor(min(_AT_ONCE, len(due))) as pool:
            trying = {pool.submit(self._try, one): one for one in due}
            for tried in as_completed(trying):
                self._take(trying[tried], tried.result())

    def close(self) -> None:
        """End all connections."""
        for link in self.all:
            link.close()

    def _take(self, address: PeerAddress, link: PeerLink | MemoryTierError) -> None:
        """Use a link from now on, or remember why there is none."""
        if isinstance(link, MemoryTierError):
            wait = self._retry.get(address.name, (0.0, _BACK_OFF[0]))[1]
            self.problems[address.name] = str(link)
            self._retry[address.name] = self._clock.now() + wait, min(2.0 * wait, _BACK_OFF[1])
            return
        self._retry.pop(address.name, None)
        self.problems.pop(address.name, None)
        self._links[address.name] = link
        self._joined(link)
        if link.ended:  # before it was added
            self._end(link)

    def _try(self, address: PeerAddress) -> PeerLink | MemoryTierError:
        try:
            return self._open(address)
        except MemoryTierError as exc:
            return exc

    def _open(self, address: PeerAddress) -> PeerLink:
        link = PeerLink(address, self._token, self._client, self._received, self._end)
        try:
            self._check(link)
        except MemoryTierError:
            link.close()
            raise
        return link

    def _end(self, link: PeerLink) -> None:
        with self._ending:
            if self._links.get(link.name) is link:
                del self._links[link.name]
        self._lost(link)
