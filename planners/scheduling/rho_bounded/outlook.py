"""What ``RhoBounded`` believes of every app: time left, time alone, and the completion time of a fair share.

Only what a live app reports is used: iterations (or goodput) left, speed at the present batch size, run time. A batch
size that will change isn't foreseen: when it does, the app reports other numbers and the outlook follows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from ebbflow.planners.model.scheduling import App, View

UNKNOWN_LEFT = 600.0  # s: the least that an app is held to need that cannot say what it needs
NO_MODEL: Mapping[str, float] = {}


class Attained(NamedTuple):
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
    attained: Mapping[str, Attained] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outlook:
    """One app as seen now. Times in s; ``left`` and ``alone`` on the GPUs it asks for, of its fastest type."""

    app: App
    left: float
    alone: float
    fair: float  # completion time on a fair share
    rates: Mapping[str, float]  # speed by GPU type over that on the fastest; empty: the same on all

    def rate(self, gpu: str) -> float:
        """Return the speed on GPUs of type ``gpu`` over that on the fastest type; 0: cannot run there."""
        return self.rates.get(gpu, 0.0) if self.rates else 1.0


def outlooks(view: View, history: History | None) -> tuple[list[Outlook], History]:
    """Return the outlook of every app of ``view``, in its order, and the history for the next decision.

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
    attained: dict[str, Attained] = {}
    found: list[Outlook] = []
    for app in view.apps:
        rates = rates_of(app)
        useful = max(app.run_time - app.restart_time, 0.0)
        last = before.attained.get(app.id) or Attained(0.0, 0.0, asked, view.now)
        held = [rates.get(types[node], 0.0) for node, _ in app.held if node in types] if rates else []
        done = last.done + (useful - last.useful) * min(held, default=1.0)
        attained[app.id] = Attained(useful, done, last.asked, last.since)
        left = time_left(app)
        if not isfinite(left):
            left = max(done, UNKNOWN_LEFT)
        lived = view.now - last.since
        mean = (asked - last.asked) / lived if lived > 0 else 0.0
        alone = max(done + left, 1e-9)
        found.append(Outlook(app, left, alone, alone * max(1.0, max(mean, demand) / gpus), rates))
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
