"""Apps on the console, readable at 80 columns and without colours."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ebbflow.tasks.capacity.status import AppView
from ebbflow.tasks.drawing.wording import clock_text, money_text, printable, seconds_text


def apps_view(apps: Sequence[AppView], now: float) -> RenderableType:
    """Return a table of apps; ``now``, s since the Unix epoch, is what ages are counted to."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("app", "kind", "team", "state"):
        table.add_column(name)
    for name in ("GPUs", "rho", "since"):
        table.add_column(name, justify="right")
    for app in apps:
        table.add_row(
            Text(printable(app.id)),
            app.kind,
            Text(printable(app.team)),
            app.phase,
            f"{app.gpus} of {app.wanted}" if app.wanted else str(app.gpus or "–"),
            "–" if app.rho is None else f"{app.rho:.2f}",
            f"{seconds_text(max(0.0, now - app.since))} ago",
        )
    return table


def app_view(content: Mapping[str, Any], now: float) -> RenderableType:
    """Return an app as ``ebbflow apps show --json`` has it; ``now``, s since the Unix epoch, for ages."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    state = content["phase"] + (f": {content['reason']}" if content["reason"] else "")
    rows = [
        ("app", content["id"] + (f" ({content['name']})" if content["name"] else "")),
        ("kind", content["kind"] + (f", team {content['team']}" if content["team"] else "")),
        ("pipeline", content["pipeline"]),
        ("state", state),
        ("registered", f"{seconds_text(max(0.0, now - content['since']))} ago"),
        ("GPUs", f"{content['gpus']} of {content['wanted']}" if content["wanted"] else ""),
        ("rho", "" if content["rho"] is None else f"{content['rho']:.2f}"),
        ("progress", "" if content["progress"] is None else f"{content['progress']:.0%}"),
        ("cost", f"{money_text(content['dollars'])} so far"),
        ("checkpoint", content["checkpoint"]),
        ("run directory", content["run_directory"]),
        ("flow run", content["flow_run"]),
    ]
    for name, text in rows:
        if text:
            facts.add_row(name, Text(printable(text)))
    parts: list[RenderableType] = [facts]
    if content["leases"]:
        leases = Table(box=None, header_style="bold", pad_edge=False)
        for name in ("lease", "node", "GPU", "ends in"):
            leases.add_column(name, justify="left" if name == "node" else "right")
        for lease in content["leases"]:
            left = seconds_text(max(0.0, lease["until"] - now))
            leases.add_row(str(lease["number"]), Text(printable(lease["node"])), str(lease["slot"]), left)
        parts += [Text(), leases]
    if content["decisions"]:
        decisions = Table(box=None, header_style="bold", pad_edge=False)
        for name in ("at", "decision", "why"):
            decisions.add_column(name)
        for one in content["decisions"]:
            decisions.add_row(clock_text(one["at"]), one["kind"], Text(printable(one["reason"])))
        parts += [Text(), decisions]
    return Group(*parts)
