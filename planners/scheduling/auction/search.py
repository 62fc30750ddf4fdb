"""The auction at scale: round the relaxation, pack it, improve it, and say how far from optimal it can be.

The relaxation takes all racks as one, so its choice may hold more rack requests than the racks do. Selling those rows
dearer, with all prices scaled so that demand still meets the offer, moves apps to other rows where that costs least.
Where that leaves a wide gap, an integer programme chooses among each app's few rows that the prices favour.
"""

from collections.abc import Sequence

import numpy as np

from ebbflow.planners.scheduling.auction.exact import solve_exact
from ebbflow.planners.scheduling.auction.improve import RowValues, climb, repair
from ebbflow.planners.scheduling.auction.packing import Packing, pack
from ebbflow.planners.scheduling.auction.problem import Bundle, Kind, Problem, Solution
from ebbflow.planners.scheduling.auction.relaxation import Relaxation, best_rows, relax
from ebbflow.planners.scheduling.locality import Array

WIDE = 0.005  # gap beyond which the integer programme is worth its time, about half a second for 200 apps
NEAR = 5  # rows of an app that it chooses among
MACHINES = 1000  # most it is given
NODES = 20  # of its search tree: bounded by work, not by time, so that equal auctions end alike
PREMIA = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)


def solve_search(
    problem: Problem,
    before: Sequence[Bundle] = (),
    target: float = 0.002,
    relaxation: Relaxation | None = None,
    repairs: int = 200,
    rng: np.random.Generator | None = None,
) -> Solution:
    """Return a good packing with a proven gap; stop early at a gap of ``target``, or after ``repairs``."""
    if not problem.apps or not problem.offer.total:
        return Solution(problem.start.copy(), ({},) * problem.apps, 0.0, 0.0)
    found = relaxation or relax(problem)
    plain = RowValues(problem)
    price = found.prices.of(problem)
    priced = RowValues(problem, price)
    guides = [priced]
    best = _improved(problem, rounded(problem, found), priced, plain, before)
    goal = found.bound - target * problem.apps
    if best.value < found.bound - WIDE * problem.apps and np.count_nonzero(problem.offer.free) <= MACHINES:
        polished = _polished(problem, found, target, before)
        if polished.value > best.value:
            best = polished
    tried = 0
    for premium in PREMIA if (problem.kind == Kind.RACK).any() else ():
        if best.value >= goal:
            break
        dear = np.where(problem.kind == Kind.RACK, price * (1.0 + premium), price)
        scaled, rows = cleared(problem, dear)
        worth = RowValues(problem, scaled)
        other = _improved(problem, rows, worth, plain, before)
        if other.value > best.value:
            best, guides = other, [worth, *guides[:2]]
        tried += 1
    better = repair(best, guides, plain, goal, repairs, rng or np.random.default_rng(0))
    value = best.value
    notes = {"relaxation_rounds": float(found.rounds), "premia": float(tried), "repairs": float(better)}
    return Solution(best.rows, tuple(best.bundles), value, max(found.bound, value), notes)


def _polished(problem: Problem, relaxation: Relaxation, target: float, before: Sequence[Bundle]) -> Packing:
    """Return the best packing of rows that lose little at the relaxation's prices."""
    loss = relaxation.surplus[problem.owner] - problem.gain + relaxation.prices.of(problem)
    order = np.lexsort((loss, problem.owner))
    near = np.sort(order[np.arange(len(order)) - problem.start[problem.owner[order]] < NEAR])
    gap = target * problem.apps / max(relaxation.bound, 1e-9)
    solution = solve_exact(problem, before, seconds=10.0, ties=False, gap=gap, among=near, nodes=NODES)
    packing = Packing(problem, before)
    for app in np.flatnonzero(problem.gpus[solution.rows] > 0):
        packing.set(int(app), int(solution.rows[app]), solution.bundles[app])
    climb(packing, RowValues(problem))
    return packing


def rounded(problem: Problem, relaxation: Relaxation) -> Array:
    """Return each app's row of most weight in the relaxation, the smaller bundle among equals."""
    rows = problem.start.copy()
    most = np.zeros(problem.apps)
    lost = np.ones(problem.apps)
    np.subtract.at(lost, problem.owner[relaxation.rows], relaxation.weight)
    most[:] = np.maximum(lost, 1e-9)
    for row, weight in zip(relaxation.rows, relaxation.weight, strict=True):
        app = problem.owner[row]
        if weight > most[app] + 1e-9:
            rows[app], most[app] = row, weight
    return rows


def cleared(problem: Problem, price: Array) -> tuple[Array, Array]:
    """Return ``price`` scaled to where the apps' best rows fit the offer, and those rows."""
    low, high = 0.0, 1.0
    total = problem.offer.total
    for step in range(24):
        middle = high if step == 0 else (low + high) / 2.0
        _, rows = best_rows(problem, problem.gain - middle * price)
        fits = problem.gpus[rows].sum() <= total
        if (
            step == 0 and not fits
        ):  # cannot happen at the relaxation's own prices; dearer ones only lower demand
            low, high = 1.0, 2.0
        elif fits:
            high = middle
        else:
            low = middle
    _, rows = best_rows(problem, problem.gain - high * price)
    return high * price, rows


def _improved(
    problem: Problem, rows: Array, priced: RowValues, plain: RowValues, before: Sequence[Bundle]
) -> Packing:
    packing, failed = pack(problem, rows, before)
    if failed and before:  # keeping what apps had may be what is in the way
        other, fewer = pack(problem, rows, before, keep=False)
        if len(fewer) < len(failed):
            packing = other
    climb(packing, priced)
    climb(packing, plain)
    return packing
