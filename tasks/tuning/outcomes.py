"""How trials end, and when a tuning run gives up since they fail alike."""

from ebbflow.infra.errors import StorageFullError
from ebbflow.planners.training.failures.failures import FailureReason
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.tuning.report import TrialEnd
from ebbflow.tasks.tuning.trial import Trial

SAME_FAILURES = 3  # trials that fail alike before the tuning run gives up


class TrialOutcomes:
    """Says what the end of a training means for its trial, and counts failures by what they have in common."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._signatures: dict[str, int] = {}

    @property
    def given_up(self) -> str:
        """Return the error with which ``SAME_FAILURES`` trials have failed; empty for none."""
        return next((line for line, times in self._signatures.items() if times >= SAME_FAILURES), "")

    def of(self, one: Trial, report: TrainingReport | None, error: Exception | None) -> tuple[TrialEnd, str]:
        """Return how a trial has ended, and why."""
        if (full := full_error(report, error)) is not None:
            return "stopped", str(full)  # no fault of the trial's: it continues when the tuning run does
        if report is None or report.state == "failed":
            reason = str(error) if report is None else report.reason
            failure = report.failure if report else None
            mark = failure.line if failure and failure.failure_class in ("user", "data") else ""
            if mark or report is None:
                self._signatures[mark or reason] = self._signatures.get(mark or reason, 0) + 1
            return "failed", reason
        if one.pruned:
            return "pruned", f"stopped early (pruned) after epoch {one.epochs}"
        if report.state == "stopped":
            return "stopped", report.reason
        if one.value is None:
            line = f"the script never reported {self._metric} (run.report({self._metric}=...))"
            self._signatures[line] = self._signatures.get(line, 0) + 1
            return "failed", line
        return "complete", ""


def full_error(report: TrainingReport | None, error: Exception | None) -> StorageFullError | None:
    """Return the error of a trial that found no space, for its files or for its last checkpoint."""
    if isinstance(error, StorageFullError):
        return error
    failure = report.failure if report is not None and report.state == "failed" else None
    if report is not None and failure is not None and failure.reason == FailureReason.NO_SPACE:
        return StorageFullError(report.reason)
    return None
