"""What the operators do, free of Airflow: requests from plain options, results as plain values.

An XCom holds what JSON can say, so results are addresses, counts and a few rows.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any
from urllib.parse import quote

from ebbflow.flows.airflow.stopping import StoppableOrchestrator
from ebbflow.flows.runs.stopping import StopTraining
from ebbflow.infra.protocols import Checkpoint
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.options import check_report_paths
from ebbflow.tasks.drawing.codec import encode
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import QueryOutcome
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.training.request import TrainingRequest

MOST_ROWS = 1000  # in an XCom, which is a row of Airflow's database
_ID_LENGTH = 100


def query_request(sql: str, options: Mapping[str, Any]) -> QueryRequest:
    """Return the request for ``sql``, which may be a file's path. Raises ``OptionError``, for unknown options too."""
    _known(QueryRequest, options, ("sql",))
    return QueryRequest.of(sql, **{name: value for name, value in options.items() if value is not None})


def training_request(
    script: str, arguments: Any, run: str, options: Mapping[str, Any]
) -> tuple[TrainingRequest, bool]:
    """Return the request for a run, and whether it resumes one that was begun.

    Raises ``OptionError``, for unknown options too, ``StorageError`` and ``TrainingError``.
    """
    _known(TrainingRequest, options, ("script", "arguments", "run_id"))
    given = {name: value for name, value in options.items() if value is not None}
    if "fault" in given:
        given["fault"] = tuple(given["fault"])
    given["report"] = check_report_paths(given.get("report"))
    request = TrainingRequest(script, tuple(str(one) for one in arguments), run_id=run, **given)
    if not request.recorded:
        return replace(request, restart=False), False
    changes = {name: getattr(request, name) for name in ("report", "restart")}
    return TrainingRequest.load(request.runs_dir, run, changes), True


def generated_id(dag: str, task: str, run: str, index: int = -1) -> str:
    """Return an id for what a task of a DAG run does: the same at each try, so that a retry resumes it.

    ``index`` is that of a mapped task. Of what would be too long the end is replaced by a digest of it all.
    """
    whole = ".".join([dag, task, run, *([str(index)] if index >= 0 else [])])
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", whole)
    plain = plain if plain[0].isalnum() else f"a{plain}"
    if plain == whole and len(plain) <= _ID_LENGTH:
        return plain
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return f"{plain[: _ID_LENGTH - 13]}-{digest}"


def query(
    request: QueryRequest,
    orchestrator: StoppableOrchestrator,
    *,
    app: str = "",
    address: str | None = None,
    cluster: str = "local",
    **asked: Any,
) -> QueryOutcome:
    """Run a query and write what it asks for; with an ``app``'s id, as one that the cluster's ledger knows of.

    Raises ``EbbflowError``.
    """
    from ebbflow.tasks.report.delivery import deliver, execute, served

    if not app:
        return execute(request, orchestrator)
    from ebbflow.infra.ledger import Ledger
    from ebbflow.tasks.query.app import run_query_app
    from ebbflow.tasks.query.app_requests import query_spec

    with Ledger.open(address, cluster=cluster, create=False) as ledger, served(request, orchestrator):
        spec = query_spec(request, id=app, **asked)
        return run_query_app(request, spec, ledger, orchestrator, stop=orchestrator.asked, deliver=deliver)


def train(request: TrainingRequest, resume: bool, stopper: StopTraining) -> TrainingReport:
    """Run a training on nodes of its own. Raises ``EbbflowError``; how it ended, the report says."""
    from ebbflow.tasks.report.training import run_training

    return run_training(request, stopper, resume=resume)


