"""One query from request to report, under any orchestrator."""

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import EngineUnavailableError, StorageError
from ebbflow.infra.protocols import CapacitySource, Checkpoint, SqlEngine
from ebbflow.infra.query.calibration import calibrate
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.slices import SliceIndex
from ebbflow.infra.storage.files import GIB
from ebbflow.planners.model import Share
from ebbflow.planners.query.coverage import coverage, sentences
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.running.execution import Execution
from ebbflow.planners.query.running.packing import simulate
from ebbflow.planners.query.running.session import MAX_PARALLEL_STAGES, Session, planning_share
from ebbflow.tasks.query.book import Book
from ebbflow.tasks.query.driver import Driver
from ebbflow.tasks.query.feedback import Feedback
from ebbflow.tasks.query.listening import CapacityChanged, Fan, Inbox, Listener, Silent, StageOutcome, Threads
from ebbflow.tasks.query.opening import Opened, arrived_capacity, opened_engine, shared_source
from ebbflow.tasks.query.planning import Prepared, prepare, remember
from ebbflow.tasks.query.report import PlanReport, QueryReport, spoken
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.sharing import Demand, SharedCapacity
from ebbflow.tasks.query.stagework import StageWork
from ebbflow.tasks.query.verify import verify


class Orchestrator(Protocol):
    """What runs things in the background and hears of them: plain threads, Prefect, Airflow."""

    listener: Listener

    def submit(self, stage: Stage, work: Callable[[], StageOutcome]) -> None: ...

    def watch(self, feedback: Feedback, stop: threading.Event) -> None:
        """Run ``feedback.run(stop)`` in the background."""
        ...

    def settle(self) -> None:
        """Wait, bounded, until what was submitted has ended."""
        ...


class PlainOrchestrator:
    """Threads of this process."""

    def __init__(self, listener: Listener | None = None) -> None:
        self.listener: Listener = listener or Silent()
        self._stages = Threads(MAX_PARALLEL_STAGES + 2)
        self._watch = ThreadPoolExecutor(1, thread_name_prefix="ebbflow-feedback")

    def submit(self, stage: Stage, work: Callable[[], StageOutcome]) -> None:
        self._stages.submit(stage, work)

    def watch(self, feedback: Feedback, stop: threading.Event) -> None:
        self._watch.submit(feedback.run, stop)

    def settle(self) -> None:
        self._stages.close()
        self._watch.shutdown(wait=True)


@dataclass(frozen=True)
class QueryOutcome:
    """A finished query: the report, and where its rows are."""

    report: QueryReport
    result: Checkpoint


def execute(
    request: QueryRequest,
    orchestrator: Orchestrator,
    clock: Clock | None = None,
    opened: Opened | None = None,
    follow: Callable[[Execution], Listener] | None = None,
) -> QueryOutcome:
    """Run ``request`` to its end and return the outcome; what it asks to be written, ``deliver`` writes
    (``ebbflow.tasks.report.query``).

    ``opened`` is an engine that the caller keeps (``opened_engine``); otherwise one is started and closed. ``follow``
    makes a further listener of the query's execution, which it may look at in the thread that it is called in.

    Raises errors of the ``EbbflowError`` family; finished stages stay in the store whatever happens.
    """
    clock = clock or SystemClock()
    run_id = uuid.uuid4().hex
    store = ParquetCheckpointStore(request.store, clock=clock)
    with (
        ExitStack() as leaving,  # a share is given up last: its cores are free only once the engine has closed
        _prepared_and_opened(request, store, clock, run_id, opened) as (found, started_engine),
    ):
        store.hash_with(started_engine.engine)
        source = shared_source(started_engine, request, store, clock)
        if isinstance(source, SharedCapacity):
            leaving.callback(source.leave)
        feedback_inbox: Inbox = Inbox()
        feedback = Feedback(
            source,
            clock,
            lambda capacity, change: feedback_inbox.put(CapacityChanged(capacity, change)),
            failed=feedback_inbox.put,
        )
        capacity = arrived_capacity(source, clock, started_engine.settled)
        started_engine.settled = True
        prepared = found
        if request.calibrate and not found.history:
            orchestrator.listener.note("measuring the engine, once")
            cores = max(Share.of(capacity).total.cores, 1.0)
            prepared = replace(found, history=calibrate(started_engine.engine, cores))
            remember(store, request, prepared.history)
        started_engine.engine.confine(prepared.read(), [store.uri], prepared.everything)
        started = clock.now()
        slices = SliceIndex(store, store.cache("slices"))
        session = session_of(request, prepared, planning_share(capacity, request.fraction), slices)
        for note in session.planner.notes:
            orchestrator.listener.note(note)
        listener = _listeners(orchestrator.listener, session.execution, source, started_engine.engine)
        if follow is not None:
            listener = Fan(listener, follow(session.execution))
        book = Book(started, listener)
        work = StageWork(
            started_engine.engine,
            store,
            prepared.relations,
            slices,
            feedback_inbox,
            reuse=request.reuse,
            since=started,
        )
        stop = threading.Event()
        feedback.begin(capacity)
        try:
            orchestrator.watch(feedback, stop)
            result = Driver(session, work, book, orchestrator, clock).run(capacity)
        finally:
            stop.set()
            orchestrator.settle()
        seconds = clock.now() - started
    remember(store, request, session.measured)
    verdict = verify(prepared, result) if request.verify else (None, "")
    report = book.report(request, session, result, seconds, verdict, store.problems())
    with suppress(StorageError):  # housekeeping: the result is there
        written = sum(stage.bytes for stage in report.stages if stage.status == "completed")
        used = frozenset(stage.fingerprint for stage in report.stages)
        store.tidy(int(request.store_budget * GIB), written, used)
    return QueryOutcome(report, result)


