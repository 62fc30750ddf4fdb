"""What a query tells Prometheus while it runs, where it was asked to (``--metrics``)."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.machine.metrics_server import metric, serving
from ebbflow.infra.machine.page_server import PageServer
from ebbflow.infra.protocols import StageProgress
from ebbflow.infra.storage.files import GIB
from ebbflow.planners.model import Capacity, Share
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.plan.state import ReplanDecision
from ebbflow.tasks.query.listening import CompositeQueryListener, NullQueryListener
from ebbflow.tasks.query.report import StageReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import Orchestrator

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_IDLE = 300.0  # s without cores after which a query does not count as healthy


class QueryMetrics(NullQueryListener):
    """Counts what a query's driver tells. A listener; ``look`` may be called in any thread."""

    def __init__(self, request: QueryRequest, clock: Clock) -> None:
        self._own = (request.name or "query",)
        self._clock = clock
        self._lock = threading.Lock()
        self._began = self._heard = clock.now()
        self._capacity: Capacity | None = None
        self._without_cores: float | None = None  # since when
        self._running: dict[str, StageProgress | None] = {}  # stage -> as last told
        self._ended: Counter[tuple[str, ...]] = Counter()  # stages by status
        self._decisions: Counter[tuple[str, ...]] = Counter()  # by kind
        self._sums: Counter[str] = Counter()
        self._left: float | None = None  # s that the chosen plan was estimated to take yet
        self._left_at = 0.0

    def begins(self, capacity: Capacity) -> None:
        with self._lock:
            self._see(capacity)

    def stage_started(self, stage: Stage) -> None:
        with self._lock:
            self._running[stage.output_fp] = None
            self._heard = self._clock.now()

    def stage_progress(self, stage: Stage, progress: StageProgress) -> None:
        with self._lock:
            if self._running.get(stage.output_fp) != progress:
                self._heard = self._clock.now()
            self._running[stage.output_fp] = progress

    def stage_ended(self, stage: Stage, report: StageReport) -> None:
        with self._lock:
            self._running.pop(stage.output_fp, None)
            self._ended[(*self._own, report.status)] += 1
            if report.status != "reused":
                self._sums["tasks"] += report.tasks
                self._sums["failed_tasks"] += report.failed_tasks
            if report.status == "completed":
                self._sums["rows"] += report.rows
                self._sums["bytes"] += report.bytes
            self._sums["saved"] += report.saved_seconds  # type: ignore[assignment]
            self._heard = self._clock.now()

    def capacity_changed(self, capacity: Capacity, change: str) -> None:
        with self._lock:
            self._see(capacity)
            self._sums["changes"] += 1

    def decided(self, decision: ReplanDecision) -> None:
        with self._lock:
            now = self._heard = self._clock.now()
            self._decisions[(*self._own, decision.kind)] += 1
            self._sums["planning"] += decision.seconds  # type: ignore[assignment]
            chosen = [one.seconds for one in decision.estimates if one.plan_id == decision.chosen]
            self._left, self._left_at = chosen[0] if chosen else None, now

    def _see(self, capacity: Capacity) -> None:
        self._capacity = capacity
        idle = Share.of(capacity).total.cores <= 0
        self._without_cores = (self._without_cores or self._clock.now()) if idle else None

    def look(self) -> tuple[Iterator["Metric"], str]:
        """Return the query's metrics, and why it is not healthy; empty where it is."""
        with self._lock:
            found = list(self._metrics(self._clock.now()))
            since = self._without_cores
        idle = 0.0 if since is None else self._clock.now() - since
        return iter(found), f"the query has had no cores for {idle:.0f} s" if idle > _IDLE else ""

    def _metrics(self, now: float) -> Iterator["Metric"]:
        own, labels = self._own, ["query"]
        for name, text, value in (
            ("seconds", "Time since the query began.", now - self._began),
            (
                "heard_age_seconds",
                "Time since anything was heard of a stage or a decision.",
                now - self._heard,
            ),
            ("stages_running", "Stages that run now.", len(self._running)),
            ("tasks_running", "Tasks of these stages that run now.", self._running_tasks("tasks_running")),
            ("tasks_done", "Tasks of these stages that are done.", self._running_tasks("tasks_done")),
            ("tasks_planned", "Tasks of these stages.", self._running_tasks("tasks_total")),
            (
                "estimated_seconds_left",
                "Time that the plan was estimated to need yet when it was chosen, less the time since.",
                None if self._left is None else max(0.0, self._left - (now - self._left_at)),
            ),
        ):
            yield metric(f"query_{name}", text, labels, {own: value})
        if self._capacity is not None:
            share = Share.of(self._capacity)
            for name, text, value in (
                ("cores", "CPU cores that the query can count on.", share.total.cores),
                ("memory_bytes", "Memory that it can count on.", share.total.memory * GIB),
                ("nodes", "Nodes that these are on.", share.nodes),
            ):
                yield metric(f"query_{name}", text, labels, {own: value})
        by = "Stages that have ended: completed, reused, cancelled, failed."
        yield metric("query_stages", by, [*labels, "status"], self._ended, "counter")
        by = "Decisions of the replanner: start, stay, switch, wait."
        yield metric("query_decisions", by, [*labels, "kind"], self._decisions, "counter")
        for name, key, text in (
            ("capacity_changes", "changes", "Changes of capacity."),
            ("tasks", "tasks", "Tasks of stages that have ended, cancelled ones included."),
            ("failed_tasks", "failed_tasks", "Of these, tasks that failed."),
            ("checkpoint_rows", "rows", "Rows of finished stages."),
            ("checkpoint_bytes", "bytes", "Bytes of their checkpoints."),
            ("saved_seconds", "saved", "Time that reused stages once took."),
            ("planning_seconds", "planning", "Time in the planner."),
        ):
            yield metric(f"query_{name}", text, labels, {own: self._sums[key]}, "counter")

    def _running_tasks(self, field: str) -> int:
        return sum(getattr(one, field) for one in self._running.values() if one is not None)


@contextmanager
def serving_query(
    request: QueryRequest, orchestrator: Orchestrator, clock: Clock | None = None
) -> Iterator[PageServer | None]:
    """Serve ``/metrics`` and ``/healthz`` of a query meanwhile; what the orchestrator's listener hears is counted.

    Raises ``OptionError`` for an address that is none, and ``InfraError`` for a port that is taken.
    """
    metrics = QueryMetrics(request, clock or SystemClock())
    before = orchestrator.listener
    with serving(request.metrics, metrics.look) as server:
        orchestrator.listener = CompositeQueryListener(before, metrics)
        try:
            yield server
        finally:
            orchestrator.listener = before
