"""A training run on a terminal while it continues: one line of figures, events above it; plain lines elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from threading import Lock

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ebbflow.flows.runs.screen import Screen
from ebbflow.tasks.drawing.wording import count_text, number_text, plural, printable, seconds_text
from ebbflow.tasks.report.training import STATE_WORDS, generation_rows
from ebbflow.tasks.training.listening import NullTrainingListener
from ebbflow.tasks.training.report import EventReport, PointReport, TrainingReport

EVERY = 5.0  # s between lines of figures where there is no terminal

_STYLES = {
    "failure": "bold red",
    "damaged": "bold red",
    "spilled": "bold red",
    "saving": "yellow",
    "node-lost": "red",
    "hang": "red",
    "node-notice": "yellow",
    "straggler": "yellow",
    "waiting": "yellow",
    "scripted": "bold magenta",
    "added": "green",
    "interrupted": "bold yellow",
    "preflight": "cyan",
}


class TrainingScreen(Screen[Live], NullTrainingListener):
    """Shows a run. Its methods may be called from any thread."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            console, lambda: Live(Text(""), console=console, transient=True, refresh_per_second=4)
        )
        self._lock = Lock()
        self._last: PointReport | None = None
        self._shown_at = -EVERY

    def point(self, point: PointReport) -> None:
        with self._lock:
            self._last = point
            if self._drawing:
                self._drawing.update(Text(self._line(point), no_wrap=True, overflow="ellipsis"))
            elif point.at - self._shown_at >= EVERY:
                self._shown_at = point.at
                self._say(self._line(point))

    def metrics(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        said = ", ".join(f"{name} {number_text(value)}" for name, value in values.items())
        with self._lock:
            self._say(f"epoch {epoch}, step {step}: {said}", "green")

    def event(self, event: EventReport) -> None:
        with self._lock:
            self._say(f"{event.at:6.1f} s  {event.text}", _STYLES.get(event.kind, ""))

    def _line(self, point: PointReport) -> str:
        if not point.batch:  # of a script with own checkpoints, of which no more is known
            gpus = f"{plural(point.gpus, 'GPU')} on {plural(point.nodes, 'node')}"
            return " · ".join(
                [f"step {point.step:,}", gpus, *([f"${point.dollars:.2f}"] if point.dollars else [])]
            )
        loss = "–" if point.loss is None else number_text(point.loss)
        parts = [
            f"step {point.step:,}",
            f"epoch {point.epoch}",
            f"loss {loss}",
            f"{plural(point.gpus, 'GPU')} on {plural(point.nodes, 'node')}",
            f"batch {point.batch:,}" + (f" in {point.passes} passes" if point.passes > 1 else ""),
            f"{count_text(point.throughput)} examples/s",
            f"goodput {count_text(point.goodput)}"
            + (f" ({count_text(point.goodput * point.tokens)} tokens/s)" if point.tokens else ""),
            f"noise {count_text(point.noise_scale)}",
            f"{point.lost_steps:,} lost" if point.lost_steps else "",
            f"${point.dollars:.2f}" if point.dollars else "",
        ]
        return " · ".join(part for part in parts if part)


def _generations(report: TrainingReport) -> str:
    """Return how many generations the run has had, as their numbers go; a report holds those since its last start."""
    here = len(report.generations)
    before = report.generations[0].number - 1 if report.generations else 0
    words = plural(before + here, "generation")
    return f"{words}, {here} of them since it resumed" if before > 0 else words


def print_training(report: TrainingReport, console: Console) -> None:
    """Print what happened."""
    head = Text.assemble(
        (report.state, STATE_WORDS[report.state]), f" after {seconds_text(report.seconds)}: ",
        f"{plural(report.steps, 'step')}, {_generations(report)}",
    )  # fmt: skip
    console.print(head)
    if report.state != "finished" and report.reason not in ("", "stop"):  # the head says as much
        console.print(Text(printable(report.reason)), soft_wrap=True)
    if report.failure and report.failure.advice:
        console.print(Text(printable(report.failure.advice), style="italic"), soft_wrap=True)
    if report.final_metrics:
        said = ", ".join(
            f"{n} {number_text(v)}" if v is not None else n for n, v in report.final_metrics.items()
        )
        console.print(f"metrics: {printable(said)}", highlight=False, soft_wrap=True)
    figures = [f"lost steps: {report.lost_steps}", f"GPU time: {seconds_text(report.gpu_seconds)}"]
    for name in ("throughput", "goodput"):
        if mean := report.mean(name):
            tokens = report.mean_tokens(name)
            also = f" ({count_text(tokens)} tokens/s)" if tokens else ""
            figures.append(f"{name}: {count_text(mean)} examples/s{also}")
    if report.state != "finished" and report.saved_step is not None:
        figures.append(f"saved: step {report.saved_step}")
    if report.skipped_steps:
        figures.append(f"skipped steps: {report.skipped_steps}")
    if report.recovery is not None and report.recovery.changes:
        figures.append(f"changes of nodes in place: {report.recovery.changes}")
    if report.price:
        figures.append(f"cost: ${report.dollars:.4f}")
    console.print(" · ".join(figures), highlight=False, soft_wrap=True)
    if report.saving is not None:
        every = f"checkpoints every {seconds_text(report.saving.interval)}: {report.saving.hazard}"
        console.print(Text(printable(every)), soft_wrap=True)
    for text in report.unusable:
        console.print(Text(printable(f"unusable checkpoint: {text}")), soft_wrap=True)
    if report.spilled is not None:
        console.print(Text(printable(f"{report.spilled}"), style="bold red"), soft_wrap=True)
    if report.state == "failed" and report.generations:
        where = Path(report.directory) / "logs" / f"generation-{report.generations[-1].number}"
        if where.is_dir():
            console.print(f"logs of the processes: {where}", highlight=False, soft_wrap=True)
    if len(report.generations) > 1:
        console.print(generation_rows(report))
        if report.recovery is not None and report.recovery.way == "restart":
            said = f"each change of nodes restarts all processes: {report.recovery.reason}"
            console.print(Text(printable(said)), soft_wrap=True)
