"""A query as an app of the cluster: no GPU, a share of the cores by its team's weight, its re-plans on record.

When a query's stages ran, as its reports carry it: ``cluster_decisions.stages`` reads it.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LedgerError, StageCancelledError, StorageError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.protocols import StageProgress
from ebbflow.planners.model import Capacity
from ebbflow.planners.model.ledger import AppSpec
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.plan.state import Estimate, ReplanDecision
from ebbflow.planners.query.running.execution import Execution
from ebbflow.tasks.apps.agent import AgentIntervals, AppAgent
from ebbflow.tasks.apps.lease_table import Rules
from ebbflow.tasks.query.app_requests import AppFolder
from ebbflow.tasks.query.feedback import Feedback
from ebbflow.tasks.query.listening import CompositeQueryListener, Listener, NullQueryListener, StageOutcome
from ebbflow.tasks.query.opening import OpenedEngine
from ebbflow.tasks.query.report import StageReport, reason_text
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import Orchestrator, PlainOrchestrator, QueryOutcome, execute
from ebbflow.tasks.query.sharing import Demand

_MOST = 200  # stages that a report carries: the newest


class StageTimes:
    """Collects stages as they start and end; times are s since the Unix epoch."""

    def __init__(self) -> None:
        self._running: dict[str, dict[str, Any]] = {}
        self._over: list[dict[str, Any]] = []

    def started(self, stage: Stage, now: float) -> None:
        """Note that a stage runs from ``now`` on."""
        self._running[stage.output_fp] = {"name": stage.name[:200], "status": "running", "started": now}

    def ended(self, stage: Stage, report: StageReport, now: float) -> None:
        """Note how a stage, or one that was reused and never started, ended."""
        known = self._running.pop(stage.output_fp, {"name": stage.name[:200], "started": now})
        self._over.append(
            {
                **known,
                "status": report.status,
                "ended": now,
                "plan": report.plan,
                "rows": report.rows,
                "note": report.note[:200],
            }
        )
        del self._over[:-_MOST]

    def metrics(self) -> dict[str, Any]:
        """Return the ``job`` of the query's next report."""
        return {"stages": [*self._over, *self._running.values()]}


_POLL = 1.0  # s between estimates of what is left

Deliver = Callable[[QueryOutcome, QueryRequest], object]


def run_query_app(
    request: QueryRequest,
    spec: AppSpec,
    ledger: Ledger,
    orchestrator: Orchestrator | None = None,
    *,
    clock: Clock | None = None,
    opened: OpenedEngine | None = None,
    stop: threading.Event | None = None,
    rules: Rules | None = None,
    pace: AgentIntervals | None = None,
    deliver: Deliver = lambda outcome, request: None,
) -> QueryOutcome:
    """Run ``request`` as the app of ``spec`` to its end and return the outcome.

    It takes its share of the cluster's cores by the weight of ``spec``. Run again under the same id it continues from
    its finished stages.

    Args:
        request: what to run; it is kept in its store until the app is over.
        spec: of the app; see ``specs.query_spec``.
        ledger: the cluster's.
        orchestrator: runs stages: plain threads unless given.
        clock: the ledger's unless given.
        opened: an engine that the caller keeps.
        stop: set by others it ends the query, which keeps its finished stages.
        rules, pace: of the agent.
        deliver: writes what the request asks for, before the app counts as finished.

    Raises:
        StageCancelledError: ``stop`` was set.
        EbbflowError: bad input, a fault that cannot be mended, or another process runs this app.
    """
    clock = clock or ledger.clock
    request = replace(request, weight=spec.weight, name=request.name or spec.title)
    orchestrator = orchestrator or PlainOrchestrator()
    folder = AppFolder(request.store_place.behind, spec.id, clock)
    agent = AppAgent(
        ledger,
        spec,
        clock,
        rules=rules,
        pace=pace,
        notify=orchestrator.listener.note,
        lock=folder.lock,
        settle=lambda: folder.keep(request),
    )
    stop = stop or threading.Event()
    with agent:
        stoppable = _Stoppable(orchestrator, stop)
        try:
            outcome = execute(
                request,
                stoppable,
                clock,
                opened,
                follow=lambda execution: follower(execution, agent, clock),
                app=spec.id,
                stop=stop,
            )
            deliver(outcome, request)
        except StageCancelledError as error:
            if stop.is_set():
                agent.moved("stopped", str(error))
            raise
        finally:
            stoppable.end()
        agent.update_metrics(progress=1.0, seconds_left=0.0, cores=0.0)
        agent.saved(outcome.result.uri)
        agent.moved("finished", f"{outcome.report.rows:,} rows")
    _forget(folder, spec.id, ledger)
    return outcome


