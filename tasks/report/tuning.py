"""One tuning run as one page, and the files that were requested."""

from ebbflow.tasks.drawing.wording import number_text
from ebbflow.tasks.report.files import write_reports
from ebbflow.tasks.report.query import page
from ebbflow.tasks.tuning.report import TrialReport, TuningReport
from ebbflow.tasks.tuning.request import TuningRequest


def deliver_tuning(report: TuningReport, request: TuningRequest) -> TuningReport:
    """Write a tuning run's report to the files that ``request`` names, and return it. Raises ``ReportError``."""
    write_reports(request.report, html=lambda: tuning_html(report), json=report.to_json)
    return report


def tuning_html(report: TuningReport) -> str:
    """Return ``report`` as one self-contained page; all text from the report is escaped."""
    return page(
        "tuning.html.j2",
        {},
        report=report,
        best=_number(report.best.value) if report.best else "–",
        trials=[(one, _number(one.value), _parameters(one)) for one in ranked(report)],
    )


def ranked(report: TuningReport) -> list[TrialReport]:
    """Return the trials: complete ones first, and the best of them first."""
    sign = -1 if report.maximize else 1
    order = {"complete": 0, "pruned": 1, "stopped": 2, "failed": 3}
    return sorted(report.trials, key=lambda t: (order[t.state], sign * (t.value or 0.0), t.number))


def _number(value: float | None) -> str:
    return "–" if value is None else number_text(value)


def _parameters(trial: TrialReport) -> str:
    return ", ".join(
        f"{name} {number_text(value) if isinstance(value, float) else value}"
        for name, value in trial.parameters.items()
    )
