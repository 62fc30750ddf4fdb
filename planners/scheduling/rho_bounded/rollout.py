"""How a rule would continue from here if nobody came any more.

A rule orders gangs: first those that the makespan hangs on, then those whose fairness bound runs out, then all the
others, each class shortest first; whatever fits in that order runs. Forecasts and decisions share the order.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MARGIN = 0.03  # of a bound: how much earlier than needed an app becomes urgent
CAN_WAIT = 2  # the class of apps that no bound presses
STEPS = 250  # of the least makespan: no step of a forecast is shorter

Array = NDArray[np.float64]


class Rule(NamedTuple):
    """Who comes first."""

    gang_power: float = 0.0  # shortest first by time left x gang ** this: 0 by time, 1 by GPU time
    rho: float = 1.0  # finish-time fairness beyond which nobody should finish; infinite: no bound
    end: float = inf  # s: by when all should be over; infinite: no bound


@dataclass(frozen=True, slots=True)
class Gangs:
    """Gangs as arrays of n, and p pools of GPUs that are alike."""

    gpus: NDArray[np.intp]
    left: Array  # s on the fastest type
    arrival: Array  # s
    fair: Array  # s
    rates: Array  # (n, p) speed over that on the fastest type; 0: cannot run there
    pool: NDArray[np.intp]  # where it runs; -1: it waits
    pools: tuple[int, ...]  # GPUs
    delay: float  # s that a start costs

    def lower_bound(self) -> float:
        """Return the least time, s, in which all can be over: the longest, or all work on all GPUs."""
        runs = self.rates.max(axis=1, initial=0.0) > 0
        if not runs.any():
            return 0.0
        speed = sum(self.pools)
        return float(max(self.left[runs].max(), (self.left * self.gpus)[runs].sum() / speed))


def order(
    gangs: Gangs, left: Array, waits: NDArray[np.bool_], now: float, rule: Rule
) -> tuple[NDArray[np.intp], NDArray[np.intp], Array]:
    """Return the apps in the order of service, their classes, and from when each one is urgent (s).

    Classes: 0 if all would not be over in time without it, 1 if its fairness bound is due, 2 if it can wait. Who
    waits needs ``delay`` more, so who runs tends to stay.
    """
    need = left + gangs.delay * waits
    keep = 1.0 - MARGIN
    by_end = rule.end - need / keep
    by_rho = gangs.arrival + rule.rho * keep * gangs.fair - need
    kind = np.where(by_end <= now, 0, np.where(by_rho <= now, 1, CAN_WAIT))
    return np.lexsort((need * gangs.gpus**rule.gang_power, kind)), kind, np.minimum(by_end, by_rho)


def rollout(gangs: Gangs, now: float, rule: Rule) -> Array:
    """Return when each gang finishes, s; infinite for one that fits nowhere.

    Time advances to the next finish or the next moment at which a bound runs out.
    """
    left = gangs.left.copy()
    pool = gangs.pool.copy()
    finish = np.full(len(left), inf)
    active = (gangs.rates * (np.array(gangs.pools) >= gangs.gpus[:, None])).max(axis=1, initial=0.0) > 0
    best = [[p for p in np.argsort(-rates, kind="stable").tolist() if rates[p] > 0] for rates in gangs.rates]
    gpus = gangs.gpus.tolist()
    least = gangs.lower_bound() / STEPS
    t = now
    for _ in range(4 * (len(left) + STEPS)):
        if not active.any():
            break
        ranked, _, since = order(gangs, left, pool < 0, t, rule)
        free, new = list(gangs.pools), np.full(len(left), -1)
        room = sum(free)
        for j in ranked[active[ranked]].tolist():
            for p in best[j]:
                if free[p] >= gpus[j]:
                    free[p] -= gpus[j]
                    room -= gpus[j]
                    new[j] = p
                    break
            if not room:
                break
        runs = np.flatnonzero(new >= 0)
        rate = gangs.rates[runs, new[runs]]
        left[runs] += gangs.delay * rate * (pool[runs] != new[runs])
        pool = new
        took = left[runs] / rate
        step = took.min()
        waiting = since[active & (pool < 0)]
        waiting = waiting[waiting > t]
        if waiting.size:
            step = min(step, waiting.min() - t)
        step = max(step, least)
        over = runs[took <= step]
        finish[over] = t + took[took <= step]
        active[over] = False
        left[runs] = np.maximum(left[runs] - rate * step, 0.0)
        pool[over] = -1
        t += step
    finish[active] = t + left[active]
    return finish