def _forget(folder: AppFolder, id: str, ledger: Ledger) -> None:
    """Remove the request and the lock of an app that has finished.

    They stay where the ledger could not be told of the end, or another process has begun the app again by now.
    """
    with suppress(StorageError, LedgerError):
        record = ledger.app(id)
        if record is None or record.phase != "finished":
            return
        folder.lock.acquire()
        try:
            folder.forget()
        finally:
            folder.lock.discard()


def follower(execution: Execution, agent: AppAgent, clock: Clock) -> Listener:
    """Return a listener that says what the query does, and how many cores it could use."""

    def want(cores: float) -> None:
        agent.update_metrics(cores=cores if isfinite(cores) else None)

    return CompositeQueryListener(QueryMetrics(execution, agent, clock), Demand(execution, want))


class QueryMetrics(NullQueryListener):
    """Tells the ledger of a query's progress and re-plans. Called in the thread that runs the query."""

    def __init__(self, execution: Execution, agent: AppAgent, clock: Clock) -> None:
        self._execution, self._agent, self._clock = execution, agent, clock
        self._begun = clock.now()
        self._looked = float("-inf")
        self._ended = 0  # stages
        self._times = StageTimes()

    def stage_started(self, stage: Stage) -> None:
        self._times.started(stage, self._clock.now())
        self._agent.update_metrics(job=self._times.metrics())
        self._look()

    def stage_progress(self, stage: Stage, progress: StageProgress) -> None:
        if self._clock.now() - self._looked >= _POLL:
            self._look()

    def stage_ended(self, stage: Stage, report: StageReport) -> None:
        self._ended += report.status in ("completed", "reused")
        self._times.ended(stage, report, self._clock.now())
        self._agent.update_metrics(job=self._times.metrics())
        if report.status == "completed":
            self._agent.update_metrics(saved_at=self._clock.now(), step=self._ended)
        self._look()

    def capacity_changed(self, capacity: Capacity, change: str) -> None:
        self._look()

    def decided(self, decision: ReplanDecision) -> None:
        self._agent.decided(
            "replan",
            reason_text(decision),
            inputs={
                "trigger": decision.trigger,
                "current": decision.current,
                "candidates": [_candidate(estimate) for estimate in decision.estimates],
            },
            outcome={"kind": decision.kind, "chosen": decision.chosen},
            revision=decision.revision,
            seconds=decision.seconds,
        )
        if decision.kind == "wait":
            self._agent.moved("waiting", reason_text(decision))
        else:
            self._agent.moved("running")
        self._look()

    def note(self, text: str) -> None:
        self._agent.update_metrics(message=text[:500])

    def _look(self) -> None:
        """Estimate what is left of the plan on the present share."""
        now = self._looked = self._clock.now()
        left = self._execution.expected(now).estimate.seconds
        spent = now - self._begun
        if not isfinite(left):
            self._agent.update_metrics(seconds_left=None)
            return
        progress = spent / (spent + left) if spent + left > 0 else 0.0
        self._agent.update_metrics(seconds_left=left, progress=progress)


def _candidate(estimate: Estimate) -> dict[str, object]:
    return {
        "plan": estimate.plan_id,
        "seconds": round(estimate.seconds, 3) if isfinite(estimate.seconds) else None,
        "reused": estimate.reused,
        "adopted": estimate.adopted,
        "needed": estimate.needed,
    }


class _Stoppable:
    """An orchestrator whose query others can end."""

    def __init__(self, inner: Orchestrator, stop: threading.Event) -> None:
        self._inner, self._stop = inner, stop
        self.listener = inner.listener
        self._over = threading.Event()

    def submit(self, stage: Stage, work: Callable[[], StageOutcome]) -> None:
        self._inner.submit(stage, work)

    def watch(self, feedback: Feedback, stop: threading.Event) -> None:
        threading.Thread(target=self._wait, args=(feedback,), name="query-stop", daemon=True).start()
        self._inner.watch(feedback, stop)

    def settle(self) -> None:
        self._inner.settle()

    def end(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _wait(self, feedback: Feedback) -> None:
        while not self._over.is_set():
            if self._stop.wait(0.2):
                feedback.fail(StageCancelledError("stopped on request; finished stages are kept"))
                return
