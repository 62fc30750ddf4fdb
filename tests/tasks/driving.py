"""A driver on real parts: planner, DuckDB and store; only the engine may be made to wait or to fail."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import StageCancelledError
from ebbflow.infra.protocols import Relation, StageJob, StageProgress, StageResult
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.slices import SliceIndex
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.model import Capacity, Node, Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.planners.query.plan.state import ExecutionState, ReplanDecision
from ebbflow.planners.query.running.execution import Execution
from ebbflow.planners.query.running.replanner import Replanner
from ebbflow.planners.query.running.session import Session, candidates
from ebbflow.tasks.query.driver import Driver
from ebbflow.tasks.query.listening import CapacityChanged, Inbox, NullQueryListener, Threads
from ebbflow.tasks.query.planning import prepare
from ebbflow.tasks.query.recorder import RunRecorder
from ebbflow.tasks.query.report import StageReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.stagework import StageWork
from ebbflow.tasks.query.verify import verify

WAIT = 150.0  # seconds; what does not happen within them does not happen
SHARED_SPARK: dict[str, Any] = {"engine": "spark", "master": "local[2]", "executor_memory": "1g"}
"""Options of queries on the Spark of tests that are marked ``spark(shared=True)``."""

FOUR_TABLES = """
    SELECT n_name, o_orderpriority, sum(l_quantity) AS quantity, count(*) AS items
    FROM customer
    JOIN orders ON c_custkey = o_custkey
    JOIN lineitem ON l_orderkey = o_orderkey
    JOIN nation ON c_nationkey = n_nationkey
    WHERE o_orderdate < DATE '1996-01-01' AND l_shipmode IN ('AIR', 'MAIL', 'RAIL')
    GROUP BY n_name, o_orderpriority
