"""One query from request to report, under any orchestrator."""

import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import EngineUnavailableError, StorageError
from ebbflow.infra.logs.json_lines import log_ids
from ebbflow.infra.protocols import CapacitySource, Checkpoint, SqlEngine
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.pins import Pins
from ebbflow.infra.query.slices import SliceIndex
from ebbflow.infra.storage.files import GIB
from ebbflow.planners.memory.tiers import Tier
from ebbflow.planners.model import Capacity, Share
from ebbflow.planners.query.costs.stage_engines import StageEngines
from ebbflow.planners.query.coverage import coverage, sentences
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.planner import PlannerOptions, QueryPlanner
from ebbflow.planners.query.running.execution import Execution
from ebbflow.planners.query.running.packing import simulate
from ebbflow.planners.query.running.session import MAX_PARALLEL_STAGES, Session, planning_share
from ebbflow.tasks.memory.meanwhile import opened_meanwhile
from ebbflow.tasks.query.driver import Driver
from ebbflow.tasks.query.feedback import Feedback
from ebbflow.tasks.query.listening import (
    CapacityChanged,
    CompositeQueryListener,
    Inbox,
    Listener,
    NullQueryListener,
    StageOutcome,
    Threads,
    TierChanged,
)
from ebbflow.tasks.query.opening import (
    OpenedEngine,
    arrived_capacity,
    choose_engine,
    connected,
    on_connect,
    opened_engine,
    shared_source,
)
from ebbflow.tasks.query.planning import Gathered, planner_of, prepare, remember
from ebbflow.tasks.query.recorder import RunRecorder
from ebbflow.tasks.query.report import PlanReport, QueryReport, reason_text
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.sharing import Demand, SharedCapacity
from ebbflow.tasks.query.stagework import StageWork, stage_ways

if TYPE_CHECKING:
    from ebbflow.tasks.memory.tier import OpenTier

