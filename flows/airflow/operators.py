"""Operators: run a query, run a training, wait for capacity. They do what the Prefect flows do, by the same tasks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from ebbflow.infra.errors import InfraError, TableError
from ebbflow.planners.errors import EbbflowError, OptionError, PlanningError

if TYPE_CHECKING:
    from airflow.sdk import Context

    from ebbflow.flows.runs.cancelling import Attended

_FOR_GOOD = (OptionError, PlanningError, TableError)  # another try would end as this one


class _AttendedOperator(BaseOperator):
    """Runs its work in a thread, so that a signal or a time limit can end it in order."""

    stop_timeout: float
    ledger_conn_id: str | None
    ledger: str | None
    cluster: str
    _attended: "Attended[Any] | None" = None

    def on_kill(self) -> None:
        """End the work in order; Airflow calls this in a signal's handler, and after a time limit."""
        self.log.info("stopping")
        if self._attended is not None:
            self._attended.stop()

    def _place(self) -> dict[str, Any]:
        """Return where the ledger is; for the task's own thread, since a connection is looked up."""
        from ebbflow.flows.airflow.work import without_password

        without_password(self.ledger)
        address, cluster = self.ledger or "", self.cluster
        if self.ledger_conn_id:
            from ebbflow.flows.airflow.hook import EbbflowHook

            address, named = EbbflowHook(self.ledger_conn_id).address()
            cluster = cluster or named
        return {"address": address or None, "cluster": cluster or "local"}


