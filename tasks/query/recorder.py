"""The account of one query: what its driver tells is kept for the report and passed on to whoever listens."""

from collections.abc import Sequence
from dataclasses import replace

from ebbflow.infra.protocols import Checkpoint, StageProgress, StageResult
from ebbflow.planners.model import Capacity
from ebbflow.planners.query.coverage import coverage
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.plan.state import ReplanDecision
from ebbflow.planners.query.running.packing import stage_seconds
from ebbflow.planners.query.running.session import Session
from ebbflow.tasks.query.listening import Listener
from ebbflow.tasks.query.report import (
    CapacityReport,
    DecisionReport,
    PlanReport,
    QueryReport,
    StageReport,
    StageStatus,
)
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.slices import StageRun


class RunRecorder(Listener):
    """Everything that happened in a run that began at ``started`` (seconds since the Unix epoch).

    It is the driver's only listener; ``listener`` hears of all that is written here. ``notes`` it has heard already.
    """

    def __init__(self, started: float, listener: Listener, notes: Sequence[str] = ()) -> None:
        self.started = started
        self.stages: list[StageReport] = []
        self.capacity: list[CapacityReport] = []
        self.decisions: list[ReplanDecision] = []
        self.notes = [*notes]  # what went differently, as sentences for people
        self._listener = listener
        self._seen: Capacity | None = None

    # --- what is heard ------------------------------------------------------------------------------------

    def stage_started(self, stage: Stage) -> None:
        self._listener.stage_started(stage)

    def stage_progress(self, stage: Stage, progress: StageProgress) -> None:
        self._listener.stage_progress(stage, progress)

    def stage_ended(self, stage: Stage, report: StageReport) -> None:
        self.stages.append(report)
        self._listener.stage_ended(stage, report)

    def capacity_changed(self, capacity: Capacity, change: str) -> None:
        """Note the capacity from now on; that of the start has no ``change``."""
        report = CapacityReport.of(capacity, self._seen, self.started)
        self.capacity.append(replace(report, at=max(0.0, report.at)))  # seen before the query began
        self._seen = capacity
        if change:
            self._listener.capacity_changed(capacity, change)
        else:
            self._listener.begins(capacity)

    def decided(self, decision: ReplanDecision) -> None:
        self.decisions.append(decision)
        self._listener.decided(decision)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._listener.note(text)

    # --- stages -------------------------------------------------------------------------------------------

    def ended(
        self,
        run: StageRun,
        now: float,
        plan: str,
        status: StageStatus,
        checkpoint: Checkpoint | None = None,
        result: StageResult | None = None,
        note: str = "",
    ) -> None:
        """Write down that a stage's run for the plan ``plan`` (its id) has ended at ``now``."""
        stage = run.stage
        report = StageReport(
            stage.name,
            stage.output_fp,
            status,
            plan,
            run.started - self.started,
            now - self.started,
            checkpoint.rows if checkpoint else 0,
            checkpoint.bytes if checkpoint else 0,
            now - run.started,
            result.tasks if result else run.progress.tasks_total,
            result.failed_tasks if result else run.progress.tasks_failed,
            stage_seconds(stage, run.cores, run.cold),
            stage.rows,
            note=note,
        )
        self.stage_ended(stage, report)

    def reused(self, stage: Stage, checkpoint: Checkpoint, now: float, plan: str) -> None:
        """Write down that the plan ``plan`` (its id) takes a stage from its checkpoint."""
        at = now - self.started
        report = StageReport(
            stage.name,
            stage.output_fp,
            "reused",
            plan,
            at,
            at,
            checkpoint.rows,
            checkpoint.bytes,
            estimated_rows=stage.rows,
            saved_seconds=checkpoint.seconds,
        )
        self.stage_ended(stage, report)

    # --- the whole ----------------------------------------------------------------------------------------

    def report(
        self,
        request: QueryRequest,
        session: Session,
        result: Checkpoint,
        seconds: float,
        verdict: tuple[bool | None, str],
        problems: Sequence[str],
    ) -> QueryReport:
        """Return the report of the finished run.

        Args:
            request: what was asked for.
            session: that made the plans.
            result: of the query.
            seconds: from start to result.
            verdict: whether the result is right, if it was checked, and how that is known.
            problems: of the store, as sentences.
        """
        decisions = tuple(DecisionReport.of(d, self.started) for d in self.decisions)
        first = decisions[0] if decisions else None
        estimates = {e.plan_id: e.seconds for e in first.estimates} if first else {}
        chosen = first.chosen if first else ""
        known = frozenset(s.fingerprint for s in self.stages if s.status in ("completed", "reused"))
        return QueryReport(
            query=request.sql,
            planner=request.planner,
            engine=request.engine,
            master=request.master if request.engine == "spark" else "",
            engine_reason=request.engine_reason,
            name=request.name,
            started=self.started,
            seconds=seconds,
            rows=result.rows,
            columns=result.relation.columns,
            result_path=request.output or result.uri,
            stages=tuple(self.stages),
            decisions=decisions,
            capacity=tuple(self.capacity),
            plans=tuple(
                PlanReport.of(
                    plan,
                    estimated_seconds=estimates.get(plan.id),
                    cores=self.capacity[0].cores,
                    chosen=plan.id == chosen,
                    reason=first.reason if first and plan.id == chosen else "",
                    checkpoints=known,
                    engine=request.engine,
                )
                for plan in session.plans.values()
            ),
            expected_seconds=estimates.get(chosen),
            problems=(*session.planner.notes, *self.notes, *problems),
            verified=verdict[0],
            verification=verdict[1],
            blocks=coverage(session.planner.analysis),
        )
