"""One query from request to report, under any orchestrator."""

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import EngineUnavailableError, StorageError
from ebbflow.infra.protocols import CapacitySource, Checkpoint, SqlEngine
from ebbflow.infra.query.calibration import calibrate as measure_engine
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.results import write_result
from ebbflow.infra.query.slices import SliceIndex
from ebbflow.infra.storage.files import GIB, write_text
from ebbflow.planners.model import Capacity, Share
from ebbflow.planners.query.costs.cost import CostModel, calibrate
from ebbflow.planners.query.coverage import coverage, sentences
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.planners.query.plan.state import StageOutput
from ebbflow.planners.query.running.execution import Execution
from ebbflow.planners.query.running.packing import simulate
from ebbflow.planners.query.running.progress import drift, repriced
from ebbflow.planners.query.running.replanner import Replanner
from ebbflow.tasks.query.driver import Driver, Record
from ebbflow.tasks.query.feedback import Feedback
from ebbflow.tasks.query.listening import CapacityChanged, Fan, Inbox, Listener, Silent, StageOutcome, Threads
from ebbflow.tasks.query.opening import Opened, arrived_capacity, opened_engine, shared_source
from ebbflow.tasks.query.planning import Prepared, prepare, remember
from ebbflow.tasks.query.report import DecisionReport, PlanReport, QueryReport, spoken
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.sharing import Demand, SharedCapacity
from ebbflow.tasks.query.verify import verify
from ebbflow.tasks.report.query import report_html

MAX_PARALLEL_STAGES = 4
_SLICES_LEFT = 8  # into which a stage is divided of which an earlier run has left slices


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

    def to_arrow(self) -> Any:
        """Return all rows as a ``pyarrow.Table``; see ``QueryReport.to_arrow``."""
        return self.report.to_arrow()

    def to_pandas(self) -> Any:
        """Return all rows as a ``pandas.DataFrame``; see ``QueryReport.to_pandas``."""
        return self.report.to_pandas()

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def calibrated(
    prepared: Prepared,
    request: QueryRequest,
    store: ParquetCheckpointStore,
    engine: SqlEngine,
    capacity: Capacity,
) -> Prepared:
    """Measure ``engine`` by a short run, remember the figures and fit the planner's costs to them."""
    measured = measure_engine(engine, max(Share.of(capacity).total.cores, 1.0))
    remember(store, request, measured)
    prepared.planner.model = calibrate(prepared.prior, measured)
    return replace(prepared, history=measured)


def execute(
    request: QueryRequest,
    orchestrator: Orchestrator | None = None,
    clock: Clock | None = None,
    opened: Opened | None = None,
    follow: Callable[[Execution], Listener] | None = None,
) -> QueryOutcome:
    """Run ``request`` to its end, write what it asks for, and return the outcome.

    Without an ``orchestrator``, stages run in threads of this process.
    ``opened`` is an engine that the caller keeps (``opened_engine``); otherwise one is started and closed. ``follow``
    makes a further listener of the query's execution, which it may look at in the thread that it is called in.

    Raises errors of the ``EbbflowError`` family; finished stages stay in the store whatever happens.
    """
    clock = clock or SystemClock()
    orchestrator = orchestrator or PlainOrchestrator()
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
            prepared = calibrated(found, request, store, started_engine.engine, capacity)
        started_engine.engine.confine(prepared.read(), [store.uri], prepared.everything)
        started = clock.now()
        index = SliceIndex(store, store.cache("slices"))
        run = _Run(request, prepared, capacity, clock, index)
        for note in prepared.planner.notes:
            orchestrator.listener.note(note)
        listener = _listeners(orchestrator.listener, run.execution, source, started_engine.engine)
        if follow is not None:
            listener = Fan(listener, follow(run.execution))
        stop = threading.Event()
        feedback.begin(capacity)
        try:
            orchestrator.watch(feedback, stop)
            driver = Driver(
                run.execution,
                run.candidates,
                engine=started_engine.engine,
                store=store,
                relations=prepared.relations,
                versions=prepared.versions,
                replan=run.replan,
                background=orchestrator,
                listener=listener,
                clock=clock,
                inbox=feedback_inbox,
                fraction=request.fraction,
                reuse=request.reuse,
                started=started,
                slices=index,
            )
            run.driver = driver
            record = driver.run(capacity)
        finally:
            stop.set()
            orchestrator.settle()
        seconds = clock.now() - started
    remember(store, request, record.measured)
    result = record.result
    assert result is not None
    if request.out:
        write_result(result, request.out)
    verdict = verify(prepared, result) if request.verify else (None, "")
    report = run.report(record, result, seconds, verdict, store.problems())
    if request.json:
        report.write_json(request.json)
    if request.report:
        write_text(request.report, report_html(report))
    with suppress(StorageError):  # housekeeping: the result is there
        written = sum(stage.bytes for stage in report.stages if stage.status == "completed")
        used = frozenset(stage.fingerprint for stage in report.stages)
        store.tidy(int(request.store_budget * GIB), written, used)
    return QueryOutcome(replace(report, result=result), result)


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


def _listeners(
    listener: Listener, execution: Execution, source: CapacitySource, engine: SqlEngine
) -> Listener:
    """Let the others on the cluster know what the query can use, where tasks tell."""
    if not isinstance(source, SharedCapacity) or engine.name != "spark":
        return listener
    return Fan(listener, Demand(execution, source.want))


