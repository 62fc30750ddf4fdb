"""When a query's stages ran, as its reports carry it: ``cluster_decisions.stages`` reads it."""

from typing import Any

from ebbflow.planners.query.plan.qep import Stage
from ebbflow.tasks.query.report import StageReport

_MOST = 200  # stages that a report carries: the newest


class StageTimes:
    """Collects stages as they start and end; times are s since the Unix epoch."""

    def __init__(self) -> None:
        self._running: dict[str, dict[str, Any]] = {}
        self._over: list[dict[str, Any]] = []

    def started(self, stage: Stage, now: float) -> None:
        """Note that a stage runs from ``now`` on."""
        self._running[stage.output_fp] = {"name": stage.name[:200], "status": "running", "started": now}

    def ended(self, stage: Stage, report: StageReport, now: float) -> None:
        """Note how a stage, or one that was reused and never started, ended."""
        known = self._running.pop(stage.output_fp, {"name": stage.name[:200], "started": now})
        self._over.append(
            {
                **known,
                "status": report.status,
                "ended": now,
                "plan": report.plan,
                "rows": report.rows,
                "note": report.note[:200],
            }
        )
        del self._over[:-_MOST]

    def figures(self) -> dict[str, Any]:
        """Return the ``job`` of the query's next report."""
        return {"stages": [*self._over, *self._running.values()]}
