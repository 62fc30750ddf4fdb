"""A pipeline on a terminal while it runs: apps by team, nodes and the last decisions; plain lines elsewhere."""

from collections.abc import Callable
from threading import RLock

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ebbflow.flows.runs.screen import Screen
from ebbflow.infra.clock import Clock
from ebbflow.planners.model.ledger import OVER
from ebbflow.tasks.drawing.wording import number_text, plural, printable, seconds_text, shorten
from ebbflow.tasks.pipeline.coordinator import NullPipelineListener
from ebbflow.tasks.pipeline.outcome import StepOutcome
from ebbflow.tasks.pipeline.view import ClusterView
from ebbflow.tasks.report.cluster.values import AppRow, ClusterReport, DecisionRow

LINES_EVERY = 15.0  # s between lines of figures where there is no terminal
_DECISIONS = 6  # that are shown
_PHASES = {"running": "green", "waiting": "yellow", "finished": "dim", "failed": "bold red", "lost": "red"}
_KINDS = {"guard": "yellow", "recovery": "bold cyan", "scaling": "magenta", "replan": "cyan", "auction": ""}
_MARKS = {"finished": "✓", "failed": "✗", "skipped": "–", "stopped": "◼"}
_STYLES = {"finished": "green", "failed": "bold red", "skipped": "dim", "stopped": "yellow"}

Steps = Callable[[], tuple[StepOutcome, ...]]


class PipelineScreen(Screen[Live], NullPipelineListener):
    """Shows a pipeline. Its methods may be called from any thread.

    ``watch`` tells it where to look, once the ledger is open.
    """

    def __init__(self, console: Console, clock: Clock, *, every: float = LINES_EVERY) -> None:
        super().__init__(console, lambda: Live(Text(""), console=console, transient=True, auto_refresh=False))
        self._clock, self._every = clock, every
        self._lock = RLock()
        self._view: ClusterView | None = None
        self._steps: Steps = tuple
        self._began = clock.now()
        self._said = 0  # number of the last decision that was printed
        self._lines_at = clock.now()
        self._shown: ClusterReport | None = None

    def watch(self, view: ClusterView, steps: Steps) -> None:
        """Look there from now on."""
        with self._lock:
            self._view, self._steps = view, steps

    # --- what happens ---------------------------------------------------------------------------------------

    def began(self, outcome: StepOutcome) -> None:
        again = f", attempt {outcome.attempts}" if outcome.attempts > 1 else ""
        self.say(f"▸ {outcome.display_name} begins ({outcome.kind}{of_team(outcome.team)}{again})", "bold")

    def ended(self, outcome: StepOutcome) -> None:
        took = f" in {seconds_text(outcome.seconds)}" if outcome.seconds is not None else ""
        why = f": {outcome.reason}" if outcome.reason and outcome.state != "finished" else ""
        said = "".join(f", {name} {value}" for name, value in shown_details(outcome))
        late = ", after its deadline" if outcome.late else ""
        self.say(
            f"{_MARKS.get(outcome.state, '·')} {outcome.display_name} {outcome.state}{took}{said}{late}{why}",
            _STYLES.get(outcome.state, ""),
        )

    def note(self, text: str) -> None:
        self.say(text)

    def say(self, text: str, style: str = "") -> None:
        """Print a line with its time, above the table where there is one."""
        with self._lock:
            self._say(text, style, time=f"{self._clock.now() - self._began:6.1f} s  ")

    def tick(self) -> None:
        """Look and show, if it is time."""
        with self._lock:
            report = self._view.look() if self._view is not None else None
            if report is None:
                return
            self._decisions(report)
            if self._drawing:
                if report is not self._shown:
                    self._shown = report
                    self._drawing.update(self._table(report), refresh=True)
            elif self._clock.now() - self._lines_at >= self._every:
                self._lines_at = self._clock.now()
                self._lines(report)

    # --- how it looks ---------------------------------------------------------------------------------------

    def _decisions(self, report: ClusterReport) -> None:
        """Print decisions as they are made, where no table shows them."""
        for one in report.decisions:
            if one.number > self._said:
                self._said = one.number
                if self._drawing is None and not dull(one):
                    self.say(decision_text(one))

    def _lines(self, report: ClusterReport) -> None:
        for app in report.apps:
            if app.phase not in OVER:
                self.say(f"{app.label}{of_team(app.team)}: {app_text(app)}")

    def _table(self, report: ClusterReport) -> RenderableType:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name, justify in (
            ("team", "left"), ("app", "left"), ("phase", "left"), ("GPUs", "right"), ("ρ", "right"),
            ("progress", "left"), ("left", "right"), ("deadline", "left"), ("$", "right"),
        ):  # fmt: skip
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        there = {app.id for app in report.apps}
        for app in sorted(report.apps, key=lambda one: (one.team, one.number)):
            table.add_row(*_cells(app), style="dim" if app.phase in OVER else "")
        for step in self._steps():
            if step.app not in there and step.state in ("waiting", "running"):
                words = "begins" if step.state == "running" else "waits for others"
                table.add_row(plain(step.team), plain(shorten(step.display_name, 28)), words, style="dim")
        parts: list[RenderableType] = [table, Text(capacity_text(report), style="bold")]
        for one in [one for one in report.decisions if not dull(one)][-_DECISIONS:]:
            line = Text(f"  {one.at - report.since:6.1f} s  ", style="dim")
            line.append(f"{one.kind:<9}", style=_KINDS.get(one.kind, ""))
            line.append(printable(" ".join(one.reason.split())))
            line.truncate(max(self._console.width - 1, 20), overflow="ellipsis")
            parts.append(line)
        if self._view is not None and self._view.problem:
            parts.append(Text(printable(f"the ledger does not answer: {self._view.problem}"), style="red"))
        return Group(*parts)


