"""Throughput-maximising: GPUs where one more raises throughput most (Optimus in the thesis on Themis, 3.6)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from ebbflow.planners.model.scheduling import App
from ebbflow.planners.scheduling.beliefs import iteration_time
from ebbflow.planners.scheduling.leased.leased import (
    Desk,
    Leased,
    Moment,
    best_placed,
    enclosing,
    merged,
    one_more,
    slowdown_of,
)
from ebbflow.planners.scheduling.locality import Slowdown


@dataclass(frozen=True, slots=True)
class RelativeGain:
    """Throughput with the next GPU, the best that is free, over the present one; infinite for an app without GPUs."""

    slowdown: Callable[[App], Slowdown] = slowdown_of
    name: str = "throughput-first"
    looks_at_room: bool = True

    def key(self, desk: Desk, moment: Moment, rng: np.random.Generator) -> tuple[float, ...]:
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

    def chunk(self, desk: Desk, moment: Moment) -> int:
        return one_more(desk)


def throughput_first(lease_s: float = 600.0, slowdown: Callable[[App], Slowdown] = slowdown_of) -> Leased:
    """Each free GPU to the app whose throughput it raises by the largest factor."""
    return Leased(RelativeGain(slowdown), lease_s)
