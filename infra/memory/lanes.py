"""``Lanes``: work in queues, each of which runs in its order and by one thread at a time."""

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

Work = Callable[[], None]  # must not raise


class WorkQueues(Protocol):
    """Runs what is submitted under one key in its order, and lets others wait for what it does."""

    def submit(self, lane: Hashable, work: Work) -> None:
        """Append ``work`` to a queue."""
        ...

    def wait(self, changed: threading.Condition, reached: Callable[[], bool], timeout: float) -> bool:
        """Wait, with ``changed`` held, until ``reached``; tell whether it is."""
        ...

    def close(self) -> None:
        """Run what is queued, and end. May be called twice."""
        ...


class Lanes:
    """``WorkQueues`` of threads.

    Args:
        threads: that work at a time.
    """

    def __init__(self, threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="memory-behind")
        self._lock = threading.Lock()
        self._queues: dict[Hashable, deque[Work]] = {}  # of queues that a thread works on, or is about to

    def submit(self, lane: Hashable, work: Work) -> None:
        with self._lock:
            queue = self._queues.get(lane)
            if queue is not None:
                queue.append(work)
                return
            self._queues[lane] = deque([work])
            self._pool.submit(self._run, lane)

    def wait(self, changed: threading.Condition, reached: Callable[[], bool], timeout: float) -> bool:
        return changed.wait_for(reached, timeout)

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _run(self, lane: Hashable) -> None:
        while True:
            with self._lock:
                queue = self._queues[lane]
                if not queue:
                    del self._queues[lane]
                    return
                work = queue.popleft()
            work()
