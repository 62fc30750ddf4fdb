"""The summary for people: tables on a terminal, one picture, files."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ebbflow.infra.storage.files import write_text
from ebbflow.tasks.drawing.charts import cdf_svg
from ebbflow.tasks.drawing.wording import number_text, plural, shorten
from tests.benchmarks.sql.records import Record

JSON_FILE, PICTURE = "sql.json", "sql-cdf.svg"
_EVENTS = 12  # shown in a run's line


def write_summary(summary: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write the JSON and the picture into ``folder`` and return their paths."""
    written = write_text(folder / JSON_FILE, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    return written, write_text(folder / PICTURE, picture(summary))


def picture(summary: dict[str, Any]) -> str:
    """Draw the distribution of the ratio over all rounds, one curve a schedule."""
    series: defaultdict[str, list[float]] = defaultdict(list)
    for row in summary["schedules"]:
        series[row["schedule"]] += [number(r) for r in row["ratios"]]
    title = "Ebbflow's completion time over that of the better plain Spark"
    return cdf_svg(title, series, label="ratio; below 1 Ebbflow is sooner", unit="", mark=1.0)


def number(value: Any) -> float:
    """Return a number of a summary, in which infinite ones are texts."""
    return math.inf if value == "inf" else float(value)


def ratio_text(value: Any) -> str:
    """Return a ratio for people; 0 means that plain Spark never completed."""
    if value is None:
        return "–"
    found = number(value)
    return "∞" if math.isinf(found) else "0 (plain failed)" if found == 0 else f"{found:.2f}"


def _figure(value: Any) -> str:
    return "–" if value is None else number_text(number(value))


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Print cases, schedules, bars and losses."""
    if not summary["cases"]:
        console.print("no whole round of Ebbflow and a plain Spark yet")
        return
    setup = summary["setup"]
    console.print(
        f"[bold]{plural(summary['runs'], 'run')}[/] on {setup.get('workers')} workers of one core, "
        f"{escape(str(setup.get('cap')))}; {setup.get('machine')}; Spark {setup.get('spark')}; "
        f"tables {', '.join(f'{k} {v}' for k, v in setup.get('tables', {}).items())}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_cases(summary))
    console.print(_schedules(summary))
    for bar in summary["bars"]:
        verdict = {True: "[green]holds[/]", False: "[red]missed[/]", None: "[dim]not measured[/]"}[
            bar["holds"]
        ]
        sign = "≥" if bar["at_least"] else "≤"
        console.print(f"{verdict}  {bar['name']}: {_figure(bar['value'])} ({sign} {bar['bar']:.2f})")
    for case in summary["cases"]:
        if case["loss"]:
            name = f"{case['suite']} Q{case['query']}, {case['schedule']}"
            console.print(
                f"loss  {name} ({ratio_text(case['ratio'])}): {escape(case['loss'])}", soft_wrap=True
            )


def _cases(summary: dict[str, Any]) -> Table:
    systems = list(dict.fromkeys(s for c in summary["cases"] for s in c["systems"]))
    table = Table(
        "query", "schedule", *systems, "ratio", "rounds", "stages", "wasted", box=None, header_style="bold"
    )
    for case in summary["cases"]:
        cells = [_seconds(case["systems"].get(s), s == case["better"]) for s in systems]
        ours, theirs = case["systems"]["ebbflow"], case["systems"][case["better"]]
        table.add_row(
            f"{case['suite']} Q{case['query']}",
            case["schedule"],
            *cells,
            ratio_text(case["ratio"]),
            str(len(case["ratios"])),
            f"{ours.get('stages', 0):.0f} / {theirs.get('stages', 0):.0f}",
            f"{ours.get('wasted', 0):.1f} / {theirs.get('wasted', 0):.1f} s",
        )
    return table


def _seconds(system: dict[str, Any] | None, better: bool) -> str:
    if system is None:
        return "–"
    median = number(system["seconds"])
    shown = "failed" if math.isinf(median) else f"{number_text(median)} s"
    failed = f", {len(system['failed'])} failed" if system["failed"] and not math.isinf(median) else ""
    wrong = f", {len(system['wrong'])} WRONG" if system["wrong"] else ""
    return ("[bold]" if better else "") + shown + failed + wrong + ("[/]" if better else "")


def _schedules(summary: dict[str, Any]) -> Table:
    table = Table(
        "suite", "schedule", "rounds", "geometric mean", "median", "worst", "gain p90", "wasted/useful",
        "failed", box=None, header_style="bold",
    )  # fmt: skip
    for row in summary["schedules"]:
        share = "\n".join(f"{s} {_figure(v)}" for s, v in row["wasted_share"].items())
        failed = "\n".join(f"{s} {n}" for s, n in row["failed"].items() if n) or "none"
        table.add_row(
            row["suite"],
            row["schedule"],
            str(row["pairs"]),
            ratio_text(row["geometric_mean"]),
            ratio_text(row["median"]),
            f"{ratio_text(row['worst'])} ({row['worst_case']})",
            ratio_text(row["gain_90"]),
            share,
            failed,
        )
    return table


def record_line(record: Record) -> str:
    """Return one run in a line of rich's markup."""
    verdict = {True: "[green]right[/]", False: "[bold red]WRONG[/]", None: "unchecked"}[record.right]
    if not record.ok:
        verdict = f"[red]failed[/]: {escape(shorten(record.error, 100))}"
    figures = record.metrics
    cost = ""
    if figures:
        cost = (
            f"  planning {figures['planning']:.1f} s, {figures['task_seconds']:.1f} task-s"
            f" ({figures['wasted']:.1f} wasted), {figures['stages']:.0f} stages"
        )
    events = " ".join(f"{h.what}@{h.at:.1f}" for h in record.happenings[:_EVENTS])
    if len(record.happenings) > _EVENTS:
        events += f" and {len(record.happenings) - _EVENTS} more"
    name = f"{record.suite} Q{record.query} {record.schedule}"
    which = "baseline" if record.pair < 0 else f"#{record.pair + 1}"
    return f"{name} {which} [bold]{record.system}[/] {record.wall:.2f} s {verdict}{cost}" + (
        f"  [dim]{events}[/]" if events else ""
    )