_LONG = 3.0  # seconds of starting an engine after which it is told of


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
        self.listener: Listener = listener or NullQueryListener()
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
    run: str = ""  # id of the run, the same for those that continue one
    pins: Pins | None = None  # what was kept for it
    tables: Mapping[str, str] = field(
        default_factory=dict
    )  # versions of the tables that it has read, by name

    def to_arrow(self) -> Any:
        """Return all rows as a ``pyarrow.Table``; see ``QueryReport.to_arrow``."""
        return self.report.to_arrow()

    def to_pandas(self) -> Any:
        """Return all rows as a ``pandas.DataFrame``; see ``QueryReport.to_pandas``."""
        return self.report.to_pandas()

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def execute(
    request: QueryRequest,
    orchestrator: Orchestrator | None = None,
    clock: Clock | None = None,
    opened: OpenedEngine | None = None,
    follow: Callable[[Execution], Listener] | None = None,
    app: str = "",
    stop: threading.Event | None = None,
) -> QueryOutcome:
    """Run ``request`` to its end and return the outcome; what it asks to be written, ``deliver`` writes
    (``ebbflow.tasks.report.delivery``).

    Without an ``orchestrator``, stages run in threads of this process.
    ``opened`` is an engine that the caller keeps (``opened_engine``); otherwise one is started and closed. ``follow``
    makes a further listener of the query's execution, which it may look at in the thread that it is called in.
    ``app`` is the id of the app that the query is, if any: what is pinned for one of its runs is for no other query.
    ``stop``, set by others, ends the wait for a cluster's first node; once stages run, ``orchestrator`` ends them.

    Raises errors of the ``EbbflowError`` family; finished stages stay in the store whatever happens.
    """
    import pyarrow  # noqa: F401 - whole: of threads that import it at once, one may find it half done

    clock, orchestrator = clock or SystemClock(), orchestrator or PlainOrchestrator()
    if opened is None and on_connect(request):
        with connected(request, clock) as (inner, engine):
            return execute(inner, orchestrator, clock, engine, follow, app, stop)
    request = choose_engine(request, clock, opened)
    store = ParquetCheckpointStore(request.store_place, clock=clock, durable=request.durable)
    pins, began = _pins(request, store, clock, app), clock.now()
    with (
        _memory(request, store) as opened_memory,
        ExitStack() as leaving,  # a share is given up last: its cores are free only once the engine has closed
        _prepared_and_opened(request, store, clock, opened, pins, orchestrator.listener.note, stop) as (
            found,
            planner,
            running,
        ),
    ):
        memory = opened_memory()
        run = pins.keep(found.pins(), anew=not request.reuse, durable=request.into is not None)
        engine, inbox = running.engine, Inbox()
        store.hash_with(engine)
        source = shared_source(running, request, store, clock)
        if isinstance(source, SharedCapacity):
            leaving.callback(source.leave)
        waited = clock.now() - began
        if engine.name == "spark" and waited >= _LONG and not running.settled:
            orchestrator.listener.note(f"Spark started in {waited:.0f} s; waiting for its executors")
        capacity = arrived_capacity(source, clock, running.settled)
        running.settled = True
        gathered = found
        if request.calibrate and not found.history:
            from ebbflow.infra.query.calibration import calibrate  # a measurement is rare

            orchestrator.listener.note("measuring the engine, once")
            gathered = replace(found, history=calibrate(engine, max(Share.of(capacity).total.cores, 1.0)))
            remember(store, request, gathered.history)
        engine.confine(gathered.read(), [store.place], gathered.everything)
        told = [*running.notes, *(() if memory is None else (memory.opening,))]
        for note in (*gathered.notes, *told):
            orchestrator.listener.note(note)
        started = clock.now()
        slices = SliceIndex(store, store.cache("slices"))
        share = planning_share(capacity, request.fraction)
        ways = stage_ways(request, gathered, engine, cores=share.total.cores)
        if ways.told:
            told.append(ways.told)
            orchestrator.listener.note(ways.told)
            chosen = replace(request, stages=ways.stages)
            made = planner_of(chosen, gathered, store, run_id=uuid.uuid4().hex)
        session = session_of(request, gathered, made if ways.told else planner, share, slices)
        listener = _listener(orchestrator.listener, session, source, engine, follow)
        book = RunRecorder(started, listener, told)
        if memory is not None:
            leaving.callback(_follow(memory, request, inbox))
        each = StageEngines(ways.stages, gathered.history) if ways.stages != "spark" else None
        work = StageWork(
            engine,
            store,
            gathered.relations,
            slices,
            inbox,
            reuse=request.reuse,
            since=started,
            engines=each,
            sampled=session.execution.policy.replans,
        )
        with log_ids(run=run), _watched(source, capacity, inbox, orchestrator, clock):
            result = Driver(session, work, book, orchestrator, clock).run(capacity)
            if request.into_table is not None:
                from ebbflow.infra.query.table_results import write_into  # few queries write into tables

                write_into(result, request.into_table, run, engine, book.note, clock)
        seconds = clock.now() - started
        if memory is not None and memory.session is not None:
            memory.flush()
            book.note(memory.summary())
    if request.into is None:  # else ``deliver`` ends it
        pins.forget()
    remember(store, request, session.measured)
    verdict: tuple[bool | None, str] = None, ""
    if request.verify:
        from ebbflow.tasks.query.verify import verify  # few are compared

        verdict = verify(gathered, result)
    report = book.report(request, session, result, seconds, verdict, store.problems())
    with suppress(StorageError):  # housekeeping: the result is there
        written = sum(stage.bytes for stage in report.stages if stage.status == "completed")
        used = frozenset(stage.fingerprint for stage in report.stages)
        store.tidy(int(request.store_budget * GIB), written, used)
    tables = {table.name: gathered.versions.get(table.name.lower(), "") for table in gathered.read()}
    return QueryOutcome(replace(report, result=result), result, run, pins, tables)


def _pins(request: QueryRequest, store: ParquetCheckpointStore, clock: Clock, app: str = "") -> Pins:
    """Return the versions of tables that runs of this query keep: of the app ``app``, or of the same statement over
    the same tables."""
    said = [app] if app else [request.sql, request.dialect, request.tables_place, request.at]
    return Pins(store.cache("pins"), repr(said), clock)


@contextmanager
def _memory(
    request: QueryRequest, store: ParquetCheckpointStore
) -> "Iterator[Callable[[], OpenTier | None]]":
    """Have outputs kept in peers' memory first, where the request says so; whoever plans waits for that."""
    with opened_meanwhile(request.store_place, request.memory_tier) as opened:

        def tier() -> Tier | None:
            memory = opened()
            return None if memory is None else memory.tier(request.durable)

        store.tier = tier
        yield opened


def _follow(memory: "OpenTier", request: QueryRequest, inbox: Inbox) -> Callable[[], None]:
    """Put ``TierChanged`` into ``inbox`` whenever peers' memory fills, leaves or is back; return what ends that."""

    def changed() -> None:
        inbox.put(TierChanged(memory.tier(request.durable)))

    stop = memory.watch(changed)
    changed()  # since the query was planned; a driver that knows it already does nothing
    return stop


