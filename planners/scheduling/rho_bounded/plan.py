"""Which rule to follow: a few are tried on what is there, and the one with the most goodput within the bounds wins.

Goodput is measured by the mean finish: for a given set of apps, less of it means more progress sooner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from ebbflow.planners.scheduling.rho_bounded.forecast import AppForecast, Group
from ebbflow.planners.scheduling.rho_bounded.rollout import Gangs, Rule, rollout

GANG_POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
STRETCHES = (1.0, 1.05, 1.1, inf)  # of the least time in which all can be over
LOOSER = (1.25, 1.6, 2.2, 3.5)  # times the bound on fairness, where the bound itself cannot be kept
SLACK = 1.05  # what an app may lose that would break the bound whatever is done
CLOSE = 0.02  # differences in how far bounds are broken that don't matter
MOST_PLANNED = 256  # apps; with more, forecasts would take longer than they are good for


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a rule must keep."""

    rho: float  # worst finish-time fairness
    makespan: float  # over the shortest that any rule reaches


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

    rule: Rule = field(default_factory=Rule)
    at: float = -inf  # s, when it was chosen
    apps: int = 0  # that there were
    busy_since: float = 0.0  # s, since when there has always been an app
    soonest: float = inf  # s: when all could be over, as seen when the last app came


def gangs_of(forecasts: Sequence[AppForecast], groups: Sequence[Group], delay: float) -> Gangs:
    """Return gangs and pools, a pool per GPU type. GPUs that leave aren't counted on."""
    stay = [group for group in groups if group.until == inf]
    types = sorted({group.type for group in stay})
    where = {node: types.index(group.type) for group in stay for node in group.room.ids}
    held = [where.get(o.app.held[0][0], -1) if o.app.held else -1 for o in forecasts]
    return Gangs(
        np.array([o.app.gpus for o in forecasts], np.intp),
        np.array([o.left for o in forecasts], float),
        np.array([o.app.arrival for o in forecasts], float),
        np.array([o.fair for o in forecasts], float),
        np.array([[o.rate(t) for t in types] for o in forecasts], float).reshape(len(forecasts), len(types)),
        np.array(held, np.intp),
        tuple(sum(g.room.total for g in stay if g.type == t) for t in types),
        delay,
    )


def due(plan: Plan, now: float, apps: int, came: bool, every: float) -> bool:
    """Tell whether to plan anew: after ``every`` s, or when apps came that make a tenth of all."""
    return now - plan.at >= every or (came and abs(apps - plan.apps) * 10 >= plan.apps)


def replan(gangs: Gangs, now: float, bounds: Bounds, plan: Plan, came: bool) -> Plan:
    """Return the best of a few rules near that of ``plan``.

    One part of the rule is tried at a time. A rule is better that breaks a bound by less, then the one with the least
    mean finish. Unless apps ``came``, the makespan is measured against what the plan found possible, not against what
    time has left of that; else every delay would excuse the next.
    """
    apps, shortest = len(gangs.left), gangs.lower_bound()
    if apps > MOST_PLANNED:
        end = now + STRETCHES[-2] * shortest
        rule = plan.rule._replace(rho=bounds.rho, end=end if came else min(end, plan.rule.end))
        return Plan(rule, now, apps, plan.busy_since, now + shortest)
    allowed = np.maximum(bounds.rho, SLACK * (now + gangs.left + gangs.delay - gangs.arrival) / gangs.fair)
    seen: dict[Rule, Forecast] = {}

    def forecast(tried: Rule) -> Forecast:
        if tried not in seen:
            ends = rollout(gangs, now, tried)
            over = ends < inf
            rho = ((ends - gangs.arrival) / gangs.fair / allowed)[over]
            mean = float(ends[over].mean()) if rho.size else now
            seen[tried] = Forecast(
                tried, float(rho.max(initial=0.0)), float(ends[over].max(initial=now)), mean
            )
        return seen[tried]

    def soonest() -> float:
        found = min(f.end for f in seen.values())
        return found if came else min(found, plan.soonest)

    def best() -> Rule:
        latest = plan.busy_since + bounds.makespan * (soonest() - plan.busy_since)
        return min(seen.values(), key=lambda f: _score(f, latest, now)).rule

    rule = plan.rule
    for end in (rule.end, *(now + stretch * shortest for stretch in STRETCHES)):
        for rho in (bounds.rho, inf):
            forecast(rule._replace(end=end, rho=rho))
    rule = best()
    for power in GANG_POWERS:
        forecast(rule._replace(gang_power=power))
    rule = best()
    for factor in LOOSER:
        if forecast(best()).excess <= 1.0:
            break
        forecast(rule._replace(rho=bounds.rho * factor))
    return Plan(best(), now, apps, plan.busy_since, soonest())


def _score(forecast: Forecast, latest: float, now: float) -> tuple[int, float]:
    late = (forecast.end - now) / max(latest - now, 1e-9)
    return round(max(forecast.excess, late, 1.0) / CLOSE), forecast.mean
