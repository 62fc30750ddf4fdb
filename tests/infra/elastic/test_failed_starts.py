"""Workers that end before they join, beside one that works: all in threads of this process."""

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence

import pytest
from elastic_samples import Mixing, expected, same

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.elastic import ElasticJob
from ebbflow.infra.elastic.wire import codec
from ebbflow.infra.elastic.wire.heartbeats import LivenessTracker
from ebbflow.infra.elastic.wire.messages import MASTER, Address
from ebbflow.infra.elastic.wire.transport import Envelope, Transport
from ebbflow.infra.elastic.worker.node import run
from ebbflow.infra.errors import ElasticError

Queues = dict[Address, "queue.SimpleQueue[list[bytes]]"]


class Line(Transport):
    """One actor's end, which breaks once ``over`` is set."""

    def __init__(self, address: Address, queues: Queues, over: threading.Event) -> None:
        self._address, self._queues, self._over = address, queues, over

    def send(self, to: Address, envelope: Envelope) -> None:
        self._queues[to].put([bytes(frame) for frame in codec.encode(envelope)])

    def receive(self, timeout: float) -> list[Envelope]:
        try:
            first = self._queues[self._address].get(timeout=max(timeout, 1e-4))
        except queue.Empty:
            if self._over.is_set():
                raise ConnectionError("the job is over") from None
            return []
        return [codec.decode(first)]

    def forget(self, address: Address) -> None:
        pass

    def close(self) -> None:
        pass


class Threads:
    """A pool of two workers, or as many as the job asks for, of which only the first ``good`` ones start."""

    shared = True
    joining = 60.0
    failed_starts = 3

    def __init__(self, good: int, leased: bool) -> None:
        self._good, self._leased = good, leased
        self._clock = SystemClock()
        self._queues: Queues = defaultdict(queue.SimpleQueue)
        self._over = threading.Event()
        self.transport: Transport = Line(MASTER, self._queues, self._over)
        self.liveness = LivenessTracker(self._clock, silence=600.0)
        self._threads: dict[str, threading.Thread] = {}
        self.job: ElasticJob | None = None  # once set, others start only when a worker of it holds something
        self.failed = 0

    def changes(self, members: Sequence[str], target: int) -> tuple[int, tuple[str, ...]]:
        if self.job is not None and not any(executors for executors, _ in self.job.holds().values()):
            target = 1
        elif self._leased:
            target = 2
        return max(0, target - len(members)), ()

    def start(self, name: str) -> None:
        if len(self._threads) < self._good:
            lines = [Line(f"{name}/{actor}", self._queues, self._over) for actor in ("worker", "server")]
            thread = threading.Thread(target=run, args=(name, self._clock, *lines), daemon=True)
            self._threads[name] = thread
            thread.start()

    def ended(self, name: str) -> str:
        if name in self._threads:
            return "" if self._threads[name].is_alive() else "ended"
        return "could not be started"

    def end(self, name: str) -> None:
        self.failed += name not in self._threads

    def pids(self) -> dict[str, int]:
        return {}

    def log(self, name: str) -> str:
        return "what it said"

    def close(self) -> None:
        self._over.set()
        for thread in self._threads.values():
            thread.join(150)


def test_failed_starts_do_not_end_a_job_whose_workers_are_well() -> None:
    app, pool = Mixing(executors=4, iterations=100), Threads(1, leased=True)
    pool.job = ElasticJob(app, 1, pool=pool)
    with pool.job as job:
        result = job.result(150)
    assert same(result.parameters, expected(app))
    assert pool.failed >= 2 * pool.failed_starts
    assert [event.kind for event in result.events].count("not started") >= 2


def test_a_job_does_not_try_for_ever_to_have_more_workers() -> None:
    app, pool = Mixing(executors=4, iterations=100), Threads(1, leased=False)
    pool.job = ElasticJob(app, 1, pool=pool)
    with pool.job as job:
        job.scale_to(2)
        result = job.result(150)
    assert same(result.parameters, expected(app))
    assert pool.failed == pool.failed_starts


def test_a_job_without_enough_workers_to_begin_ends() -> None:
    with (
        ElasticJob(Mixing(), 2, pool=Threads(1, leased=False)) as job,
        pytest.raises(
            ElasticError, match=r"3 workers ended before they joined; n\d+ could not be started\nwhat"
        ),
    ):
        job.result(150)
