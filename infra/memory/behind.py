"""``WriteBehind``: what waits for the store behind, lane by lane, and the entries that bound it."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import InfraError, MemoryTierError, StorageError
from ebbflow.infra.memory.blocks import BehindStore, BlockSettings, TierMetrics
from ebbflow.planners.memory.slab_table import BlockRange

Work = Callable[[], None]  # must not raise

log = logging.getLogger(__name__)


class WorkQueues(Protocol):
    """Runs what is submitted under one key in its order, and lets others wait for what it does."""

    def submit(self, lane: Hashable, work: Work) -> None:
        """Append ``work`` to a queue."""
        ...

    def wait(self, changed: threading.Condition, reached: Callable[[], bool], timeout: float) -> bool:
        """Wait, with ``changed`` held, until ``reached``; tell whether it is."""
        ...


class Lanes:
    """``WorkQueues`` of threads, which end when nothing is queued and keep no process from ending.

    Args:
        threads: that work at a time.
    """

    def __init__(self, threads: int = 4) -> None:
        self._threads, self._working = threads, 0
        self._changed = threading.Condition()
        self._queues: dict[Hashable, deque[Work]] = {}  # of queues that a thread works on, or is about to
        self._due = deque[Hashable]()  # those of them that wait for a thread

    def submit(self, lane: Hashable, work: Work) -> None:
        with self._changed:
            queue = self._queues.get(lane)
            if queue is not None:
                queue.append(work)
            else:
                self._queues[lane] = deque([work])
                self._due.append(lane)
            self._start(self._threads if queue is None else 1)

    def wait(self, changed: threading.Condition, reached: Callable[[], bool], timeout: float) -> bool:
        with self._changed:
            self._start(1)
        return changed.wait_for(reached, timeout)

    def close(self, timeout: float) -> bool:
        """Run what is queued, for at most ``timeout`` seconds; tell whether all of it was done."""
        with self._changed:
            self._start(1)
            return self._changed.wait_for(lambda: not self._working, timeout) and not self._queues

    def _start(self, most: int) -> None:
        """Start a thread, with the lock held, where a lane waits for one and fewer than ``most`` work."""
        if not self._due or self._working >= most:
            return
        try:
            threading.Thread(target=self._work, name="memory-behind", daemon=True).start()
        except RuntimeError as exc:  # the lane waits for the next one that starts, or has done its own
            log.warning("what is queued for the store behind the memory waits for a thread: %s", exc)
        else:
            self._working += 1

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._due:
                    self._working -= 1
                    self._changed.notify_all()
                    return
                lane = self._due.popleft()
            self._run(lane)

    def _run(self, lane: Hashable) -> None:
        while True:
            with self._changed:
                queue = self._queues[lane]
                if not queue:
                    del self._queues[lane]
                    return
                work = queue.popleft()
            work()


@dataclass(slots=True, eq=False)
class Lane:
    """What is queued for the store behind in one lane."""

    left: int = 0  # writes that are not stored
    incomplete: int = 0  # writes that neither a peer nor the store has
    error: Exception | None = None  # the first that the store has refused


@dataclass(slots=True, eq=False)
class PendingWrite:
    """A write under way. It is complete when a peer or the store has it; its entry is free when both have ended."""

    lane: Lane
    left: int  # of peer and store, those that have not ended
    complete: bool = False


class WriteBehind:
    """Queues writes for the store behind. Safe for several threads.

    Args:
        settings: limits.
        store: the store behind.
        queues: runs what is queued.
        changed: the client's lock, notified at each change.
        metrics: where stalls and writes are counted.
        clock: of stalls.
    """

    def __init__(
        self,
        settings: BlockSettings,
        store: BehindStore,
        queues: WorkQueues,
        changed: threading.Condition,
        metrics: TierMetrics,
        clock: Clock,
    ) -> None:
        self._store, self._queues, self._changed, self._metrics, self._clock = (
            store, queues, changed, metrics, clock,
        )  # fmt: skip
        self._entries, self._timeout = settings.entries, settings.store_timeout
        self._free = settings.entries
        self._lanes: dict[Hashable, Lane] = {}

    def take_entry(self) -> None:
        """Wait for a free entry, with the lock held. Raises ``MemoryTierError`` where none becomes free in time."""
        if self._free <= 0:
            self._metrics.stalls += 1
            began = self._clock.now()
            in_time = self._queues.wait(self._changed, lambda: self._free > 0, self._timeout)
            self._metrics.stall_seconds += self._clock.now() - began
            if not in_time:
                raise MemoryTierError(
                    f"the store behind has taken none of {self._entries} writes for {self._timeout:g} s"
                )
        self._free -= 1

    def begin(self, blocks: BlockRange, data: bytes, *, remote: bool) -> PendingWrite:
        """Queue a write that holds an entry, with the lock held; ``remote``: a peer gets it as well."""
        key = self._store.lane(blocks)
        lane = self._lanes.setdefault(key, Lane())
        lane.left += 1
        lane.incomplete += 1
        write = PendingWrite(lane, 2 if remote else 1)
        self._queues.submit(key, lambda: self._run(lane, lambda: self._store.write(blocks, data), write))
        return write

    def end_part(self, write: PendingWrite, *, complete: bool) -> None:
        """Record, with the lock held, that a peer or the store has ended its part; ``complete``: it has the data."""
        if complete and not write.complete:
            write.complete = True
            write.lane.incomplete -= 1
        write.left -= 1
        self._free += not write.left
        self._changed.notify_all()

    def then(self, key: Hashable, work: Callable[[], None], *, always: bool = False) -> None:
        """Queue ``work`` behind the writes of a lane; what it raises is as if the store had refused a write.

        Args:
            key: of the lane.
            work: what is done.
            always: do it even if a write before it was refused.
        """
        with self._changed:
            lane = self._lanes.setdefault(key, Lane())
            lane.left += 1
            self._queues.submit(key, lambda: self._run(lane, work, always=always))

    def settle(self, key: Hashable) -> None:
        """Wait until a peer or the store has each write of a lane. Raises ``StorageError``."""
        self._wait(key, lambda lane: not lane.incomplete)

    def flush(self, key: Hashable) -> None:
        """Wait until the store behind has all writes of a lane. Raises ``StorageError``."""
        self._wait(key, lambda lane: not lane.left)

    def forget(self, key: Hashable) -> None:
        """Drop what is known of a lane that is not used again."""
        with self._changed:
            self._lanes.pop(key, None)

    def read(self, blocks: BlockRange, offset: int, size: int) -> bytes:
        """Return ``size`` bytes of the store behind, behind what is queued in their lane. Raises ``StorageError``."""
        key, found = self._store.lane(blocks), list[bytes | Exception]()

        def work() -> None:
            try:
                data: bytes | Exception = self._store.read(blocks, offset, size)
            except Exception as exc:
                data = exc
            with self._changed:
                found.append(data)
                self._changed.notify_all()

        with self._changed:
            lane = self._lanes.get(key)
            if lane is not None and lane.error is not None:
                raise StorageError(
                    f"the store behind the memory has refused what no peer holds: {lane.error}"
                )
            self._queues.submit(key, work)
            if not self._queues.wait(self._changed, lambda: bool(found), self._timeout):
                raise StorageError(f"the store behind the memory has not answered for {self._timeout:g} s")
            self._metrics.store_hits += 1
        data = found[0]
        if isinstance(data, InfraError | OSError):
            raise data
        if isinstance(data, Exception):
            raise StorageError(f"the store behind the memory cannot be read: {data!r}") from data
        if len(data) != size:
            raise StorageError(f"the store behind the memory has {len(data)} bytes of {size}")
        return data

    def _run(
        self, lane: Lane, work: Callable[[], None], write: PendingWrite | None = None, *, always: bool = False
    ) -> None:
        error: Exception | None = None
        try:
            if always or lane.error is None:  # what follows a write that was refused is not stored either
                work()
        except Exception as exc:
            error = exc
            if not isinstance(exc, InfraError | OSError):
                log.exception("the store behind the memory has failed")
        with self._changed:
            lane.error = lane.error or error
            lane.left -= 1
            if write is not None:
                self._metrics.store_writes += lane.error is None
                self.end_part(write, complete=True)
            self._changed.notify_all()

    def _wait(self, key: Hashable, reached: Callable[[Lane], bool]) -> None:
        with self._changed:
            lane = self._lanes.get(key)
            if lane is None:
                return
            in_time = self._queues.wait(
                self._changed, lambda: reached(lane) or lane.error is not None, self._timeout
            )
            if lane.error is not None:
                raise StorageError(f"the store behind the memory refuses: {lane.error}") from lane.error
            if not in_time:
                raise StorageError(
                    f"the store behind the memory has not taken what was written for {self._timeout:g} s"
                )
