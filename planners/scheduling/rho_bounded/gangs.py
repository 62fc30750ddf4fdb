"""Who runs where, when every app is a gang."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from ebbflow.planners.model.scheduling import App, Grant, Placement, gpus_of
from ebbflow.planners.scheduling.placement import Placer
from ebbflow.planners.scheduling.rho_bounded.forecast import AppForecast, Group, Moves
from ebbflow.planners.scheduling.rho_bounded.rollout import CAN_WAIT, Gangs, Rule, order

REASONS = ("lowers the makespan", "its fairness bound is due", "the shortest that fits")


class QueuePosition(NamedTuple):
    """An app's place in the queue."""

    forecast: AppForecast
    kind: int  # see ``rho_bounded_rollout.order``
    since: float  # s: from when it cannot wait


def queue(forecasts: Sequence[AppForecast], gangs: Gangs, now: float, rule: Rule) -> list[QueuePosition]:
    """Return all apps in the order in which they are served."""
    waits = np.array([not o.app.held for o in forecasts], bool)
    ranked, kind, since = order(gangs, gangs.left, waits, now, rule)
    return [QueuePosition(forecasts[j], int(kind[j]), float(since[j])) for j in ranked.tolist()]


def assign(
    turns: Sequence[QueuePosition],
    groups: Sequence[Group],
    now: float,
    moves: Moves,
    placer: Placer,
    value: float | None,
) -> dict[str, Grant]:
    """Return what everyone gets.

    Each app takes the GPUs on which it gets on fastest, of equals those that stay, then the cheaper ones. Where a
    GPU-hour at its best speed is worth ``value`` dollars, an app that can wait takes none that cost more than that.
    """
    free = [group.room.total for group in groups]
    chosen: list[tuple[App, int]] = []
    grants: dict[str, Grant] = {}
    for forecast, kind, _ in turns:
        app = forecast.app
        options = []
        dear = False
        for number, group in enumerate(groups):
            if free[number] >= app.gpus:
                worth = group.worth(forecast, now, moves)
                paid = value is None or kind < CAN_WAIT or group.price <= value * forecast.rate(group.type)
                dear = dear or (worth > 0 and not paid)
                if worth > 0 and paid:
                    options.append((-worth, group.advised, group.price, number))
        if options:
            number = min(options)[-1]
            free[number] -= app.gpus
            chosen.append((app, number))
            grants[app.id] = Grant(reason=REASONS[kind])
        else:
            grants[app.id] = Grant(
                reason="pending (Cost): GPUs cost more than their value" if dear else "pending (Priority)"
            )
    for app, number, placement in _placed(chosen, groups, placer):
        until = groups[number].until
        grants[app.id] = Grant(placement, until - moves.leave if until < inf else inf, grants[app.id].reason)
    return grants


def _placed(
    chosen: Sequence[tuple[App, int]], groups: Sequence[Group], placer: Placer
) -> list[tuple[App, int, Placement]]:
    """Return placements: first what can stay as it is, then the largest gangs."""
    placed: list[tuple[App, int, Placement]] = []
    rest = []
    for app, number in chosen:
        room = groups[number].room
        if app.held and gpus_of(app.held) == app.gpus and room.covers(app.held):
            room.hold(app.held)
            placed.append((app, number, app.held))
        else:
            rest.append((app, number))
    for app, number in sorted(rest, key=lambda c: (-c[0].gpus, c[0].number)):
        placement = placer(groups[number].room, app, app.gpus)
        if placement is not None:
            placed.append((app, number, placement))
    return placed
