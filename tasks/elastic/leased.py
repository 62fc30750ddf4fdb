"""Workers of an elastic job on the slots that its app has leases on, one each."""

import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from ebbflow.infra.clock import Clock
from ebbflow.infra.elastic.wire.heartbeats import JOINING, SILENCE, LivenessTracker
from ebbflow.infra.elastic.wire.messages import MASTER
from ebbflow.infra.elastic.wire.network import MasterInbox, NetworkTransport
from ebbflow.infra.errors import InfraError, StorageError
from ebbflow.infra.storage import records
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.channel.wire import Entry
from ebbflow.planners.model.ledger import Lease
from ebbflow.tasks.apps.agent import AppAgent
from ebbflow.tasks.training.leased.enforcer import LeaseEnforcer
from ebbflow.tasks.training.leased.nodes import FencedPool, NodeBackoff
from ebbflow.tasks.training.leased.site import MakePool

_PROGRAM = "ebbflow.infra.elastic.worker.remote"
_AT_ONCE = 8  # workers that are started or ended at a time
_POLL = 0.2  # s between looks at nodes
_LOOK = 0.1  # s for which a look at the leases serves
_SILENT_START = 30.0  # s without a heartbeat of a worker that has not joined yet: imports may hold it up
_LEFT = "its first process ended with status 0"  # what a pool says of a worker that has left
_FORMAT = 1

log = logging.getLogger(__name__)


class PoolRecord:
    """Which pools of nodes a job has, on file, for whoever runs it again: what they run must be gone first."""

    def __init__(self, folder: str) -> None:
        self._file = StorageLocation(folder).under("pools.json")
        self._lock = threading.Lock()
        self._uids: set[str] = set()

    def earlier(self) -> tuple[str, ...]:
        """Return the pools of earlier processes. Raises ``StorageError``."""
        if not self._file.is_file():
            return ()
        try:
            return tuple(records.load(self._file, _FORMAT)["uids"])
        except (ValueError, KeyError, records.OtherVersionError) as error:
            raise StorageError(
                f"{self._file} is damaged ({error}); it names processes that may still run"
            ) from error

    def add(self, uid: str) -> None:
        """Write down a pool before anything runs there. Raises ``StorageError``."""
        with self._lock:
            self._uids.add(uid)
            self._save()

    def remove(self, uid: str) -> None:
        """Strike a pool of which nothing runs any more."""
        with self._lock:
            self._uids.discard(uid)
            self._save()

    def _save(self) -> None:
        records.save(self._file, {"uids": sorted(self._uids)}, _FORMAT)


@dataclass
class _Worker:
    lease: Lease
    pool: FencedPool | None = None
    ended: str = ""  # how, once it has
    launch: "Future[None] | None" = None
    admitted: float | None = None  # when its key was told: its process runs since
    dismissed: threading.Event = field(default_factory=threading.Event)


