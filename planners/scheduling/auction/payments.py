"""Hidden payments: what fraction of its win each app keeps (NSDI 2020, section 5.1).

c_i is the others' value at the optimum over their value without app i. Tiers by what they cost:

``exact``        a mixed-integer programme without each winner; c_i itself when the allocation is optimal
``relaxed``      a relaxation without each winner; at most c_i, so nobody is charged too little
``multipliers``  one relaxation: Z_-i <= Z - (surplus of i); at most what ``relaxed`` gives
``prices``       one relaxation and its prices scaled down. i pays for its bundle at market prices, less what
                 the others would save as prices fall without i. An estimate, not a bound, in which a gap of the
                 allocation does not count as a payment: with the bounds of the other tiers it would.
"""

from math import exp
from typing import Literal

import numpy as np

from ebbflow.planners.scheduling.auction.exact import solve_exact
from ebbflow.planners.scheduling.auction.problem import Problem, Solution
from ebbflow.planners.scheduling.auction.relaxation import Classes, Relaxation, best_rows, relax
from ebbflow.planners.scheduling.locality import Array

Tier = Literal["exact", "relaxed", "multipliers", "prices"]
PATH = 1.0 - np.linspace(0.0, 1.0, 25) ** 2  # factors on the prices


def kept_fractions(
    problem: Problem, solution: Solution, tier: Tier, relaxation: Relaxation | None = None
) -> Array:
    """Return c by app: in (0, 1], 1 for an app that won nothing."""
    kept = np.ones(problem.apps)
    winners = np.flatnonzero(problem.gpus[solution.rows] > 0)
    others = solution.value - problem.gain[solution.rows]  # Σ over the other apps, by app
    if tier in ("exact", "relaxed"):
        for app in winners:
            rest = problem.without(int(app))
            if not rest.apps:
                continue
            best = solve_exact(rest, ties=False).value if tier == "exact" else relax(rest, 1e-6).bound
            kept[app] = _clamped(others[app] - best)
        return kept
    found = relaxation or relax(problem)
    if tier == "multipliers":
        kept[winners] = [_clamped(others[a] - found.bound + found.surplus[a]) for a in winners]
        return kept
    price, saved = market(problem, solution, found)
    kept[winners] = [_clamped(saved[a] - price[a]) for a in winners]
    return kept


def lower_bounds(problem: Problem, solution: Solution, relaxation: Relaxation) -> Array:
    """Return a lower bound on every exact c at the optimum's prices: ``multipliers``, tightened along the path.

    Proven like it for an optimal allocation; a gap of the allocation lowers it.
    """
    _, saved = market(problem, solution, relaxation)
    others = solution.value - problem.gain[solution.rows]
    bound = relaxation.bound - relaxation.surplus - saved
    return np.exp(np.minimum(others - bound, 0.0))


def market(problem: Problem, solution: Solution, relaxation: Relaxation) -> tuple[Array, Array]:
    """Return each app's bundle at market prices, and by how much the bound on the others' value without it falls when
    prices do."""
    classes = Classes.of(problem)
    base = relaxation.prices.of(problem)
    saved = np.zeros(problem.apps)
    for factor in PATH[1:]:
        prices = relaxation.prices.scaled(float(factor))
        surplus, _ = best_rows(problem, problem.gain - factor * base)
        saved = np.maximum(
            saved, (relaxation.bound - relaxation.surplus) - (classes.bound(prices, surplus) - surplus)
        )
    return base[solution.rows], saved


def _clamped(log_kept: float) -> float:
    return exp(min(log_kept, 0.0))