@contextmanager
def _prepared_and_opened(
    request: QueryRequest, store: ParquetCheckpointStore, clock: Clock, run_id: str, given: Opened | None
) -> Iterator[tuple[Prepared, Opened]]:
    """Plan while the engine starts, which takes seconds for Spark. A bad query is told first."""
    if given is not None:
        yield prepare(request, store, clock, run_id=run_id, engine=given.engine), given
        return
    if request.catalog:
        with opened_engine(request, clock) as opened:
            yield prepare(request, store, clock, run_id=run_id, engine=opened.engine), opened
        return
    with ThreadPoolExecutor(1, thread_name_prefix="ebbflow-planning") as pool:
        planning = pool.submit(prepare, request, store, clock, run_id=run_id)
        try:
            with opened_engine(request, clock) as opened:
                yield planning.result(), opened
        except EngineUnavailableError:
            planning.result()
            raise


def session_of(
    request: QueryRequest, prepared: Prepared, share: Share, slices: SliceIndex | None = None
) -> Session:
    """Return the query's session, with its first candidates for ``share``; ``slices`` are those of earlier runs."""
    session = Session(
        prepared.planner,
        share,
        request.policy,
        hysteresis=request.hysteresis,
        fraction=request.fraction,
        history=prepared.history,
        versions=prepared.versions,
    )
    if slices is None or not request.reuse or request.policy == "single":
        return session
    if begun := slices.begun(session.fingerprints):  # an earlier run has left slices
        session.divide_as_before(begun)
    return session


def _listeners(
    listener: Listener, execution: Execution, source: CapacitySource, engine: SqlEngine
) -> Listener:
    """Let the others on the cluster know what the query can use, where tasks tell."""
    if not isinstance(source, SharedCapacity) or engine.name != "spark":
        return listener
    return Fan(listener, Demand(execution, source.want))


def explain(
    request: QueryRequest, share: Share, clock: Clock | None = None
) -> tuple[tuple[PlanReport, ...], tuple[str, ...]]:
    """Plan ``request`` for ``share`` without running anything; return candidates and notes."""
    clock = clock or SystemClock()
    store = ParquetCheckpointStore(request.store, clock=clock)
    prepared = prepare(request, store, clock, run_id="explain")
    session = session_of(request, prepared, share)
    session.begin({}, clock.now())
    decision = session.execution.decisions[0]
    reports: list[Any] = [
        PlanReport.of(
            plan,
            estimated_seconds=simulate(plan, share, MAX_PARALLEL_STAGES).seconds,
            cores=share.total.cores,
            chosen=plan.id == decision.chosen,
            reason=spoken(decision) if plan.id == decision.chosen else "",
        )
        for plan in session.plans.values()
    ]
    return tuple(reports), (*sentences(coverage(prepared.planner.analysis)), *prepared.planner.notes)
