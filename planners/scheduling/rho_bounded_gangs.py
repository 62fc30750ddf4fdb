"""Who runs, when every app is a gang: urgent ones first, then the shortest, and nothing idles that fits.

The rule (``rho_bounded_rollout``) is chosen by trying a few on what is there: of those that keep the bounds, the one
that gives the most goodput, measured as the least mean completion time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ebbflow.planners.model.scheduling import App, Placement, View, gpus_of
from ebbflow.planners.scheduling.placement import Placer
from ebbflow.planners.scheduling.rho_bounded_groups import Group
from ebbflow.planners.scheduling.rho_bounded_outlook import Outlook
from ebbflow.planners.scheduling.rho_bounded_rollout import Gangs, Rule, order, rollout

GANG_POWERS = (0.0, 0.5, 1.0)
STRETCHES = (1.0, 1.05, 1.1, inf)
SLACK = 1.05
LOOSER = (1.0, 1.25, 1.6, 2.2, 3.5, inf)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a rule is judged by."""

    rho: float  # the worst finish-time fairness that is allowed
    makespan: float  # over the shortest makespan that any rule reaches


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a rule would lead to if nobody came any more."""

    rule: Rule
    excess: float  # worst finish-time fairness over the bound, or over what can still be had
    end: float  # s, when all would be over
    mean: float  # s, when they would be over on average


@dataclass(frozen=True, slots=True)
class Plan:
    """A rule that is followed for a while."""

    rule: Rule = Rule()
    at: float = -inf  # s, when it was chosen
    busy_since: float = 0.0  # s, since when there has always been an app
    soonest: float = inf  # s: when all could be over, as seen when the last app came


def gangs_of(outlooks: Sequence[Outlook], groups: Sequence[Group], delay: float) -> Gangs:
    """Return gangs and pools, a pool per GPU type. GPUs that leave are not counted on."""
    types = sorted({group.type for group in groups if group.until == inf})
    pools = [sum(g.gpus for g in groups if g.type == t and g.until == inf) for t in types]
    where = {node: types.index(g.type) for g in groups if g.until == inf for node in g.room.ids}
    held = [where.get(o.app.held[0][0], -1) if o.app.held else -1 for o in outlooks]
    rates = [[o.rate(t) for t in types] for o in outlooks]
    return Gangs(
        np.array([o.app.gpus for o in outlooks], np.intp),
        np.array([o.left for o in outlooks], float),
        np.array([o.app.arrival for o in outlooks], float),
        np.array([o.fair for o in outlooks], float),
        np.array(rates, float).reshape(len(outlooks), len(types)),
        np.array(held, np.intp),
        tuple(pools),
        delay,
    )


def replan(
    outlooks: Sequence[Outlook], groups: Sequence[Group], now: float, bounds: Bounds, delay: float, plan: Plan, arrivals: bool
) -> Plan:
    """Return the best of a few rules near that of ``plan``.

    One part of the rule is tried at a time. A rule is better that breaks a bound by less, then the one with the least
    mean finish. Unless apps came, the makespan is measured against what the plan found possible, not against what is
    left of that now: else every delay would excuse the next.
    """
    gangs = gangs_of(outlooks, groups, delay)
    shortest = gangs.lower_bound()
    unavoidable = np.array([max(bounds.rho, SLACK * o.rho(now + o.left + delay)) for o in outlooks])
    seen: dict[Rule, Forecast] = {}

    def forecast(tried: Rule) -> Forecast:
        if tried not in seen:
            ends = rollout(gangs, now, tried)
            rho = (ends - gangs.arrival) / gangs.fair / unavoidable
            reached = ends < inf
            some = bool(reached.any())
            seen[tried] = Forecast(
                tried,
                float(rho[reached].max()) if some else 0.0,
                float(ends[reached].max()) if some else now,
                float(ends[reached].mean()) if some else now,
            )
        return seen[tried]

    def best() -> Rule:
        found = min(f.end for f in seen.values())
        soonest = found if arrivals else min(found, plan.soonest)
        latest = plan.busy_since + bounds.makespan * (soonest - plan.busy_since)
        return min(seen.values(), key=lambda f: _score(f, latest, now)).rule

    rule = plan.rule._replace(rho=bounds.rho)
    for end in (plan.rule.end, *(now + stretch * shortest for stretch in STRETCHES)):
        forecast(rule._replace(end=end))
        forecast(rule._replace(end=end, rho=inf))
    rule = best()
    for power in GANG_POWERS:
        forecast(rule._replace(gang_power=power))
    rule = best()
    for factor in LOOSER:
        if forecast(rule).excess <= 1.0 or forecast(rule._replace(rho=bounds.rho * factor)).excess <= 1.0:
            break
    found = min(f.end for f in seen.values())
    return Plan(best(), now, plan.busy_since, found if arrivals else min(found, plan.soonest))


def _score(forecast: Forecast, latest: float, now: float) -> tuple[float, float]:
    late = (forecast.end - now) / max(latest - now, 1e-9)
    return round(max(forecast.excess, late, 1.0) / 0.02), forecast.mean


@dataclass(frozen=True, slots=True)
class Turn:
    """An app's place in the queue."""

    outlook: Outlook
    kind: int  # 0: the makespan hangs on it, 1: its fairness bound runs out, 2: it can wait
    since: float  # s: from when it is urgent