class LeasedWorkers:
    """A ``WorkerPool`` of an elastic job. A lease that may not be used any longer has its worker leave.

    Workers reach their master, and each other, over the network; snapshots go through the master.

    Args:
        agent: of the app.
        enforcer: ends what stays on a slot for too long.
        pool: makes pools of the cluster's nodes, one for each worker.
        application: ``MODULE:CLASS`` of the application.
        most: workers at most.
        record: where pools are written down.
        avoided: nodes that were lost lately.
        clock: the app's.
        variables: of the workers' environment, on top of their nodes'.
        silence: seconds without a heartbeat after which a worker counts as dead.
        code: directory of the user's code that workers import the application from, a path or URI; empty: none.
    """

    shared = False
    joining = (
        600.0  # Systems Manager may have to learn of a node first; see ``ended`` for what is known sooner
    )
    failed_starts = 20

    def __init__(
        self,
        agent: AppAgent,
        enforcer: LeaseEnforcer,
        pool: MakePool,
        application: str,
        most: int,
        record: PoolRecord,
        avoided: NodeBackoff,
        clock: Clock,
        variables: Mapping[str, str] | None = None,
        silence: float = SILENCE,
        code: str = "",
    ) -> None:
        self._agent, self._enforcer, self._pool, self._application = agent, enforcer, pool, application
        self._most, self._record, self._avoided, self._clock = most, record, avoided, clock
        self._variables, self._silence, self._code = dict(variables or {}), silence, code
        asked = pool()
        self._host = asked.host
        asked.close()
        self._inbox = MasterInbox(self._host, clock, silence)
        self.liveness: LivenessTracker = self._inbox.liveness
        self.transport = NetworkTransport(MASTER, self._inbox, self._inbox.route, self.liveness.record_broken)
        self._lock = threading.RLock()
        self._workers: dict[str, _Worker] = {}
        self._outputs: dict[str, str] = {}  # last lines of workers that have ended by themselves
        self._ending: set[int] = set()  # leases whose workers are being ended
        self._looked = float("-inf")
        self._usable: dict[int, Lease] = {}
        self._startable: list[Lease] = []
        self.stranded = False  # all workers that have joined must leave: there is none to hand over to
        self._work = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ebbflow-elastic-nodes")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ebbflow-elastic-nodes", daemon=True)
        self._thread.start()

    @property
    def present(self) -> int:
        """Return how many workers there are, those that start included."""
        with self._lock:
            return len(self._workers)

    # --- what the job asks --------------------------------------------------------------------------------

    def changes(self, members: Sequence[str], target: int) -> tuple[int, tuple[str, ...]]:
        """See ``WorkerPool``; the leases decide."""
        with self._lock:
            self._look()
            leaving = tuple(name for name in members if self._workers[name].lease.number not in self._usable)
            staying = [name for name in members if name not in leaving]
            joined = self.liveness.watched()
            # executors need a worker to move to; where there is none the job is saved and ends
            self.stranded = any(name in joined for name in leaving) and joined.isdisjoint(staying)
            if self.stranded:
                leaving = tuple(name for name in leaving if name not in joined)
            count = min(len(self._startable), self._most - len(staying))
            return max(0, count), leaving

    def start(self, name: str) -> None:
        """See ``WorkerPool``."""
        with self._lock:
            worker = self._workers[name] = _Worker(self._startable.pop(0))
            worker.launch = self._work.submit(self._launch, name, worker)

    def ended(self, name: str) -> str:
        """See ``WorkerPool``. A worker whose process was started has ended, too, if its heartbeats say so."""
        with self._lock:
            worker = self._workers[name]
            if not worker.ended and (silent := self._silent(name, worker)):
                self._avoided.lost([worker.lease.node])
                worker.ended = f"is gone from {worker.lease.node}: {silent}"
            return worker.ended

    def end(self, name: str) -> None:
        """See ``WorkerPool``."""
        self._inbox.forget(name)
        with self._lock:
            worker = self._workers.pop(name)
            worker.dismissed.set()
            if worker.pool is not None and name not in self._outputs:
                self._outputs[name] = worker.pool.log(worker.lease.node)
            self._ending.add(worker.lease.number)
            self._work.submit(self._close, worker)

    def pids(self) -> dict[str, int]:
        """See ``WorkerPool``; nodes know their processes."""
        return {}

    def log(self, name: str) -> str:
        """See ``WorkerPool``."""
        return self._outputs.get(name, "")

    def close(self) -> None:
        """See ``WorkerPool``. Returns once all processes are gone, or it is known which are not."""
        if self._stop.is_set():
            return
        for name in list(self._workers):
            self.end(name)
        self._work.shutdown(wait=True)
        self._stop.set()
        self._thread.join(10.0)
        self._inbox.close()

    # --- how ----------------------------------------------------------------------------------------------

    def _silent(self, name: str, worker: _Worker) -> str:
        """Return why a worker that has not joined yet will not any more; empty: it may.

        A process that reaches no master ends by itself after ``JOINING`` seconds, and one that has reached it beats
        until it ends. Once it has joined the tracker watches it.
        """
        if worker.admitted is None or name in self.liveness.watched():
            return ""
        now, last = self._clock.now(), self.liveness.last_beat(name)
        if last is None:
            late = now - worker.admitted > JOINING + self._silence
            return f"no heartbeat within {JOINING + self._silence:g} s of its start" if late else ""
        limit = max(self._silence, _SILENT_START)
        return f"missed heartbeats for {limit:g} s before it joined" if now - last > limit else ""

    def _look(self) -> None:
        now = self._clock.now()
        if now - self._looked >= _LOOK:
            self._looked = now
            allowed = self._agent.lease_table.allowed()
            self._usable = {lease.number: lease for lease in allowed}
            taken = self._ending | {worker.lease.number for worker in self._workers.values()}
            self._startable = [one for one in self._avoided.without(allowed) if one.number not in taken]

    def _launch(self, name: str, worker: _Worker) -> None:
        agent, lease = self._agent, worker.lease
        try:
            made = self._pool()
            pool = FencedPool(
                made,
                agent.lease_table,
                agent.left,
                self._clock,
                lambda: {lease.number},
                agent.is_pool_reported,
            )
            worker.pool = pool
            self._record.add(made.uid)
            self._enforcer.watch(pool)
            agent.poke()  # nothing starts before the ledger has heard of it
            arguments = (name, str(self._silence), self._application)
            entry = Entry(
                launcher=self._inbox.address,
                server=self._inbox.public,
                run=agent.spec.id,
                name=lease.node,
                key=secrets.token_hex(6),
                address="",
                folder="",
                program=_PROGRAM,
                arguments=(*arguments, *(f"{key}={value}" for key, value in self._variables.items())),
                code=self._code,
            )

            def admit(public: str) -> None:
                self._inbox.admit(public)
                worker.admitted = self._clock.now()

            if not worker.dismissed.is_set():
                pool.start(lease.node, 1, entry, admit)
        except InfraError as error:
            log.info("%s: no worker on %s: %s", agent.spec.id, lease.node, error)
            self._avoided.lost([lease.node])
            worker.ended = f"could not be started on {lease.node}: {error}"
        except Exception as error:
            log.exception("%s: a worker could not be started", agent.spec.id)
            worker.ended = f"could not be started on {lease.node}: {type(error).__name__}: {error}"

    def _close(self, worker: _Worker) -> None:
        """End a worker, and give its lease back to what may use it."""
        try:
            if worker.launch is not None:
                worker.launch.exception()
            if worker.pool is not None:
                worker.pool.close()
                if worker.pool.closed:
                    self._record.remove(worker.pool.uid)
        except Exception:
            log.exception("%s: a worker could not be ended", self._agent.spec.id)
        finally:
            with self._lock:
                self._ending.discard(worker.lease.number)
            self._agent.poke()

    def _watch(self) -> None:
        """Look at nodes now and then: what became of one is asked of its provider, which may take a moment."""
        while not self._clock.wait(self._stop, _POLL):
            with self._lock:
                running = [(n, w) for n, w in self._workers.items() if w.pool is not None and not w.ended]
            for name, worker in running:
                if worker.launch is None or not worker.launch.done() or worker.pool is None:
                    continue
                try:
                    how = worker.pool.lost(worker.lease.node)
                except InfraError as error:
                    log.warning("%s: a node could not be looked at: %s", self._agent.spec.id, error)
                    continue
                if how:
                    if how != _LEFT:
                        self._avoided.lost([worker.lease.node])
                    self._outputs[name] = worker.pool.log(worker.lease.node)
                    worker.ended = f"is gone from {worker.lease.node}: {how}"
