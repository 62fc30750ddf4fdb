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
from ebbflow.flows.runs.attached import Attached, run_name
from ebbflow.flows.runs.block_refs import found, of_a_cluster, store_of
from ebbflow.flows.runs.cancelling import attended
from ebbflow.flows.runs.deployed import allowed, app_fields
from ebbflow.flows.runs.output_pipes import outlive_readers
from ebbflow.flows.runs.request_options import fields_of
from ebbflow.flows.runs.stopping import StopQuery
from ebbflow.planners.errors import OptionError
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.tasks.query.feedback import Feedback
from ebbflow.tasks.query.listening import CompositeQueryListener, Listener, StageOutcome
from ebbflow.tasks.query.opening import engine_in, request_in
from ebbflow.tasks.query.report import QueryReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import QueryOutcome
from ebbflow.tasks.report.delivery import deliver, execute, served
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
    """Return the parameters of ``run_query`` that make the same request."""
    given = {f.name: getattr(request, f.name) for f in fields(request) if f.name in _PARAMETERS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def run_attached(request: QueryRequest, listener: Listener) -> QueryOutcome:
    """Run ``request`` as a flow run of ``run_query`` with a listener in this process (the command line)."""
    return _ATTACHED.run(listener, lambda: run_query(**parameters_of(request)))


@flow(
    name="run-query",
    flow_run_name=run_name("query", "name", "app", "sql"),
    task_runner=task_runner(),
    validate_parameters=True,
)
def run_query(
    sql: str,
    tables: str | None = None,
    *,
    name: str = "",
    catalog: bool = False,
    at: str = "",
    engine: str = "auto",
    stages: str = "auto",
    master: str | None = None,
    planner: str = "qoop",
    materialize: str = "cost",
    dialect: str = "spark",
    store: str | None = None,
    durable: str = "before-commit",
    memory_tier: str = "auto",
    reuse: bool = True,
    hysteresis: float = 0.15,
    interruption_rate: float | None = None,
    fraction: float = 1.0,
    weight: float = 1.0,
    calibrate: bool = False,
    executor_memory: str | None = None,
    conf: dict[str, str] | None = None,
    output: str | None = None,
    into: str | None = None,
    into_mode: str = "append",
    into_key: list[str] | None = None,
    into_partition: list[str] | None = None,
    into_format: str = "delta",
    metrics: str = "",
    report: str | list[str] | None = None,
    verify: bool = False,
    ledger: str | None = None,
    cluster: str | None = None,
    app: str = "",
    team: str = "",
    allow_functions: list[str] | None = None,
    session: Any = None,
) -> QueryReport:
    """Run a SQL query that re-plans itself while capacity changes.

    Stages are task runs that carry the stage's name, decisions a table artifact, capacity changes events
    (``ebbflow.capacity.changed``, ``ebbflow.plan.replaced``). The same query again resumes from finished stages.

    Args:
        sql: the query, or the path of a file that holds it.
        tables: directory of Parquet files, of directories of them and of tables of Delta Lake and Iceberg, local or
            ``s3://``.
        name: display name of the query.
        catalog: use the tables of the Spark session's catalog instead of ``tables``.
        at: version or time that tables of Delta Lake and Iceberg are read at: a version, a snapshot's id or ISO 8601,
            in UTC unless it says otherwise; by default their newest.
        engine: ``spark``, ``duckdb`` (embedded, no JVM) or ``auto``: ``duckdb`` where no Spark master is named and
            this machine can hold what the query reads, else ``spark``.
        stages: how Spark runs a stage: ``spark`` (its SQL), ``native`` (DuckDB in its tasks, where answers are proven
            equal) or ``auto``, by cost, where executors have memory and Python packages for it.
        master: Spark master: ``local[2]`` (the default where Spark runs), ``spark://host:7077``, ``sc://host:15002``
            (Spark Connect), ...
        planner: ``qoop`` re-plans at each change of capacity; ``clarinet`` and ``volcano`` plan once; ``single`` runs
            the query as one statement.
        materialize: which intermediate results become checkpoints: ``cost`` (where it pays), ``every-join`` or
            ``none``.
        dialect: SQL dialect of the query, as sqlglot names it.
        store: directory of the checkpoints, local or ``s3://``, or the block ``ebbflow-storage/NAME``; it must
            outlive nodes. With ``memory+`` before it, checkpoints go to nodes' free memory first (engine ``duckdb``).
        durable: when a checkpoint of a ``memory+`` store is committed: ``before-commit``, once the store behind has
            its data, or ``behind``, earlier: a stage whose data is lost is computed again.
        memory_tier: use of nodes' memory before a ``memory+`` store: ``auto``, where it is measured to be faster, or
            ``always``.
        reuse: reuse stages that earlier runs finished.
        hysteresis: fraction of the remaining time that a switch to another plan must save.
        interruption_rate: expected interruptions per node-hour; by default estimated from observed losses, and 0 on
            DuckDB, whose process sees none.
        fraction: fraction of the cluster that this query may count on.
        weight: weight of this query among those that share the cluster; its share is its weight over the sum of all.
        calibrate: measure the engine's speed before the query, unless it is known.
        executor_memory: heap size of an executor, such as ``1400m``.
        conf: further Spark settings.
        output: Parquet file for the rows of the result.
        into: table that the rows of the result are written into, once for each run: a directory of Delta Lake, local
            or ``s3://``, or ``iceberg://CATALOG/NAMESPACE/TABLE``; it is made if it is not there.
        into_mode: what becomes of the rows that it has: ``create`` fails if it is there, ``append`` keeps them,
            ``overwrite`` replaces all, ``overwrite-partitions`` those of the partitions that the result has,
            ``merge`` those with keys that the result has.
        into_key: columns that rows are merged by.
        into_partition: columns that the table is partitioned by where it is made.
        into_format: what a directory is: ``delta``, a table of Delta Lake, or ``parquet``, Parquet files.
        metrics: ``HOST:PORT`` at which ``/metrics`` for Prometheus and ``/healthz`` are served while it runs.
        report: file or files for the report, each ending in ``.html`` (a page) or ``.json`` (the data).
        verify: compare the result with DuckDB's on the same files.
        ledger: ledger of the cluster that the query becomes an app of; the cluster's capacity loop restarts the
            query when its process is lost. A file, an address without a password, or the block
            ``ebbflow-cluster/NAME``.
        cluster: name of the cluster in that ledger.
        app: app ID in that ledger; generated by default. A run with the same ID resumes it.
        team: team of the app.
        allow_functions: functions that SQL may call though they read more than tables, such as ``read_csv``; in a
            run of a deployment, only those of them that the deployment's own parameters have.
        session: SparkSession to run in, of this process or of Spark Connect, instead of one that is started; without
            ``tables`` the query reads its tables and views, temporary ones too. It runs on afterwards.

    Returns:
        The report of the run; the rows are in ``result_path``.

    Raises:
        EbbflowError: a usage error or a fault that no retry recovers from; finished stages are kept.
    """
    given = dict(locals())  # the parameters
    outlive_readers()
    attachment = _ATTACHED.get()
    of_a_cluster(ledger, cluster=cluster, app=app, team=team)
    with found(ledger, cluster) as place:
        chosen = {
            "master": master or place.master,
            "store": store_of(store, place.storage),
            "allow_functions": allowed("allow_functions", allow_functions),
        }
        if session is not None:
            chosen["catalog"] = catalog or not tables
        request = QueryRequest.of(**fields_of(QueryRequest, {**given, **chosen}))
        if session is not None:
            request = request_in(session, request)
            if ledger is not None:
                raise OptionError(
                    "session runs a query of this process alone; leave out ledger, or name a master and no session"
                )
        orchestrator = PrefectOrchestrator(attachment.given if attachment else None)

        def work() -> QueryOutcome:
            if session is not None:
                with engine_in(session, request) as opened_session:
                    return execute(request, orchestrator, opened=opened_session)
            if ledger is None:
                return execute(request, orchestrator)
            from ebbflow.tasks.query.app import run_query_app
            from ebbflow.tasks.query.app_requests import query_spec

            id_ = app or f"query-{uuid.uuid4().hex[:8]}"
            spec = query_spec(request, id_, **app_fields(team=team))
            with place.place.opened() as opened, served(request, orchestrator):
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
