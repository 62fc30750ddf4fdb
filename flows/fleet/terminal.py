"""A fleet on the console, readable at 80 columns and without colours."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from math import inf

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ebbflow.infra.aws.notices.dead_letters import DeadLetter
from ebbflow.infra.protocols import ApplyResult
from ebbflow.planners.fleet.guard import GuardResult, new_nodes
from ebbflow.planners.fleet.guard_gang import GangVerdict, gang_node
from ebbflow.planners.model.gangs import GangRequest
from ebbflow.tasks.drawing.wording import money_text as money
from ebbflow.tasks.drawing.wording import number_text, plural, printable, seconds_text, shorten
from ebbflow.tasks.fleet.money import CostReport, CostRow, OfferRow
from ebbflow.tasks.fleet.plan import PoolPlan
from ebbflow.tasks.fleet.report import NodeRow, PoolRow, Status
from ebbflow.tasks.fleet.steps import Observation

_DIM = "bright_black"


def status_view(status: Status) -> RenderableType:
    """Return pools, nodes and what is to be known."""
    head = f"cluster {status.cluster} in {status.region}, {_clock(status.at)}, revision {status.revision}"
    rate = f"{dollars(status.dollars_per_hour)}/h"
    if status.limit_dollars_per_hour is not None:
        rate += f" of {dollars(status.limit_dollars_per_hour)}/h allowed"
    parts: list[RenderableType] = [Text(f"{head}, {rate}"), _pools(status)]
    parts += [
        Text(f"{pool.name}: insufficient Spot capacity: {printable(pool.short_why)}")
        for pool in status.pools
        if pool.short_why
    ]
    if status.nodes:
        parts += [Text(), _nodes(status.nodes)]
    return Group(*parts, *_bullets(status.problems))


def _pools(status: Status) -> Table:
    table = _table(
        "pool",
        "planned>",
        "requested>",
        "observed>",
        "spot>",
        "on-demand>",
        "leaving",
        "insufficient for",
        "$/h>",
    )
    for pool in status.pools:
        short = "" if pool.short_since is None else seconds_text(status.at - pool.short_since)
        table.add_row(
            Text(pool.name),
            str(pool.planned),
            str(pool.requested),
            str(pool.observed),
            str(pool.spot),
            f"{pool.on_demand} of {pool.on_demand_planned}",
            _leaving(pool),
            short or "–",
            dollars(pool.dollars_per_hour),
        )
    return table


def _leaving(pool: PoolRow) -> str:
    parts = []
    if pool.leaving:
        soon = f", {seconds_text(pool.seconds_left)}" if pool.seconds_left is not None else ""
        parts.append(f"{pool.leaving} interruption pending{soon}")
    if pool.advised:
        parts.append(f"{pool.advised} rebalance recommended")
    if pool.draining:
        parts.append(f"{pool.draining} draining")
    return "; ".join(parts) or "–"


def _nodes(nodes: Sequence[NodeRow]) -> Table:
    table = _table("node", "pool", "type", "zone", "market", "$/h>", "state")
    for node in nodes:
        left = "" if node.seconds_left is None else f", {seconds_text(node.seconds_left)} left"
        words = {
            "ok": "ok",
            "draining": "draining",
            "leaving": "! interruption pending",
            "advised": "? rebalance recommended",
        }
        table.add_row(
            Text(node.id),
            Text(node.pool),
            Text(node.instance_type),
            Text(node.zone),
            node.market,
            dollars(node.dollars_per_hour),
            f"{words[node.state]}{left if node.state != 'ok' else ''}",
            style="bold" if node.state == "leaving" else "",
        )
    return table


def prices_view(rows: Sequence[OfferRow], problems: Iterable[str]) -> RenderableType:
    """Return offers, the cheapest of each pool marked."""
    table = _table(
        "",
        "pool",
        "type",
        "zone",
        "market",
        "now>",
        "7 d mean>",
        "7 d high>",
        "on-demand>",
        "saves>",
        "useful>",
    )
    for row in rows:
        table.add_row(
            "►" if row.cheapest else "",
            Text(row.pool),
            Text(row.instance_type),
            Text(row.zone or "all"),
            row.market,
            dollars(row.price),
            dollars(row.mean),
            dollars(row.high),
            dollars(row.on_demand),
            "–" if row.saving is None else f"{row.saving:.0%}".replace("%", " %"),
            dollars(row.useful),
            style="bold" if row.cheapest else "",
        )
    legend = "$ per hour; useful: interruption-adjusted price per effective hour; ► cheapest offer of its pool by it"
    return Group(table, Text(legend, style=_DIM), *_bullets(problems))


def cost_view(report: CostReport) -> RenderableType:
    """Return what was paid and what is to come."""
    hours = report.total.bill.ahead.seconds / 3600
    ahead = f"next {number_text(hours)} h>"
    table = _table(
        "pool",
        "nodes>",
        "node-hours>",
        "so far>",
        "on-demand>",
        "saved>",
        ahead,
        "by past prices",
        "on-demand>",
    )
    for row in (*report.pools, report.total) if len(report.pools) != 1 else report.pools:
        table.add_row(*_cost_cells(row), style="bold" if row is report.total else "")
    since = f"cluster {report.cluster}, since {_clock(report.since)}, {seconds_text(report.at - report.since)} ago"
    note = "compute only: volumes, addresses and traffic are not counted"
    return Group(Text(since), table, Text(note, style=_DIM), *_bullets(report.problems))


def _cost_cells(row: CostRow) -> list[str]:
    paid, ahead = row.bill.so_far, row.bill.ahead
    saved = "–" if paid.saved is None else f"{paid.saved:.0%}".replace("%", " %")
    return [
        row.pool,
        str(row.nodes),
        number_text(paid.node_hours),
        money(paid.dollars),
        money(paid.list_dollars),
        saved,
        money(ahead.expected),
        f"{money(ahead.least)} to {money(ahead.most)}",
        money(ahead.list_dollars),
    ]


def plan_view(plans: Sequence[PoolPlan], problems: Iterable[str]) -> RenderableType:
    """Return what would be done, pool by pool, and why."""
    parts: list[RenderableType] = []
    for plan in plans:
        pool = plan.pool
        parts.append(
            Text.assemble(
                (plan.pool.name, "bold"),
                f"  planned {pool.planned}, requested {pool.requested}, observed {len(pool.nodes)}",
            )
        )
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style=_DIM, no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("scaling", printable(plan.wanted.reason))
        table.add_row(
            "target", printable(target_text(plan.target.nodes, plan.target.on_demand, plan.target.drain))
        )
        if plan.target.reason != plan.wanted.reason:
            table.add_row("because", printable(plan.target.reason))
        table.add_row("guard", Text("\n".join(map(printable, verdict_lines(plan.verdict)))))
        for line in plan.market:
            table.add_row("market", printable(line))
        for line in _would(plan):
            table.add_row("would", printable(line))
        before, after = dollars(plan.dollars_now), dollars(plan.dollars_then)
        table.add_row(
            "cost", f"{before}/h now, {after}/h then, worst-case price" if plan.changes else f"{before}/h"
        )
        parts += [Padding(table, (0, 0, 0, 2)), Text()]
    return Group(*parts, *_bullets(problems))


def gang_view(
    request: GangRequest, seen: Observation, verdict: GangVerdict, would: ApplyResult
) -> RenderableType:
    """Return what starting a gang comes to."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style=_DIM, no_wrap=True)
    table.add_column(overflow="fold")
    together = [name for name, yes in (("one zone", request.one_zone), ("one type", request.one_type)) if yes]
    nodes = plural(request.size, f"{request.market} node")
    table.add_row("gang", f"{nodes} of {request.pool}, all-or-nothing, {' and '.join(together)}")
    table.add_row("guard", printable("; ".join(verdict.reasons) or "passes"))
    for line in applied_lines(would) if verdict.target is not None else ():
        table.add_row("would", printable(line))
    each = gang_node(request, new_nodes(seen.offers)).price(request.market)
    cost = "not known" if each is None else f"{dollars(each * request.size)}/h, worst-case price"
    table.add_row("cost", cost)
    head = Text(request.shown, style="bold")
    return Group(head, Padding(table, (0, 0, 0, 2)), Text(), *_bullets(seen.problems))


