"""A policy is asked who is to hold what, its answer is checked, and what the guard refuses is asked for anew."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, isnan
from numbers import Real
from typing import Any

import numpy as np

from ebbflow.planners.capacity.admission import Terms, over_quota, unsaved
from ebbflow.planners.capacity.cycle_state import CycleState
from ebbflow.planners.capacity.values import DesiredAllocation, Memory
from ebbflow.planners.capacity.view import PolicyView
from ebbflow.planners.model.scheduling import App, Decision, View, gpus_of, take

ROUNDS = 4  # times that a policy is asked in one auction


@dataclass(frozen=True, slots=True)
class AuctionResult:
    """What everyone is to hold, or why there is no answer."""

    wanted: Mapping[str, DesiredAllocation] = field(default_factory=dict)
    memory: Any = None
    wake: float = inf
    notes: Mapping[str, float] = field(default_factory=dict)
    terms: Terms = field(default_factory=Terms)
    problem: str = ""


def ask(scene: CycleState, seen: PolicyView, memory: Memory, seed: int) -> AuctionResult:
    """Return the policy's answer within what the guard allows.

    A policy that raises, or breaks a rule of placement, has a ``problem`` in place of an answer. Each time it is
    asked in one auction it is given the same memory and a generator of the same ``seed``.
    """
    terms = Terms()
    settings, view = scene.settings, seen.view
    name = settings.policy.name
    decision: Decision | None = None
    for _ in range(ROUNDS):
        asked = _view(view, terms)
        # whatever a user's policy raises, the loop continues
        try:
            decision = settings.policy.decide(asked, memory.policy, np.random.default_rng(seed))
            problem = broken(asked, decision, settings.elastic)
        except Exception as error:
            return AuctionResult(problem=f"policy {name} failed: {type(error).__name__}: {error}")
        if problem:
            return AuctionResult(problem=f"policy {name} broke a rule: {problem}")
        nodes = {node.id: node for node in scene.usable}
        found = over_quota(scene, asked.apps, decision.grants, nodes, terms.spared)
        found.merge(unsaved(scene, asked.apps, decision.grants, memory))
        if not terms.merge(found):
            break
    assert decision is not None  # asked at least once
    return AuctionResult(
        _wanted(scene, view, decision, terms),
        decision.memory,
        decision.wake if not isnan(decision.wake) else inf,
        decision.notes,
        terms,
    )


def broken(view: View, decision: Decision, elastic: bool) -> str:
    """Return which rule a decision breaks: GPUs that are not there, given twice, or of no use to an app; or what it
    says that makes no sense."""
    if what := _senseless(decision):
        return what
    free = {node.id: node.gpus for node in view.capacity.usable}
    apps = {app.id: app for app in view.apps}
    unknown = sorted(set(decision.grants) - set(apps))
    if unknown:
        return f"it grants GPUs to apps that are not schedulable: {unknown[:3]}"
    for app in view.apps:
        grant = decision.grants.get(app.id)
        if grant is None or not grant.placement:
            continue
        if not grant.until > view.now:
            return f"app {app.id} gets a lease that has expired"
        if what := take(free, app, grant.placement, elastic=elastic):
            return f"app {app.id} gets {what}"
    return ""


def _senseless(decision: Any) -> str:
    """Return what a decision says that is not of its kind: no type checker looks at a user's policy."""
    if not isinstance(decision.wake, Real):
        return f"its wake time {decision.wake!r} is no timestamp"
    for name, value in decision.notes.items():
        if not isinstance(value, Real):
            return f"its note {name!r:.80} is no number: {value!r:.80}"
    for app, grant in decision.grants.items():
        if not isinstance(grant.reason, str):
            return f"app {app} gets a reason that is no text: {grant.reason!r:.80}"
    return ""


def _view(view: View, terms: Terms) -> View:
    """Return the view without who is refused or spared, and with fewer GPUs for who is capped."""
    if not (terms.refused or terms.spared or terms.capped):
        return view
    apps = [
        _capped(app, terms) for app in view.apps if app.id not in terms.refused and app.id not in terms.spared
    ]
    kept: dict[str, int] = {}
    for placement, _ in terms.spared.values():
        for node, gpus in placement:
            kept[node] = kept.get(node, 0) + gpus
    nodes = tuple(
        replace(node, gpus=node.gpus - kept[node.id]) if node.id in kept else node
        for node in view.capacity.nodes
    )
    capacity = replace(view.capacity, nodes=tuple(node for node in nodes if node.gpus > 0))
    # what was promised to others on the GPUs of who is spared is no longer theirs
    room = {node.id: node.gpus for node in capacity.nodes}
    for app in apps:
        if all(room.get(node, 0) >= gpus for node, gpus in app.held):
            for node, gpus in app.held:
                room[node] -= gpus
        else:
            app.held = ()
    return View(view.now, apps, capacity, view.ran)


def _capped(app: App, terms: Terms) -> App:
    app = replace(app)
    if app.id in terms.capped:
        app.max_gpus = terms.capped[app.id][0]
        app.gpus = min(app.gpus, app.max_gpus)
    return app


def _wanted(scene: CycleState, view: View, decision: Decision, terms: Terms) -> dict[str, DesiredAllocation]:
    """Return what each app of the auction is to hold, in the order of their arrival.

    What was refused in the last round still has its place in the decision, and who is spared may be in the way of
    others, who then wait for the next auction.
    """
    free = {node.id: node.gpus for node in view.capacity.nodes}
    for placement, _ in terms.spared.values():
        for node, gpus in placement:
            free[node] = free.get(node, 0) - gpus
    found: dict[str, DesiredAllocation] = {}
    for app in view.apps:
        grant = decision.grants.get(app.id)
        if app.id in terms.refused:
            found[app.id] = DesiredAllocation((), inf, terms.refused[app.id])
        elif app.id in terms.spared:
            found[app.id] = DesiredAllocation(terms.spared[app.id][0], inf, terms.spared[app.id][1])
        elif grant is None:
            found[app.id] = DesiredAllocation((), inf, "pending (Priority): the policy grants it no GPUs")
        else:
            most, why = terms.capped.get(app.id, (inf, ""))
            if (
                any(free.get(node, 0) < gpus for node, gpus in grant.placement)
                or gpus_of(grant.placement) > most
            ):
                found[app.id] = DesiredAllocation(
                    (), inf, why or "pending (Resources): apps protected from preemption hold its GPUs"
                )
                continue
            for node, gpus in grant.placement:
                free[node] -= gpus
            reason = "; ".join(part for part in (grant.reason, why) if part)
            placed = tuple(sorted((str(node), int(gpus)) for node, gpus in grant.placement))
            found[app.id] = DesiredAllocation(placed, grant.until, reason)
    return found
