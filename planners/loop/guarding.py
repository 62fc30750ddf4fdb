"""What no decision about leases may break: quotas and budgets, and work that is in no checkpoint.

A policy is asked again without what was refused, so that others get the GPUs; every refusal has its reason.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite

from ebbflow.planners.loop.leases import SLACK
from ebbflow.planners.loop.scene import HOUR, Scene, placement_of
from ebbflow.planners.loop.values import Memory
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


def over_budget(scene: Scene, records: Collection[AppRecord]) -> tuple[dict[str, str], float]:
    """Return the apps whose budget is spent, with the reason, and when the next will be.

    Budgets are an app's own, its pipeline's and its team's. What an app pays while it saves and lets go is counted
    as spent already.
    """
    known = scene.state.apps.values()
    spent: dict[tuple[str, str], float] = {}
    rate: dict[tuple[str, str], float] = {}
    for record in known:
        spec = record.spec
        dollars, per_hour = scene.dollars(record), scene.rate(spec.id)
        for key in (("app", spec.id), ("pipeline", spec.pipeline), ("team", spec.team)):
            if key[1]:
                spent[key] = spent.get(key, 0.0) + dollars
                rate[key] = rate.get(key, 0.0) + per_hour
    budgets = _budgets(scene)
    found: dict[str, str] = {}
    soonest = inf
    for record in records:
        spec = record.spec
        for key in (("app", spec.id), ("pipeline", spec.pipeline), ("team", spec.team)):
            budget = budgets.get(key)
            if budget is None:
                continue
            left = budget - spent[key] - rate[key] * scene.settings.grace_s / HOUR
            whose = "its" if key[0] == "app" else f"the {key[0]} {key[1]}'s"
            if left <= SLACK:
                found.setdefault(
                    spec.id, f"{whose} budget of ${budget:.2f} is spent: ${spent[key]:.2f} by now"
                )
            elif rate[key] > 0:
                soonest = min(soonest, scene.now + left / rate[key] * HOUR)
    return found, soonest


def _budgets(scene: Scene) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for record in scene.state.apps.values():
        spec = record.spec
        if spec.budget is not None:
            found["app", spec.id] = spec.budget
        if spec.pipeline and spec.pipeline_budget is not None:
            key = ("pipeline", spec.pipeline)
            found[key] = min(spec.pipeline_budget, found.get(key, inf))
    for name, team in scene.settings.teams.items():
        if name and isfinite(team.dollars):
            found["team", name] = team.dollars
    return found


def over_quota(
    scene: Scene,
    apps: Collection[App],
    grants: Mapping[str, Grant],
    nodes: Mapping[str, Node],
    spared: Mapping[str, tuple[Placement, str]],
) -> Terms:
    """Return what of ``grants`` is beyond the quotas of teams.

    What apps keep that are ``spared`` counts first, then who holds GPUs, then who came first.
    """
    found = Terms()
    teams = {
        name: team
        for name, team in scene.settings.teams.items()
        if team.gpus < inf or team.dollars_per_hour < inf
    }
    if not teams:
        return found
    gpus: dict[str, float] = {}
    rate: dict[str, float] = {}
    for id_, (placement, _) in spared.items():
        name = scene.state.apps[id_].spec.team
        gpus[name] = gpus.get(name, 0.0) + gpus_of(placement)
        rate[name] = rate.get(name, 0.0) + sum(count * price_of(nodes[node]) for node, count in placement)
    for app in sorted(apps, key=lambda a: (not a.held, a.number)):
        team = teams.get(app.team)
        grant = grants.get(app.id)
        if team is None or grant is None or not grant.placement:
            continue
        number = gpus_of(grant.placement)
        price = sum(count * price_of(nodes[node]) for node, count in grant.placement)
        used, paid = gpus.get(app.team, 0.0), rate.get(app.team, 0.0)
        if used + number <= team.gpus and paid + price <= team.dollars_per_hour + SLACK:
            gpus[app.team], rate[app.team] = used + number, paid + price
            continue
        dearest = max(price_of(nodes[node]) for node, _ in grant.placement)
        room = team.gpus - used
        if dearest > 0:
            room = min(room, (team.dollars_per_hour - paid + SLACK) / dearest)
        limit = (
            f"team {app.team} may hold {team.gpus:g} GPUs, its other apps have {used:g}"
            if used + number > team.gpus
            else f"team {app.team} may spend ${team.dollars_per_hour:g}/h, its other apps spend ${paid:.4g}/h"
        )
        if app.min_gpus <= room < number and app.min_gpus < app.max_gpus:
            most = int(room)
            found.capped[app.id] = (most, f"{most} GPUs at most: {limit}")
            gpus[app.team], rate[app.team] = used + most, paid + most * dearest
        else:
            found.refused[app.id] = limit
    return found


def unsaved(scene: Scene, apps: Collection[App], grants: Mapping[str, Grant], memory: Memory) -> Terms:
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
        if not has or grant is None:
            continue
        gets = dict(grant.placement)
        if all(gets.get(node, 0) >= gpus for node, gpus in has):
            continue
        report = scene.report(app.id)
        saved = report.saved_at if report is not None and report.saved_at is not None else -inf
        risk = scene.now - max(saved, min(lease.since for lease in leases))
        since = memory.spared.get(app.id, scene.now)
        if risk > settings.unsaved_s and scene.now - since < settings.spare_s:
            why = f"{risk:.0f} s of its work are in no checkpoint; it is spared for {settings.spare_s:.0f} s at most"
            found.spared[app.id] = (has, why)
    return found


def price_of(node: Node) -> float:
    """Return the price of one GPU of a node, dollars per hour."""
    return node.price / node.gpus if node.gpus else 0.0
