"""Rigid gangs in an order: the common part of the simple policies that Tiresias is compared with (NSDI 2019)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from ebbflow.planners.model.scheduling import App, Decision, Grant, View, gpus_of
from ebbflow.planners.scheduling.placement import Placer, Room, by_skew

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
        room = Room(nodes)
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
        waits = Grant(reason="gangs ahead of it leave too few GPUs")
        return Decision(
            {app.id: grants.get(app.id, waits) for app in view.apps},
            None,
            view.now + self.refresh if grants else inf,
        )

    def _place(self, runs: list[App], room: Room, order: list[App]) -> dict[str, Grant]:
        grants: dict[str, Grant] = {}
        for app in runs:
            if _stays(app, room):
                room.hold(app.held)
                grants[app.id] = Grant(app.held, reason="goes on")
        for app in runs:
            if app.id in grants:
                continue
            placement = self.placer(room, app, app.gpus)
            if placement:
                grants[app.id] = Grant(placement, reason="next in order")
            elif self.blocking:
                break
        return grants


def _stays(app: App, room: Room) -> bool:
    """Tell whether an app holds its whole gang on nodes that stay."""
    return bool(app.held) and gpus_of(app.held) == app.gpus and room.covers(app.held)
