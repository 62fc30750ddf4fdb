"""The Prefect side of a query run: stages as task runs, changes as events, decisions as a table artifact."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner

from ebbflow.flows.runs import artifacts
from ebbflow.infra.errors import StageCancelledError
from ebbflow.infra.protocols import StageProgress
from ebbflow.planners.model import Capacity
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.plan.state import ReplanDecision
from ebbflow.tasks.query.feedback import Feedback
from ebbflow.tasks.query.listening import NullQueryListener, StageOutcome
from ebbflow.tasks.query.report import QueryReport, StageReport, reason_text

MAX_PARALLEL_STAGES = 4


def task_runner() -> ThreadPoolTaskRunner:  # type: ignore[type-arg]
    """Return the task runner that query flows use: one thread a stage and one for the feedback task."""
    return ThreadPoolTaskRunner(max_workers=MAX_PARALLEL_STAGES + 2)


@task(name="run-stage", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def run_stage(name: str, fingerprint: str, work: Callable[[], StageOutcome]) -> State[Any]:
    """Run one stage of a query plan and commit its checkpoint.

    The checkpoint store decides what is reused, not Prefect's cache, since only the store can tell that a
    checkpoint's files are still whole. A stage cancelled by a switch of plans ends as Cancelled.
    """
    outcome = work()
    if isinstance(outcome.error, StageCancelledError):
        return Cancelled(message="not needed any more: the query has gone over to another plan, or is over")
    if outcome.error is not None:
        return Failed(message=str(outcome.error))
    checkpoint = outcome.checkpoint
    assert checkpoint is not None
    message = f"{checkpoint.rows:,} rows, {checkpoint.bytes:,} bytes at {checkpoint.uri}"
    return Completed(name="Reused" if outcome.result is None else "Completed", message=message)


@task(
    name="resource-feedback", task_run_name="resource-feedback", cache_policy=NO_CACHE, persist_result=False
)
def watch_capacity(feedback: Feedback, stop: threading.Event) -> int:
    """Watch capacity until the query ends and wake the replanner at each change; return the number of changes."""
    return feedback.run(stop)


class PrefectBackground:
    """Submits each stage as a Prefect task run of the present flow run."""

    def __init__(self) -> None:
        self.futures: list[PrefectFuture[Any]] = []

    def submit(self, stage: Stage, work: Callable[[], StageOutcome]) -> None:
        self.futures.append(run_stage.submit(stage.name, stage.output_fp, work))

    def wait(self, timeout: float) -> None:
        """Wait for the task runs to be recorded, at most ``timeout`` seconds each."""
        for future in self.futures:
            with suppress(Exception):  # how a stage ended was handled already
                future.wait(timeout)


class PrefectListener(NullQueryListener):
    """Tells Prefect what happens: events for capacity and switches, logs for everything."""

    def __init__(self) -> None:
        self._logger = get_run_logger()
        self._run_id = str(flow_run.id)

    def stage_ended(self, stage: Stage, report: StageReport) -> None:
        self._logger.info("%s: %s, %s rows in %.1f s", stage.name, report.status, report.rows, report.seconds)

    def capacity_changed(self, capacity: Capacity, change: str) -> None:
        self._logger.info(
            "capacity revision %s: %s; %s cores left", capacity.revision, change, capacity.cores
        )
        self._emit(
            "ebbflow.capacity.changed",
            {
                "revision": capacity.revision,
                "cores": capacity.cores,
                "memory_gib": capacity.memory,
                "nodes": [n.id for n in capacity.nodes],
                "noticed": [n.node_id for n in capacity.notices],
                "change": change,
            },
        )

    def decided(self, decision: ReplanDecision) -> None:
        self._logger.info(decision.reason)  # which begins with its kind
        if decision.kind == "switch":
            self._emit(
                "ebbflow.plan.replaced",
                {
                    "revision": decision.revision,
                    "from": decision.current,
                    "to": decision.chosen,
                    "reason": reason_text(decision),
                },
            )

    def note(self, text: str) -> None:
        self._logger.warning(text)

    def stage_progress(self, stage: Stage, progress: StageProgress) -> None: ...

    def _emit(self, event: str, payload: Mapping[str, Any]) -> None:
        emit_event(
            event=event,
            resource={"prefect.resource.id": f"ebbflow.query.{self._run_id}"},
            related=[
                {
                    "prefect.resource.id": f"prefect.flow-run.{self._run_id}",
                    "prefect.resource.role": "flow-run",
                }
            ],
            payload=dict(payload),
        )


def publish_artifacts(report: QueryReport, timeline_svg: str) -> None:
    """Publish the decisions and stages as table artifacts and the timeline as a picture."""
    artifacts.table("ebbflow-decisions", _decision_rows(report), "Every re-planning decision")
    artifacts.table("ebbflow-stages", _stage_rows(report), "Stages of the query")
    artifacts.picture("ebbflow-timeline", timeline_svg, "timeline", "Stages and capacity over time")


def _decision_rows(report: QueryReport) -> Sequence[dict[str, Any]]:
    return [
        {
            "at (s)": round(d.at, 1),
            "revision": d.revision,
            "decision": d.kind,
            "from": d.current,
            "to": d.chosen,
            "trigger": d.trigger,
            "reason": d.reason,
        }
        for d in report.decisions
    ] or [{"decision": "none", "reason": "the policy never re-plans"}]


def _stage_rows(report: QueryReport) -> Sequence[dict[str, Any]]:
    return [
        {
            "stage": s.name,
            "status": s.status,
            "rows": s.rows,
            "seconds": round(s.seconds, 1),
            "plan": s.plan,
            "fingerprint": s.fingerprint[:12],
        }
        for s in report.stages
    ]