def plain(text: str, style: str = "") -> Text:
    """Return what others have written, as it is: no markup, nothing that steers a terminal."""
    return Text(printable(text), style=style)


def of_team(team: str) -> str:
    """Return how a team is named after something of it."""
    return f" of {team}" if team else ""


def app_text(app: AppRow) -> str:
    """Return where an app stands, in a line."""
    parts: list[str] = [app.phase]
    if app.kind != "query":
        parts.append(plural(app.held, "GPU"))
    if app.progress is not None:
        parts.append(f"{app.progress:.0%}".replace("%", " %"))
    if app.seconds_left is not None:
        parts.append(f"{seconds_text(app.seconds_left)} left")
    if app.rho.value is not None:
        parts.append(f"ρ {'at least ' if app.rho.bound else ''}{number_text(app.rho.value)}")
    if app.deadline is not None and app.margin is not None:
        parts.append(deadline_text(app))
    parts.append(f"${app.dollars:.4f}")
    return ", ".join(parts)


def deadline_text(app: AppRow) -> str:
    """Return how an app stands to its deadline."""
    if app.margin is None:
        return app.deadline_state
    word = "before" if app.margin >= 0 else "after"
    return f"{seconds_text(abs(app.margin))} {word} its deadline"


def dull(one: DecisionRow) -> bool:
    """Tell whether a decision left everything as it was: auctions are held all the time."""
    return one.kind == "auction" and not any(one.outcome.get(name) for name in ("placements", "waits"))


def decision_text(one: DecisionRow) -> str:
    """Return a decision in a line."""
    return f"{one.kind}: {one.reason}"


def capacity_text(report: ClusterReport) -> str:
    """Return what nodes there are, and what they have cost."""
    if not report.capacity:
        return "no nodes yet"
    step = report.capacity[-1]
    parts = [f"{plural(step.nodes, 'node')}: {plural(step.cores, 'core')}, {plural(step.gpus, 'GPU')}"]
    if step.leaving:
        parts.append(f"{step.leaving} about to leave")
    if report.money.total.dollars:
        parts.append(f"${report.money.total.dollars:.4f} so far")
    return ", ".join(parts)


def shown_details(outcome: StepOutcome) -> list[tuple[str, str]]:
    """Return what is worth saying of a step's result."""
    found = []
    for name, value in outcome.details.items():
        if value is True:
            found.append((name, "✓"))
        elif value is False:
            found.append((name, "✗"))
        elif isinstance(value, int | float):
            found.append((name, number_text(float(value))))
        elif value:
            found.append((name, str(value)))
    return found


def _cells(app: AppRow) -> tuple[RenderableType, ...]:
    rho = "" if app.rho.value is None else f"{'≥ ' if app.rho.bound else ''}{app.rho.value:.2f}"
    progress = "" if app.progress is None else f"{_bar(app.progress)} {app.progress:4.0%}"
    left = "" if app.seconds_left is None or app.phase in OVER else seconds_text(app.seconds_left)
    deadline = "" if app.deadline is None else app.deadline_state or "open"
    return (
        plain(app.team),
        plain(shorten(app.label, 28)),
        Text(app.phase, style=_PHASES.get(app.phase, "")),
        "" if app.kind == "query" else f"{app.held}/{app.gpus}",
        rho,
        progress,
        left,
        deadline,
        f"{app.dollars:.4f}" if app.dollars else "",
    )


def _bar(share: float, width: int = 10) -> str:
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)
