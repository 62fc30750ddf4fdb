"""The auction without placement: the largest marginal gain first, exact for concave values (Fox 1966).

Payments need no second solve: without an app its GPUs, and those left over, go to the others' next largest gains.
"""

from math import exp

import numpy as np

from ebbflow.planners.scheduling.auction.packing import Packing
from ebbflow.planners.scheduling.auction.problem import Bundle, Kind, Problem, Solution
from ebbflow.planners.scheduling.locality import Array


def is_concave(problem: Problem) -> bool:
    """Tell whether every row needs only a number of GPUs and every app gains less by each further GPU."""
    if np.any(problem.kind != Kind.ANY):
        return False
    inner = problem.gpus > 0
    if np.any(np.diff(problem.gpus)[inner[1:]] != 1):
        return False
    steps = _steps(problem)
    follows = problem.gpus[inner][1:] > 1
    return bool(np.all(steps[1:][follows] <= steps[:-1][follows] + 1e-12))


def _steps(problem: Problem) -> Array:
    """Return the marginal gain of every row but those of no GPUs."""
    return np.diff(problem.gain)[problem.gpus[1:] > 0] if len(problem.gain) else problem.gain


def solve_concave(problem: Problem, before: tuple[Bundle, ...] = ()) -> tuple[Solution, Array]:
    """Return the optimum and every app's kept fraction c.

    Among equal gains: an app's first GPU, then larger ρ, then the earlier app.
    """
    inner = np.flatnonzero(problem.gpus > 0)
    step = np.round(_steps(problem), 12)
    owner, count = problem.owner[inner], problem.gpus[inner]
    order = np.lexsort((count, owner, -np.round(problem.start_rho[owner], 12), count > 1, -step))
    taken, left = order[: problem.offer.total], order[problem.offer.total :]
    wins = np.bincount(owner[taken], minlength=problem.apps)
    rows = problem.start + wins
    packing = Packing(problem, before)
    for app in np.argsort(-wins, kind="stable"):
        if wins[app]:
            packing.place(int(rows[app]))
    kept = np.ones(problem.apps)
    exact = _steps(problem)
    for app in np.flatnonzero(wins):
        freed, forgone = int(wins[app]) + packing.total, 0.0
        for other in left:
            if not freed:
                break
            if owner[other] != app:
                forgone += float(exact[other])
                freed -= 1
        kept[app] = exp(-forgone)
    value = problem.value(rows)
    return Solution(rows, tuple(packing.bundles), value, value), kept
