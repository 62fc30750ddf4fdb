"""What ``RhoBounded`` believes of every app: time left, time alone, and the completion time of a fair share.

Only what a live app reports is used: iterations (or goodput) left, speed at the present batch size, run time. A batch
size that will change isn't foreseen: when it does, the app reports other numbers and the forecast follows.

GPUs that are worth the same: of one type, and for as long as their nodes stay.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, View
from ebbflow.planners.scheduling.placement import FreeCapacity

UNKNOWN_LEFT = 600.0  # s: the least that an app is held to need that cannot say what it needs
NO_MODEL: Mapping[str, float] = {}


class AttainedService(NamedTuple):
    """What one app got up to now."""

    useful: float  # s holding GPUs, restarts not counted, of whatever type
    done: float  # the same in s on its fastest type
    asked: float  # GPU-seconds asked for by all apps when it came
    since: float  # s, when it was first seen


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered from one decision to the next."""

    now: float = -inf
    demand: int = 0  # GPUs asked for by all apps
    asked: float = 0.0  # its integral, GPU-seconds
    attained: Mapping[str, AttainedService] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AppForecast:
    """One app as seen now. Times in s; ``left`` and ``alone`` on the GPUs it asks for, of its fastest type."""

    app: App
    left: float
    alone: float
    fair: float  # completion time on a fair share
    rates: Mapping[str, float]  # speed by GPU type over that on the fastest; empty: the same on all

    def rate(self, gpu: str) -> float:
        """Return the speed on GPUs of type ``gpu`` over that on the fastest type; 0: cannot run there."""
        return self.rates.get(gpu, 0.0) if self.rates else 1.0


def forecasts(view: View, history: History | None) -> tuple[list[AppForecast], History]:
    """Return the forecast of every app of ``view``, in its order, and the history for the next decision.

    The fair completion time is the time alone times contention: the GPUs that all apps ask for over those there are,
    now or on average over the app's life so far, whichever is more, at least 1. (Themis, NSDI 2020, equation 1, with
    N_avg in GPUs.) An app that cannot say what it has left is held to need as long again as it ran.
    """
    before = history or History(view.now)
    passed = max(view.now - before.now, 0.0)
    asked = before.asked + before.demand * passed
    gpus = max(sum(node.gpus for node in view.capacity.usable), 1)
    types = {node.id: node.instance_type for node in view.capacity.nodes}
    demand = sum(min(app.gpus, gpus) for app in view.apps)
    attained: dict[str, AttainedService] = {}
    found: list[AppForecast] = []
    for app in view.apps:
        rates = rates_of(app)
        useful = max(app.run_time - app.restart_time, 0.0)
        last = before.attained.get(app.id) or AttainedService(0.0, 0.0, asked, view.now)
        held = [rates.get(types[node], 0.0) for node, _ in app.held if node in types] if rates else []
        done = last.done + (useful - last.useful) * min(held, default=1.0)
        attained[app.id] = AttainedService(useful, done, last.asked, last.since)
        left = time_left(app)
        if not isfinite(left):
            left = max(done, UNKNOWN_LEFT)
        lived = view.now - last.since
        mean = (asked - last.asked) / lived if lived > 0 else 0.0
        alone = max(done + left, 1e-9)
        found.append(AppForecast(app, left, alone, alone * max(1.0, max(mean, demand) / gpus), rates))
    return found, History(view.now, demand, asked, attained)


def rates_of(app: App) -> Mapping[str, float]:
    """Return the speed of ``app`` by GPU type, the fastest as 1; empty if it isn't known by type."""
    fastest = max(app.throughputs.values(), default=0.0)
    if fastest <= 0:
        return NO_MODEL
    return {gpu: speed / fastest for gpu, speed in app.throughputs.items()}


def time_left(app: App) -> float:
    """Return the seconds left on the GPUs that ``app`` asks for, of its fastest type; infinite if it cannot say.

    Goodput comes first, then throughputs, then speed.
    """
    if app.goodput is not None and isfinite(app.goodput_left):
        counts = np.arange(1, max(app.gpus, 1) + 1)
        best = float(app.goodput.best(np.ones(len(counts), int), counts).max())
        return max(app.goodput_left, 0.0) / best if best > 0 else inf
    if not isfinite(app.remaining):
        return inf
    fastest = max(app.throughputs.values(), default=0.0)
    if fastest > 0:
        return max(app.remaining, 0.0) / fastest
    return max(app.remaining, 0.0) * app.speed.iteration_time(app.gpus) if app.speed is not None else inf


@dataclass(frozen=True, slots=True)
class Moves:
    """What moving costs."""

    delay: float  # s that a start takes
    leave: float  # s before a deadline by which an app must be gone: the time to save a checkpoint


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes of one GPU type that leave at ``until`` (s; infinite: not that anybody knows)."""

    type: str
    until: float
    advised: bool  # notices that aren't firm: the last choice among equals
    price: float  # dollars per GPU-hour, of the dearest node
    room: FreeCapacity

    def time(self, now: float, moves: Moves) -> float:
        """Return the seconds for which its GPUs can still be used."""
        return self.until - moves.leave - now

    def worth(self, forecast: AppForecast, now: float, moves: Moves) -> float:
        """Return how fast an app gets on with a gang of these GPUs, over its fastest; 0 or less: rather not at all.

        GPUs that leave are worth it if the app is over in time, or trains on them for longer than it takes to start,
        now and again elsewhere. What that takes is lost.
        """
        rate = forecast.rate(self.type)
        time = self.time(now, moves)
        if time == inf or rate <= 0:
            return rate
        here = bool(forecast.app.held) and self.room.covers(forecast.app.held)
        start = 0.0 if here else moves.delay
        if time <= 0 or start + forecast.left / rate <= time:
            return rate if time > 0 else 0.0
        return rate * (time - start - moves.delay) / time


def groups_of(view: View) -> list[Group]:
    """Return all nodes with GPUs in groups: those that stay, then those that leave, the last first.

    A firm notice ends a node's worth at its deadline; nodes past theirs are left out.
    """
    firm: dict[str, float] = {}
    advised: set[str] = set()
    for notice in view.capacity.notices:
        if notice.kind == "interruption":
            firm[notice.node_id] = min(notice.deadline, firm.get(notice.node_id, inf))
        else:
            advised.add(notice.node_id)
    nodes: dict[tuple[float, bool, str], list[Node]] = {}
    for node in view.capacity.nodes:
        until = firm.get(node.id, inf)
        if node.gpus and until > view.now:
            nodes.setdefault((-until, node.id in advised, node.instance_type), []).append(node)
    return [
        Group(gpu, -until, soft, max(n.price / n.gpus for n in members), FreeCapacity(members))
        for (until, soft, gpu), members in sorted(nodes.items())
    ]
