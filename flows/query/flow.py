"""The Prefect flow that runs one query: ``from ebbflow.flows.query.flow import run_query``."""

import inspect
import threading
import uuid
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from prefect import flow
from prefect.futures import PrefectFuture

from ebbflow.flows.query.orchestration import (
    PrefectBackground,
    PrefectListener,
    publish_artifacts,
    task_runner,
    watch_capacity,
)
from ebbflow.flows.runs.asking import RENAMED, fields_of
from ebbflow.flows.runs.attached import Attached, run_name
from ebbflow.flows.runs.block_refs import found, of_a_cluster, store_of
from ebbflow.flows.runs.cancelling import attended
from ebbflow.flows.runs.deployed import allowed, app_fields
from ebbflow.flows.runs.stopping import StopQuery
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.tasks.query.feedback import Feedback
from ebbflow.tasks.query.listening import CompositeQueryListener, Listener, StageOutcome
from ebbflow.tasks.query.report import QueryReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import QueryOutcome
from ebbflow.tasks.report.query import deliver, execute
from ebbflow.tasks.report.timeline import timeline_svg

_SETTLE = 30.0  # seconds


class PrefectOrchestrator(StopQuery):
    """Runs stages and the feedback task as task runs of the present flow run."""

    def __init__(self, listener: Listener | None = None) -> None:
        super().__init__()
        own = PrefectListener()
        self.listener: Listener = CompositeQueryListener(own, listener) if listener is not None else own
        self._background = PrefectBackground()
        self._watching: list[PrefectFuture[Any]] = []

    def submit(self, stage: Stage, work: Callable[[], StageOutcome]) -> None:
        self._background.submit(stage, work)

    def watch(self, feedback: Feedback, stop: threading.Event) -> None:
        self._watching.append(watch_capacity.submit(feedback, stop))
        self.follow(feedback)

    def settle(self) -> None:
        self._background.wait(_SETTLE)
        for future in self._watching:
            future.wait(_SETTLE)


_ATTACHED: Attached[Listener, QueryOutcome] = Attached("query")


def parameters_of(request: QueryRequest) -> dict[str, Any]:
    """Return the parameters by which ``run_query`` asks for the same."""
    given = {RENAMED.get(f.name, f.name): getattr(request, f.name) for f in fields(request)}
    return {name: value for name, value in given.items() if name in _PARAMETERS}


def run_attached(request: QueryRequest, listener: Listener) -> QueryOutcome:
    """Run ``request`` as a flow run of ``run_query`` with a listener in this process (the command line)."""
    return _ATTACHED.run(listener, lambda: run_query(**parameters_of(request)))


@flow(
    name="run-query",
    flow_run_name=run_name("query", "title", "app", "sql"),
    task_runner=task_runner(),
    validate_parameters=True,
)
def run_query(
    sql: str,
    tables: str | None = None,
    *,
    title: str = "",
    catalog: bool = False,
    engine: str = "spark",
    stages: str = "spark",
    master: str | None = None,
    policy: str = "qoop",
    cuts: str = "cost",
    dialect: str = "spark",
    store: str | None = None,
    reuse: bool = True,
    hysteresis: float = 0.15,
    hazard: float | None = None,
    fraction: float = 1.0,
    weight: float = 1.0,
    calibrate: bool = False,
    executor_memory: str | None = None,
    conf: dict[str, str] | None = None,
    out: str | None = None,
    json_report: str | None = None,
    html_report: str | None = None,
    verify: bool = False,
    ledger: str | None = None,
    cluster: str | None = None,
    app: str = "",
    team: str = "",
    allow_functions: list[str] | None = None,
) -> QueryReport:
    """Run a SQL query that re-plans itself while capacity changes.

    Stages are task runs that carry the stage's name, decisions a table artifact, capacity changes events
    (``ebbflow.capacity.changed``, ``ebbflow.plan.replaced``). The same query again resumes from finished stages.

    Args:
        sql: the query, or the path of a file that holds it.
        tables: folder of Parquet files or of folders of them, local or ``s3://``.
        title: what people call the query.
        catalog: use the tables that the Spark session's catalogue knows, in place of ``tables``.
        engine: ``spark`` or ``duckdb`` (embedded, no JVM).
        stages: how Spark runs a stage: ``spark`` (its SQL), ``native`` (DuckDB in its tasks, where answers are proven
            equal) or ``auto``, by cost.
        master: Spark master: ``local[2]`` (the default), ``spark://host:7077``, ...
        policy: ``qoop`` re-plans at each change; ``clarinet`` and ``volcano`` choose once; ``single`` runs the query
            as one statement.
        cuts: where a plan is cut into stages: ``cost``, ``every-join`` or ``none``.
        dialect: SQL dialect of the query, as sqlglot names it.
        store: where checkpoints live, local or ``s3://``, or the block ``ebbflow-storage/NAME``; it outlives nodes.
        reuse: take finished stages of earlier runs.
        hysteresis: fraction of the remaining time by which another plan must be sooner.
        hazard: expected node losses per node-hour; learnt from what happens when not given.
        fraction: part of the cluster that this query may count on.
        weight: of this query among those that share the cluster; its share is its weight over the sum of all.
        calibrate: measure the engine first if nothing is known of its speed.
        executor_memory: heap of an executor, such as ``1400m``.
        conf: further Spark settings.
        out: write the result to this Parquet file.
        json_report: write the report to this JSON file.
        html_report: write the report to this HTML file.
        verify: compare the result with DuckDB's on the same files.
        ledger: makes it an app of a cluster, which its capacity loop knows of and starts again when it is lost: a
            file, an address without a password, or the block ``ebbflow-cluster/NAME``.
        cluster: the cluster's name in that ledger.
        app: id in that ledger; made up unless given. The same again goes on with it.
        team: that it counts for there.
        allow_functions: functions that SQL may call though they read more than tables, such as ``read_csv``; in a
            run of a deployment, of those the ones that the deployment itself has.

    Returns:
        What happened and why; the rows are in ``result_path``.

    Raises:
        EbbflowError: bad input or a fault that cannot be mended; finished stages are kept.
    """
    given = dict(locals())  # the parameters
    attachment = _ATTACHED.get()
    of_a_cluster(ledger, cluster=cluster, app=app, team=team)
    with found(ledger, cluster) as place:
        chosen = {
            "master": master or place.master or "local[2]",
            "store": store_of(store, place.storage),
            "allow_functions": allowed("allow_functions", allow_functions),
        }
        request = QueryRequest.of(**fields_of(QueryRequest, {**given, **chosen}))
        orchestrator = PrefectOrchestrator(attachment.given if attachment else None)

        def work() -> QueryOutcome:
            if ledger is None:
                return execute(request, orchestrator)
            from ebbflow.tasks.query.app import run_query_app
            from ebbflow.tasks.query.app_requests import query_spec

            id_ = app or f"query-{uuid.uuid4().hex[:8]}"
            spec = query_spec(request, id_, **app_fields(team=team))
            with place.place.opened() as opened:
                return run_query_app(
                    request, spec, opened, orchestrator, stop=orchestrator.asked, deliver=deliver
                )

        # the command line has handlers of its own
        outcome = work() if attachment else attended(work, orchestrator.stop)
    publish_artifacts(outcome.report, timeline_svg(outcome.report))
    if attachment is not None:
        attachment.outcome = outcome
    return outcome.report


_PARAMETERS = frozenset(inspect.signature(run_query.fn).parameters)
