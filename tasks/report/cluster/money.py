"""What a cluster's nodes and leases have cost, from the prices that its ledger holds.

Nodes are billed by the rules of ``planners.fleet.spending``; an app's dollars are those of its leases, at its nodes'
prices divided by their GPUs, as the ledger counts them. Prices move only when the loop looked.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ebbflow.planners.fleet.spending import Cost, UsageInterval, spent
from ebbflow.planners.model.prices import HOUR, Series
from ebbflow.tasks.report.cluster.spans import NodeSpan
from ebbflow.tasks.report.cluster.values import (
    AppRow,
    LeaseReport,
    MoneyReport,
    MoneyRow,
    NodeReport,
    TeamRow,
)


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """One stay of a node within the report's time."""

    span: NodeSpan
    since: float
    until: float
    leased: float  # GPU-seconds

    @property
    def gpu_seconds(self) -> float:
        return self.span.node.gpus * (self.until - self.since)

    @property
    def rate(self) -> float:
        """Return the mean price, dollars per hour, whatever is billed of it."""
        if self.until <= self.since:
            return 0.0
        return _series(self.span).mean(self.since, self.until)


def counted(
    nodes: Iterable[NodeSpan], leases: Sequence[LeaseReport], since: float, until: float
) -> list[NodeUsage]:
    """Return the stays that overlap ``since`` to ``until``, each with what was leased of it."""
    on: dict[str, list[LeaseReport]] = defaultdict(list)
    for lease in leases:
        on[lease.node].append(lease)
    found = []
    for span in nodes:
        begin = max(span.since, since)
        end = min(until if span.until is None else span.until, until)
        if end < begin or (end == begin and span.until is not None and since < until):
            continue
        leased = sum(
            (max(0.0, min(x.until, end) - max(x.since, begin)) for x in on.get(span.node.id, ())), 0.0
        )
        found.append(NodeUsage(span, begin, end, leased))
    return found


def node_report(one: NodeUsage) -> NodeReport:
    """Return a stay as the report lists it."""
    node, span = one.span.node, one.span
    ending: Literal["", "left", "reclaimed", "lost"] = ""
    if span.until is not None and span.until <= one.until:
        ending = "lost" if span.ending == "lost" else "reclaimed" if span.ending == "reclaimed" else "left"
    return NodeReport(
        node.id, node.instance_type, node.market, node.zone, node.cores, node.gpus, node.price, span.since,
        span.until if ending else None, ending, one.gpu_seconds, one.leased,
    )  # fmt: skip


def money(
    stays: Sequence[NodeUsage],
    apps: Sequence[AppRow],
    since: float,
    until: float,
    listed: Mapping[str, float] | None = None,
) -> MoneyReport:
    """Return what the time from ``since`` to ``until`` has cost.

    ``listed``: on-demand prices by instance type, dollars per hour; on-demand nodes of the ledger itself count too.
    """
    prices = {
        one.span.node.instance_type: one.span.node.price
        for one in stays
        if one.span.node.market == "on-demand" and one.span.node.price > 0
    } | dict(listed or {})
    kinds = sorted({(one.span.node.instance_type, one.span.node.market) for one in stays})
    rows = tuple(_row(kind, market, _of(stays, kind, market), prices, since, until) for kind, market in kinds)
    total = _row("all", "", stays, prices, since, until)
    idle = sum(
        (one.rate / HOUR * _idle_seconds(one) / one.span.node.gpus for one in stays if one.span.node.gpus),
        0.0,
    )
    teams = tuple(
        TeamRow(team, len(mine), sum(a.service for a in mine) / HOUR, sum((a.dollars for a in mine), 0.0))
        for team in sorted({app.team for app in apps})
        if (mine := [app for app in apps if app.team == team])
    )
    return MoneyReport(
        rows,
        total,
        teams,
        sum((app.dollars for app in apps), 0.0),
        idle,
        sum(not _priced(one) for one in stays),
    )


def _of(stays: Sequence[NodeUsage], kind: str, market: str) -> list[NodeUsage]:
    return [s for s in stays if (s.span.node.instance_type, s.span.node.market) == (kind, market)]


def _idle_seconds(one: NodeUsage) -> float:
    return max(0.0, one.gpu_seconds - one.leased)


def _row(
    kind: str,
    market: str,
    stays: Sequence[NodeUsage],
    listed: Mapping[str, float],
    since: float,
    until: float,
) -> MoneyRow:
    def paid(one: NodeUsage, now: float) -> Cost:
        """Return the whole bill of a stay at ``now``; what is free, or billed at least, is known late."""
        span = one.span
        if not (_priced(one) and span.since < now):
            return Cost()
        series, spot = _series(span), span.node.market == "spot"
        # as spot, since the ledger knows how an on-demand node's price has changed too
        node = span.node if spot else replace(span.node, market="spot")
        stay = UsageInterval(node, span.since, span.until, spot and span.ending == "reclaimed")
        found = spent([stay], lambda _: series, lambda node: listed.get(node.instance_type), now)
        return found if spot else replace(found, list_dollars=found.dollars)

    cost = Cost()
    for one in stays:
        cost = cost.plus(_minus(paid(one, until), paid(one, since)))
    return MoneyRow(
        kind,
        market,
        len(stays),
        sum(one.until - one.since for one in stays) / HOUR,
        cost.dollars,
        cost.list_dollars,
        cost.free_hours,
        sum(one.gpu_seconds for one in stays) / HOUR,
        sum(one.leased for one in stays) / HOUR,
    )


def _minus(after: Cost, before: Cost) -> Cost:
    known = None
    if after.list_dollars is not None and before.list_dollars is not None:
        known = after.list_dollars - before.list_dollars
    return Cost(
        after.dollars - before.dollars,
        known,
        after.node_hours - before.node_hours,
        after.free_hours - before.free_hours,
    )


def _priced(one: NodeUsage) -> bool:
    return any(price > 0 for _, price in one.span.prices)


def _series(span: NodeSpan) -> Series:
    return Series(tuple(at for at, _ in span.prices), tuple(price for _, price in span.prices))