@contextmanager
def _prepared_and_opened(
    request: QueryRequest,
    store: ParquetCheckpointStore,
    clock: Clock,
    given: OpenedEngine | None,
    pins: Pins,
    note: Callable[[str], object],
    stop: threading.Event | None,
) -> Iterator[tuple[Gathered, QueryPlanner, OpenedEngine]]:
    """Plan while the engine starts, which takes seconds for Spark. A bad query is told first."""
    run_id = uuid.uuid4().hex
    if given is not None:
        yield *prepare(request, store, clock, run_id=run_id, engine=lambda: given.engine, pins=pins), given
        return
    if request.catalog:
        with opened_engine(request, clock, note, stop) as opened:
            yield (
                *prepare(request, store, clock, run_id=run_id, engine=lambda: opened.engine, pins=pins),
                opened,
            )
        return
    started: Future[SqlEngine | None] = Future()
    with ThreadPoolExecutor(1, thread_name_prefix="ebbflow-planning") as pool:
        planning = pool.submit(
            prepare, request, store, clock, run_id=run_id, engine=started.result, pins=pins
        )
        try:
            with opened_engine(request, clock, note, stop) as opened:
                started.set_result(opened.engine)
                yield *planning.result(), opened
        except EngineUnavailableError:
            if not started.done():
                started.set_result(None)
            planning.result()
            raise
        finally:
            if not started.done():  # whatever else has failed: the planning thread does not wait for it
                started.set_result(None)


@contextmanager
def _watched(
    source: CapacitySource, known: Capacity, inbox: Inbox, orchestrator: Orchestrator, clock: Clock
) -> Iterator[None]:
    """Have changes of capacity after ``known`` put into ``inbox``; wait at the end for what was submitted."""
    feedback = Feedback(
        source, clock, lambda capacity, change: inbox.put(CapacityChanged(capacity, change)), failed=inbox.put
    )
    feedback.begin(known)
    stop = threading.Event()
    try:
        orchestrator.watch(feedback, stop)
        yield
    finally:
        stop.set()
        orchestrator.settle()


def session_of(
    request: QueryRequest,
    gathered: Gathered,
    planner: QueryPlanner,
    share: Share,
    slices: SliceIndex | None = None,
) -> Session:
    """Return the query's session, with its first candidates for ``share``; ``slices`` are those of earlier runs."""
    session = Session(
        planner,
        share,
        request.planner,
        hysteresis=request.hysteresis,
        fraction=request.fraction,
        history=gathered.history,
        versions=gathered.versions,
    )
    if slices is None or not request.reuse or request.planner == "single":
        return session
    if begun := slices.begun(session.fingerprints):  # an earlier run has left slices
        session.divide_as_before(begun)
    return session


def _listener(
    listener: Listener,
    session: Session,
    source: CapacitySource,
    engine: SqlEngine,
    follow: Callable[[Execution], Listener] | None,
) -> Listener:
    """Return who hears of the run; where an engine tells of tasks, the others on the cluster hear what the query can
    use."""
    for note in session.planner.notes:
        listener.note(note)
    if isinstance(source, SharedCapacity) and engine.name == "spark":
        listener = CompositeQueryListener(listener, Demand(session.execution, source.want))
    return listener if follow is None else CompositeQueryListener(listener, follow(session.execution))


def explain(
    request: QueryRequest, share: Share, clock: Clock | None = None, *, without: Collection[str] = ()
) -> tuple[tuple[PlanReport, ...], tuple[str, ...]]:
    """Plan ``request`` for ``share`` without running anything; return the candidates and notes.

    ``without`` names rewrites that the planner leaves out, of ``planners.query.planner.REWRITE_NAMES``. Raises
    ``OptionError`` for another name, and the errors of planning.
    """
    options = PlannerOptions(cuts=request.materialize, without=frozenset(without))
    clock = clock or SystemClock()
    request = choose_engine(request, clock)
    store = ParquetCheckpointStore(request.store_place, clock=clock)
    pins = _pins(request, store, clock)
    gathered, planner = prepare(request, store, clock, run_id="explain", options=options, pins=pins)
    session = session_of(request, gathered, planner, share)
    session.begin({}, clock.now())
    decision = session.execution.decisions[0]
    reports: list[Any] = [
        PlanReport.of(
            plan,
            estimated_seconds=simulate(plan, share, MAX_PARALLEL_STAGES).seconds,
            cores=share.total.cores,
            chosen=plan.id == decision.chosen,
            reason=reason_text(decision) if plan.id == decision.chosen else "",
            engine=request.engine,
        )
        for plan in session.plans.values()
    ]
    return tuple(reports), (*sentences(coverage(planner.analysis)), *gathered.notes, *planner.notes)
