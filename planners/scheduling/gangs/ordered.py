"""Rigid gangs in an order: the common part of the simple policies that Tiresias is compared with (NSDI 2019).

First in, first out without preemption (YARN-CS in Tiresias' comparison, NSDI 2019, section 5).

Smallest or shortest first, preemptive, with durations known (Tiresias, NSDI 2019, section 2 and Table 1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from ebbflow.planners.model.scheduling import App, Decision, Grant, Placement, View, gpus_of
from ebbflow.planners.scheduling.locality import remaining_service, remaining_time
from ebbflow.planners.scheduling.placement import FreeCapacity, Placer, by_skew, consolidated, rack_aware

Key = Callable[[App, View], tuple[float, ...]]
"""What apps are sorted by, ascending; submission decides between equals."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """Whole gangs by ``key``; later ones may fill what an earlier one leaves.

    A ``preemptive`` policy takes GPUs from apps late in the order; another one never takes any. With ``blocking``,
    nobody passes the first gang that does not fit. ``refresh`` is after how many seconds it wants to be asked again,
    for keys that change while apps run.
    """

    name: str
    key: Key
    preemptive: bool = True
    blocking: bool = False
    refresh: float = inf
    placer: Placer = by_skew

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Return the gangs that run, in order, and where."""
        nodes = view.capacity.usable
        room = FreeCapacity(nodes)
        order = sorted(view.apps, key=lambda app: (*self.key(app, view), app.number))
        if not self.preemptive:
            order.sort(key=lambda app: not _stays(app, room))
        budget, runs, blocked = room.total, [], False
        for app in order:
            if app.gpus <= budget and not (blocked and not _stays(app, room)):
                runs.append(app)
                budget -= app.gpus
            elif self.blocking:
                blocked = True
        grants = self._place(runs, room, order)
        waits = Grant(reason="pending (Resources): gangs ahead of it leave too few GPUs")
        return Decision(
            {app.id: grants.get(app.id, waits) for app in view.apps},
            None,
            view.now + self.refresh if grants else inf,
        )

    def _place(self, runs: list[App], room: FreeCapacity, order: list[App]) -> dict[str, Grant]:
        grants: dict[str, Grant] = {}
        for app in runs:
            if _stays(app, room):
                room.hold(app.held)
                grants[app.id] = Grant(app.held, reason="continues")
        for app in runs:
            if app.id in grants:
                continue
            placement = self.placer(room, app, app.gpus)
            if placement:
                grants[app.id] = Grant(placement, reason="next in order")
            elif self.blocking:
                break
        return grants


def _stays(app: App, room: FreeCapacity) -> bool:
    """Tell whether an app holds its whole gang on nodes that stay."""
    return bool(app.held) and gpus_of(app.held) == app.gpus and room.covers(app.held)


def _arrival(app: App, view: View) -> tuple[float, ...]:
    return (app.arrival,)


def consolidated_if_possible(room: FreeCapacity, app: App, gpus: int) -> Placement | None:
    """Consolidate, or wait for it; only a gang that no rack could hold even if empty is spread."""
    placement = consolidated(room, app, gpus)
    if placement is None and consolidated(FreeCapacity(room.nodes), app, gpus) is None:
        return rack_aware(room, app, gpus)
    return placement


def yarn_cs(placer: Placer = consolidated_if_possible) -> Ordered:
    """By submission; the first gang that finds no place blocks all later ones."""
    return Ordered("yarn-cs", _arrival, preemptive=False, blocking=True, placer=placer)


def best_effort(placer: Placer = consolidated_if_possible) -> Ordered:
    """By submission, but any later gang that fits may start."""
    return Ordered("best-effort", _arrival, preemptive=False, placer=placer)


def smallest_first(placer: Placer = by_skew) -> Ordered:
    """Fewest GPUs first, whatever the duration."""

    def gpus(app: App, view: View) -> tuple[float, ...]:
        return app.gpus, app.arrival

    return Ordered("smallest-first", gpus, placer=placer)


def srtf(placer: Placer = by_skew) -> Ordered:
    """Shortest remaining time first."""

    def left(app: App, view: View) -> tuple[float, ...]:
        return remaining_time(app, app.gpus), app.arrival

    return Ordered("srtf", left, placer=placer)


def srsf(placer: Placer = by_skew) -> Ordered:
    """Shortest remaining service first: remaining time x GPUs."""

    def left(app: App, view: View) -> tuple[float, ...]:
        return remaining_service(app, app.gpus), app.arrival

    return Ordered("srsf", left, placer=placer)
