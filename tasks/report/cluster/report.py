"""From a ledger's events to the report of a cluster."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from ebbflow.planners.model.ledger import AppReport, Event
from ebbflow.tasks.apps.aggregators import AggregationReport
from ebbflow.tasks.report.cluster.account import AppAccount, Period
from ebbflow.tasks.report.cluster.decisions import decisions, latency, paced, stages
from ebbflow.tasks.report.cluster.fairness import fairness
from ebbflow.tasks.report.cluster.history import History
from ebbflow.tasks.report.cluster.money import counted, money, node_report
from ebbflow.tasks.report.cluster.spans import AppHistory, LeaseSpan
from ebbflow.tasks.report.cluster.values import (
    CapacityStep,
    ClusterReport,
    LeaseReport,
)

__all__ = ["ClusterReport", "cluster_report"]


def cluster_report(
    events: Iterable[Event] | History,
    reports: Mapping[str, AppReport] | None = None,
    *,
    cluster: str = "local",
    now: float | None = None,
    since: float | None = None,
    until: float | None = None,
    pipeline: str = "",
    listed: Mapping[str, float] | None = None,
    aggregation: AggregationReport | None = None,
) -> ClusterReport:
    """Return the report of a ledger's ``events``, all of them and in order.

    ``reports`` are what apps said last. ``now``: up to when what still lasts is counted, by default the last event.
    ``since`` and ``until`` (s since the Unix epoch) limit the report to a part of the time; ``pipeline`` to the apps
    of one, from the first one's arrival to the last one's end. ``listed``: on-demand prices by instance type, dollars
    per hour. ``aggregation``: of the shared aggregators, which a report has that ends now. Raises ``OptionError`` for
    events that cannot follow each other.
    """
    history = events if isinstance(events, History) else History.of(events)
    known = max([history.times[-1] if history.times else 0.0, now or 0.0])
    chosen = [app for app in history.apps.values() if not pipeline or app.spec.pipeline == pipeline]
    first, last = history.first, known
    if pipeline and chosen:
        first = min(app.entered for app in chosen)
        ends = [app.ended(known) for app in chosen]
        last = known if None in ends else max(end for end in ends if end is not None)
    begin = max(first, since if since is not None else -inf)
    end = max(begin, min(last, until if until is not None else inf))
    period = Period(history, begin, end, live=end >= known)
    said = dict(reports or {})
    chosen = [app for app in chosen if app.entered <= end and _there(app, begin, end)]
    ids = {app.spec.id for app in chosen}
    leases = tuple(
        found
        for span in history.leases.values()
        if span.app in history.apps and (found := _lease(span, begin, end)) is not None
    )
    mine = tuple(lease for lease in leases if lease.app in ids)
    held: dict[str, list[LeaseReport]] = {id_: [] for id_ in ids}
    for lease in mine:
        held[lease.app].append(lease)
    rows = tuple(AppAccount(period, app, held[app.spec.id], said.get(app.spec.id)).row() for app in chosen)
    stays = counted(history.nodes, leases, begin, end)
    times = [at for at in history.times if period.has(at)]
    return ClusterReport(
        cluster=cluster,
        since=begin,
        until=end,
        number=history.state.number,
        events=len(times),
        pipeline=pipeline,
        loops=tuple(loop for loop in history.loops if period.has(loop.at)),
        capacity=_steps(history, begin, end),
        changes=tuple(change for change in history.changes if period.has(change.at)),
        nodes=tuple(map(node_report, stays)),
        apps=rows,
        leases=mine,
        stages=tuple(s for app in chosen for s in stages(app, said.get(app.spec.id), begin, end)),
        decisions=decisions(history, ids if pipeline else None, begin, end),
        money=money(stays, rows, begin, end, listed),
        fairness=fairness(rows),
        aggregation=aggregation if period.live and not pipeline else None,
        latency=(*paced(said if period.live and not pipeline else {}), *latency(history, ids, begin, end)),
    )


def _there(app: AppHistory, begin: float, end: float) -> bool:
    """Tell whether ``app`` was active in the report's time, or held a lease."""
    spans = app.active(end)
    return not spans or any(a <= end and b >= begin for a, b in spans)


def _lease(span: LeaseSpan, begin: float, end: float) -> LeaseReport | None:
    over = span.until is not None and span.until <= end
    last = min(end, span.until) if span.until is not None else end
    first = max(span.since, begin)
    if last < first or (last == first and first > span.since):
        return None
    recalled = span.recalled if span.recalled is not None and span.recalled <= end else None
    ended_for = span.ended_for if over or recalled is not None else ""
    return LeaseReport(
        span.number,
        span.app,
        span.node,
        span.slot,
        first,
        last,
        over,
        recalled,
        span.price,
        span.reason,
        ended_for,
    )


def _steps(history: History, begin: float, end: float) -> tuple[CapacityStep, ...]:
    """Return the capacity from ``begin`` on; what held before begins there."""
    before = [step for step in history.steps if step.at <= begin][-1:]
    return (
        *(replace(step, at=begin) for step in before),
        *(step for step in history.steps if begin < step.at <= end),
    )
