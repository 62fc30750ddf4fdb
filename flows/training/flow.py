"""The Prefect flow that runs one elastic training: ``from ebbflow.flows.training.flow import train``."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from prefect import flow
from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from ebbflow.flows.runs import artifacts
from ebbflow.flows.runs.artifacts import Publisher
from ebbflow.flows.runs.attached import Attached, run_name
from ebbflow.flows.runs.block_refs import found, of_a_cluster, runs_of
from ebbflow.flows.runs.cancelling import SAVE
from ebbflow.flows.runs.deployed import app_fields
from ebbflow.flows.runs.output_pipes import outlive_readers
from ebbflow.flows.runs.request_options import fields_of
from ebbflow.flows.runs.stopping import StopTraining
from ebbflow.flows.runs.work import AppWork
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import TrainingError
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.options import check_report_paths
from ebbflow.tasks.drawing.charts import lines_svg
from ebbflow.tasks.report.training import deliver, placement_text, run_training
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.leased.place import ClusterPlace
from ebbflow.tasks.training.listening import CompositeTrainingListener, NullTrainingListener, TrainingListener
from ebbflow.tasks.training.report import EventReport, PointReport, TrainingReport
from ebbflow.tasks.training.request import TrainingRequest, default_runs_dir
from ebbflow.tasks.training.run import new_id

PUBLISH_EVERY = 10.0  # s between two versions of the live artifact
_SETTLE = 5.0  # s for the last of them to be published

_EVENTS = {
    "generation": "resized",
    "node-lost": "node-lost",
    "node-notice": "node-notice",
    "failure": "failed",
}


_ATTACHED: Attached[tuple[TrainingRequest, TrainingListener, bool], TrainingReport] = Attached("training")


def train_attached(request: TrainingRequest, listener: TrainingListener, *, resume: bool) -> TrainingReport:
    """Run ``request`` as a flow run of ``train`` with a listener in this process (the command line)."""

    def call() -> None:
        train(request.script, arguments=list(request.arguments), name=request.name, run_id=request.run_id)

    return _ATTACHED.run((request, listener, resume), call, handled=TrainingError)


@flow(name="train", flow_run_name=run_name("train", "name", "run_id", "script"), validate_parameters=True)
def train(
    script: str,
    *,
    arguments: list[str] | None = None,
    run_id: str = "",
    name: str = "",
    workdir: str = "",
    requirements: str = "",
    setup: str = "",
    env: list[str] | None = None,
    nodes: str = "local:1x1",
    min_gpus: int = 1,
    max_gpus: int | None = None,
    replica_gpus: int = 1,
    runs_dir: str | None = None,
    adaptive: bool = True,
    communication: Literal["ddp", "planned"] = "ddp",
    own_checkpoints: bool = False,
    step_pattern: str = "",
    sync: Literal["allreduce", "service", "auto"] = "allreduce",
    recovery: Literal["auto", "in-place", "restart"] = "auto",
    aggregators: int = 1,
    mirrors: int = 0,
    mirror_every: int = 1,
    aggregation_cluster: str = "",
    checkpoint_interval: float | None = None,
    keep_checkpoints: int = 2,
    partial_checkpoint_interval: int = 0,
    partial_checkpoint_fraction: float = 0.125,
    partial_checkpoint_memory: bool = False,
    interruption_rate: float | None = None,
    preflight: Literal["auto", "always", "never"] = "auto",
    price: float = 0.0,
    failure_rules: str | None = None,
    retry_policy: Literal["by-class", "blind"] = "by-class",
    retry_backoff: float = 120.0,
    node_timeout: float = 3600.0,
    collective_timeout: float = 60.0,
    termination_grace: float = 30.0,
    cpus_per_slot: float | None = None,
    fault: list[str] | None = None,
    final_save_timeout: float = 120.0,
    spill_dir: str = "",
    track: list[str] | None = None,
    metrics: str = "",
    resume: bool = False,
    restart: bool = False,
    repack: bool = False,
    report: str | list[str] | None = None,
    ledger: str | None = None,
    cluster: str | None = None,
    fleet: str | None = None,
    team: str = "",
    weight: float = 1.0,
    deadline: float | None = None,
    budget: float | None = None,
) -> TrainingReport:
    """Run a PyTorch script elastically, on nodes that come and go.

    Prefect's own retries stay at zero: which failures a retry can recover depends on their class, and the run resumes
    from its checkpoint. Live metrics are versions of the artifact ``ebbflow-training``.

    Args:
        script: a Python file that trains inside ``with ElasticRun.start() as run:``.
        arguments: arguments of the script.
        run_id: run ID; generated from the script's name and the time by default.
        name: display name of the run.
        workdir: working directory of the script, packed and unpacked once on each node: a directory, ``REPO@REF`` of
            a git repository on this machine, or ``git+URL@REF``. ``script`` is then relative to it.
        requirements: requirements file of pip, for an environment that is built once on each node, on top of its own.
        setup: shell command that runs once on each node, before the script.
        env: environment variables of the script's processes, ``KEY=VALUE``; ``KEY`` alone takes the value that it has
            in this process and is recorded nowhere, so secrets are given like that.
        nodes: ``local:NODESxGPUS``: processes of this machine; ``aws:POOL:NODESxGPUS``: of the cluster's fleet.
        min_gpus: minimum number of GPUs; with fewer the run waits.
        max_gpus: maximum number of GPUs; all GPUs of the nodes by default.
        replica_gpus: number of GPUs that hold one replica of the model; a multiple of it is used.
        runs_dir: directory of all runs, local or ``s3://``, or the block ``ebbflow-storage/NAME``.
        adaptive: whether the batch size follows the goodput.
        communication: ``ddp`` leaves the exchange of gradients to PyTorch; ``planned`` searches an order and a cut
            for each collective while the run trains, and falls back to ``ddp``.
        own_checkpoints: whether the script is any torchrun script: it saves and restores by itself, gets SIGTERM
            before it must leave, and status 0 means finished.
        step_pattern: with ``own_checkpoints``, a regular expression whose first group is the step in what rank 0
            prints; progress bars and step lines of common frameworks by default.
        sync: where gradients meet: ``allreduce``: among the processes, all of which are needed; ``service``: at
            aggregators, so that processes are lost and join while the others train on; ``auto``: the cheaper of both,
            by what a preflight run measures.
        recovery: what processes do when others fail, leave or join: ``in-place`` keeps them, ``restart`` starts all
            of them again, ``auto`` is in-place where the script and its options allow it.
        aggregators: with ``service``: number of aggregator processes.
        mirrors: with ``service``: number of further aggregators that hold each tensor, so that one can be lost.
        mirror_every: rounds after which they are brought up to date; moments may be so many rounds old after a loss.
        aggregation_cluster: with ``service``: the cluster whose shared aggregators hold the tensors, in the ledger
            that ``ledger`` or ``$EBBFLOW_LEDGER`` names; aggregators of the run's own by default.
        checkpoint_interval: seconds between two full checkpoints; from the measured costs and the interruption rate
            by default.
        keep_checkpoints: number of full checkpoints to keep.
        partial_checkpoint_interval: iterations in which partial checkpoints (SCAR) have saved every parameter once,
            beside the full checkpoints; 0: no partial checkpoints.
        partial_checkpoint_fraction: fraction of the parameters in each partial checkpoint, those that changed most.
        partial_checkpoint_memory: keep partial checkpoints in memory that nodes lend first.
        interruption_rate: expected interruptions per node-hour.
        preflight: whether a preflight run on one or two GPUs comes first.
        price: dollars per GPU-hour.
        failure_rules: a TOML or YAML file of rules that are tried before the built-in failure table.
        retry_policy: ``by-class`` of failure, or three ``blind`` retries.
        retry_backoff: seconds before the first retry after an infrastructure failure.
        node_timeout: maximum seconds to wait for nodes when fewer than ``min_gpus`` are left.
        collective_timeout: seconds after which a collective operation that hangs is an error.
        termination_grace: seconds that processes have to save and exit after a stop request.
        cpus_per_slot: CPU cores of each local GPU slot.
        fault: faults to inject, such as ``20s:kill:node-2``.
        final_save_timeout: seconds in which a failed final save is retried before the checkpoint goes to
            ``spill_dir``, and in which checkpoints that cannot be read at the start are tried again.
        spill_dir: directory for a checkpoint that the run's directory cannot take; of the saving node by default.
        metrics: ``HOST:PORT`` at which ``/metrics`` for Prometheus and ``/healthz`` are served while it runs.
        track: experiment trackers that show the run, over all its restarts, as one: ``mlflow:URI_OR_DIR#EXPERIMENT``
            or ``wandb:PROJECT``.
        resume: resume the run ``run_id`` with its recorded options; others but ``runs_dir`` are not read.
        restart: with ``resume``, restart at step 0 if none of the run's checkpoints is usable.
        repack: with ``resume``, pack the working directory and requirements again.
        report: report file or files: ``.html`` is a page, ``.json`` is data.
        ledger: makes it an app of a cluster: it asks for as many GPUs as ``nodes`` has and trains on those that the
            capacity loop leases it; lost, it is started again. A file, an address without a password, or the block
            ``ebbflow-cluster/NAME``.
        cluster: the cluster's name in that ledger.
        fleet: the cluster's nodes: ``local[:NAME]``, ``aws[:FILE]``, or ``aws:ebbflow-aws/NAME``.
        team: that it counts for there.
        weight: among the apps there.
        deadline: seconds since the Unix epoch.
        budget: dollars.

    Returns:
        What happened and why; its ``state`` is ``finished`` or ``stopped``.

    Raises:
        TrainingError: the training failed, with the reason.
        EbbflowError: bad input.
    """
    given = dict(locals())  # the parameters
    outlive_readers()
    files = check_report_paths(report)
    attachment = _ATTACHED.get()
    of_a_cluster(ledger, cluster=cluster, fleet=fleet, team=team, deadline=deadline, budget=budget)
    with found(ledger, cluster, fleet) as told:
        place = runs_of(runs_dir, told.storage) or default_runs_dir()
        if attachment is not None:
            request, _, resume = attachment.given
        elif resume:
            changes = {"report": files, "fault": tuple(fault or ()), "restart": restart, "repack": repack}
            request = TrainingRequest.load(place, run_id, changes)
        else:
            if repack:
                raise OptionError("repack goes with resume; a new run packs its code anyway")
            if restart:
                raise OptionError("restart goes with resume; a new run starts at step 0 anyway")
            request = TrainingRequest(
                **fields_of(TrainingRequest, given) | {"runs_dir": place, "report": files}
            )
        if not request.run_id:
            request = replace(request, run_id=new_id(request))
        own = _PrefectListener(request)
        listener = own if attachment is None else CompositeTrainingListener(own, attachment.given[1])
        asked = app_fields(team=team, weight=weight, deadline=deadline, budget=budget)
        work = _work(request, listener, resume, None if ledger is None else told.place, **asked)
        # the command line has handlers of its own
        outcome = work.run("run-training", attend=attachment is None)
    own.artifacts.settle(_SETTLE)
    _publish(outcome)
    if attachment is not None:
        attachment.outcome = outcome
    if outcome.state == "failed":
        raise TrainingError(outcome.reason)
    return outcome


def _work(
    request: TrainingRequest,
    listener: TrainingListener,
    resume: bool,
    cluster: ClusterPlace | None,
    **asked: Any,
) -> AppWork[TrainingReport]:
    """Return the training, as an app of ``cluster`` that has ``asked``; it leaves within what a cancelled run has."""
    stop = threading.Event()
    nodes = Nodes(request.placement, request.most_gpus, request.min_gpus, replica=request.replica_gpus)

    def alone() -> TrainingReport:
        if request.pool:  # its nodes are those that are free there
            return run_training(
                request, CompositeTrainingListener(listener, StopTraining(stop)), resume=resume
            )
        return run_training(request, listener, resume=resume, nodes=nodes)

    def as_app() -> Callable[..., TrainingReport]:
        from ebbflow.tasks.training.leased.app import run_training_app
        from ebbflow.tasks.training.leased.spec import training_spec

        request.save()
        spec = training_spec(request, **asked)
        return partial(
            run_training_app, request, spec, listener=listener, stop=stop, save=SAVE, deliver=deliver,
            options={"ledger": cluster.ledger if cluster is not None else None},
        )  # fmt: skip

    def leave() -> None:
        stop.set()
        nodes.stop(SystemClock().now() + min(request.termination_grace, SAVE))

    return AppWork(request.run_id, request.termination_grace, cluster, alone, as_app, leave)


class _PrefectListener(NullTrainingListener):
    """Tells Prefect what happens: live figures as an artifact, changes as events, logs for everything."""

    def __init__(self, request: TrainingRequest) -> None:
        self._logger = get_run_logger()
        self._request = request
        self._run_id = str(flow_run.id)
        self.artifacts = Publisher()
        self._lock = threading.Lock()
        self._published = -PUBLISH_EVERY
        self._latest: PointReport | None = None

    def point(self, point: PointReport) -> None:
        with self._lock:
            self._latest = point

    def tick(self) -> None:
        """Publish the latest figures: from here, since an artifact belongs to the task run of its thread."""
        with self._lock:
            point = self._latest
            if point is None or point.at - self._published < PUBLISH_EVERY:
                return
            self._published = point.at
        self.artifacts.table(
            "ebbflow-training",
            [_row(point, self._request.price)],
            f"Run {self._request.run_id} after {point.at:.0f} s",
        )

    def metrics(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self._logger.info(
            "epoch %s, step %s: %s", epoch, step, ", ".join(f"{k} {v:.6g}" for k, v in values.items())
        )

    def event(self, event: EventReport) -> None:
        self._logger.info(event.text)
        if event.kind in _EVENTS:
            emit_event(
                event=f"ebbflow.training.{_EVENTS[event.kind]}",
                resource={"prefect.resource.id": f"ebbflow.training.{self._request.run_id}"},
                related=[
                    {
                        "prefect.resource.id": f"prefect.flow-run.{self._run_id}",
                        "prefect.resource.role": "flow-run",
                    }
                ],
                payload={"at": event.at, "text": event.text, "node": event.node},
            )


def _row(point: PointReport, price: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": point.step,
        "epoch": point.epoch,
        "loss": point.loss,
        "goodput (examples/s)": round(point.goodput, 1),
        "throughput (examples/s)": round(point.throughput, 1),
        "batch": point.batch,
        "noise scale": round(point.noise_scale, 1),
        "GPUs": point.gpus,
        "nodes": point.nodes,
        "lost steps": point.lost_steps,
        "skipped steps": point.skipped,
    }
    if not price:
        return row
    return row | {"$ so far": round(point.dollars, 4), "$ per hour": round(point.gpus * price, 4)}


def _publish(report: TrainingReport) -> None:
    """Publish what happened: totals, generations and a picture."""
    last = report.last
    totals = {
        "state": report.state,
        "seconds": round(report.seconds, 1),
        "steps": report.steps,
        "lost steps": report.lost_steps,
        "saved step": report.saved_step,
        "recovery": report.recovery.way if report.recovery else None,
        "changes in place": report.recovery.changes if report.recovery else 0,
        "mean goodput (examples/s)": round(report.mean("goodput") or 0.0, 1),
        "mean throughput (examples/s)": round(report.mean("throughput") or 0.0, 1),
        "batch": last.batch if last else None,
        "noise scale": round(last.noise_scale, 1) if last else None,
        "GPU hours": round(report.gpu_seconds / 3600, 4),
        "dollars": round(report.dollars, 4),
        **report.final_metrics,
    }
    artifacts.table("ebbflow-training", [totals], f"Run {report.id}: {report.reason}")
    rows = [
        {
            "generation": g.number,
            "placement": placement_text(g),
            "seconds": round(g.ended - g.started, 1),
            "steps": f"{g.first_step} to {g.last_step}",
            "lost steps": g.lost_steps,
            "end": g.kind,
            "failure": g.failure.reason if g.failure else "",
            "next action": g.decision,
        }
        for g in report.generations
    ] or [{"generation": 0, "end": report.reason}]
    artifacts.table("ebbflow-generations", rows, "World sizes")
    series = {
        name: [(p.at, float(getattr(p, name))) for p in report.series] for name in ("throughput", "goodput")
    }
    if len(report.series) > 1:
        speed = lines_svg("Examples a second", series, label="seconds", unit="examples/s")
        artifacts.picture("ebbflow-training-speed", speed, "speed", "Throughput and goodput over time")
