"""One training run as one page and as lines on a console, and the files that were asked for."""

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from ebbflow.tasks.drawing.charts import lines_svg
from ebbflow.tasks.drawing.iterations import iterations_svg
from ebbflow.tasks.drawing.wording import number_text, plural, printable, seconds_text, shorten
from ebbflow.tasks.report.aggregation import aggregation_rows
from ebbflow.tasks.report.files import write_reports
from ebbflow.tasks.report.query import page
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.listening import TrainingListener
from ebbflow.tasks.training.report import GenerationReport, PointReport, TrainingReport
from ebbflow.tasks.training.request import TrainingRequest

_WIDE, _NARROW = 980.0, 380.0
_ROWS = 100  # of a table
STATE_WORDS = {"finished": "bold green", "stopped": "bold yellow", "failed": "bold red"}


def run_training(
    request: TrainingRequest,
    listener: TrainingListener | None = None,
    *,
    resume: bool = False,
    nodes: Nodes | None = None,
) -> TrainingReport:
    """Run ``request`` to its end, write what it asks for, and return the report; see ``tasks.training.run``."""
    from ebbflow.tasks.training import run

    return deliver(run.run_training(request, listener, resume=resume, nodes=nodes), request)


def deliver(report: TrainingReport, request: TrainingRequest) -> TrainingReport:
    """Write a run's report to the files that ``request`` asks for, and return it. Raises ``ReportError``."""
    write_reports(request.report, html=lambda: training_html(report), json=report.to_json)
    return report


def training_html(report: TrainingReport) -> str:
    """Return ``report`` as one self-contained page; all text from the report is escaped."""
    pictures: dict[str, str] = {}
    keys = []
    for key, draw in _pictures(report):
        keys.append(key)
        pictures[f"{key}-wide"], pictures[f"{key}-narrow"] = draw(_WIDE), draw(_NARROW)
    return page(
        "run.html.j2",
        pictures,
        report=report,
        keys=keys,
        metrics={n: number_text(v) if v is not None else "–" for n, v in report.final_metrics.items()},
        placements={g.number: placement_text(g) for g in report.generations},
        gaps=[g.gap_seconds for g in report.generations if g.gap_seconds is not None],
        dollars=f"{report.dollars:.4f}" if report.price else "",
        throughput=report.mean("throughput"),
        goodput=None if report.own_checkpoints else report.mean("goodput"),
        service=aggregation_rows(report.aggregation, _ROWS),
    )


def _pictures(report: TrainingReport) -> list[tuple[str, Callable[[float], str]]]:
    """Return what draws each picture at a width; those without points are left out."""
    found: list[tuple[str, Callable[[float], str]]] = []

    def draw(key: str, title: str, unit: str, lines: dict[str, list[tuple[float, float]]]) -> None:
        shown = {name: line for name, line in lines.items() if line}
        if shown:
            found.append(
                (key, lambda width: lines_svg(title, shown, label="seconds", unit=unit, width=width))
            )

    series = report.series
    speed = {"throughput": _line(series, "throughput"), "goodput": _line(series, "goodput")}
    if report.own_checkpoints:
        draw("steps", "Steps, as the script's output says", "steps", {"step": _line(series, "step")})
    else:
        draw(
            "speed",
            "Examples a second; goodput counts those worth as much at the initial batch",
            "examples/s",
            speed,
        )
        if any(point.tokens for point in series):
            tokens = {
                name: [(one.at, getattr(one, name) * one.tokens) for one in series]
                for name in ("throughput", "goodput")
            }
            draw("tokens", "Tokens a second, and those of the goodput", "tokens/s", tokens)
    draw("gpus", "GPUs: of all nodes that are there, and in use", "GPUs", _capacity(report))
    if not report.own_checkpoints:
        draw("batch", "Batch, and the gradient's noise scale", "examples",
             {"batch": _line(series, "batch"), "noise scale": _line(series, "noise_scale")})  # fmt: skip
    draw("loss", "Loss of the training batches", "", {"loss": _line(series, "loss")})
    names = dict.fromkeys(m.name for m in report.metrics)
    metrics = {
        n: [(m.at, m.value) for m in report.metrics if m.name == n and m.value is not None] for n in names
    }
    draw("metrics", "What the script reported", "", metrics)
    if report.exchanges:
        plan = report.exchanges[-1]
        shown = {
            "without the plan (predicted)": plan.before,
            f"with plan {plan.version} (predicted)": plan.after,
        }
        title = "An iteration: what computes, and what each channel carries"
        found.append(("communication", lambda width: iterations_svg(title, shown, width=width)))
    return found


def _line(series: Sequence[PointReport], name: str) -> list[tuple[float, float]]:
    return [(point.at, float(value)) for point in series if (value := getattr(point, name)) is not None]


def _capacity(report: TrainingReport) -> dict[str, list[tuple[float, float]]]:
    there: list[tuple[float, float]] = []
    used: list[tuple[float, float]] = []
    ends = [point.at for point in report.capacity[1:]] + [report.seconds]
    for point, end in zip(report.capacity, ends, strict=False):
        there += [(point.at, point.rented), (end, point.rented)]
        used += [(point.at, point.used), (end, point.used)]
    return {"there": there, "in use": used}


def placement_text(generation: GenerationReport) -> str:
    """Return ``3 GPUs: node-1 2, node-3 1``."""
    return f"{plural(generation.gpus, 'GPU')}: " + ", ".join(
        f"{s.node} {s.slots}" for s in generation.placement
    )


def generation_rows(report: TrainingReport) -> Table:
    """Return a table with a row for each generation: GPUs, steps, pause, end and what followed."""
    table = Table("", "GPUs", "steps", "lost", "pause", "end", "next action", box=None, header_style="bold")
    for g in report.generations:
        done = f"{max(g.first_step, 0)}-{g.last_step}" if g.first_step >= 0 else "–"
        why = f"{g.kind}: {g.failure.reason}" if g.failure else g.kind
        gap = seconds_text(g.gap_seconds) if g.gap_seconds is not None else ""
        followed = Text(printable(shorten(g.decision, 60)))
        table.add_row(str(g.number), str(g.gpus), done, str(g.lost_steps or ""), gap, why, followed)
    return table
