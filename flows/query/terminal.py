"""How a run looks on a terminal while it lasts: progress bars, decisions, notes."""

from collections.abc import Callable
from typing import Any

from ebbflow.flows.query.bars import StageBars
from ebbflow.infra.protocols import StageProgress
from ebbflow.planners.model import Capacity
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.plan.state import ReplanDecision
from ebbflow.tasks.drawing.wording import plural
from ebbflow.tasks.query.listening import NullQueryListener
from ebbflow.tasks.query.report import StageReport


class TerminalListener(NullQueryListener):
    """Shows a run on a console while it lasts. ``also`` hears of each stage's start (the demo's schedule)."""

    def __init__(self, bars: StageBars, also: Callable[[Stage], Any] | None = None) -> None:
        self._bars = bars
        self._also = also

    def stage_started(self, stage: Stage) -> None:
        self._bars.started(stage.output_fp, stage.name)
        if self._also is not None:
            self._also(stage)

    def stage_progress(self, stage: Stage, progress: StageProgress) -> None:
        self._bars.progress(stage.output_fp, progress.tasks_done, progress.tasks_total)

    def stage_ended(self, stage: Stage, report: StageReport) -> None:
        if report.status == "reused":
            self._bars.started(stage.output_fp, stage.name)
        detail = report.note or f"{plural(report.rows, 'row')} in {report.seconds:.1f} s"
        self._bars.finished(stage.output_fp, report.status, "" if report.status == "cancelled" else detail)

    def capacity_changed(self, capacity: Capacity, change: str) -> None:
        nodes = plural(len(capacity.usable), "node")
        self._bars.note(f"capacity: {plural(capacity.cores, 'core')} on {nodes} ({change})")

    def decided(self, decision: ReplanDecision) -> None:
        self._bars.note(decision.reason)

    def note(self, text: str) -> None:
        self._bars.note(f"note: {text}")
