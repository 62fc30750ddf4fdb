"""A tuning run on a console."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ebbflow.tasks.drawing.wording import number_text, plural, printable, seconds_text, shorten
from ebbflow.tasks.report.tuning import ranked
from ebbflow.tasks.tuning.report import TuningReport

_MOST = 20  # trials shown


def print_tuning(report: TuningReport, console: Console) -> None:
    """Print the trials, the best first, and what was found."""
    table = Table(
        "trial", report.metric, "end", "epochs", "GPU time", "parameters", box=None, header_style="bold"
    )
    for trial in ranked(report)[:_MOST]:
        value = "–" if trial.value is None else number_text(trial.value)
        words = ", ".join(
            f"{k} {number_text(v) if isinstance(v, float) else v}" for k, v in trial.parameters.items()
        )
        why = f"{trial.state}: {shorten(trial.reason, 50)}" if trial.state == "failed" else trial.state
        row = (str(trial.number), value, why, str(trial.epochs), seconds_text(trial.gpu_seconds), words)
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table)
    if len(report.trials) > _MOST:
        console.print(f"and {plural(len(report.trials) - _MOST, 'more trial')}; --json lists all")
    console.print(
        f"{report.state} after {seconds_text(report.seconds)}: {printable(report.reason)}", highlight=False
    )
    if report.best is not None and report.best.value is not None:
        found = " ".join(f"--{name} {value}" for name, value in report.best.parameters.items())
        said = f"best {report.metric} {number_text(report.best.value)}, {report.best.run}: {found}"
        console.print(Text(printable(said), style="bold green"), soft_wrap=True)
