"""What is written down of a decision: what it was based on, what came of it, and why, in words."""

from collections.abc import Mapping, MutableMapping
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from ebbflow.planners.capacity.cycle_state import CycleState
from ebbflow.planners.capacity.leases import placement_text
from ebbflow.planners.capacity.policy_call import AuctionResult
from ebbflow.planners.capacity.values import DesiredAllocation, Memory
from ebbflow.planners.capacity.view import PolicyView
from ebbflow.planners.model.ledger import Change, Decided
from ebbflow.planners.model.scheduling import App, gpus_of
from ebbflow.planners.scheduling.locality import Level

NAMED = 3  # apps that a sentence names
MANY = 50  # apps, of more than which not all are told of each time


class Recorded(NamedTuple):
    """An auction as it is written down, and whether it tells of all apps."""

    event: Decided
    whole: bool


def auction_event(
    scene: CycleState, seen: PolicyView, answer: AuctionResult, memory: Memory, seed: int, why: str
) -> Recorded | None:
    """Return what is written down of an auction; ``None`` where it changed nothing and the last is not long ago.

    Of more than ``MANY`` apps all are told of once a period, and in between those whose share is another: fifty
    arrivals a second would else fill the ledger with what has not changed.
    """
    changed = {
        app: wanted
        for app, wanted in answer.wanted.items()
        if app not in memory.plan.wanted or wanted.placement != memory.plan.wanted[app].placement
    }
    moved = {app: w for app, w in changed.items() if w.placement != _before(memory, app).placement}
    gone = [app for app, w in memory.plan.wanted.items() if w.placement and app not in answer.wanted]
    period = scene.settings.interval_s
    if not moved and not gone and (scene.now < memory.recorded + period or not answer.wanted):
        return None
    whole = len(answer.wanted) <= MANY or scene.now >= memory.whole + period
    last_logged = answer.wanted if whole else changed
    there = sum(node.gpus for node in seen.view.capacity.nodes)
    inputs: dict[str, Any] = {
        "policy": scene.settings.policy.name,
        "seed": seed,
        "why": why,
        "gpus": there,
        "apps": {
            app.id: _bid(seen, app, answer.wanted[app.id], scene.now)
            for app in seen.view.apps
            if app.id in last_logged
        },
    }
    if scene.settings.teams:
        inputs["teams"] = {
            name: _round_value(team.weight) for name, team in sorted(scene.settings.teams.items())
        }
    if answer.notes:
        inputs["notes"] = {name: _round_value(value) for name, value in sorted(answer.notes.items())}
    outcome: dict[str, Any] = {
        "gpus": {app: gpus_of(wanted.placement) for app, wanted in last_logged.items()},
        "placements": {app: dict(wanted.placement) for app, wanted in moved.items()},
        "waits": {app: wanted.reason for app, wanted in last_logged.items() if not wanted.placement},
    }
    if not whole:
        inputs["others"] = len(answer.wanted) - len(last_logged)
    if seen.left_out and whole:
        outcome["left_out"] = dict(sorted(seen.left_out.items()))
    reason = _sentence(seen, answer, moved, there, why)
    return Recorded(Decided("auction", reason, "", scene.state.revision, 0.0, inputs, outcome), whole)


def guard_events(
    scene: CycleState,
    seen: PolicyView,
    answer: AuctionResult,
    refused: Mapping[str, str],
    last_logged: MutableMapping[str, str],
) -> list[Change]:
    """Return what the guard refused or changed since the last time, and who is left out for another reason."""
    terms = answer.terms
    rules: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for app, why in (*refused.items(), *terms.refused.items()):
        rules[app] = ("refused", f"{app} gets no GPUs: {why}", {"gpus": 0})
    for app, (most, why) in terms.capped.items():
        rules[app] = ("capped", f"{app} gets {why}", {"most_gpus": most})
    for app, (placement, why) in terms.spared.items():
        rules[app] = ("spared", f"{app} keeps its GPUs: {why}", {"placement": dict(placement)})
    for app, why in seen.left_out.items():
        if app not in rules and app in scene.state.apps and scene.trains(scene.state.apps[app]):
            rules[app] = ("left out", f"{app} is not schedulable: {why}", {"gpus": 0})
    found: list[Change] = []
    for app, (rule, reason, outcome) in sorted(rules.items()):
        if last_logged.get(f"guard {app}") != rule:
            found.append(
                Decided("guard", reason, app, scene.state.revision, inputs={"rule": rule}, outcome=outcome)
            )
        last_logged[f"guard {app}"] = rule
    for key in [
        key for key in last_logged if key.startswith("guard ") and key.removeprefix("guard ") not in rules
    ]:
        del last_logged[key]
    return found


