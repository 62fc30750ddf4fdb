"""The Prefect flow that runs a pipeline: ``from ebbflow.flows.pipeline.flow import run_pipeline``."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner

from ebbflow.flows.blocks import environment
from ebbflow.flows.capacity.flow import PrefectLoopListener
from ebbflow.flows.runs import artifacts
from ebbflow.flows.runs.artifacts import Publisher
from ebbflow.flows.runs.attached import Attached, run_name
from ebbflow.flows.runs.block_refs import found
from ebbflow.flows.runs.cancelling import SAVE, attended
from ebbflow.flows.runs.deployed import allowed
from ebbflow.flows.runs.output_pipes import outlive_readers
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import PipelineRunError
from ebbflow.infra.ledger.address import VARIABLE
from ebbflow.planners.model.options import check_report_paths
from ebbflow.planners.query.sql.forbidden import checked_functions
from ebbflow.tasks.capacity.own_policies import checked_names
from ebbflow.tasks.pipeline.coordinator import AttemptResult
from ebbflow.tasks.pipeline.file.spec import StepSpec
from ebbflow.tasks.pipeline.outcome import PipelineOutcome, StepOutcome
from ebbflow.tasks.pipeline.record import app_id
from ebbflow.tasks.pipeline.run import NullWatcher, PipelineRequest, Steps, Watcher, run_steps
from ebbflow.tasks.pipeline.view import ClusterView
from ebbflow.tasks.report.cluster.picture import cluster_svg
from ebbflow.tasks.report.cluster.values import ClusterReport
from ebbflow.tasks.training.checks import absolute_source

PUBLISH_EVERY = 15.0  # s between two versions of the live artifact
MOST_STEPS = 64  # that run at once
_SETTLE = 30.0  # s
_SETTLE_ARTIFACTS = 5.0  # s


_ATTACHED: Attached[tuple[PipelineRequest, Watcher, Clock], PipelineOutcome] = Attached("pipeline")


def run_attached(request: PipelineRequest, listener: Watcher, clock: Clock) -> PipelineOutcome:
    """Run ``request`` as a flow run with a listener in this process (the command line)."""

    def call() -> None:
        run_pipeline(request.file or None, resume=request.resume or None, run_id=request.run_id or None)

    return _ATTACHED.run((request, listener, clock), call, handled=PipelineRunError)


@flow(
    name="run-pipeline",
    flow_run_name=run_name("pipeline", "resume", "run_id", "file"),
    validate_parameters=True,
    task_runner=ThreadPoolTaskRunner(max_workers=MOST_STEPS),  # type: ignore[arg-type]
)
def run_pipeline(
    file: str | None = None,
    *,
    resume: str | None = None,
    restart: bool = False,
    run_id: str | None = None,
    parameters: dict[str, str] | None = None,
    runs_dir: str | None = None,
    metrics: str = "",
    report: str | list[str] | None = None,
    ledger: str | None = None,
    allow_policies: list[str] | None = None,
    allow_functions: list[str] | None = None,
    allow_workdirs: list[str] | None = None,
) -> PipelineOutcome:
    """Run a pipeline: queries, trainings and tuning runs of several teams on one elastic cluster.

    Each step is a task run that carries the step's name. The artifact ``ebbflow-pipeline`` lists the apps and has a
    new version every fifteen seconds; ``ebbflow-pipeline-decisions`` holds every decision with its reason,
    ``ebbflow-pipeline-timeline`` a picture. Events ``ebbflow.step.started`` and ``ebbflow.step.completed``,
    ``ebbflow.plan.replaced``, and those of the capacity loop (``ebbflow.flows.capacity.flow``) where the flow runs
    it, can start automations. Cancelling the run lets all steps save and leave.

    Args:
        file: the pipeline's file; ``examples/pipeline.yaml`` explains the format.
        resume: ID of a run to resume, instead of a file; finished steps are not repeated.
        restart: with ``resume``, restart trainings from step 0 none of whose checkpoints can be read.
        run_id: ID of a new run; generated from the pipeline's name and the time unless given.
        parameters: values of the file's parameters that override its own.
        runs_dir: local directory of all runs of pipelines.
        metrics: ``HOST:PORT`` at which ``/metrics`` for Prometheus and ``/healthz`` are served while it runs.
        report: files for the report, beside those of the run's directory: ``.html`` the page, ``.json`` the outcome.
        ledger: what ``${env:EBBFLOW_LEDGER}`` stands for in the file: an address without a password, or the block
            ``ebbflow-cluster/NAME``.
        allow_policies: policies that the file may name and that may be imported, each ``MODULE:NAME``; in a run of a
            deployment, of those the ones that the deployment itself has.
        allow_functions: functions that the file's queries may call though they read more than tables, such as
            ``read_csv``; in a run of a deployment, of those the ones that the deployment itself has.
        allow_workdirs: working directories whose elastic applications the file may import; in a run of a deployment,
            of those the ones that the deployment itself has.

    Returns:
        What became of the pipeline and of each of its steps.

    Raises:
        PipelineRunError: a step has failed.
        EbbflowError: bad input.
    """
    outlive_readers()
    attachment = _ATTACHED.get()
    also: Watcher = NullWatcher()
    clock: Clock = SystemClock()
    if attachment is not None:
        request, also, clock = attachment.given
    else:
        request = PipelineRequest(
            file or "",
            resume or "",
            run_id or "",
            parameters or {},
            runs_dir or "",
            metrics=metrics,
            report=check_report_paths(report),
            restart=restart,
            allow_policies=checked_names(allowed("allow_policies", allow_policies)),
            allow_functions=checked_functions(allowed("allow_functions", allow_functions)),
            allow_workdirs=tuple(map(absolute_source, allowed("allow_workdirs", allow_workdirs))),
        )
    own = _PrefectListener(clock, also)
    background = PrefectBackground()
    run, stop = str(flow_run.id or ""), threading.Event()

    def work() -> PipelineOutcome:
        with found(ledger) as place, environment({VARIABLE: place.ledger} if place.ledger else {}):
            return steps()

    def steps() -> PipelineOutcome:
        outcome = run_steps(
            replace(request, flow_run=run, save=None if attachment is not None else SAVE),
            own,
            background=background,
            loop_listener=PrefectLoopListener(run, request.name()),
            clock=clock,
            stop=stop,
        )
        own.publish(last=True)
        return outcome

    # the command line has handlers of its own
    outcome = work() if attachment is not None else attended(work, stop.set)
    if attachment is not None:
        attachment.outcome = outcome
    if outcome.state == "failed":
        raise PipelineRunError(outcome.reason)
    return outcome


@task(name="run-step", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def run_step(name: str, kind: str, work: Callable[[], AttemptResult]) -> State[Any]:
    """Carry out one step of a pipeline. What is to be tried again, the pipeline decides, not Prefect's retries."""
    carried = work()
    if carried.state == "finished":
        said = ", ".join(f"{key}: {value}" for key, value in carried.details.items())
        return Completed(message=said or f"the {kind} has finished")
    if carried.state == "stopped":
        return Cancelled(message=carried.reason or "stopped")
    return Failed(message=carried.reason)


