"""The Prefect flow that runs a search over hyper-parameters: ``from ebbflow.flows.tuning.flow import search``."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.logging import get_run_logger

from ebbflow.flows.runs import artifacts
from ebbflow.flows.runs.attached import run_name
from ebbflow.flows.runs.block_refs import found, of_a_cluster, runs_of
from ebbflow.flows.runs.cancelling import SAVE
from ebbflow.flows.runs.deployed import app_fields
from ebbflow.flows.runs.request_options import fields_of
from ebbflow.flows.runs.work import AppWork
from ebbflow.infra.errors import TrainingError
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.training.leased.place import ClusterPlace
from ebbflow.tasks.training.request import default_folder
from ebbflow.tasks.tuning.report import TuningReport
from ebbflow.tasks.tuning.request import Parameter, TuningRequest
from ebbflow.tasks.tuning.run import new_search, run_tuning


@flow(name="search", flow_run_name=run_name("search", "id", "script"), validate_parameters=True)
def search(
    script: str,
    space: dict[str, dict[str, list[Any]]] | None = None,
    metric: str = "accuracy",
    *,
    arguments: list[str] | None = None,
    id: str = "",
    maximise: bool = True,
    trials: int = 20,
    nodes: str = "local:1x1",
    gpus: int = 1,
    max_gpus: int | None = None,
    epochs: int | None = None,
    pruner: Literal["halving", "curve", "none"] = "halving",
    factor: int = 3,
    sampler: Literal["tpe", "random"] = "tpe",
    seed: int = 0,
    folder: str | None = None,
    resume: bool = False,
    restart: bool = False,
    json_report: str | None = None,
    ledger: str | None = None,
    cluster: str | None = None,
    fleet: str | None = None,
    team: str = "",
    weight: float = 1.0,
    deadline: float | None = None,
    budget: float | None = None,
) -> TuningReport:
    """Search for good hyper-parameters: trials are elastic trainings that share nodes.

    The artifact ``ebbflow-search`` lists the trials, the best first. A run that is cancelled lets its trials save and
    leave, and can be gone on with.

    Args:
        script: a Python file that takes each parameter as an option and reports the metric.
        space: a parameter each, such as ``{"lr": {"log": [0.001, 1]}}``: float, log, int or choice.
        metric: that the script reports.
        arguments: of the script, the same for all trials.
        id: of the search; made up unless given.
        maximise: whether more is better.
        trials: how many.
        nodes: ``local:NODESxGPUS``, shared by all trials.
        gpus: of each trial.
        max_gpus: of a trial when there are some to spare.
        epochs: of a whole trial; needed by ``curve``.
        pruner: how trials without prospects are found: ``halving``, ``curve`` or ``none``.
        factor: one trial in so many goes on.
        sampler: ``tpe`` or ``random``.
        seed: of the sampler.
        folder: of all searches and runs, a local one, or the block ``ebbflow-storage/NAME``.
        resume: go on with the search ``id`` as it was recorded; what it searches is not read anew.
        restart: with ``resume``, let trials begin again none of whose checkpoints can be used.
        json_report: write the report to this JSON file.
        ledger: makes it an app of a cluster whose trials share its leases; lost, it is started again. A file, an
            address without a password, or the block ``ebbflow-cluster/NAME``.
        cluster: the cluster's name in that ledger.
        fleet: the cluster's nodes: ``local[:NAME]``, ``aws[:FILE]``, or ``aws:ebbflow-aws/NAME``.
        team: that it counts for there.
        weight: among the apps there.
        deadline: seconds since the Unix epoch.
        budget: dollars.

    Returns:
        The trials, and the best of them.

    Raises:
        TrainingError: no trial came to its end.
        EbbflowError: bad input.
    """
    given = dict(locals())  # the parameters
    of_a_cluster(ledger, cluster=cluster, fleet=fleet, team=team, deadline=deadline, budget=budget)
    with found(ledger, cluster, fleet) as told:
        place = runs_of(folder, told.storage) or default_folder()
        if "://" in place:  # its journal is locked, which S3 cannot do
            if folder is not None:
                raise OptionError(f"a search needs a local folder; folder {folder} is {place}")
            place = default_folder()
        # one that was lost before it began is begun
        if resume and (begun(place, id) or not space):
            request = TuningRequest.load(place, id, {"json": json_report, "restart": restart})
        else:
            if not space:
                raise OptionError("a search needs a space, such as {'lr': {'log': [0.001, 1]}}; got none")
            parameters = tuple(Parameter.parse(name, entry) for name, entry in space.items())
            chosen = {"id": id or new_search(), "folder": place, "space": parameters, "restart": False}
            request = TuningRequest(**fields_of(TuningRequest, given) | chosen)
        asked = app_fields(team=team, weight=weight, deadline=deadline, budget=budget)
        work = _work(request, resume, None if ledger is None else told.place, **asked)
        report = work.run("run-search")
    _publish(report)
    if report.state == "failed" or (report.state == "finished" and report.best is None):
        raise TrainingError(report.reason)
    return report


def _work(
    request: TuningRequest, resume: bool, cluster: ClusterPlace | None, **asked: Any
) -> AppWork[TuningReport]:
    """Return the search, as an app of ``cluster`` that has ``asked``; it leaves within what a cancelled run has."""
    request = replace(request, grace=min(request.grace, SAVE))
    stop = threading.Event()

    def alone() -> TuningReport:
        return run_tuning(request, get_run_logger().info, resume=resume, stop=stop)

    def as_app() -> Callable[..., TuningReport]:
        from ebbflow.tasks.tuning.app import run_tuning_app
        from ebbflow.tasks.tuning.app_spec import tuning_spec

        spec = tuning_spec(request, **asked)
        return partial(run_tuning_app, request, spec, say=get_run_logger().info, stop=stop)

    return AppWork(request.id, request.grace, cluster, alone, as_app, stop.set)


def begun(folder: str, search: str) -> bool:
    """Tell whether there is a search of this id in a local folder."""
    return bool(search) and Path(folder, search, "search.json").is_file()


def _publish(report: TuningReport) -> None:
    rows = [
        {
            "trial": one.run,
            "state": one.state,
            report.metric: None if one.value is None else round(one.value, 6),
            "epochs": one.epochs,
            "GPU seconds": round(one.gpu_seconds, 1),
            **one.parameters,
            "reason": one.reason,
        }
        for one in report.trials
    ] or [{"trial": "none", "reason": report.reason}]
    best = report.best
    if best is not None:
        rows.sort(key=lambda row: row["trial"] != best.run)
    artifacts.table("ebbflow-search", rows, f"Search {report.id}: {report.reason}")