def _before(memory: Memory, app: str) -> DesiredAllocation:
    return memory.plan.wanted.get(app) or DesiredAllocation()


def _bid(seen: PolicyView, app: App, wanted: DesiredAllocation, now: float) -> dict[str, Any]:
    """Return what an app's share was decided on. ``rho`` is with what it gets; with what it asked for if it waits."""
    believed = seen.beliefs[app.id]
    gpus = gpus_of(wanted.placement)
    found: dict[str, Any] = {"held": gpus_of(app.held), "gpus": gpus}
    if app.bidder is not None:
        placement = wanted.placement or (("", app.gpus),)
        rho = app.bidder.rho(placement, seen.view.capacity, now)
        if isfinite(rho):
            found["rho"] = _round_value(rho)
    left = believed.seconds(gpus or app.gpus)
    if isfinite(left):
        found["left_s"] = _round_value(left)
    if not believed.sure:
        found["guessed"] = True
    if app.max_gpus > 1:
        found["spread_by"] = believed.spread_by
    if believed.cost is not None:
        found["slowdown"] = {
            level.name.lower(): _round_value(believed.cost.slowdown(gpus or app.gpus, level))
            for level in (Level.RACK, Level.CLUSTER)
        }
    if believed.goodput is not None and gpus:
        rate = believed.goodput.best(np.array([len(wanted.placement)]), np.array([gpus]))
        found["goodput"] = _round_value(float(rate[0]))
    if app.weight != 1.0:
        found["weight"] = _round_value(app.weight)
    return found


def _predicted(seen: PolicyView, app: str, wanted: DesiredAllocation) -> str:
    """Return what an app's communication predicts of placements; nothing where that was not what it bid by."""
    cost, gpus = seen.beliefs[app].cost, gpus_of(wanted.placement)
    if cost is None or gpus < 2:
        return ""
    rack, cluster = (cost.slowdown(gpus, level) for level in (Level.RACK, Level.CLUSTER))
    return (
        f"its communication predicts iterations {rack:.2f} times as long on nodes of a rack, "
        f"{cluster:.2f} across racks"
    )


def _sentence(
    seen: PolicyView,
    answer: AuctionResult,
    changed: Mapping[str, DesiredAllocation],
    there: int,
    why: str,
) -> str:
    gets = {app: wanted for app, wanted in answer.wanted.items() if wanted.placement}
    given = sum(gpus_of(wanted.placement) for wanted in gets.values())
    if not answer.wanted:
        return f"{why}: no app requests GPUs"
    parts = [f"{why}: {len(gets)} of {len(answer.wanted)} apps are allocated {given} of {there} GPUs"]
    news = [(app, wanted) for app, wanted in changed.items() if wanted.placement]
    for app, wanted in news[:NAMED]:
        said = "; ".join(filter(None, (wanted.reason, _predicted(seen, app, wanted))))
        parts.append(f"{app} gets {placement_text(wanted)}" + (f" ({said})" if said else ""))
    if len(news) > NAMED:
        parts.append(f"{len(news) - NAMED} more apps have a new allocation")
    loses = [(app, wanted) for app, wanted in changed.items() if not wanted.placement]
    for app, wanted in loses[:NAMED]:
        parts.append(f"{app} is preempted: {wanted.reason}")
    if not changed:
        parts.append("no allocation changes")
    return "; ".join(parts)


def _round_value(value: float) -> float | None:
    """Return four significant digits; none of what is not finite, which JSON does not have."""
    return float(f"{value:.4g}") if isfinite(value) else None