class EbbflowQueryOperator(_AttendedOperator):
    """Run a SQL query that re-plans itself while capacity changes.

    Another try resumes from finished stages. When the task is ended, running stages are cancelled.

    XCom: ``result`` (the address of the rows: ``output``, or the checkpoint), ``rows`` (how many), ``first`` (the
    first ``fetch`` of them), ``seconds``, ``plan``, ``switches`` (reasons), ``verified``.

    Args:
        sql: the query, or the path of a file that holds it; templated, files too.
        tables: directory of Parquet files, of directories of them and of tables of Delta Lake and Iceberg, local or
            ``s3://``.
        engine: ``spark``, ``duckdb`` (in the worker's process, no JVM), or ``auto``: ``duckdb`` where no master is
            named and the worker's machine can hold what the query reads, else ``spark``.
        master: Spark master.
        store: where checkpoints live, local or ``s3://``; every worker must reach it for a retry to resume.
        output: write the rows to this Parquet file.
        options: further fields of ``ebbflow.tasks.query.request.QueryRequest``, such as ``{"planner": "volcano"}``.
        ledger_conn_id: an Airflow connection of type ``ebbflow``: the query is then an app of that cluster, which its
            capacity loop and its reports know of.
        ledger: or the ledger's address, without a password.
        cluster: the cluster's name in the ledger.
        team: on whose account it runs there.
        fetch: rows that the XCom holds, 1,000 at most.
        stop_timeout: seconds that a task which has run into its time limit waits for its stages to end.
    """

    template_fields: Sequence[str] = (
        "sql",
        "tables",
        "master",
        "store",
        "output",
        "ledger_conn_id",
        "ledger",
        "cluster",
        "team",
        "options",
    )
    template_ext: Sequence[str] = (".sql",)
    template_fields_renderers = {"sql": "sql", "options": "json"}  # noqa: RUF012  Airflow's own way
    ui_color = "#d7ebe8"

    def __init__(
        self,
        *,
        sql: str,
        tables: str | None = None,
        engine: str = "auto",
        master: str | None = None,
        store: str | None = None,
        output: str | None = None,
        ledger_conn_id: str | None = None,
        ledger: str | None = None,
        cluster: str = "",
        team: str = "",
        options: Mapping[str, Any] | None = None,
        fetch: int = 0,
        stop_timeout: float = 30.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.sql, self.tables, self.engine, self.master = sql, tables, engine, master
        self.store, self.output, self.team = store, output, team
        self.ledger_conn_id, self.ledger, self.cluster = ledger_conn_id, ledger, cluster
        self.options = dict(options or {})
        self.fetch = fetch
        self.stop_timeout = stop_timeout

    def execute(self, context: "Context") -> dict[str, Any]:
        """Run the query and return plain values. Raises ``AirflowFailException`` for what no retry can mend."""
        from ebbflow.flows.airflow.stopping import StoppableOrchestrator
        from ebbflow.flows.airflow.work import (
            MOST_ROWS,
            generated_id,
            only_with,
            query,
            query_request,
            query_values,
        )
        from ebbflow.flows.runs.cancelling import Attended

        if not 0 <= self.fetch <= MOST_ROWS:
            raise AirflowFailException(f"fetch must be from 0 to {MOST_ROWS} rows; got {self.fetch}")
        given = {
            "tables": self.tables,
            "engine": self.engine,
            "master": self.master,
            "store": self.store,
            "output": self.output,
        }
        orchestrator = StoppableOrchestrator()
        try:
            request = query_request(self.sql, {"name": self.task_id, **given, **self.options})
            work = partial(query, request, orchestrator)
            if self.ledger_conn_id or self.ledger:
                ti = context["ti"]
                app = generated_id(ti.dag_id, ti.task_id, ti.run_id, ti.map_index)
                work = partial(work, app=app, team=self.team, **self._place())
            else:
                only_with("ledger_conn_id or ledger", cluster=self.cluster, team=self.team)
            self._attended = Attended(work, orchestrator.stop, self.stop_timeout)
            outcome = self._attended.wait()
        except _FOR_GOOD as error:
            raise AirflowFailException(str(error)) from error
        except EbbflowError as error:
            if orchestrator.asked.is_set():
                raise AirflowException(
                    "stopped; finished stages are kept, another try resumes from them"
                ) from None
            raise AirflowException(str(error)) from error
        self.log.info("%s rows in %.1f s", f"{outcome.result.rows:,}", outcome.report.seconds)
        return query_values(outcome, request.output, self.fetch)


class EbbflowTrainingOperator(_AttendedOperator):
    """Train a PyTorch script elastically.

    The run's id is made of DAG, task and DAG run, so another attempt resumes from the newest checkpoint. The run
    itself retries what is retryable: a failed training fails the task for good. When the task is ended, the training
    saves and leaves.

    XCom: ``run``, ``directory``, ``state``, ``reason``, ``steps``, ``lost_steps``, ``seconds``, ``dollars`` and
    ``metrics``.

    Args:
        script: path of a Python file that trains inside an ``ElasticRun``; templated.
        arguments: of the script; templated.
        nodes: ``local:NODESxGPUS``, or ``aws:POOL:NODESxGPUS``.
        fleet: run on GPUs that a capacity loop grants instead, up to as many as ``nodes`` names: ``local`` or
            ``local:NAME``, nodes of the worker's machine. The task waits for leases and gives them back at its end.
        ledger_conn_id: an Airflow connection of type ``ebbflow``: that loop's ledger.
        ledger: or the ledger's address, without a password. Default: that of ``EBBFLOW_LEDGER``.
        cluster: the cluster's name in the ledger.
        team: on whose account it runs there.
        runs_dir: directory of all runs, local or ``s3://``.
        run_id: run ID; generated from DAG, task and DAG run by default.
        options: further fields of ``ebbflow.tasks.training.request.TrainingRequest``.
        stop_timeout: seconds that a task which has run into its time limit waits for the training to save.
    """

    template_fields: Sequence[str] = (
        "script",
        "arguments",
        "nodes",
        "fleet",
        "ledger_conn_id",
        "ledger",
        "cluster",
        "team",
        "runs_dir",
        "run_id",
        "options",
    )
    template_fields_renderers = {"options": "json"}  # noqa: RUF012  Airflow's own way
    ui_color = "#efe3d0"

    def __init__(
        self,
        *,
        script: str,
        arguments: Sequence[str] = (),
        nodes: str = "local:1x1",
        fleet: str | None = None,
        ledger_conn_id: str | None = None,
        ledger: str | None = None,
        cluster: str = "",
        team: str = "",
        runs_dir: str | None = None,
        run_id: str = "",
        options: Mapping[str, Any] | None = None,
        stop_timeout: float = 45.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.script, self.arguments, self.nodes = script, list(arguments), nodes
        self.fleet, self.team = fleet, team
        self.ledger_conn_id, self.ledger, self.cluster = ledger_conn_id, ledger, cluster
        self.runs_dir, self.run_id = runs_dir, run_id
        self.options = dict(options or {})
        self.stop_timeout = stop_timeout

    def execute(self, context: "Context") -> dict[str, Any]:
        """Run the training and return plain values. Raises ``AirflowFailException`` for what no retry can mend."""
        from ebbflow.flows.airflow.work import (
            generated_id,
            only_with,
            train,
            train_on_leases,
            training_request,
            training_values,
        )
        from ebbflow.flows.runs.cancelling import Attended
        from ebbflow.flows.runs.stopping import StopTraining

        ti = context["ti"]
        run = self.run_id or generated_id(ti.dag_id, ti.task_id, ti.run_id, ti.map_index)
        stopper = StopTraining()
        try:
            request, resume = training_request(
                self.script,
                self.arguments,
                run,
                {"nodes": self.nodes, "runs_dir": self.runs_dir, **self.options},
            )
            request = request if request.name else replace(request, name=self.task_id)
            if resume:
                self.log.info("resuming the run %s", run)
            work = partial(train, request, resume, stopper)
            if self.fleet:
                asked = {"team": self.team, **self._place()}
                work = partial(train_on_leases, request, stopper, fleet=self.fleet, **asked)
            else:
                only_with(
                    "fleet", ledger=self.ledger_conn_id or self.ledger, cluster=self.cluster, team=self.team
                )
            self._attended = Attended(work, stopper.stop, self.stop_timeout)
            report = self._attended.wait()
        except _FOR_GOOD as error:
            raise AirflowFailException(str(error)) from error
        except EbbflowError as error:
            raise AirflowException(str(error)) from error
        if report.state == "failed":
            raise AirflowFailException(f"the training {run} failed: {report.reason}")
        if report.state == "stopped":
            saved = "has saved" if not report.unsaved_steps else f"{report.unsaved_steps} steps are not saved"
            raise AirflowException(f"the training {run} was stopped and {saved}; another try resumes it")
        self.log.info("%s steps in %.1f s, %s of them twice", report.steps, report.seconds, report.lost_steps)
        return training_values(report)


class WaitForCapacityOperator(BaseOperator):
    """Wait until a cluster has enough, without a worker slot: by its ledger, or by its Spark master.

    XCom: the room that was seen: ``nodes``, ``gpus``, ``cores``, ``memory`` (GiB), ``free_gpus``, ``free_cores``.

    Args:
        nodes: at least so many nodes without a firm notice.
        gpus: at least so many GPUs.
        cores: at least so many cores.
        memory: at least so much memory, GiB.
        free: count only GPUs without a lease, and cores without an executor where a master tells of them.
        ledger_conn_id: an Airflow connection of type ``ebbflow``, which says where the ledger is.
        ledger: or the ledger's address, without a password: Airflow stores it. Default: that of ``EBBFLOW_LEDGER``.
        cluster: the cluster's name in the ledger.
        master: or look at a Spark master, ``spark://HOST:PORT``.
        timeout: seconds to wait at most.
        poll: seconds between two looks.
        soft_fail: skip the task, in place of failing it, when the time is over.
    """

    template_fields: Sequence[str] = (
        "nodes",
        "gpus",
        "cores",
        "memory",
        "ledger_conn_id",
        "ledger",
        "cluster",
        "master",
    )
    ui_color = "#e6e6f4"

    def __init__(
        self,
        *,
        nodes: int | str = 0,
        gpus: int | str = 0,
        cores: int | str = 0,
        memory: float | str = 0.0,
        free: bool = True,
        ledger_conn_id: str | None = None,
        ledger: str | None = None,
        cluster: str = "",
        master: str | None = None,
        timeout: float = 3600.0,
        poll: float = 10.0,
        soft_fail: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.nodes, self.gpus, self.cores, self.memory, self.free = nodes, gpus, cores, memory, free
        self.ledger_conn_id, self.ledger, self.cluster, self.master = ledger_conn_id, ledger, cluster, master
        self.timeout, self.poll, self.soft_fail = timeout, poll, soft_fail

    def execute(self, context: "Context") -> dict[str, Any]:
        """Look once, and hand over to the trigger unless there is enough already."""
        from ebbflow.flows.airflow.triggers import WaitForCapacityTrigger, open_lookout
        from ebbflow.flows.airflow.work import numbers, without_password
        from ebbflow.planners.capacity.need import Need

        where = {
            "ledger_conn_id": self.ledger_conn_id,
            "ledger": self.ledger,
            "cluster": self.cluster,
            "master": self.master,
        }
        try:
            wanted = numbers(nodes=self.nodes, gpus=self.gpus, cores=self.cores, memory=self.memory)
            need = Need(**wanted, free=self.free)
            without_password(self.ledger)
            if not 0 < self.poll <= self.timeout:
                raise OptionError(
                    f"poll must be above 0 and at most timeout; got {self.poll} and {self.timeout}"
                )
            lookout = open_lookout(where)
        except _FOR_GOOD as error:
            raise AirflowFailException(str(error)) from error
        except InfraError as error:  # away for now: the trigger continues polling
            self.log.warning("%s", error)
        else:
            try:
                room = lookout.look()
                if not (lacking := need.lacking(room)):
                    return asdict(room)
                self.log.info("waiting: %s", "; ".join(lacking))
            except InfraError as error:
                self.log.warning("%s", error)
            finally:
                lookout.close()
        self.defer(
            trigger=WaitForCapacityTrigger(asdict(need), where, time.time() + self.timeout, self.poll),
            method_name="arrived",
            timeout=timedelta(
                seconds=self.timeout + 10 * self.poll + 60
            ),  # should the triggerer itself be away
        )
        raise AssertionError("defer has raised")

    def arrived(self, context: "Context", event: dict[str, Any]) -> dict[str, Any]:
        """Continue from the trigger's event."""
        if event["status"] == "ready":
            return dict(event["room"])
        said = "; ".join(event["lacking"]) or event["problem"] or "nothing was seen"
        message = f"not enough capacity after {self.timeout:g} s: {said}"
        if self.soft_fail:
            raise AirflowSkipException(message)
        raise AirflowException(message)
