"""A cluster on the console, readable at 80 columns and without colours."""

from collections.abc import Sequence
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ebbflow.tasks.capacity.listeners import LoopEvent
from ebbflow.tasks.capacity.loop import LoopEnd
from ebbflow.tasks.capacity.status import AppView, ClusterView, DecisionView, LeaseView, NodeView
from ebbflow.tasks.drawing.wording import clock_text, plural, printable, seconds_text
from ebbflow.tasks.drawing.wording import money_text as money

T = TypeVar("T")

_NODES = 20  # rows that a table shows unless all are asked for
_LEASES = 12
_APPS = 20


def cluster_view(view: ClusterView, *, everything: bool = False) -> RenderableType:
    """Return the loop, nodes, apps, leases and decisions; long tables are cut unless ``everything``."""
    gpus = sum(node.gpus for node in view.nodes)
    price = sum(node.price for node in view.nodes)
    head = (
        f"cluster {view.cluster}, {clock_text(view.at)} UTC, revision {view.revision}:"
        f" {plural(len(view.nodes), 'node')}, "
        f"{sum(node.leased for node in view.nodes if node.gpus)} of {plural(gpus, 'GPU')} leased, {money(price)}/h"
    )
    parts: list[RenderableType] = [Text(head), _loop(view)]
    if view.nodes:
        parts += [
            Text(),
            _nodes(_cut(view.nodes, _NODES, everything)),
            *_more(view.nodes, _NODES, everything),
        ]
    if view.apps:
        parts += [Text(), _apps(_cut(view.apps, _APPS, everything)), *_more(view.apps, _APPS, everything)]
    if view.leases:
        shown = _cut(view.leases, _LEASES, everything)
        parts += [Text(), _leases(shown), *_more(view.leases, _LEASES, everything)]
    if view.decisions:
        parts += [Text(), _decisions(view.decisions)]
    parts += [Text(f"- {printable(problem)}") for problem in view.problems]
    return Group(*parts)


def _loop(view: ClusterView) -> Text:
    if view.loop is None:
        return Text("loop: none has run yet")
    row = view.loop
    if not view.leads:
        since = "" if view.loop_silent is None else f", last heartbeat {seconds_text(view.loop_silent)} ago"
        return Text(f"loop: no leader; {printable(row.holder)} was the last, {row.phase}{since}")
    metrics = row.metrics
    latency = metrics.get("latency_s", {})
    said = [
        f"loop: {printable(row.holder)} is the leader (fencing token {row.token}), {row.policy}, up"
        f" {seconds_text(view.at - row.started)}",
        f"{row.cycles} decisions, change to lease {_three(latency)}",
        f"capacity observed {_ago(row.capacity_age)}"
        + (f", fleet {_ago(row.fleet_age)}" if row.fleet_age is not None else ""),
    ]
    if metrics.get("dropped"):
        said.append(f"{metrics['dropped']} decisions dropped")
    if row.doing:
        said.append(f"{row.doing} actions in progress")
    return Text("; ".join(said))


def _three(latency: object) -> str:
    if not isinstance(latency, dict) or latency.get("p50") is None:
        return "not measured yet"
    return " / ".join(seconds_text(latency[name]) for name in ("p50", "p95", "p99")) + " (p50/p95/p99)"


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds_text(seconds)} ago"


def _nodes(nodes: Sequence[NodeView]) -> Table:
    table = _table("node", "market", "zone", "cores>", "GPUs>", "leased>", "$/h>", "terminates in")
    for node in nodes:
        leaves = "" if node.leaves_in is None else f"{seconds_text(max(0.0, node.leaves_in))} ({node.notice})"
        table.add_row(
            Text(printable(node.id)),
            node.market,
            Text(printable(node.zone)),
            str(node.cores),
            str(node.gpus),
            str(node.leased),
            f"{node.price:.3f}",
            leaves,
        )
    return table


def _apps(apps: Sequence[AppView]) -> Table:
    table = _table("app", "kind", "team", "phase", "GPUs>", "rho>", "done>", "left>", "$>")
    for app in apps:
        phase = (
            app.phase
            if app.silent is None or app.silent < 10
            else f"{app.phase}, no heartbeat for {app.silent:.0f} s"
        )
        table.add_row(
            Text(printable(app.id)),
            app.kind,
            Text(printable(app.team)),
            phase,
            f"{app.gpus} of {app.wanted}" if app.wanted else str(app.gpus or "–"),
            "–" if app.rho is None else f"{app.rho:.2f}",
            "–" if app.progress is None else f"{app.progress:.0%}",
            seconds_text(app.seconds_left),
            f"{app.dollars:.3f}",
        )
    return table


def _leases(leases: Sequence[LeaseView]) -> Table:
    table = _table("lease>", "app", "node", "GPU>", "ends in>", "preempted")
    for lease in leases:
        table.add_row(
            str(lease.number),
            Text(printable(lease.app)),
            Text(printable(lease.node)),
            str(lease.slot),
            seconds_text(lease.seconds_left),
            "" if lease.recalled_in is None else f"released in {seconds_text(max(0.0, lease.recalled_in))}",
        )
    return table


def _decisions(decisions: Sequence[DecisionView]) -> Table:
    table = _table("at", "decision", "app", "why")
    for one in decisions:
        reason = printable(one.reason)
        if one.times > 1:
            reason += f" ({one.times} times since {clock_text(one.since)})"
        table.add_row(clock_text(one.at), one.kind, Text(printable(one.app)), Text(reason))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left")
    return table


def _cut(rows: Sequence[T], most: int, everything: bool) -> Sequence[T]:
    return rows if everything else rows[:most]


def _more(rows: Sequence[object], most: int, everything: bool) -> list[Text]:
    left = 0 if everything else len(rows) - most
    return [Text(f"  and {left} more: --all shows them")] if left > 0 else []


class ConsoleLoopListener:
    """Prints what a loop does, a line each. A ``LoopListener``."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_event(self, event: LoopEvent) -> None:
        """Print ``event``."""
        self._console.print(
            f"{clock_text(event.at)}  {event.kind:<9}  {escape(printable(event.text))}",
            highlight=False,
            soft_wrap=True,
        )


def loop_latency(end: LoopEnd) -> str:
    """Return how fast an ended loop was, to follow its reason; "" where it has decided nothing."""
    latency: Any = end.metrics.get("latency_s", {})
    if not latency or latency.get("p50") is None:
        return ""
    return (
        f"; {end.metrics['cycles']} decisions, change to lease p50 {latency['p50']:.2f} s, "
        f"p95 {latency['p95']:.2f} s, p99 {latency['p99']:.2f} s"
    )