"""

ORDERS = "orders ⋈ lineitem"  # stages of FOUR_TABLES: of the bushy plan only
SHARED = "customer ⋈ nation"  # of both
JOINED = "customer ⋈ orders ⋈ lineitem ⋈ nation"  # of both, joined in different ways


def capacity(revision: int, nodes: int = 2, cores: int = 1) -> Capacity:
    return Capacity(revision, tuple(Node(f"n{i}", cores, 4.0) for i in range(nodes)), at=SystemClock().now())


@dataclass
class Scripted:
    """DuckDB, whose jobs ``before`` may delay or break. It is called in the job's thread, with the job, how
    often its stage was run before, and an event that is set when the job is cancelled."""

    before: Callable[[StageJob, int, threading.Event], None] = lambda *_: None
    name: Literal["spark", "duckdb"] = "duckdb"
    inner: DuckDbEngine = field(default_factory=lambda: DuckDbEngine.start(2, 2.0))
    runs: Counter[str] = field(default_factory=Counter)  # by the first digits of the stage's fingerprint
    jobs: list[StageJob] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    sizes: list[tuple[float, float]] = field(default_factory=list)
    _events: dict[str, threading.Event] = field(default_factory=dict)

    @property
    def scratch(self) -> StorageLocation:
        return self.inner.scratch

    def run(self, job: StageJob, on_progress: Callable[[StageProgress], None] | None = None) -> StageResult:
        before, event = self.runs[fp_of(job)], threading.Event()
        self.runs[fp_of(job)] += 1
        self.jobs.append(job)
        self._events[job.id] = event
        self.before(job, before, event)
        return self.inner.run(job, on_progress)

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)
        if job_id in self._events:
            self._events[job_id].set()
        self.inner.cancel(job_id)

    def resize(self, cores: float, memory: float) -> None:
        self.sizes.append((cores, memory))

    def confine(
        self, relations: Sequence[Relation], folders: Sequence[StorageLocation], everything: bool = False
    ) -> None:
        self.inner.confine(relations, folders, everything)

    def tables(self) -> Sequence[Relation]:
        return ()

    def close(self) -> None:
        self.inner.close()


def fp_of(job: StageJob) -> str:
    return job.id.split("-")[0]


def key(stage: Stage) -> str:
    return stage.output_fp[:12]


def until_cancelled(job: StageJob, cancelled: threading.Event) -> None:
    """Wait until the job is cancelled, then end as an engine does."""
    assert cancelled.wait(WAIT), f"{job.name} was never cancelled"
    raise StageCancelledError(f"{job.name} was cancelled")


class Obedient(Replanner):
    """A replanner that goes to the plans it is told, one at each decision, and stays after that."""

    def __init__(self, plans: Sequence[QueryExecutionPlan], orders: Sequence[str]) -> None:
        super().__init__(plans)
        self.orders = list(orders)

    def significant(self, before: Share, after: Share) -> bool:
        return True

    def decide(self, state: ExecutionState, share: Share, now: float, trigger: str) -> ReplanDecision:
        current = state.plan.id
        target = self.orders.pop(0) if self.orders and trigger == "as told" else current
        kind: Literal["switch", "stay"] = "stay" if target == current else "switch"
        return ReplanDecision(kind, share.revision, now, current, target, "as told", trigger)


@dataclass
class Recorder(NullQueryListener):
    """Keeps what a listener hears; ``on_start`` is called as well."""

    on_start: Callable[[Stage], None] = lambda _: None
    started: list[Stage] = field(default_factory=list)
    ended: list[StageReport] = field(default_factory=list)
    decisions: list[ReplanDecision] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    def stage_started(self, stage: Stage) -> None:
        self.started.append(stage)
        self.on_start(stage)

    def stage_ended(self, stage: Stage, report: StageReport) -> None:
        self.ended.append(report)

    def decided(self, decision: ReplanDecision) -> None:
        self.decisions.append(decision)

    def capacity_changed(self, capacity: Capacity, change: str) -> None:
        self.changes.append(change)

    def note(self, text: str) -> None:
        self.notes.append(text)


class Ride:
    """A query, prepared; ``drive`` runs it with the engine and the replanner given."""

    def __init__(self, request: QueryRequest, cores: float = 2.0, hazard: float = 0.0) -> None:
        self.request = request
        self.clock = SystemClock()
        self.store = ParquetCheckpointStore(request.store_place, clock=self.clock)
        self.gathered, self.planner = prepare(request, self.store, self.clock, run_id="ride")
        if hazard:  # statements without a fixed cost: even small stages are worth dividing
            model = self.planner.model
            self.planner.model = model.with_rates(model.rates, 1e-9)
        self.plans = candidates(self.planner, request.planner, Share.uniform(cores, 8.0, 2, hazard=hazard))
        self.inbox: Inbox = Inbox()
        self.listener = Recorder()

    def tell(self, seen: Capacity, change: str = "as told") -> None:
        self.inbox.put(CapacityChanged(seen, change))

    def drive(
        self,
        engine: Any,
        replanner: Replanner | None = None,
        chosen: QueryExecutionPlan | None = None,
        first: Capacity | None = None,
    ) -> Driver:
        """Run to the end; return the driver, whose session and book tells everything. Raises what the run raises."""
        execution = Execution(
            self.plans,
            chosen,
            self.request.planner,
            replanner or Replanner(self.plans),
            max_parallel_stages=4,
        )
        threads = Threads(8)
        planner = self.planner
        planner.candidates = lambda share, actuals=None, also=(), contrasts=True: self.plans  # type: ignore[method-assign]
        session = Session(
            planner, Share.of(capacity(1)), versions=self.gathered.versions, execution=execution
        )
        book = RunRecorder(self.clock.now(), self.listener)
        slices = SliceIndex(self.store, self.store.cache("slices"))
        work = StageWork(
            engine,
            self.store,
            self.gathered.relations,
            slices,
            self.inbox,
            reuse=self.request.reuse,
            since=book.started,
        )
        driver = Driver(session, work, book, threads, self.clock)
        self.driver = driver
        try:
            driver.run(first or capacity(1))
        finally:
            threads.close()
        return driver


def bushy_and_deep(plans: Sequence[QueryExecutionPlan]) -> tuple[QueryExecutionPlan, QueryExecutionPlan]:
    """Return the plans of ``FOUR_TABLES``: ol beside cn, then both joined; and cn, then con, then all."""
    bushy = next(p for p in plans if sum(not s.inputs for s in p.stages) == 2)
    deep = next(p for p in plans if sum(not s.inputs for s in p.stages) == 1)
    assert "customer ⋈ nation" in names(bushy) & names(deep)
    return bushy, deep


def names(plan: QueryExecutionPlan) -> set[str]:
    return {s.name for s in plan.stages}


def fingerprint(plan: QueryExecutionPlan, name: str) -> str:
    """Return that of the stage that is named so."""
    return next(s.output_fp for s in plan.stages if s.name == name)


def right(ride: Ride, driver: Driver) -> bool:
    assert driver.result is not None
    return verify(ride.gathered, driver.result)[0] is True


def statuses(driver: Driver, name: str) -> list[str]:
    return [s.status for s in driver.recorder.stages if s.name == name]
