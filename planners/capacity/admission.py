"""What no decision about leases may break: quotas and budgets, and work that is in no checkpoint.

A policy is asked again without what was refused, so that others get the GPUs; every refusal has its reason.

What teams may hold: GPUs, and dollars per hour that these cost.

What a policy must be asked again with, because the guard would not let its answer pass.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf

from ebbflow.planners.capacity.cycle_state import HOUR, CycleState, needs, placement_of
from ebbflow.planners.capacity.values import Memory, Settings, Team
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import AppRecord
from ebbflow.planners.model.scheduling import App, Grant, Placement, gpus_of


@dataclass(slots=True)
class Terms:
    """What a policy must be asked again with."""

    refused: dict[str, str] = field(default_factory=dict)  # apps that get nothing
    capped: dict[str, tuple[int, str]] = field(default_factory=dict)  # apps that get so many GPUs at most
    spared: dict[str, tuple[Placement, str]] = field(default_factory=dict)  # apps that keep what they have

    def merge(self, other: "Terms") -> bool:
        """Take over ``other``; tell whether anything is new."""
        before = (dict(self.refused), dict(self.capped), dict(self.spared))
        self.refused |= other.refused
        for app, (most, why) in other.capped.items():
            if app not in self.capped or most < self.capped[app][0]:
                self.capped[app] = (most, why)
        self.spared |= other.spared
        for app in self.refused:
            self.capped.pop(app, None)
            self.spared.pop(app, None)
        return before != (self.refused, self.capped, self.spared)


SLACK = 1e-9  # $/h; sums of prices are not exact


def limited(settings: Settings) -> dict[str, Team]:
    """Return the teams that have a quota."""
    return {
        name: team for name, team in settings.teams.items() if team.gpus < inf or team.dollars_per_hour < inf
    }


class TeamHeadroom:
    """What teams may still be granted: what their apps hold and may use counts, what is called back does not."""

    def __init__(self, scene: CycleState) -> None:
        self._teams = limited(scene.settings)
        self._gpus: dict[str, int] = {}
        self._rate: dict[str, float] = {}
        for app in scene.mine if self._teams else ():
            team = scene.state.apps[app].spec.team
            for lease in scene.live(app) if team in self._teams else ():
                self.add(team, 1, lease.price)

    def fits(self, name: str, gpus: int, rate: float) -> bool:
        """Tell whether a team may have so many GPUs more, at ``rate`` dollars per hour together."""
        team = self._teams.get(name)
        if team is None:
            return True
        return (
            self._gpus.get(name, 0) + gpus <= team.gpus
            and self._rate.get(name, 0.0) + rate <= team.dollars_per_hour + SLACK
        )

    def add(self, name: str, gpus: int, rate: float) -> None:
        """Count so much more, or less."""
        self._gpus[name] = self._gpus.get(name, 0) + gpus
        self._rate[name] = self._rate.get(name, 0.0) + rate


def over_quota(
    scene: CycleState,
    apps: Collection[App],
    grants: Mapping[str, Grant],
    nodes: Mapping[str, Node],
    spared: Mapping[str, tuple[Placement, str]],
) -> Terms:
    """Return what of ``grants`` is beyond the quotas of teams.

    What apps keep that are ``spared`` counts first, then who holds GPUs, then who came first.
    """
    found = Terms()
    teams = limited(scene.settings)
    if not teams:
        return found
    shares: dict[str, _Share] = {
        name: _Share(team.gpus, team.dollars_per_hour) for name, team in teams.items()
    }
    for id_, (placement, _) in spared.items():
        share = shares.get(scene.state.apps[id_].spec.team)
        if share is not None:
            share.add(gpus_of(placement), sum(count * price_of(nodes[node]) for node, count in placement))
    asking: dict[str, list[_AppRequest]] = {}
    for app in sorted(apps, key=lambda a: (not a.held, a.number)):
        grant = grants.get(app.id)
        if app.team in teams:
            placement = grant.placement if grant is not None else ()
            number = gpus_of(placement)
            cost = sum(count * price_of(nodes[node]) for node, count in placement)
            elastic = scene.settings.elastic and app.min_gpus < app.max_gpus
            asks = _AppRequest(
                app, number, cost / number if number else 0.0, app.min_gpus if elastic else number
            )
            asking.setdefault(app.team, []).append(asks)
    for name, some in asking.items():
        share = shares[name]
        if share.holds(sum(one.gpus for one in some), sum(one.gpus * one.price for one in some)):
            continue
        _divide(name, share, [one for one in some if one.gpus], found)
    return found


@dataclass(slots=True)
class _AppRequest:
    """One app of a team and what it was given, before the team's quota counts."""

    app: App
    gpus: int
    price: float  # dollars per hour of one of its GPUs, on average
    least: int  # of use to it
    gets: int = 0


@dataclass(slots=True)
class _Share:
    """What a team may have, and has."""

    most: float  # GPUs
    dollars: float  # per hour
    gpus: float = 0.0
    rate: float = 0.0  # dollars per hour

    def add(self, gpus: float, rate: float) -> None:
        self.gpus += gpus
        self.rate += rate

    def holds(self, gpus: float, rate: float) -> bool:
        """Tell whether there is room for so much more."""
        return self.gpus + gpus <= self.most and self.rate + rate <= self.dollars + SLACK

    def why(self, name: str, gpus: float) -> str:
        if self.gpus + gpus > self.most:
            return f"team {name} may hold {self.most:g} GPUs, its other apps hold {self.gpus:g}"
        return f"team {name} may spend ${self.dollars:g}/h, its other apps spend ${self.rate:.4g}/h"


