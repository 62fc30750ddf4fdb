"""``MemoryDaemon``: lends this machine's free memory, slab by slab, and retreats before its own work suffers.

It never decides what is stored: clients read and write their slabs. Once a second, and sooner where less than half of
the headroom is left, it compares what is free with the headroom that it has to leave, allocates slabs, releases them,
or evicts the least active of a sample.

Source: Infiniswap (NSDI 2017), sections 4.3 to 4.5.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory import protocol
from ebbflow.infra.memory.lending import counters
from ebbflow.infra.memory.lending.connection import HANDSHAKE_TIMEOUT, ClientConnection
from ebbflow.infra.memory.lending.counters import MemoryCounters
from ebbflow.infra.memory.lending.entries import OWNER, SharedEntries
from ebbflow.infra.memory.lending.sessions import SessionLog
from ebbflow.infra.memory.lending.slabs import LentMemory
from ebbflow.infra.memory.protocol import Frame, Kind
from ebbflow.planners.memory.eviction import by_owner, choose_victims
from ebbflow.planners.memory.headroom import Allocate, Evict, HeadroomPolicy, MemorySample, Release

ACTIVITY_TIMEOUT = 1.0  # s; an owner that does not answer loses nothing that is active
LOOKS = 4  # in a period: whether so little memory is free that a period is too long
DONE_TIMEOUT = 5.0  # s; then the connection is closed and the slab released
MAX_CLIENTS = 256
_BUFFER = 1 << 20  # bytes that are read ahead of a connection
_COUNTED = ("reads", "writes", "gets", "get_hits", "puts", "maps", "refused_maps", "evictions", "refusals")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DaemonSettings:
    """What a daemon lends, and when it retreats.

    Args:
        name: of the node, for people.
        token: what clients and daemons of one cluster share.
        host: address of the interface to listen on.
        port: number; 0: any free one.
        slab_bytes: size of a slab.
        max_bytes: most that is lent; it has to be drained within a notice.
        headroom: fraction of the memory that stays free for everything else.
        period: seconds between two looks at the memory.
    """

    name: str
    token: bytes
    host: str = "127.0.0.1"
    port: int = 0
    slab_bytes: int = 16 << 20
    max_bytes: int = 1 << 30
    headroom: float = 0.125
    period: float = 1.0

    def __post_init__(self) -> None:
        if len(self.token) < 16:
            raise MemoryTierError(f"a token must have at least 16 bytes, not {len(self.token)}")
        if not 4096 <= self.slab_bytes <= self.max_bytes:
            raise MemoryTierError(
                f"a slab must have 4096 bytes to all that is lent ({self.max_bytes}), not {self.slab_bytes}"
            )
        if not 0.0 <= self.headroom < 1.0:
            raise MemoryTierError(f"headroom must be a fraction from 0 to 1, not {self.headroom:g}")
        if not self.period > 0.0:
            raise MemoryTierError(f"the period must be more than 0 s, not {self.period:g}")


class MemoryDaemon:
    """Serves until it is drained or cancelled. Used by one event loop.

    Args:
        settings: what it lends.
        look: how much memory there is now.
        rng: draws the slabs that are compared when some must go.
    """

    def __init__(
        self,
        settings: DaemonSettings,
        *,
        look: Callable[[], MemoryCounters] = counters.read,
        rng: np.random.Generator | None = None,
    ) -> None:
        self._settings, self._look, self._rng = settings, look, rng or np.random.default_rng()
        self._memory = LentMemory(settings.slab_bytes)
        self._entries = SharedEntries(self._memory)
        self._reserve = int(settings.headroom * look().total)
        self._policy = HeadroomPolicy(settings.slab_bytes, self._reserve, max_lent_bytes=settings.max_bytes)
        self._clients: dict[str, ClientConnection] = {}  # by a key of the connection, the owner of slabs
        self._sessions = SessionLog()
        self._returned = asyncio.Condition()
        self._number = 0  # of connections so far
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._drained = asyncio.Event()
        self.port = 0
        self.counts = dict.fromkeys(_COUNTED, 0)

    async def start(self) -> None:
        """Listen, and look after the memory from now on. Raises ``MemoryTierError`` without the port."""
        host, port = self._settings.host, self._settings.port
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_BUFFER)
        except OSError as exc:
            why = exc.strerror or str(exc)
            raise MemoryTierError(f"cannot listen on {host}:{port}: {why}; give another port") from exc
        self.port = int(self._server.sockets[0].getsockname()[1])
        self._step()
        self._spawn(self._control())

    async def drained(self) -> None:
        """Wait until everything is drained: on request of a client, or by ``drain``."""
        await self._drained.wait()

    async def drain(self, within: float) -> None:
        """Have all clients give their slabs back, and lend nothing more.

        Args:
            within: seconds; slabs that are not released by then go with their connections.
        """
        if self._draining:
            await self._drained.wait()
            return
        self._draining = True
        self._memory.release(self._memory.counts.unmapped)
        end = time.monotonic() + within
        left = within
        while self._memory.pool.evictable and left > 0:
            slabs = by_owner(self._memory.pool.evictable)
            await self._evict(slabs, min(left, DONE_TIMEOUT))
            left = end - time.monotonic()
        async with self._returned:
            try:
                async with asyncio.timeout(max(0.0, left)):
                    await self._returned.wait_for(lambda: not self._memory.counts.mapped)
            except TimeoutError:
                log.warning("%s: %d slabs were not released", self._settings.name, self._memory.counts.mapped)
        self._drained.set()

    async def close(self) -> None:
        """End all connections and give all memory back."""
        if self._server is not None:
            self._server.close()
        for client in list(self._clients.values()):
            client.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._memory.close()

    @property
    def allocated(self) -> int:
        """Return the bytes of all slabs."""
        return self._memory.allocated

    def status(self) -> dict[str, Any]:
        """Return what is lent, and what has happened."""
        there = self._memory.counts
        return {
            "name": self._settings.name,
            "slab_bytes": self._memory.slab_bytes,
            "max_bytes": self._settings.max_bytes,
            "unmapped": there.unmapped,
            "mapped": there.mapped,
            "draining": self._draining,
            "entries": len(self._entries),
            "clients": len(self._clients),
            "sessions": self._sessions.rows(self._clients),
            **self.counts,
        }

    # --- connections --------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        client, self._number = ClientConnection(reader, writer), self._number + 1
        key = str(self._number)
        try:
            if len(self._tasks) > MAX_CLIENTS:
                raise MemoryTierError(f"a daemon serves at most {MAX_CLIENTS} connections")
            self._tasks.add(task)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                await client.greet(self._settings.token, self._settings.name, self._memory.slab_bytes)
            self._clients[key] = client
            while True:
                await self._handle(key, client, await client.receive())
        except MemoryTierError as exc:
            self.counts["refusals"] += 1
            log.warning("a connection to %s is ended: %s", self._settings.name, exc)
            await client.refuse(str(exc))
        except (OSError, EOFError, TimeoutError):
            pass  # the client is gone; so are its slabs
        finally:
            self._tasks.discard(task)
            self._clients.pop(key, None)
            for handle in self._memory.pool.owned(key):
                await self._take_back(key, handle, self._memory.generation(handle))
            await client.close()

    async def _handle(self, key: str, client: ClientConnection, frame: Frame) -> None:
        match frame.kind:
            case Kind.ACTIVITY:
                client.answered(frame)
            case Kind.DONE:
                await self._take_back(key, frame.slab, frame.generation)
            case Kind.DROP:
                self._entries.answer(frame, self.counts, draining=self._draining)
            case Kind.METRICS:
                self._sessions.record(key, client.client, protocol.unpack_json(frame.payload))
            case _:
                try:
                    answer = self._answer(key, frame)
                except MemoryTierError as exc:
                    self.counts["refusals"] += 1
                    await client.refuse(str(exc), frame.request)
                else:
                    await client.send(answer)

    def _answer(self, key: str, frame: Frame) -> Frame:
        match frame.kind:
            case Kind.READ:
                if frame.size > protocol.MAX_BLOCK:
                    raise MemoryTierError(
                        f"READ must ask for at most {protocol.MAX_BLOCK} bytes, not {frame.size}"
                    )
                data = self._memory.read(key, frame.slab, frame.generation, frame.offset, frame.size)
                self.counts["reads"] += 1
                return _reply(frame, Kind.DATA, payload=data)
            case Kind.WRITE:
                self._memory.write(key, frame.slab, frame.generation, frame.offset, frame.payload)
                self.counts["writes"] += 1
                return _reply(frame, Kind.ACK)
            case Kind.QUERY_MEM:
                return _reply(
                    frame, Kind.FREE_MEM, size=0 if self._draining else self._memory.counts.unmapped
                )
            case Kind.MAP:
                handle = None if self._draining else self._memory.lend(key, frame.generation)
                self.counts["refused_maps" if handle is None else "maps"] += 1
                if handle is None:
                    return _reply(frame, Kind.MR_INFO)  # length 0: refused
                return Frame(
                    Kind.MR_INFO, frame.request, handle, frame.generation, size=self._memory.slab_bytes
                )
            case Kind.GET | Kind.PUT | Kind.SET:
                found = self._entries.answer(frame, self.counts, draining=self._draining)
                assert found is not None
                return found
            case Kind.STATUS:
                return _reply(frame, Kind.REPORT, payload=protocol.pack_json(self.status()))
            case Kind.DRAIN:
                self._spawn(self.drain(frame.size / 1000.0))
                return _reply(frame, Kind.ACK)
            case _:
                raise MemoryTierError(f"{frame.kind.name} is nothing that a client asks")

    async def _take_back(self, key: str, handle: int, generation: int) -> None:
        keep = not self._draining and handle not in self._memory.pool.evicting
        self._memory.take_back(key, handle, generation, keep=keep)
        async with self._returned:
            self._returned.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- memory -------------------------------------------------------------------------------------------

    async def _control(self) -> None:
        while not self._draining:
            self._entries.tick(await self._pause())
            try:
                if excess := self._step():
                    await self._evict_least_active(excess)
            except MemoryTierError as exc:
                log.warning("%s cannot look after its memory: %s", self._settings.name, exc)
            except Exception:  # a defect must not keep it from giving way
                log.exception("%s cannot look after its memory", self._settings.name)

    async def _pause(self) -> float:
        """Wait for a period, or until less than half of the headroom is free; return the seconds waited."""
        began = time.monotonic()
        for _ in range(LOOKS):
            await asyncio.sleep(self._settings.period / LOOKS)
            with suppress(MemoryTierError):  # the next step tells
                if self._look().free < self._reserve // 2:
                    break
        return time.monotonic() - began

    def _step(self) -> int:
        """Allocate or release as the policy says; return how many mapped slabs must be evicted."""
        found = self._look()
        sample = MemorySample(found.total, max(0, found.total - found.free - self._memory.allocated))
        action = self._policy.step(sample, self._memory.counts)
        while isinstance(action, Release):
            self._memory.release(action.n)
            action = self._policy.decide(self._memory.counts)
        if isinstance(action, Allocate) and not self._draining:
            self._memory.allocate(action.n)
        return action.n if isinstance(action, Evict) else 0

    async def _evict_least_active(self, count: int) -> None:
        round_ = choose_victims(self._memory.pool.evictable, count, count, self._rng)
        try:
            question = next(round_)
            while True:
                question = round_.send(await self._activity(question.slabs))
        except StopIteration as end:
            decision = end.value
        if decision.victims:
            log.info("%s evicts %s", self._settings.name, decision.reason)
            await self._evict(by_owner(decision.victims), DONE_TIMEOUT)

    async def _activity(self, slabs: Mapping[str, Iterable[int]]) -> dict[int, float]:
        """Return the activity of slabs by handle, as far as their clients answer in time."""

        async def ask(key: str, theirs: frozenset[int]) -> dict[int, float]:
            if key == OWNER:
                return self._entries.activity(theirs)
            payload = protocol.pack_slabs((one, self._memory.generation(one)) for one in theirs)
            answer = None
            if (client := self._clients.get(key)) is not None:
                answer = await client.ask(Kind.CHECK_ACTIVITY, payload, ACTIVITY_TIMEOUT)
            try:
                found = protocol.unpack_activity(answer.payload) if answer is not None else {}
            except MemoryTierError:
                return {}
            return {handle: value for (handle, _), value in found.items() if handle in theirs}

        answers = await asyncio.gather(*(ask(key, frozenset(theirs)) for key, theirs in slabs.items()))
        return {handle: value for one in answers for handle, value in one.items()}

    async def _evict(self, slabs: Mapping[str, Iterable[int]], timeout: float) -> None:
        """Have clients give slabs back; a connection whose client does not within ``timeout`` seconds is ended."""

        async def tell(key: str, theirs: tuple[int, ...]) -> None:
            theirs = tuple(one for one in theirs if self._memory.pool.owner(one) == key)
            if key == OWNER:
                self._entries.evict(theirs)
                self.counts["evictions"] += len(theirs)
                return
            client = self._clients.get(key)
            if client is None or not theirs:
                return
            self._memory.pool.start_eviction(theirs)
            self.counts["evictions"] += len(theirs)
            lent = {one: self._memory.generation(one) for one in theirs}
            try:
                async with asyncio.timeout(timeout):
                    await client.send(Frame(Kind.EVICT, payload=protocol.pack_slabs(lent.items())))
                    async with self._returned:
                        await self._returned.wait_for(
                            lambda: not self._memory.pool.evicting.intersection(theirs)
                        )
            except (OSError, TimeoutError):
                log.warning("a client (%s) has not given %d slabs back in time", client.client, len(theirs))
                client.abort()
                for handle, generation in lent.items():
                    await self._take_back(key, handle, generation)

        await asyncio.gather(*(tell(key, tuple(theirs)) for key, theirs in slabs.items()))


def _reply(frame: Frame, kind: Kind, *, size: int = 0, payload: bytes = b"") -> Frame:
    return Frame(kind, frame.request, frame.slab, frame.generation, frame.offset, size, payload)