def _would(plan: PoolPlan) -> list[str]:
    leaving = plan.verdict.target.drain if plan.verdict.target is not None else ()
    lines = [f"drain {name}" for name in leaving]
    asked = applied_lines(plan.would)
    return [*asked, *lines] if plan.would.asked or plan.would.refused or not lines else lines


def verdict_lines(verdict: GuardResult) -> list[str]:
    """Return the guard's word."""
    if verdict.target is None:
        return list(verdict.reasons)
    return list(verdict.reasons) if verdict.changed else ["passes unchanged", *verdict.reasons]


def applied_lines(applied: ApplyResult) -> list[str]:
    """Return what was asked for, and what was not."""
    asked = [f"{ask}  ({ask.call})" if ask.call else str(ask) for ask in applied.asked]
    return [*asked, *(f"not {refusal.of}: {refusal.why}" for refusal in applied.refused)] or [
        "nothing to request"
    ]


def target_text(nodes: int, on_demand: int, drain: Sequence[str]) -> str:
    """Return a target in words."""
    said = plural(nodes, "node") + (f", {on_demand} on-demand at least" if on_demand else "")
    return said + (f"; draining: {', '.join(drain)}" if drain else "")


def letters_view(letters: Sequence[DeadLetter], width: int) -> RenderableType:
    """Return dead letters."""
    table = _table("sent", "received>", "error", "message")
    for letter in letters:
        wrong = letter.problem or "readable: redrive it"
        if letter.undelivered:
            wrong = f"not delivered ({letter.undelivered}); {wrong}"
        table.add_row(
            _clock(letter.sent),
            str(letter.received),
            Text(printable(wrong)),
            Text(printable(shorten(letter.body, width))),
        )
    return table


def dollars(value: float | None) -> str:
    """Return a price per hour: four digits, since spot prices differ in the third."""
    if value is None:
        return "–"
    if 0 < value < 0.00005:
        return "<$0.0001"
    return "none" if value == inf else f"${value:,.4f}" if value < 100 else f"${value:,.2f}"


def print_bullets(console: Console, lines: Iterable[str]) -> None:
    """Print sentences, one a line."""
    for line in _bullets(lines):
        console.print(line)


def _bullets(lines: Iterable[str]) -> list[Text]:
    return [Text(f"• {printable(line)}") for line in lines]


def _clock(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _table(*columns: str) -> Table:
    """Return a borderless table; a trailing ``>`` in a column's name aligns it to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        right = column.endswith(">")
        words = column in ("leaving", "state", "error", "message", "by past prices")
        table.add_column(column.rstrip(">"), justify="right" if right else "left", no_wrap=not words)
    return table
