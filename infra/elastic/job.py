"""An elastic job: a master in a thread of this process, workers in processes that come and go."""

import contextlib
import os
import queue
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.elastic.application import Application, Driver, Key, Value
from ebbflow.infra.elastic.master.master import Master
from ebbflow.infra.elastic.settings import Event, Settings, check
from ebbflow.infra.elastic.wire.heartbeats import SILENCE
from ebbflow.infra.elastic.wire.messages import MASTER, NodeLoss, Scale
from ebbflow.infra.elastic.wire.transport import Envelope
from ebbflow.infra.elastic.workers import LocalWorkers, WorkerPool
from ebbflow.infra.errors import ElasticError
from ebbflow.infra.storage import private
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.storage.scratch import ScratchFolder
from ebbflow.planners.errors import OptionError

_TICK = 0.02  # seconds between looks at workers and requests
_ENDING = 5.0  # seconds that workers get to end by themselves
_SAVE_AGAIN = 0.2  # seconds between requests for a snapshot


@dataclass(frozen=True, slots=True)
class Result:
    """What a job leaves."""

    parameters: dict[Key, Value]
    executors: dict[int, Any]  # the state of each
    driver: Driver
    events: list[Event]
    seconds: float  # from the start of the first worker


class ElasticJob:
    """Runs an application on worker processes whose number may change at any time.

    >>> with ElasticJob(application, workers=2) as job:
    ...     job.scale_to(4)
    ...     result = job.result(timeout=600)

    ``directory`` keeps snapshots and logs, of one job at a time (else ``RunLockedError``, which says whose);
    without one they go when the job ends. With ``resume`` a job resumes from the
    newest whole snapshot in ``directory``; where there are some and none is whole, only with ``restart`` from the
    beginning. A worker that dies is replaced while ``replace``; otherwise the rest continue alone. Workers are
    processes of this machine, unless a ``pool`` starts them elsewhere; the job closes it at its end.

    Raises ``OptionError``.
    """

    def __init__(
        self,
        application: Application,
        workers: int = 2,
        *,
        directory: str | os.PathLike[str] | None = None,
        settings: Settings | None = None,
        resume: bool = False,
        restart: bool = False,
        replace: bool = True,
        silence: float = SILENCE,
        clock: Clock | None = None,
        pool: WorkerPool | None = None,
    ) -> None:
        settings = settings or Settings()
        check(application, workers, settings)
        if resume and directory is None:
            raise OptionError("resume needs the directory of the earlier job")
        if restart and not resume:
            raise OptionError("restart goes with resume; a new job starts from the beginning anyway")
        self._replace = replace
        self._clock = clock or SystemClock()
        # two jobs in one directory would take each other's snapshots for their own
        self._lock = (
            RunLock(StorageLocation(directory), Path(directory).absolute().name, clock=self._clock)
            if directory
            else None
        )
        if self._lock is not None:
            self._lock.acquire()
        self._uid = uuid.uuid4().hex[:12]
        self._scratch = ScratchFolder("job")
        self._sockets = str(self._scratch.path)  # only this user may enter
        self._folder = Path(directory) if directory else self._scratch.path / "job"
        private.make_folder(self._folder)
        self._target = workers
        self._started = 0
        self._failed_starts = 0
        self._serving: set[str] = set()  # workers that have become active, and are here
        self._joined: set[str] = set()
        self._since: dict[str, float] = {}  # when a worker was started, later when it was dismissed
        self._names: dict[str, None] = {}  # workers that were started and have not ended, oldest first
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._begin = self._end = self._clock.now()
        self._pool = pool or LocalWorkers(
            self._sockets, self._folder, f"elastic-{self._uid}", class_name(application), silence, self._clock
        )
        try:
            self._master = Master(
                application, workers, str(self._folder), settings, self._pool.transport.send, self._clock.now,
                self._pool.transport.forget, resume, restart, self._pool.shared,
            )  # fmt: skip
        except BaseException:
            self._pool.transport.close()
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="ebbflow-elastic-master", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what a user may ask

    def scale_to(self, workers: int) -> None:
        """Ask for so many workers; returns at once. Of too many, the newest leave, in an orderly way.

        Raises ``OptionError``.
        """
        if workers < 1:
            raise OptionError(f"workers must be >= 1; got {workers}")

        def ask() -> None:
            self._target = workers

        self._requests.put(ask)

    def leave(self, *names: str) -> None:
        """Ask the named workers to hand over and end, as on a notice; the job continues with fewer."""

        def ask() -> None:
            staying = [name for name in self._members() if name not in names]
            self._target = max(1, min(self._target, len(staying)))
            self._master.receive(Envelope(MASTER, 0, Scale(names)))

        self._requests.put(ask)

    def save(self, timeout: float) -> bool:
        """Take a snapshot now; return whether it was written within ``timeout`` seconds, or the job has ended."""
        before = self._snapshots()
        end = self._clock.now() + timeout
        while self._snapshots() == before and not self.ended:
            if self._clock.now() >= end:
                return False
            self._requests.put(self._master.save_soon)
            self._clock.sleep(_SAVE_AGAIN)
        return True

    def workers(self) -> dict[str, int]:
        """Return the process ids of the live workers, by name."""
        return self._pool.pids()

    def holds(self) -> dict[str, tuple[int, int]]:
        """Return how many executors and shards each worker holds."""
        return self._master.holds()

    def events(self) -> list[Event]:
        """Return what has happened so far."""
        return list(self._master.events)

    @property
    def driver(self) -> Driver:
        """The driver, to look at while it runs; a recovery replaces it."""
        return self._master.driver

    @property
    def ended(self) -> bool:
        """Whether the job is over, well or not; ``result`` then returns at once."""
        return self._over.is_set()

    def result(self, timeout: float) -> Result:
        """Wait for the end. Raises ``ElasticError`` when the job failed or ``timeout`` seconds were not enough."""
        if not self._clock.wait(self._over, timeout):
            raise ElasticError(f"the job has not ended within {timeout:g} s; workers hold {self.holds()}")
        if self._error:
            raise self._error
        return Result(
            self._master.values, self._master.states, self._master.driver,
            list(self._master.events), self._end - self._begin,
        )  # fmt: skip

    def close(self) -> None:
        """End all processes and threads, finished or not."""
        self._stop.set()
        if self._thread.ident:
            self._thread.join(timeout=30.0)
        else:
            self._pool.transport.close()
        self._release()

    def _release(self) -> None:
        self._pool.close()
        self._scratch.close()
        if self._lock is not None:
            self._lock.release()

    # --- the master's thread

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and self._master.phase not in {"done", "failed"}:
                self._reconcile()
                for envelope in self._pool.transport.receive(_TICK):
                    self._master.receive(envelope)
                while self._master.work():
                    pass
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._requests.get_nowait()()
            self._error = self._master.error
        except BaseException as error:
            self._error = error
        finally:
            self._end = self._clock.now()
            if self._error is None and self._master.phase != "done":
                self._error = ElasticError("the job was closed before its end")
            self._over.set()
            self._pool.transport.close()
            self._end_workers()

    def _snapshots(self) -> int:
        return sum(event.kind == "snapshot" for event in self.events())

    def _members(self) -> list[str]:
        """Return the workers that are here to stay, or on their way, oldest first."""
        return [name for name in self._names if self._stays(name)]

    def _stays(self, name: str) -> bool:
        if node := self._master.nodes.get(name):
            return node.state in {"joining", "active"}
        return name not in self._joined  # else it was dismissed and is ending

    def _reconcile(self) -> None:
        """Notice who has died or left, and start or dismiss workers until they are as the pool has it."""
        pool = self._pool
        for name in self._master.nodes.keys() - self._joined:
            self._joined.add(name)
            # heartbeats count from here on; a start may take long on a busy machine
            pool.liveness.expect(name)
        serving = {node.name for node in self._master.nodes.values() if node.state != "joining"}
        if serving - self._serving:
            self._failed_starts = 0
        self._serving = serving
        for name, why in pool.liveness.lost().items():
            if name in self._master.nodes:
                self._lose(name, f"{name} {why}")
            elif name in self._names:  # it was dismissed, and has ended
                self._remove(name)
        for name in list(self._names):
            how = pool.ended(name)
            if not how:
                self._end_when_late(name)
            elif name in self._master.nodes:
                self._lose(name, f"{name} {how}")
            else:
                self._remove(name)
                if name not in self._joined:
                    self._count_failed_start(f"{name} {how}", name)
        members = self._members()
        count, leaving = pool.changes(members, self._target)
        for _ in range(count):
            self._start()
        if leaving:
            self._master.receive(Envelope(MASTER, 0, Scale(leaving)))
            for name in leaving:
                if name not in self._master.nodes and name in self._names:  # it has not joined yet
                    self._remove(name)

    def _end_when_late(self, name: str) -> None:
        """End a worker that takes too long to join, or to end after it was dismissed; it holds nothing."""
        if name in self._master.nodes:
            self._since[name] = self._clock.now()
        elif self._clock.now() - self._since[name] > (
            _ENDING if name in self._joined else self._pool.joining
        ):
            joined = name in self._joined
            self._remove(name)
            if not joined:
                self._count_failed_start(f"{name} has not joined within {self._pool.joining:g} s", name)

    def _remove(self, name: str) -> None:
        """End a worker, or what is left of it."""
        self._pool.liveness.give_up(name)
        if name in self._names:
            del self._names[name]
            self._pool.end(name)

    def _lose(self, name: str, reason: str) -> None:
        self._remove(name)
        if not self._replace and self._target > 1:
            self._target -= 1
        if self._master.nodes[name].state == "joining":
            self._count_failed_start(reason, name)
        else:
            self._failed_starts = 0
        self._master.receive(Envelope(MASTER, 0, NodeLoss(name, reason)))

    def _count_failed_start(self, reason: str, name: str) -> None:
        """Take note that a worker has ended before it joined; too many in a row end a job that has no other."""
        self._failed_starts += 1
        if self._failed_starts < self._pool.failed_starts:
            return
        if self._master.phase != "waiting" and self._serving & self._master.nodes.keys():
            self._target, self._failed_starts = max(1, len(self._members())), 0
            self._master.log("not started", reason=reason)
            return
        text = self._pool.log(name)
        raise ElasticError(f"{self._failed_starts} workers ended before they joined; {reason}\n{text}")

    def _start(self) -> None:
        self._started += 1
        name = f"n{self._started}"
        self._since[name] = self._clock.now()
        self._names[name] = None
        self._pool.start(name)

    def _end_workers(self) -> None:
        end = self._clock.now() + (_ENDING if self._master.phase in {"done", "failed"} else 0.0)
        for name in [name for name in self._names if name not in self._joined]:
            self._remove(name)  # it has not joined, and will not hear that all is over
        while self._clock.now() < end and not all(map(self._pool.ended, self._names)):
            self._clock.sleep(_TICK)
        for name in list(self._names):
            self._remove(name)


def class_name(application: Application) -> str:
    """Return ``MODULE:CLASS`` of an application, by which workers import it."""
    return f"{type(application).__module__}:{type(application).__qualname__}"