def queue(
    outlooks: Sequence[Outlook], groups: Sequence[Group], rule: Rule, now: float, delay: float
) -> list[Turn]:
    """Return all apps in the order in which they are served."""
    gangs = gangs_of(outlooks, groups, delay)
    waits = np.array([not o.app.held for o in outlooks], bool)
    ranked, kind, since = order(gangs, gangs.left, waits, now, rule)
    return [Turn(outlooks[j], int(kind[j]), float(since[j])) for j in ranked.tolist()]


def worth(group: Group, outlook: Outlook, now: float, delay: float, leave: float) -> bool:
    """Tell whether an app gains by holding GPUs of ``group`` rather than none until they leave.

    It gains if it finishes in time, or trains for longer than its start and the next one cost.
    """
    rate = outlook.rate(group.type)
    if rate <= 0:
        return False
    if group.until == inf:
        return True
    time = group.until - leave - now
    at_home = outlook.app.held and all(node in group.room.ids for node, _ in outlook.app.held)
    start = 0.0 if at_home else delay
    return time > 0 and (start + outlook.left / rate <= time or time > start + delay)


def assign(
    turns: Sequence[Turn],
    groups: Sequence[Group],
    view: View,
    placer: Placer,
    delay: float,
    leave: float,
    value: float | None,
) -> dict[str, tuple[Placement, Group]]:
    """Return who holds what until which group's end.

    Each app takes the GPUs that finish it first; those that stay come before those that leave, and where a GPU-hour
    at its best speed is worth ``value`` dollars, an app that isn't urgent takes none that cost more than they give.
    """
    count = {id(group): group.gpus for group in groups}
    chosen: list[tuple[App, Group]] = []
    for turn in turns:
        outlook, app = turn.outlook, turn.outlook.app
        best: tuple[tuple[float, bool, float], Group] | None = None
        for group in groups:
            if count[id(group)] < app.gpus or not worth(group, outlook, view.now, delay, leave):
                continue
            rate = outlook.rate(group.type)
            if value is not None and turn.kind == 2 and group.price > value * rate:
                continue
            rank = (-_progress(group, outlook, view.now, delay, leave), group.advised, group.price)
            if best is None or rank < best[0]:
                best = rank, group
        if best is not None:
            count[id(best[1])] -= app.gpus
            chosen.append((app, best[1]))
    return _placed(chosen, placer)


def _progress(group: Group, outlook: Outlook, now: float, delay: float, leave: float) -> float:
    """Return how fast an app gets on with GPUs of ``group``: its rate, less what the moves cost until they leave."""
    rate = outlook.rate(group.type)
    if group.until == inf:
        return rate
    time = group.until - leave - now
    return rate if outlook.left / rate <= time else rate * max(time - delay, 0.0) / time


def _placed(chosen: Sequence[tuple[App, Group]], placer: Placer) -> dict[str, tuple[Placement, Group]]:
    """Return placements: those that can stay as they are first, the largest of the others next."""
    placed: dict[str, tuple[Placement, Group]] = {}
    for app, group in chosen:
        if app.held and gpus_of(app.held) == app.gpus and group.room.covers(app.held):
            group.room.hold(app.held)
            placed[app.id] = app.held, group
    for app, group in sorted(chosen, key=lambda c: (-c[0].gpus, c[0].number)):
        if app.id in placed:
            continue
        placement = placer(group.room, app, app.gpus)
        if placement is not None:
            placed[app.id] = placement, group
    return placed


def deadlines(outlooks: Mapping[str, Outlook], bound: float) -> dict[str, float]:
    """Return the latest finish of every app within ``bound``, s."""
    return {name: o.app.arrival + bound * o.fair for name, o in outlooks.items()}
