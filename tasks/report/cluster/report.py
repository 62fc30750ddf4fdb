"""From a ledger's events to the report of a cluster."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import cast

from ebbflow.planners.model.ledger import OVER, AppPhase, AppReport, Event
from ebbflow.tasks.report.cluster.decisions import changed, decisions, latency, paced, stages
from ebbflow.tasks.report.cluster.fairness import Crowd, fairness, last_phase, rho, service_of
from ebbflow.tasks.report.cluster.history import History, goodput_of
from ebbflow.tasks.report.cluster.money import counted, money, node_report
from ebbflow.tasks.report.cluster.spans import AppHistory, LeaseSpan
from ebbflow.tasks.report.cluster.values import (
    AppRow,
    CapacityStep,
    ClusterReport,
    DeadlineState,
    LeaseReport,
    PhaseSpan,
    Sample,
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
) -> ClusterReport:
    """Return the report of a ledger's ``events``, all of them and in order.

    ``reports`` are what apps said last. ``now``: up to when what goes on is counted, by default the last event.
    ``since`` and ``until`` (s since the Unix epoch) limit the report to a part of the time; ``pipeline`` to the apps
    of one, from the first one's arrival to the last one's end. ``listed``: on-demand prices by instance type, dollars
    per hour. Raises ``OptionError`` for events that cannot follow each other.
    """
    history = events if isinstance(events, History) else History.of(events)
    known = max([history.times[-1] if history.times else 0.0, now or 0.0])
    chosen = [app for app in history.apps.values() if not pipeline or app.spec.pipeline == pipeline]
    first, last = history.first, known
    if pipeline and chosen:
        first = min(app.entered for app in chosen)
        ends = [last_phase(app, known)[2] for app in chosen]
        last = known if None in ends else max(end for end in ends if end is not None)
    begin = max(first, since if since is not None else -inf)
    end = max(begin, min(last, until if until is not None else inf))
    live = end >= known  # what apps say now is not what they said then
    said = dict(reports or {})
    chosen = [app for app in chosen if app.entered <= end and _there(app, begin, end)]
    ids = {app.spec.id for app in chosen}
    leases = tuple(
        found
        for span in history.leases.values()
        if span.app in history.apps and (found := _lease(span, begin, end)) is not None
    )
    crowd = Crowd(history, end)
    mine = tuple(lease for lease in leases if lease.app in ids)
    rows = _rows(history, chosen, mine, said, crowd, begin, end, live)
    stays = counted(history.nodes, leases, begin, end)
    times = [at for at in history.times if begin <= at <= end]
    return ClusterReport(
        cluster=cluster,
        since=begin,
        until=end,
        number=history.state.number,
        events=len(times),
        pipeline=pipeline,
        loops=tuple(loop for loop in history.loops if begin <= loop.at <= end),
        capacity=_steps(history, begin, end),
        changes=tuple(change for change in history.changes if begin <= change.at <= end),
        nodes=tuple(map(node_report, stays)),
        apps=rows,
        leases=mine,
        stages=tuple(s for app in chosen for s in stages(app, said.get(app.spec.id), begin, end)),
        decisions=decisions(history, ids if pipeline else None, begin, end),
        money=money(stays, rows, begin, end, listed),
        fairness=fairness(rows),
        latency=(*paced(said if live and not pipeline else {}), *latency(history, ids, begin, end)),
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


# --- apps -----------------------------------------------------------------------------------------------------


def _rows(
    history: History,
    apps: Sequence[AppHistory],
    leases: Sequence[LeaseReport],
    said: Mapping[str, AppReport],
    crowd: Crowd,
    begin: float,
    end: float,
    live: bool,
) -> tuple[AppRow, ...]:
    per: dict[str, list[LeaseReport]] = {}
    for lease in leases:
        per.setdefault(lease.app, []).append(lease)
    plans: dict[str, int] = {}
    for event, decided in history.decisions:
        if decided.kind == "replan" and begin <= event.at <= end and changed(decided):
            plans[decided.app] = plans.get(decided.app, 0) + 1
    return tuple(
        _row(history, app, per.get(app.spec.id, []), said.get(app.spec.id), crowd, begin, end, live, plans)
        for app in apps
    )


def _row(
    history: History,
    app: AppHistory,
    leases: Sequence[LeaseReport],
    said: AppReport | None,
    crowd: Crowd,
    begin: float,
    end: float,
    live: bool,
    plans: Mapping[str, int],
) -> AppRow:
    spec = app.spec
    phase, reason, ended = last_phase(app, end)
    over = phase in OVER
    now = said if said is not None and (live or phase == "finished") else None
    held = sum(1 for lease in leases if not lease.over)
    first = app.first_lease if app.first_lease is not None and app.first_lease <= end else None
    left = now.seconds_left if now is not None and not over else None
    state, margin = _deadline(spec.deadline, phase, ended, left, end)
    goodput = [sample for sample in app.goodput if begin <= sample.at <= end]
    value = goodput_of(now) if now is not None and not over else None
    if (
        now is not None
        and value is not None
        and begin <= now.at <= end
        and (not goodput or goodput[-1].at < now.at)
    ):
        goodput.append(Sample(now.at, value))
    return AppRow(
        id=spec.id,
        number=app.number,
        kind=spec.kind,
        team=spec.team,
        title=spec.title,
        pipeline=spec.pipeline,
        phase=cast(AppPhase, phase),
        reason=reason or (now.message if now is not None and not over else ""),
        entered=app.entered,
        ended=ended,
        gpus=spec.gpus,
        held=held,
        first_wait=None if first is None else max(0.0, first - app.entered),
        waited=_waited(app, begin, end),
        service=sum((lease.seconds for lease in leases), 0.0),
        leases=len(leases),
        restarts=_restarts(app, begin, end),
        returns=sum(begin <= at <= end for at in app.returns),
        saves=sum(begin <= at <= end for at in app.saves),
        dollars=sum((lease.seconds / 3600 * lease.price for lease in leases), 0.0),
        rho=rho(app, phase, held, service_of(app, history, end), now, crowd, end),
        weight=spec.weight,
        budget=spec.budget,
        pipeline_budget=spec.pipeline_budget,
        deadline=spec.deadline,
        deadline_state=state,
        margin=margin,
        progress=1.0 if phase == "finished" else now.progress if now is not None else None,
        step=now.step if now is not None else 0,
        seconds_left=left,
        checkpoint=app.checkpoint,
        replans=plans.get(spec.id, 0),
        phases=_phases(app, begin, end),
        goodput=tuple(goodput),
        goodput_unit="examples/s" if goodput else "",
        rhos=tuple(sample for sample in app.rhos if begin <= sample.at <= end),
    )


def _deadline(
    deadline: float | None, phase: str, ended: float | None, left: float | None, now: float
) -> tuple[DeadlineState, float | None]:
    """Return how an app stands to its deadline, and the seconds between its end and it."""
    if deadline is None:
        return "", None
    if phase == "finished" and ended is not None:
        return ("met" if ended <= deadline else "missed"), deadline - ended
    if now > deadline:
        return "missed", deadline - now
    if ended is not None or left is None:
        return "open", None
    return ("on course" if now + left <= deadline else "late"), deadline - now - left


def _phases(app: AppHistory, begin: float, end: float) -> tuple[PhaseSpan, ...]:
    before = [span for span in app.phases if span.at <= begin][-1:]
    found = [PhaseSpan(begin, span.phase, span.reason) for span in before]
    for span in app.phases:
        if begin < span.at <= end and (not found or found[-1].phase != span.phase):
            found.append(span)
    return tuple(found)


def _waited(app: AppHistory, begin: float, end: float) -> float:
    """Return the seconds in which ``app`` wanted to run and held nothing."""
    marks = sorted(
        {begin, end}
        | {span.at for span in app.phases if begin < span.at < end}
        | {at for at, _ in app.held if begin < at < end}
    )
    total, phase, held = 0.0, "", 0
    phases, holds = iter([*app.phases, None]), iter([*app.held, None])
    next_phase, next_held = next(phases), next(holds)
    for start, stop in pairwise(marks):
        while next_phase is not None and next_phase.at <= start:
            phase, next_phase = next_phase.phase, next(phases)
        while next_held is not None and next_held[0] <= start:
            held, next_held = next_held[1], next(holds)
        idle = phase == "waiting" or (phase == "running" and not held and app.spec.kind != "query")
        total += stop - start if idle else 0.0
    return total


def _restarts(app: AppHistory, begin: float, end: float) -> int:
    """Return how often it went on with another placement than it had, or again after a pause."""
    count, before, paused = 0, (), False
    for at, placement in app.moves:
        if at > end:
            break
        if placement and before and (placement != before or paused):
            count += at >= begin
        paused = not placement
        before = placement or before
    return count