def train_on_leases(
    request: TrainingRequest,
    stopper: StopTraining,
    *,
    fleet: str,
    address: str | None,
    cluster: str,
    **asked: Any,
) -> TrainingReport:
    """Run a training as an app of a cluster, on the GPUs that its capacity loop grants; see ``run_training_app``.

    ``fleet`` is ``local`` or ``local:NAME``, nodes of this machine; ``asked`` are further fields of its ``AppSpec``.

    Raises ``OptionError``.
    """
    from ebbflow.infra.ledger import Ledger
    from ebbflow.infra.local_fleet import LocalFleet
    from ebbflow.tasks.report.training import deliver
    from ebbflow.tasks.training.leased.app import run_training_app
    from ebbflow.tasks.training.leased.spec import training_spec

    kind, _, name = fleet.partition(":")
    if kind != "local":
        raise OptionError(f"fleet must be local or local:NAME; got {fleet!r}")
    with (
        Ledger.open(address, cluster=cluster, create=False) as ledger,
        LocalFleet.attach(name or "local") as nodes,
    ):
        spec = training_spec(request, **asked)
        return run_training_app(
            request,
            spec,
            ledger,
            lambda: nodes.nodes_for(request.run_id),
            stop=stopper.asked,
            options={"ledger": address},
            deliver=deliver,
        )


def query_values(outcome: QueryOutcome, out: str | None, fetch: int) -> dict[str, Any]:
    """Return what is known of a finished query as values that JSON can hold; ``fetch`` rows of it at most."""
    report = outcome.report
    return {
        "result": out or outcome.result.uri,
        "rows": outcome.result.rows,
        "seconds": round(report.seconds, 3),
        "plan": report.stages[-1].plan if report.stages else "",
        "switches": [switch.reason for switch in report.switches],
        "verified": report.verified,
        "first": first_rows(outcome.result, fetch) if fetch else [],
    }


def first_rows(result: Checkpoint, count: int) -> list[dict[str, Any]]:
    """Return the first rows of a result; what JSON lacks (dates, decimals) is given as text."""
    from ebbflow.infra.query.results import preview

    rows: list[dict[str, Any]] = preview(result, count).to_pylist()
    return [{name: _plain(value) for name, value in row.items()} for row in rows]


def training_values(report: TrainingReport) -> dict[str, Any]:
    """Return what is known of a training as values that JSON can hold."""
    return {
        "run": report.id,
        "directory": report.directory,
        "state": report.state,
        "reason": report.reason,
        "steps": report.steps,
        "lost_steps": report.lost_steps,
        "seconds": round(report.seconds, 3),
        "dollars": round(report.dollars, 6),
        "metrics": encode(report.final_metrics),
    }


def _known(kind: type, options: Mapping[str, Any], apart: tuple[str, ...]) -> None:
    names = [f.name for f in fields(kind) if f.name not in apart]
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise OptionError(f"there is no option {unknown[0]!r}; there are {', '.join(names)}")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def numbers(**given: Any) -> dict[str, Any]:
    """Return numbers that a template may have made texts of. Raises ``OptionError``."""
    found = {}
    for name, value in given.items():
        try:
            found[name] = float(value) if name == "memory" else int(value)
        except (TypeError, ValueError) as error:
            raise OptionError(f"{name} must be a number; got {value!r}") from error
    return found


def only_with(option: str, **given: object) -> None:
    """Refuse what only an app of a cluster has, where nothing makes it one. Raises ``OptionError``."""
    if named := [name for name, value in given.items() if value]:
        raise OptionError(f"{', '.join(named)} need {option}: without it there is no app of a cluster")


def without_password(address: str | None) -> None:
    """Refuse a ledger's address with a password, without repeating it: Airflow stores what a task is given.

    Raises ``OptionError``.
    """
    from ebbflow.infra.ledger.address import parse

    if address and parse(address).secret:
        raise OptionError(
            "ledger must hold no password, since Airflow stores it: make a connection of type ebbflow and name it by "
            "ledger_conn_id"
        )


def address_of(connection: Any) -> tuple[str, str]:
    """Return the ledger's address and the cluster's name that a connection holds. Raises ``OptionError``."""
    extra = connection.extra_dejson
    cluster = str(extra.get("cluster", ""))
    if ledger := extra.get("ledger"):
        return str(ledger), cluster
    if not connection.host:
        return "", cluster
    if not connection.schema:
        raise OptionError(f"the connection {connection.conn_id!r} names a host and no database (Database)")
    login = quote(connection.login or "", safe="")
    if connection.password:
        login += ":" + quote(connection.password, safe="")
    port = f":{connection.port}" if connection.port else ""
    return f"postgresql://{login + '@' if login else ''}{connection.host}{port}/{connection.schema}", cluster