class PrefectBackground:
    """Submits each attempt at a step as a task run of the present flow run."""

    def __init__(self) -> None:
        self._futures: list[PrefectFuture[Any]] = []

    def submit(self, step: StepSpec, work: Callable[[], AttemptResult], lost: Callable[[str], None]) -> None:
        begun = threading.Event()

        def begin() -> AttemptResult:
            begun.set()
            return work()

        def ended(future: PrefectFuture[Any]) -> None:
            if not begun.is_set():  # without its API, Prefect gives a task up before it calls it
                lost(f"its task run did not begin{_why(future)}")

        try:
            future = run_step.submit(step.label, step.kind, begin)
        except Exception as error:
            lost(f"its task run could not be submitted: {error}")
        else:
            self._futures.append(future)
            future.add_done_callback(ended)

    def settle(self, timeout: float) -> None:
        """Wait for the task runs to be recorded, all within ``timeout`` seconds, half a minute at least."""
        end = time.monotonic() + max(timeout, _SETTLE)
        for future in self._futures:
            with suppress(Exception):  # how a step ended the coordinator has heard
                future.wait(max(0.1, end - time.monotonic()))


def _why(future: PrefectFuture[Any]) -> str:
    """Return what a future that is done says of its end, without asking the API."""
    try:
        future.result(timeout=0)
    except BaseException as error:  # the task's, whatever it is
        return f": {error}" if str(error) else f": {type(error).__name__}"
    return ""


