"""``MemorySession``: a client's block store with its connections to all daemons, kept up in the background."""

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory.behind import Lanes
from ebbflow.infra.memory.blocks import BehindStore, BlockSettings
from ebbflow.infra.memory.client import BlockStore
from ebbflow.infra.memory.hosting import PendingAnswer
from ebbflow.infra.memory.peer import PeerAddress, PeerLink
from ebbflow.infra.memory.protocol import Frame, Kind
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.planners.memory.tiers import Tier

PERIOD = 1.0  # s between two ticks
_BACK_OFF = (1.0, 30.0)  # s before a daemon that did not answer is tried again: the first, the most
_END = 10.0  # s for background threads to end

log = logging.getLogger(__name__)


class MemorySession:
    """A block store on the daemons of a registry. It belongs to the process that made it: after a fork, make another.

    Args:
        registry: of the daemons.
        behind: the store behind the blocks.
        settings: layout and limits; ``slab_bytes`` must be that of the daemons, of which others are not used.
        client: what daemons call this client, for people.
        exclude: name of this machine's own node, whose memory it has anyway.
        period: seconds between two ticks.
        threads: writes to the store behind at a time.
        clock: of back-offs.

    Raises ``MemoryTierError`` without a token; daemons that do not answer are tried again in the background.
    """

    def __init__(
        self,
        registry: MemoryRegistry,
        behind: BehindStore,
        settings: BlockSettings,
        *,
        client: str = "",
        exclude: str = "",
        period: float = PERIOD,
        threads: int = 4,
        clock: Clock | None = None,
    ) -> None:
        self._registry, self._token, self._client, self._exclude = (
            registry, registry.token(), client or f"process {os.getpid()}", exclude,
        )  # fmt: skip
        self._period, self._clock, self._process = period, clock or SystemClock(), os.getpid()
        self._deferred: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._queues = Lanes(threads)
        rng = np.random.default_rng()
        self.blocks = BlockStore(settings, behind, self._queues, self._deferred.put, rng, self._clock)
        self._links: dict[str, PeerLink] = {}
        self._retry: dict[str, tuple[float, float]] = {}  # of daemons: when, and the back-off after that
        self._ended = threading.Event()
        self.problems: dict[str, str] = {}  # of daemons that cannot be used: why
        self._threads = [
            threading.Thread(target=self._send_deferred, name="memory-control", daemon=True),
            threading.Thread(target=self._keep_up, name="memory-peers", daemon=True),
        ]
        self._connect()
        for thread in self._threads:
            thread.start()

    @property
    def peers(self) -> tuple[str, ...]:
        """Return the names of the daemons that are connected."""
        return self.blocks.slabs.peers

    def measure(self, size: int) -> Tier | None:
        """Return latency and bandwidth of one peer's memory, for requests of ``size`` bytes.

        ``None`` where no peer lends a slab now.
        """
        for link in list(self._links.values()):
            lent = _ask(link, Frame(Kind.MAP, generation=1))
            if lent is None or lent.kind != Kind.MR_INFO or not lent.size:
                continue
            try:
                size = min(size, lent.size)
                frame = Frame(Kind.WRITE, slab=lent.slab, generation=1, payload=bytes(size))
                if _ask(link, frame) is None:
                    continue
                small, large = (
                    min(
                        _seconds(link, Frame(Kind.READ, slab=lent.slab, generation=1, size=n))
                        for _ in range(3)
                    )
                    for n in (1, size)
                )
            finally:
                link.tell(Frame(Kind.DONE, slab=lent.slab, generation=1))
            if large < math.inf:
                return Tier("peers' memory", small, size / max(large - small, 1e-9))
        return None

    def close(self) -> None:
        """Let the store behind have what is queued, and end all connections. May be called twice."""
        if self._ended.is_set() or os.getpid() != self._process:
            return
        self._ended.set()
        self._queues.close()
        self._deferred.put(None)
        for thread in self._threads:
            thread.join(_END)
        for link in list(self._links.values()):
            link.close()

    # --- how ----------------------------------------------------------------------------------------------

    def _send_deferred(self) -> None:
        while (act := self._deferred.get()) is not None:
            try:
                act()
            except Exception:
                log.exception("a message to a daemon could not be sent")

    def _keep_up(self) -> None:
        while not self._clock.wait(self._ended, self._period):
            try:
                self._connect()
                self.blocks.tick(self._period)
            except Exception:  # a defect must not end all remote memory
                log.exception("looking after peers' memory has failed")

    def _connect(self) -> None:
        for address in self._registry.addresses():
            at, wait = self._retry.get(address.name, (0.0, _BACK_OFF[0]))
            if address.name in (self._exclude, *self._links) or self._clock.now() < at:
                continue
            try:
                link = self._link(address)
            except MemoryTierError as exc:
                self.problems[address.name] = str(exc)
                self._retry[address.name] = self._clock.now() + wait, min(2.0 * wait, _BACK_OFF[1])
                continue
            self._retry.pop(address.name, None)
            self.problems.pop(address.name, None)
            self._links[address.name] = link
            self.blocks.slabs.add(link)
            if link.ended:  # before it was added
                self._lose(link)

    def _link(self, address: PeerAddress) -> PeerLink:
        link = PeerLink(address, self._token, self._client, self.blocks.slabs.receive, self._lose)
        if link.slab_bytes != self.blocks.settings.slab_bytes:
            link.close()
            raise MemoryTierError(
                f"{address.name} lends slabs of {link.slab_bytes} bytes, this client uses "
                f"{self.blocks.settings.slab_bytes}"
            )
        return link

    def _lose(self, link: PeerLink) -> None:
        if self._links.get(link.name) is link:
            del self._links[link.name]
        self.blocks.slabs.lose(link)


def _ask(link: PeerLink, frame: Frame, timeout: float = 5.0) -> Frame | None:
    answer = PendingAnswer()
    link.post(frame, answer.set)
    answer.done.wait(timeout)
    return answer.frame


def _seconds(link: PeerLink, frame: Frame) -> float:
    began = time.perf_counter()
    answer = _ask(link, frame)
    return time.perf_counter() - began if answer is not None and answer.kind == Kind.DATA else math.inf
