"""``MemorySession``: a client's block store with its connections to all daemons, kept up in the background."""

import logging
import math
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory import protocol
from ebbflow.infra.memory.behind import Lanes
from ebbflow.infra.memory.blocks import BehindStore, BlockSettings
from ebbflow.infra.memory.client import BlockStore
from ebbflow.infra.memory.hosting import ask
from ebbflow.infra.memory.links import PeerLinks
from ebbflow.infra.memory.peer import PeerLink
from ebbflow.infra.memory.protocol import Frame, Kind
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.planners.memory.tiers import Tier

PERIOD = 1.0  # s between two ticks
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
        token = registry.token()
        self._period, self._clock, self._process = period, clock or SystemClock(), os.getpid()
        self._deferred: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._queues = Lanes(threads)
        rng = np.random.default_rng()
        self.blocks = BlockStore(settings, behind, self._queues, self._deferred.put, rng, self._clock)
        self._links = PeerLinks(
            registry,
            token,
            client or f"process {os.getpid()} on {socket.gethostname()}",
            self._clock,
            received=self.blocks.slabs.receive,
            check=self._check,
            joined=self.blocks.slabs.add,
            lost=self._lose,
            exclude=exclude,
        )
        self._ended = threading.Event()
        self._watchers: list[Callable[[], None]] = []
        self._lent = False  # what watchers were told last
        self._session = secrets.token_hex(8)
        self._told: tuple[dict[str, float], frozenset[PeerLink]] = {}, frozenset()
        self._threads = [
            threading.Thread(target=self._send_deferred, name="memory-control", daemon=True),
            threading.Thread(target=self._keep_up, name="memory-peers", daemon=True),
        ]
        self._links.connect()
        self._tell_watchers()
        for thread in self._threads:
            thread.start()

    @property
    def peers(self) -> tuple[str, ...]:
        """Return the names of the daemons that are connected."""
        return self.blocks.slabs.peers

    @property
    def lent(self) -> bool:
        """Tell whether peers are connected that lend slabs."""
        return self.blocks.slabs.lent

    def watch(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called, in any thread, whenever ``lent`` may be another. It must not block."""
        self._watchers.append(changed)

    @property
    def problems(self) -> dict[str, str]:
        """Return the daemons that cannot be used, and why."""
        return self._links.problems

    def measure(self, size: int) -> Tier | None:
        """Return latency and bandwidth of one peer's memory, for requests of ``size`` bytes.

        ``None`` where no peer lends a slab now.
        """
        for link in self._links.all:
            lent = ask(link, Frame(Kind.MAP, generation=1))
            if lent is None or lent.kind != Kind.MR_INFO or not lent.size:
                continue
            try:
                size = min(size, lent.size)
                frame = Frame(Kind.WRITE, slab=lent.slab, generation=1, payload=bytes(size))
                if ask(link, frame) is None:
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
        """Let the store behind have what is queued, and end all connections. May be called twice.

        What it has not taken after its timeout stays queued while the process lives, and the log is told so.
        """
        if self._ended.is_set() or os.getpid() != self._process:
            return
        self._ended.set()
        timeout = self.blocks.settings.store_timeout
        if not self._queues.close(timeout):
            log.warning("the store behind the memory has not taken what was written within %g s", timeout)
        self._tell_metrics()
        self._deferred.put(None)
        for thread in self._threads:
            thread.join(_END)
        self._links.close()

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
                self._links.connect()
                self.blocks.tick(self._period)
                self._tell_metrics()
                self._tell_watchers()
            except Exception:  # a defect must not end all remote memory
                log.exception("looking after peers' memory has failed")

    def _tell_watchers(self) -> None:
        now = self.lent
        if now != self._lent:
            self._lent = now
            for changed in self._watchers:
                changed()

    def _tell_metrics(self) -> None:
        """Tell all daemons what has happened to this client's blocks, where they do not know it yet."""
        now = self.blocks.metrics.as_dict(), frozenset(self._links.all)
        if now == self._told:
            return
        self._told = now
        frame = Frame(Kind.METRICS, payload=protocol.pack_json({"session": self._session, **now[0]}))
        for link in now[1]:
            self._deferred.put(partial(link.tell, frame))

    def _check(self, link: PeerLink) -> None:
        if link.slab_bytes != self.blocks.settings.slab_bytes:
            raise MemoryTierError(
                f"{link.name} lends slabs of {link.slab_bytes} bytes, this client uses "
                f"{self.blocks.settings.slab_bytes}"
            )

    def _lose(self, link: PeerLink) -> None:
        self.blocks.slabs.lose(link)
        self._tell_watchers()


def _seconds(link: PeerLink, frame: Frame) -> float:
    began = time.perf_counter()
    answer = ask(link, frame)
    return time.perf_counter() - began if answer is not None and answer.kind == Kind.DATA else math.inf