class _PrefectListener:
    """Tells Prefect what happens: events and logs for steps, tables for apps and decisions."""

    def __init__(self, clock: Clock, also: Watcher) -> None:
        self._logger = get_run_logger()
        self._run_id = str(flow_run.id)
        self._clock, self._also = clock, also
        self._view: ClusterView | None = None
        self._steps: Steps = tuple
        self._artifacts = Publisher()
        self._published = clock.now()
        self._told = 0  # number of the last decision that was told

    def watch(self, view: ClusterView, steps: Steps) -> None:
        self._view, self._steps = view, steps
        self._also.watch(view, steps)

    def began(self, outcome: StepOutcome) -> None:
        self._logger.info("%s begins, attempt %s", outcome.display_name, outcome.attempts)
        self._emit("started", outcome)
        self._also.began(outcome)

    def ended(self, outcome: StepOutcome) -> None:
        self._logger.info("%s %s %s", outcome.display_name, outcome.state, outcome.reason)
        self._emit("completed", outcome)
        self._also.ended(outcome)

    def note(self, text: str) -> None:
        self._logger.info(text)
        self._also.note(text)

    def tick(self) -> None:
        self._also.tick()
        self._tell_plans()
        if self._clock.now() - self._published >= PUBLISH_EVERY:
            self.publish()

    def publish(self, *, last: bool = False) -> None:
        """Publish where all apps stand; at the end also every decision and the picture."""
        self._published = self._clock.now()
        report = self._view.look(now=last) if self._view is not None else None
        if report is None:
            return
        self._tell_plans()
        rows, description = _app_rows(report, self._steps()), "Apps of the pipeline"
        if not last:
            self._artifacts.table("ebbflow-pipeline", rows, description)
            return
        self._artifacts.settle(_SETTLE_ARTIFACTS)
        artifacts.table("ebbflow-pipeline", rows, description)
        artifacts.table(
            "ebbflow-pipeline-decisions", _decision_rows(report), "Every decision with its reason"
        )
        artifacts.picture(
            "ebbflow-pipeline-timeline",
            cluster_svg(report),
            "timeline",
            "Capacity, stages and leases over time",
        )

    def _tell_plans(self) -> None:
        """Emit the plans that queries have gone over to: they say so in the ledger."""
        report = self._view.look() if self._view is not None else None
        for one in report.decisions if report is not None else ():
            if one.number <= self._told:
                continue
            self._told = one.number
            if one.kind == "replan" and one.outcome.get("kind") == "switch":
                self._send(
                    "ebbflow.plan.replaced",
                    one.app,
                    {
                        "revision": one.revision,
                        "from": one.inputs.get("current"),
                        "to": one.outcome.get("chosen"),
                        "reason": one.reason,
                    },
                )

    def _emit(self, what: str, outcome: StepOutcome) -> None:
        payload = {
            "step": outcome.name,
            "kind": outcome.kind,
            "team": outcome.team,
            "state": outcome.state,
            "reason": outcome.reason,
            "attempts": outcome.attempts,
        }
        self._send(f"ebbflow.step.{what}", outcome.app or outcome.name, payload)

    def _send(self, event: str, app: str, payload: Mapping[str, Any]) -> None:
        run = f"prefect.flow-run.{self._run_id}"
        emit_event(
            event=event,
            resource={"prefect.resource.id": f"ebbflow.app.{app}"},
            related=[{"prefect.resource.id": run, "prefect.resource.role": "flow-run"}],
            payload=dict(payload),
        )


def _app_rows(report: ClusterReport, steps: Sequence[StepOutcome]) -> list[dict[str, Any]]:
    known = {app.id: app for app in report.apps}
    rows = []
    for step in steps:
        app = known.get(step.app)
        row: dict[str, Any] = {
            "team": step.team,
            "step": step.display_name,
            "kind": step.kind,
            "state": step.state,
        }
        if app is not None:
            row |= {
                "state": app.phase if step.state == "running" else step.state,
                "GPUs": app.held,
                "progress": None if app.progress is None else round(app.progress, 3),
                "rho": None if app.rho.value is None else round(app.rho.value, 3),
                "deadline": app.deadline_state,
                "$": round(app.dollars, 5),
            }
        rows.append(row | {"reason": step.reason})
    return _told(rows)


def _told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the columns that say nothing: Prefect's tables are narrow."""
    empty = {key for row in rows for key in row} - {
        key for row in rows for key, value in row.items() if value not in (None, "")
    }
    return [{key: value for key, value in row.items() if key not in empty} for row in rows]


def _decision_rows(report: ClusterReport) -> list[dict[str, Any]]:
    return [
        {
            "at (s)": round(one.at - report.since, 1),
            "decision": one.kind,
            "app": one.app.removeprefix(app_id(report.pipeline, "")),
            "revision": one.revision,
            "reason": one.reason,
        }
        for one in report.decisions
    ] or [{"decision": "none", "reason": "there was nothing to decide"}]