class _Run:
    """The planning side of one run: candidates now, and anew when sizes turn out differently."""

    def __init__(
        self,
        request: QueryRequest,
        prepared: Prepared,
        capacity: Capacity,
        clock: Clock,
        index: SliceIndex,
    ) -> None:
        self._request = request
        self._planner = prepared.planner
        self._prepared = prepared
        self._clock = clock
        self.driver: Driver | None = None
        share = planning_share(capacity, request.fraction)
        self._cores = share.total.cores  # at the start: what the first stages' estimates assumed
        before = clock.now()
        self.candidates = candidates(prepared, request.policy, share)
        if request.reuse and request.policy != "single":
            fps = {*self._planner.partial_fps, *(s.output_fp for p in self.candidates for s in p.stages)}
            begun = {fp: names[0] for fp in sorted(fps) if (names := index.divisions(fp))}
            if begun:  # an earlier run has left slices
                self._planner.keep_divided({fp: (name, _SLICES_LEFT) for fp, name in begun.items()})
                self.candidates = candidates(prepared, request.policy, share)
        self.planning_seconds = clock.now() - before
        self.execution = Execution(
            self.candidates,
            None,
            request.policy,
            Replanner(self.candidates, request.hysteresis),
            MAX_PARALLEL_STAGES,
        )

    def replan(self, share: Share, outputs: Mapping[str, StageOutput]) -> Sequence[QueryExecutionPlan]:
        """Return candidates for ``share`` from actual sizes, the current plan among them, with rates fitted to
        this run; none for a policy that never re-plans or a share without cores."""
        if not self.execution.policy.replans:
            return ()
        if self.driver is not None:
            self._planner.keep_divided(self.driver.divided)
            measured = [*self._prepared.history, *self.driver.record.measured]
            model = calibrate(self._prepared.prior, measured)
            cores = (self._cores + share.total.cores) / 2  # about what the running stages have had
            self._planner.model = model.slower(self._drift(model, cores))
        if share.total.cores <= 0:
            return ()
        return self._planner.candidates(share, outputs, also=(self.execution.plan.id,))

    def _drift(self, model: CostModel, cores: float) -> float:
        """Return how many times slower than by ``model`` the stages run that run now.

        Their estimates are as old as the last planning, and count how slow things were then already.
        """
        now = self._clock.now()
        running = self.execution.state(now).running.values()
        return drift([repriced(r, model.core_seconds(r.stage.work)) for r in running], cores, now)

    def report(
        self,
        record: Record,
        result: Checkpoint,
        seconds: float,
        verdict: tuple[bool | None, str],
        problems: Sequence[str],
    ) -> QueryReport:
        """Return the report of the finished run."""
        request = self._request
        decisions = tuple(DecisionReport.of(d, record.started) for d in self.execution.decisions)
        first = decisions[0] if decisions else None
        estimates = {e.plan_id: e.seconds for e in first.estimates} if first else {}
        chosen = first.chosen if first else ""
        known = frozenset(s.fingerprint for s in record.stages if s.status in ("completed", "reused"))
        cores = record.capacity[0].cores
        return QueryReport(
            query=request.sql,
            policy=request.policy,
            engine=request.engine,
            master=request.master if request.engine == "spark" else "",
            title=request.title,
            started=record.started,
            seconds=seconds,
            rows=result.rows,
            columns=result.relation.columns,
            result_path=request.out or result.uri,
            stages=tuple(record.stages),
            decisions=decisions,
            capacity=tuple(record.capacity),
            plans=tuple(
                PlanReport.of(
                    plan,
                    estimated_seconds=estimates.get(plan.id),
                    cores=cores,
                    chosen=plan.id == chosen,
                    reason=first.reason if first and plan.id == chosen else "",
                    checkpoints=known,
                )
                for plan in record.plans.values()
            ),
            expected_seconds=estimates.get(chosen),
            problems=(*self._planner.notes, *record.notes, *problems),
            verified=verdict[0],
            verification=verdict[1],
            blocks=coverage(self._planner.analysis),
        )


def planning_share(capacity: Capacity, fraction: float = 1.0) -> Share:
    """Return the share to plan for; without any node yet, that of one small node."""
    share = Share.of(capacity, fraction)
    return share if share.total.cores > 0 else _nominal(share)


def _nominal(share: Share) -> Share:
    return Share.uniform(1.0, 1.0, 1, epoch=share.epoch, hazard=share.hazard)


def candidates(prepared: Prepared, policy: str, share: Share) -> tuple[QueryExecutionPlan, ...]:
    """Return the plans that ``policy`` chooses among."""
    if policy == "single":
        return (prepared.planner.single(share),)
    return prepared.planner.candidates(share)


def explain(
    request: QueryRequest, share: Share, clock: Clock | None = None
) -> tuple[tuple[PlanReport, ...], tuple[str, ...]]:
    """Plan ``request`` for ``share`` without running anything; return candidates and notes."""
    clock = clock or SystemClock()
    store = ParquetCheckpointStore(request.store, clock=clock)
    prepared = prepare(request, store, clock, run_id="explain")
    plans = candidates(prepared, request.policy, share)
    execution = Execution(
        plans, None, request.policy, Replanner(plans, request.hysteresis), MAX_PARALLEL_STAGES
    )
    execution.begin(share, {}, clock.now())
    decision = execution.decisions[0]
    reports: list[Any] = [
        PlanReport.of(
            plan,
            estimated_seconds=simulate(plan, share, MAX_PARALLEL_STAGES).seconds,
            cores=share.total.cores,
            chosen=plan.id == decision.chosen,
            reason=spoken(decision) if plan.id == decision.chosen else "",
        )
        for plan in plans
    ]
    return tuple(reports), (*sentences(coverage(prepared.planner.analysis)), *prepared.planner.notes)
