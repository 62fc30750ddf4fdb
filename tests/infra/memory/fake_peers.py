"""Peers, a store behind and queues that run when a test says so: every order can be tried, and none waits."""

import random
import threading
from collections import deque
from collections.abc import Callable, Hashable

import numpy as np

from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.client import BlockStore
from ebbflow.infra.memory.peer import Answered
from ebbflow.infra.memory.protocol import Frame, Kind, pack_slabs
from ebbflow.planners.memory.slab_table import BlockRange

BLOCK, PER_SLAB, SLABS = 8, 4, 6
SETTINGS = BlockSettings(SLABS, BLOCK * PER_SLAB, BLOCK, request_blocks=2, entries=4, hot=0.0)


class ManualQueues:
    """``WorkQueues`` of which a draw of ``rng`` runs the next piece of work."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._queues: dict[Hashable, deque[Callable[[], None]]] = {}
        self.others: Callable[[], bool] = lambda: False  # runs what else there is

    def submit(self, lane: Hashable, work: Callable[[], None]) -> None:
        self._queues.setdefault(lane, deque()).append(work)

    def wait(self, changed: threading.Condition, reached: Callable[[], bool], timeout: float) -> bool:
        while not reached() and (self.run() or self.others()):
            pass
        return reached()

    def run(self) -> bool:
        lanes = [lane for lane, queue in self._queues.items() if queue]
        if lanes:
            self._queues[self._rng.choice(lanes)].popleft()()
        return bool(lanes)

    def close(self) -> None:
        while self.run():
            pass


class FakePeer:
    """A daemon whose writes take effect when a test says so; what is asked after them is done after them."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.slab_bytes = name, SETTINGS.slab_bytes
        self._capacity = capacity
        self._next = 0
        self.slabs: dict[tuple[int, int], bytearray] = {}
        self.gone: set[tuple[int, int]] = set()  # of which DONE has come
        self._late = deque[tuple[Frame, Answered]]()
        self.alive = True

    def post(self, frame: Frame, answered: Answered) -> None:
        self._late.append((frame, answered))
        if frame.kind != Kind.WRITE:
            while self._late:
                self.run()

    def tell(self, frame: Frame) -> None:
        if frame.kind == Kind.DONE and self.alive:
            assert not [f for f, _ in self._late if (f.slab, f.generation) == (frame.slab, frame.generation)]
            del self.slabs[frame.slab, frame.generation]
            self.gone.add((frame.slab, frame.generation))

    def close(self) -> None:
        self.alive = False
        while self._late:
            self._late.popleft()[1](None)

    def run(self) -> bool:
        """Do what was asked first."""
        if not self._late:
            return False
        frame, answered = self._late.popleft()
        answered(self._do(frame) if self.alive else None)
        return True

    def _do(self, frame: Frame) -> Frame:
        key = frame.slab, frame.generation
        assert key not in self.gone, "no operation of a mapping is issued after its DONE"
        match frame.kind:
            case Kind.QUERY_MEM:
                return Frame(Kind.FREE_MEM, size=self._capacity - len(self.slabs))
            case Kind.MAP if len(self.slabs) < self._capacity:
                self._next += 1
                self.slabs[self._next, frame.generation] = bytearray(self.slab_bytes)
                return Frame(Kind.MR_INFO, slab=self._next, generation=frame.generation, size=self.slab_bytes)
            case Kind.MAP:
                return Frame(Kind.MR_INFO)
            case Kind.WRITE:
                self.slabs[key][frame.offset : frame.offset + len(frame.payload)] = frame.payload
                return Frame(Kind.ACK)
            case _:
                return Frame(
                    Kind.DATA, payload=bytes(self.slabs[key][frame.offset : frame.offset + frame.size])
                )


class MemoryBehind:
    """A store behind with a lane for each slab."""

    def __init__(self) -> None:
        self.data = bytearray(SLABS * SETTINGS.slab_bytes)
        self.broken = False

    def lane(self, blocks: BlockRange) -> Hashable:
        return blocks.slab

    def write(self, blocks: BlockRange, data: bytes) -> None:
        if self.broken:
            raise OSError("the disk is gone")
        start = self._start(blocks)
        self.data[start : start + len(data)] = data

    def read(self, blocks: BlockRange, offset: int, size: int) -> bytes:
        start = self._start(blocks) + offset
        return bytes(self.data[start : start + size])

    @staticmethod
    def _start(blocks: BlockRange) -> int:
        return blocks.slab * SETTINGS.slab_bytes + blocks.first * BLOCK


class FakeCluster:
    """A client with fake peers, in one thread."""

    def __init__(self, seed: int, peers: int = 3, capacity: int = 2) -> None:
        self.rng = random.Random(seed)
        self.queues, self.behind = ManualQueues(self.rng), MemoryBehind()
        self._deferred = deque[Callable[[], None]]()
        self.store = BlockStore(
            SETTINGS, self.behind, self.queues, self._deferred.append, np.random.default_rng(seed)
        )
        self._capacity = capacity
        self.peers: dict[str, FakePeer] = {}
        self.queues.others = lambda: any(one.run() for one in list(self.peers.values()))
        for number in range(peers):
            self.revive(f"node-{number}")

    def revive(self, name: str) -> None:
        self.peers[name] = FakePeer(name, self._capacity)
        self.store.slabs.add(self.peers[name])

    def kill(self, name: str) -> None:
        peer = self.peers.pop(name)
        peer.alive = False
        self.store.slabs.lose(peer)
        peer.close()

    def evict(self, name: str) -> None:
        lent = sorted(self.peers[name].slabs)
        self.store.slabs.receive(self.peers[name], Frame(Kind.EVICT, payload=pack_slabs(lent[:1])))

    def step(self) -> None:
        """Let one thing happen that is under way."""
        self.rng.choice([self.queues.run, self.control, *(one.run for one in self.peers.values())])()

    def control(self) -> None:
        if self._deferred:
            self._deferred.popleft()()

    def settle(self) -> None:
        for peer in self.peers.values():
            while peer.run():
                pass
        self.queues.close()
        while self._deferred:
            self.control()
