"""Gandiva (OSDI 2018) as Themis' evaluation has it: apps report placement preferences, the best go first, and apps
migrate to better GPUs; no time-slicing or packing (NSDI 2020, section 6.1).

Throughput-maximising: GPUs where one more raises throughput most (Optimus in the thesis on Themis, 3.6).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from ebbflow.planners.model.scheduling import App
from ebbflow.planners.scheduling.leased.leased import (
    AppAllocation,
    Leased,
    RoundState,
    best_placed,
    enclosing,
    merged,
    one_more,
    slowdown_of,
)
from ebbflow.planners.scheduling.locality import Slowdown, iteration_time
from ebbflow.planners.scheduling.themis.leases import Lease


@dataclass(frozen=True, slots=True)
class PlacementPreference:
    """1/S with everything the app could get, best first; of equals the larger bundle."""

    slowdown: Callable[[App], Slowdown] = slowdown_of
    name: str = "gandiva"
    looks_at_room: bool = True

    def key(self, desk: AppAllocation, moment: RoundState, rng: np.random.Generator) -> tuple[float, ...]:
        gpus = min(desk.unmet, moment.room.total)
        if not gpus:
            return (np.inf, 0.0)
        bundle = merged(desk.counts, best_placed(desk, gpus, moment))
        return self.slowdown(desk.app).levels[enclosing(bundle, moment.racks)], -float(gpus)

    def chunk(self, desk: AppAllocation, moment: RoundState) -> int:
        return desk.unmet


@dataclass(frozen=True, slots=True)
class Migration:
    """Moves apps that are spread to free GPUs that are closer together, the slowest first."""

    slowdown: Callable[[App], Slowdown] = slowdown_of
    least_gain: float = 0.0  # by which S must fall, relative

    def __call__(self, desks: dict[str, AppAllocation], moment: RoundState) -> None:
        spread = [(self._slowness(desk, moment), desk) for desk in desks.values() if len(desk.counts) > 1]
        for slowness, desk in sorted(spread, key=lambda entry: (-entry[0], entry[1].app.number)):
            held = tuple(desk.counts.items())
            moment.room.give_back(held)
            if moment.room.total < desk.gpus:  # some of its GPUs leave, and no others are free
                moment.room.hold(held)
                continue
            fresh = AppAllocation(desk.app, (), {}, {})
            new = best_placed(fresh, desk.gpus, moment)
            levels = self.slowdown(desk.app).levels
            if levels[enclosing(new, moment.racks)] < slowness * (1 - self.least_gain):
                desk.counts = dict(new)
                desk.live = (Lease(new, min(lease.until for lease in desk.live)),)
                moment.room.hold(new)
            else:
                moment.room.hold(held)

    def _slowness(self, desk: AppAllocation, moment: RoundState) -> float:
        return self.slowdown(desk.app).levels[enclosing(tuple(desk.counts.items()), moment.racks)]


def gandiva(lease_s: float = 600.0, slowdown: Callable[[App], Slowdown] = slowdown_of) -> Leased:
    """Greedy by placement preference, with migration."""
    return Leased(PlacementPreference(slowdown), lease_s, before=Migration(slowdown))


@dataclass(frozen=True, slots=True)
class RelativeGain:
    """Throughput with the next GPU, the best that is free, over the present one; infinite for an app without GPUs."""

    slowdown: Callable[[App], Slowdown] = slowdown_of
    name: str = "throughput-first"
    looks_at_room: bool = True

    def key(self, desk: AppAllocation, moment: RoundState, rng: np.random.Generator) -> tuple[float, ...]:
        app, has = desk.app, desk.gpus
        if has < max(app.min_gpus, 1):
            return (-inf, app.arrival)
        if not moment.room.total:
            return (inf, app.arrival)
        levels = self.slowdown(app).levels
        more = merged(desk.counts, best_placed(desk, 1, moment))
        now = iteration_time(app, has) * levels[enclosing(tuple(desk.counts.items()), moment.racks)]
        then = iteration_time(app, has + 1) * levels[enclosing(more, moment.racks)]
        return (-now / then, app.arrival)

    def chunk(self, desk: AppAllocation, moment: RoundState) -> int:
        return one_more(desk)


def throughput_first(lease_s: float = 600.0, slowdown: Callable[[App], Slowdown] = slowdown_of) -> Leased:
    """Each free GPU to the app whose throughput it raises by the largest factor."""
    return Leased(RelativeGain(slowdown), lease_s)