def _divide(name: str, share: _Share, some: list[_AppRequest], found: Terms) -> None:
    """Divide a team's quota: first what each needs to run, in order; then GPU by GPU to who has least by weight."""
    for one in some:
        if share.holds(one.least, one.least * one.price):
            one.gets = one.least
            share.add(one.least, one.least * one.price)
        else:
            found.refused[one.app.id] = share.why(name, one.least)
    more = [one for one in some if 0 < one.gets < one.gpus]
    while more:
        one = min(more, key=lambda each: (each.gets / each.app.weight, each.app.number))
        if one.gets < one.gpus and share.holds(1, one.price):
            one.gets += 1
            share.add(1, one.price)
        else:
            more.remove(one)
    for one in some:
        if 0 < one.gets < one.gpus:
            limit = f"{share.most:g} GPUs" if share.most < inf else f"${share.dollars:g}/h"
            found.capped[one.app.id] = (one.gets, f"{one.gets} GPUs at most: team {name} may hold {limit}")


def price_of(node: Node) -> float:
    """Return the price of one GPU of a node, dollars per hour."""
    return node.price / node.gpus if node.gpus else 0.0


def over_budget(scene: CycleState, records: Collection[AppRecord]) -> tuple[dict[str, str], float]:
    """Return the apps whose budget is spent, with the reason, and when the next will be.

    Budgets are an app's own, its pipeline's, its team's and ``Limits.dollars_per_run``. What an app pays while it
    saves and lets go is counted as spent already, and one that holds nothing is not started for less than a lease.
    """
    budgets = _budgets(scene)
    if not budgets:
        return {}, inf
    # what was forgotten of apps that are over counts on
    past: dict[str, Mapping[str, float]] = {"app": {}, **scene.past()}
    spent = {(kind, name): past[kind].get(name, 0.0) for kind, name in budgets}
    rate = dict.fromkeys(budgets, 0.0)
    for record in scene.state.apps.values():
        spec = record.spec
        for key in (("app", spec.id), ("pipeline", spec.pipeline), ("team", spec.team)):
            if key in budgets:
                spent[key] += scene.dollars(record)
                rate[key] += scene.rate(spec.id)
    settings = scene.settings
    cheapest = min((price_of(node) for node in scene.usable), default=0.0)
    found: dict[str, str] = {}
    soonest = inf
    for record in records:
        spec = record.spec
        for key in (("app", spec.id), ("pipeline", spec.pipeline), ("team", spec.team)):
            budget = budgets.get(key)
            if budget is None:
                continue
            left = budget - spent[key] - rate[key] * settings.termination_grace_s / HOUR
            if not rate[key]:
                start = cheapest * needs(record, settings.elastic)
                left -= start * (settings.lease_s + settings.termination_grace_s) / HOUR
            whose = "its" if key[0] == "app" else f"the {key[0]} {key[1]}'s"
            if left <= SLACK:
                found.setdefault(
                    spec.id, f"{whose} budget of ${budget:.2f} is exhausted: ${spent[key]:.2f} spent"
                )
            elif rate[key] > 0:
                soonest = min(soonest, scene.now + left / rate[key] * HOUR)
    return found, soonest


def _budgets(scene: CycleState) -> dict[tuple[str, str], float]:
    """Return what apps, pipelines and teams may spend, dollars, of those that are active."""
    found: dict[tuple[str, str], float] = {}

    def at_most(kind: str, name: str, dollars: float | None) -> None:
        if name and dollars is not None and dollars < inf:
            found[kind, name] = min(dollars, found.get((kind, name), inf))

    run = scene.settings.limits.dollars_per_run
    for record in scene.active:
        spec = record.spec
        at_most("app", spec.id, spec.budget)
        at_most("pipeline", spec.pipeline, spec.pipeline_budget)
        at_most("pipeline" if spec.pipeline else "app", spec.pipeline or spec.id, run)
        if spec.team in scene.settings.teams:
            at_most("team", spec.team, scene.settings.teams[spec.team].budget)
    return found


def unsaved(scene: CycleState, apps: Collection[App], grants: Mapping[str, Grant], memory: Memory) -> Terms:
    """Return the apps that are to lose GPUs now although much of their work is in no checkpoint.

    Each is spared for a while at most, in which it can save, so nobody waits for ever. GPUs that leave by themselves
    are no matter of choice.
    """
    found = Terms()
    settings = scene.settings
    for app in apps:
        grant = grants.get(app.id)
        leases = scene.live(app.id)
        has = placement_of(leases)
        if not has:
            continue
        gets = dict(grant.placement) if grant is not None else {}
        if all(gets.get(node, 0) >= gpus for node, gpus in has):
            continue
        report = scene.report(app.id)
        saved = report.saved_at if report is not None and report.saved_at is not None else -inf
        risk = scene.now - max(saved, min(lease.since for lease in leases))
        since = memory.spared.get(app.id, scene.now)
        if risk > settings.unsaved_work_s and scene.now - since < settings.preempt_exempt_s:
            why = (
                f"protected from preemption for at most {settings.preempt_exempt_s:.0f} s: "
                f"{risk:.0f} s of unsaved work"
            )
            found.spared[app.id] = (has, why)
    return found
