"""Reports on the console, readable at 80 columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ebbflow.planners.query.coverage import sentences
from ebbflow.planners.query.plan.state import Estimate
from ebbflow.tasks.drawing.wording import (
    against,
    count_text,
    memory_text,
    number_text,
    plural,
    printable,
    seconds_text,
    shorten,
)
from ebbflow.tasks.query.report import MARKS, PlanReport, QueryReport, StageStatus

if TYPE_CHECKING:
    import pyarrow as pa

STYLES: dict[StageStatus, str] = {
    "completed": "blue",
    "reused": "green",
    "cancelled": "bright_black",
    "failed": "red",
}
_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST = 16  # rows of changes, and decisions above which "stay" is only counted
_CELL = 40  # characters of a cell in a result preview


def print_summary(report: QueryReport, console: Console) -> None:
    """Print what ran, what capacity did, each decision with its reason, and the time against expectation."""
    console.print(_headline(report))
    if report.capacity:
        console.print(_section("Capacity"), _capacity_line(report, min(console.width - 14, 60)), sep="\n")
        if len(report.capacity) > 1:
            console.print(Padding(_capacity_table(report), (0, 0, 0, 2)))
    if report.blocks:
        first, *rest = sentences(report.blocks)
        console.print(_section("Joins", first))
        console.print(*(Padding(Text(f"• {printable(s)}"), (0, 0, 0, 2)) for s in rest), sep="", end="")
    if report.stages:
        console.print(_section("Stages", _counts(report)))
        console.print(Padding(_stage_table(report), (0, 0, 0, 2)))
    if report.decisions:
        console.print(_section("Decisions", plural(len(report.switches), "switch", "switches")))
        console.print(Padding(_decisions(report), (0, 0, 0, 2)))
    if report.problems:
        console.print(_section("Worth knowing"))
        console.print(Group(*(Padding(Text(f"• {printable(p)}"), (0, 0, 0, 2)) for p in report.problems)))
    if report.result_path:
        console.print(Text.assemble(("\nResult  ", "bold"), report.result_path), soft_wrap=True)


def print_candidates(plans: Sequence[PlanReport], console: Console, *, stages: bool = True) -> None:
    """Print candidates side by side and, with ``stages``, what each is made of."""
    table = _table("plan", "stages>", "expected>", "work>", "critical path>", "memory>", "", wrap=True)
    for plan in plans:
        fits = plan.estimated_seconds is not None
        table.add_row(
            Text(plan.id),
            str(len(plan.stages)),
            seconds_text(plan.estimated_seconds) if fits else "does not fit",
            f"{number_text(plan.total_work)} core-s",
            seconds_text(plan.critical_path),
            memory_text(plan.peak_memory),
            "✓ chosen" if plan.chosen else "",
            style="bold" if plan.chosen else "",
        )
    console.print(table)
    for plan in plans:
        head = Text.assemble(("\n" + plan.id, "bold"), f"  {plan.reason}" if plan.reason else "")
        console.print(head)
        if plan.shape:
            console.print(Padding(Text(printable(plan.shape), style="cyan"), (0, 0, 0, 2)))
        if stages:
            console.print(Padding(_plan_stages(plan), (0, 0, 0, 2)))
        for note in plan.notes:
            console.print(Padding(Text(f"• {note}"), (0, 0, 0, 2)))


def print_line(report: QueryReport, console: Console) -> None:
    """Print what matters most in one line: rows, time, switches of plan, verification, and where the result is."""
    said = [f"{plural(report.rows, 'row')} in {seconds_text(report.seconds)}"]
    said.append(plural(len(report.switches), "switch", "switches"))
    if report.verified:
        said.append("✓ verified")
    if report.result_path:
        said.append(f"result in {printable(report.result_path)}")
    console.print(Text(", ".join(said)), soft_wrap=True)


def print_result(table: "pa.Table", console: Console) -> str:
    """Print every row of ``table`` and as many columns as fit the width; return which do not, in words."""
    rows = table.to_pylist() if len(set(table.column_names)) == table.num_columns else _rows(table)
    cells = [[_cell(v) for v in (row.values() if isinstance(row, dict) else row)] for row in rows]
    names = [Text(printable(shorten(name, _CELL)), style="bold") for name in table.column_names]
    widths = [max([name.cell_len, *(line[i].cell_len for line in cells)]) + 2 for i, name in enumerate(names)]
    shown = _fitting(widths, console.width)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, field in zip(names[:shown], table.schema, strict=False):
        grid.add_column(name, justify="right" if _numeric(str(field.type)) else "left", no_wrap=True)
    for line in cells:
        grid.add_row(*line[:shown])
    console.print(grid)
    if shown == len(names):
        return ""
    return f"{plural(len(names) - shown, 'more column')}: {', '.join(table.column_names[shown:])}"


def sparkline(points: Sequence[tuple[float, float]], seconds: float, width: int) -> str:
    """Return ``width`` block characters for a step function given as (second, value), from 0 to ``seconds``.

    Each character shows the lowest value within its slice of time, so that a short loss is seen. Zero shows
    as a blank.
    """
    top = max((value for _, value in points), default=0.0)
    if not points or top <= 0 or width < 1:
        return " " * max(width, 0)
    span = max(seconds, points[-1][0], 1e-9)
    line = []
    for cell in range(width):
        start, end = span * cell / width, span * (cell + 1) / width
        before = [v for at, v in points if at <= start] or [points[0][1]]
        low = min(before[-1], *(v for at, v in points if start < at < end), before[-1])
        line.append(" " if low <= 0 else _BLOCKS[max(0, round(low / top * len(_BLOCKS)) - 1)])
    return "".join(line)


def _headline(report: QueryReport) -> Text:
    line = Text()
    if report.name:
        line.append(printable(shorten(report.name, 76)) + "\n", style="bold")
    line.append(f"{plural(report.rows, 'row')} in {seconds_text(report.seconds)}", style="bold")
    line.append(f", {against(report.seconds, report.expected_seconds)}\n")
    where = f"{report.engine} on {report.master}" if report.master else report.engine
    line.append(f"planner {report.planner}, {where}\n", style="bright_black")
    if report.engine_reason:
        line.append(f"engine: {printable(report.engine_reason)}\n", style="bright_black")
    if report.verified is None:
        line.append(printable(report.verification) or "not verified", style="bright_black")
    else:
        mark, style = ("✓ verified", "green") if report.verified else ("✗ NOT verified", "bold red")
        line.append(mark, style=style)
        line.append(f": {printable(report.verification)}" if report.verification else "")
    return line


def _section(title: str, more: str = "") -> Text:
    return Text.assemble((f"\n{title}", "bold"), (f"  {more}" if more else "", "bright_black"))


def _counts(report: QueryReport) -> str:
    statuses: tuple[StageStatus, ...] = ("completed", "reused", "cancelled", "failed")
    counts = [f"{len(found)} {s}" for s in statuses if (found := report.with_status(s))]
    saved = sum(s.saved_seconds for s in report.stages if s.status == "reused")
    return ", ".join(counts) + (f"; reuse saved {seconds_text(saved)}" if saved > 0 else "")


def _capacity_line(report: QueryReport, width: int) -> Text:
    cores = [c.cores for c in report.capacity]
    line = sparkline([(c.at, c.cores) for c in report.capacity], report.seconds, width)
    low, high = number_text(min(cores)), number_text(max(cores))
    span = f"{high} cores" if low == high else f"{low} to {high} cores"
    end = seconds_text(report.seconds)
    return Text.assemble(
        "  ", (line, "blue"), f"\n  0 s{end:>{max(width - 3, len(end) + 1)}}\n", (f"  {span}", "bright_black")
    )


def _capacity_table(report: QueryReport) -> Table:
    table = _table("at>", "cores>", "memory>", "nodes>", "change")
    for c in report.capacity[:_MOST]:
        table.add_row(
            seconds_text(c.at),
            number_text(c.cores),
            memory_text(c.memory),
            str(c.nodes),
            Text(printable(c.change)),
        )
    if (more := len(report.capacity) - _MOST) > 0:
        table.add_row("", "", "", "", Text(f"… and {plural(more, 'more change')}", style="bright_black"))
    return table


def _stage_table(report: QueryReport) -> Table:
    table = _table("stage", "status", "plan", "took>", "estimate>", "rows>")
    for s in report.stages:
        done = s.status in ("completed", "reused")
        name = Text(printable(shorten(s.name, 29)))
        if s.note:
            name.append(f"\n{printable(shorten(s.note, 29))}", style="bright_black")
        table.add_row(
            name,
            Text(f"{MARKS[s.status]} {s.status}", style=STYLES[s.status]),
            Text(s.plan),
            "–" if s.status == "reused" else seconds_text(s.seconds),
            "–" if s.status == "reused" else seconds_text(s.estimated_seconds),
            count_text(s.rows) if done else "–",
        )
    return table


def _decisions(report: QueryReport) -> Table:
    table = _table("at>", "decision", "plan", "because of, and reason")
    switches = hidden = 0
    crowded = len(report.decisions) > _MOST
    for d in report.decisions:
        switches += d.kind == "switch"
        if crowded and d.kind == "stay":
            hidden += 1
            continue
        kind = f"switch {switches}" if d.kind == "switch" else d.kind
        why = Text(f"{printable(d.trigger)}: ", style="bright_black")
        why.append(printable(d.reason), style="default")
        if d.estimates:
            why.append(f"\n{_estimates(d.estimates)}", style="bright_black")
        plan = f"{d.current} → {d.chosen}" if d.current != d.chosen else d.chosen
        style = "magenta" if d.kind == "switch" else ""
        table.add_row(seconds_text(d.at), Text(kind, style=style), Text(plan), why)
    if hidden:
        stays = f"and {hidden} times the plan stayed; the report has the reasons"
        table.add_row("", "stay", "", Text(stays, style="bright_black"))
    return table


def _estimates(estimates: Sequence[Estimate], most: int = 4) -> str:
    ordered = sorted(estimates, key=lambda e: e.seconds)
    shown = " · ".join(f"{e.plan_id} {seconds_text(e.seconds)}" for e in ordered[:most])
    return shown + (f" · {len(ordered) - most} more" if len(ordered) > most else "")


def _plan_stages(plan: PlanReport) -> Table:
    names = {s.fingerprint: str(i) for i, s in enumerate(plan.stages, 1)}
    table = _table("#>", "stage", "reads", "expected>", "rows>")
    for number, s in enumerate(plan.stages, 1):
        reads = [*(f"#{names[fp]}" for fp in s.inputs if fp in names), *s.tables]
        name = Text(("◆ " if s.checkpoint else "") + printable(shorten(s.name, 30)))
        if s.cut:
            name.append(f"\n{s.cut}", style="bright_black")
        figures = (seconds_text(s.estimated_seconds), count_text(s.rows))
        table.add_row(str(number), name, Text(", ".join(reads) or "–"), *figures)
    return table


def _table(*columns: str, wrap: bool = False) -> Table:
    """Return a borderless table; a trailing ``>`` in a column's name aligns it to the right.

    Columns of words wrap where the console is narrow, all columns with ``wrap``.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bright_black")
    for column in columns:
        right = column.endswith(">")
        words = column != "plan" and (
            wrap or column in ("stage", "change", "reads", "because of, and reason")
        )
        table.add_column(column.rstrip(">"), justify="right" if right else "left", no_wrap=not words)
    return table


def _rows(table: "pa.Table") -> list[tuple[Any, ...]]:
    """Return rows of a table in which two columns share a name."""
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _cell(value: Any) -> Text:
    if value is None:
        return Text("NULL", style="bright_black")
    return Text(printable(shorten(str(value), _CELL)))


def _numeric(kind: str) -> bool:
    return kind.startswith(("int", "uint", "float", "double", "half", "decimal"))


def _fitting(widths: Sequence[int], room: int) -> int:
    """Return how many leading columns fit, at least one when there is any."""
    total = 0
    for count, width in enumerate(widths):
        total += width
        if total > room + 2 and count:
            return count
    return len(widths)
