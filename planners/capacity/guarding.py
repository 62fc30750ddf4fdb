"""What no decision about leases may break: quotas and budgets, and work that is in no checkpoint.

A policy is asked again without what was refused, so that others get the GPUs; every refusal has its reason.
"""

from collections.abc import Collection, Mapping
from math import inf

from ebbflow.planners.capacity.cycle_state import HOUR, Scene, needs, placement_of
from ebbflow.planners.capacity.quotas import SLACK, price_of
from ebbflow.planners.capacity.terms import Terms
from ebbflow.planners.capacity.values import Memory
from ebbflow.planners.model.ledger import AppRecord
from ebbflow.planners.model.scheduling import App, Grant


def over_budget(scene: Scene, records: Collection[AppRecord]) -> tuple[dict[str, str], float]:
    """Return the apps whose budget is spent, with the reason, and when the next will be.

    Budgets are an app's own, its pipeline's, its team's and ``Limits.dollars_per_run``. What an app pays while it
    saves and lets go is counted as spent already, and one that holds nothing is not started for less than a lease.
    """
    budgets = _budgets(scene)
    if not budgets:
        return {}, inf
    # what was forgotten of apps that are over counts on
    past: dict[str, Mapping[str, float]] = {
        "app": {},
        "pipeline": scene.state.pipelines,
        "team": scene.state.teams,
    }
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
            left = budget - spent[key] - rate[key] * settings.grace_s / HOUR
            if not rate[key]:
                start = cheapest * needs(record, settings.elastic)
                left -= start * (settings.lease_s + settings.grace_s) / HOUR
            whose = "its" if key[0] == "app" else f"the {key[0]} {key[1]}'s"
            if left <= SLACK:
                found.setdefault(
                    spec.id, f"{whose} budget of ${budget:.2f} is spent: ${spent[key]:.2f} by now"
                )
            elif rate[key] > 0:
                soonest = min(soonest, scene.now + left / rate[key] * HOUR)
    return found, soonest


def _budgets(scene: Scene) -> dict[tuple[str, str], float]:
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
            at_most("team", spec.team, scene.settings.teams[spec.team].dollars)
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
        if not has:
            continue
        gets = dict(grant.placement) if grant is not None else {}
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
