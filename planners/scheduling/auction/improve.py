"""Makes a packing better: one app at a time to its best row that fits, and racks emptied and filled again."""

from collections.abc import Sequence

import numpy as np

from ebbflow.planners.scheduling.auction.packing import Packing
from ebbflow.planners.scheduling.auction.problem import Kind, Problem
from ebbflow.planners.scheduling.locality import Array

EMPTIED = 12  # apps of a rack that lose their bundles at once: enough to exchange, few enough to fill up fast
MAX_FAILED_REPAIRS = 50  # repairs without success after which more are unlikely to help


class RowValues:
    """What rows are worth to a climb, and each app's best row by kind and most GPUs."""

    def __init__(self, problem: Problem, price: Array | None = None):
        self.rows = problem.gain if price is None else problem.gain - price
        self.best = [self._prefix(problem, kind) for kind in Kind]

    def _prefix(self, problem: Problem, kind: Kind) -> tuple[Array, Array]:
        chosen = np.flatnonzero((problem.kind == kind) & (problem.gpus > 0))
        most = int(problem.gpus[chosen].max(initial=0))
        values = np.full((problem.apps, most + 1), -np.inf)
        which = np.full((problem.apps, most + 1), -1)
        values[problem.owner[chosen], problem.gpus[chosen]] = self.rows[chosen]
        which[problem.owner[chosen], problem.gpus[chosen]] = chosen
        top = np.maximum.accumulate(values, axis=1)
        at = np.maximum.accumulate(np.where(values == top, np.arange(most + 1), 0), axis=1)
        return top, np.take_along_axis(which, at, axis=1)


def climb(packing: Packing, worth: RowValues) -> int:
    """Move apps to better rows, the largest improvement of Σ ``worth`` first; return the number of moves."""
    problem = packing.problem
    apps = np.arange(problem.apps)
    blocked = np.zeros(problem.apps, bool)
    options = np.zeros((len(Kind) + 1, problem.apps))  # the last: nothing at all
    moves = 0
    while True:
        limits = _limits(packing)
        for kind in Kind:
            values = worth.best[kind][0]
            options[kind] = values[apps, np.minimum(limits[kind], values.shape[1] - 1)]
        better = options.max(axis=0) - worth.rows[packing.rows]
        better[blocked] = 0.0
        app = int(better.argmax())
        if better[app] <= 1e-9:
            return moves
        choice = int(options[:, app].argmax())
        old = packing.clear(app)
        if choice < len(Kind):
            values, which = worth.best[choice]
            row = int(which[app, min(int(limits[choice][app]), values.shape[1] - 1)])
            if not packing.place(row, keep=False):
                packing.set(app, *old)
                blocked[app] = True
                continue
        blocked[:] = False
        moves += 1


def _limits(packing: Packing) -> tuple[Array, Array, Array]:
    """Return the most GPUs each app can get by kind, its own given back."""
    problem, own = packing.problem, packing.own
    spot, home = packing.spot, packing.home
    machine_anchor, rack_anchor = problem.anchors
    machine = np.where(spot >= 0, packing.free[spot] + own, 0)
    rack = np.where(home >= 0, packing.rack_free[home] + own, 0)
    machine = np.maximum(machine, packing.free.max())
    rack = np.maximum(rack, packing.rack_free.max())
    for anchor, limit, free, where in (
        (machine_anchor, machine, packing.free, spot),
        (rack_anchor, rack, packing.rack_free, home),
    ):
        tied = np.flatnonzero(anchor >= 0)
        limit[tied] = free[anchor[tied]] + np.where(where[tied] == anchor[tied], own[tied], 0)
    return machine, rack, packing.total + own


def repair(
    packing: Packing,
    priced: Sequence[RowValues],
    plain: RowValues,
    goal: float,
    rounds: int,
    rng: np.random.Generator,
) -> int:
    """Empty one or two racks, mostly, and apps far from their best row; fill up; keep what is better.

    Stops at a value of ``goal``; returns how often it got better. One of ``priced`` at random guides the filling,
    ``plain`` uses what is left.
    """
    problem = packing.problem
    rack = problem.offer.rack
    free_at_first = np.flatnonzero(problem.offer.rack_free)
    wish = [np.max([values[:, -1] for values, _ in worth.best], axis=0) for worth in priced]
    kept, value, idle = 0, packing.value, 0
    for _ in range(rounds):
        if value >= goal or idle >= MAX_FAILED_REPAIRS:
            break
        idle += 1
        before = packing.state()
        which = int(rng.integers(len(priced)))
        chosen = set(
            rng.choice(free_at_first, size=min(int(rng.integers(1, 3)), len(free_at_first))).tolist()
        )
        inside = [a for a, b in enumerate(packing.bundles) if not chosen.isdisjoint(rack[list(b)].tolist())]
        affected = set(rng.permutation(inside)[:EMPTIED].tolist())
        regret = wish[which] - priced[which].rows[packing.rows] + rng.gumbel(0.0, 0.2, problem.apps)
        for app in sorted(affected | set(np.argsort(-regret)[:3].tolist())):
            packing.clear(app)
        climb(packing, priced[which])
        climb(packing, plain)
        if packing.value > value + 1e-12:
            value = packing.value
            kept += 1
            idle = 0
        else:
            packing.restore(before)
    return kept
