"""What ``RhoBounded`` believes of every app: time left, time alone, and by when a fair share would have finished it.

Only what a live app reports is used: iterations left, speed at the present batch size, run time. A batch size that
will change later isn't foreseen; when it changes, the app reports other numbers and the outlook follows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import NamedTuple

from ebbflow.planners.model.scheduling import App, View

import os
MET = bool(os.environ.get('MET'))
UNKNOWN_LEFT = 600.0  # s: the least that an app is held to need that cannot say what it needs


class Attained(NamedTuple):
    """What one app got up to now."""

    useful: float  # s holding GPUs, restarts not counted, of whatever type
    done: float  # the same in s on its fastest type
    area: float  # app-seconds of the whole cluster when it came
    since: float  # s, when it was first seen
    gone: int


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered from one decision to the next."""

    now: float = -inf
    active: int = 0
    area: float = 0.0  # app-seconds: integral of the number of active apps
    attained: Mapping[str, Attained] = field(default_factory=dict)
    total: int = 0


@dataclass(slots=True)
class Outlook:
    """One app, as seen now. Times in s; ``left`` and ``alone`` on the GPUs it asks for, of its fastest type."""

    app: App
    left: float
    alone: float
    fair: float  # completion time on a fair share: ``alone`` x contention
    rates: Mapping[str, float]  # speed by GPU type over that on the fastest; empty: the same on all

    def rate(self, gpu: str) -> float:
        """Return the speed on GPUs of type ``gpu`` over that on the fastest type; 0: cannot run there."""
        return self.rates.get(gpu, 0.0) if self.rates else 1.0

    def rho(self, finish: float) -> float:
        """Return finish-time fairness if the app finished at ``finish``."""
        return (finish - self.app.arrival) / self.fair


Left = Callable[[App], float]
"""Seconds that an app has left on the GPUs it asks for."""


def rates_of(app: App) -> Mapping[str, float]:
    """Return the speed of ``app`` by GPU type, the fastest as 1; empty if it makes no difference or isn't known."""
    fastest = max(app.throughputs.values(), default=0.0)
    if fastest <= 0:
        return {}
    return {gpu: speed / fastest for gpu, speed in app.throughputs.items()}


def gang_left(app: App) -> float:
    """Return the seconds left of a gang on its fastest GPU type; NaN if the app cannot say."""
    if not isfinite(app.remaining):
        return inf
    fastest = max(app.throughputs.values(), default=0.0)
    if fastest > 0:
        return max(app.remaining, 0.0) / fastest
    if app.speed is not None:
        return max(app.remaining, 0.0) * app.speed.iteration_time(app.gpus)
    return inf


def outlooks(
    view: View, history: History | None, left_of: Left = gang_left
) -> tuple[dict[str, Outlook], History]:
    """Return the outlook of every app of ``view``, and the history for the next decision.

    Contention is the mean number of active apps over the app's life so far, itself included, per GPU, at least 1
    (the finish-time fairness of Themis, NSDI 2020, with the ratio of Shockwave, NSDI 2023: a gang counts as one app).
    An app that cannot say what it has left is held to need as long again as it ran.
    """
    before = history or History(view.now)
    passed = max(view.now - before.now, 0.0) if isfinite(before.now) else 0.0
    area = before.area + before.active * passed
    gpus = max(sum(node.gpus for node in view.capacity.usable), 1)
    types = {node.id: node.instance_type for node in view.capacity.nodes}
    attained: dict[str, Attained] = {}
    found: dict[str, Outlook] = {}
    active = len(view.apps)
    total = before.total + sum(a.id not in before.attained for a in view.apps)
    for app in view.apps:
        rates = rates_of(app)
        useful = max(app.run_time - app.restart_time, 0.0)
        last = before.attained.get(app.id)
        if last is None:
            last = Attained(0.0, 0.0, area, view.now, total - active)
        held = [rates.get(types[node], 0.0) for node, _ in app.held if node in types] if rates else []
        done = last.done + (useful - last.useful) * (min(held) if held else 1.0)
        attained[app.id] = Attained(useful, done, last.area, last.since, last.gone)
        left = left_of(app)
        if not isfinite(left):
            left = max(done, UNKNOWN_LEFT)
        lived = view.now - last.since
        apps = max((area - last.area) / lived if lived > 0 else 0.0, float(active))
        if MET:
            apps = float(total - last.gone)
        alone = max(done + left, 1e-9)
        found[app.id] = Outlook(app, left, alone, alone * max(1.0, apps / gpus), rates)
    return found, History(view.now, active, area, attained, total)
