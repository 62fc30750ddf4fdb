"""A bound on the auction by prices: the linear relaxation over machine patterns, solved by column generation.

Machines with equally many free GPUs are one class, whatever their rack; a machine is cut by a pattern (a multiset of
machine-local sizes), what is left serves requests of a rack or of the cluster. That racks are separate enters only
through how many large requests they can hold: of size t and more at most Σ_r floor(free_r / t). Relaxing so much
leaves an LP of one row an app and some twenty more, and any prices, optimal or not, prove a bound. At its optimum
no more apps are split between rows than there are constraints on GPUs, which is what makes rounding cheap.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csc_array

from ebbflow.planners.scheduling.auction.problem import Kind, Problem
from ebbflow.planners.scheduling.locality import Array

THRESHOLDS = 24  # sizes of rack requests at which their number is limited
PATTERN_LIMIT = 8  # GPUs of a machine up to which every pattern is written out


@dataclass(frozen=True)
class Prices:
    """What GPUs cost: ``size[s]`` a machine-local request of s, ``unit`` any other GPU, ``large[t]`` on top for a
    rack request of at least ``thresholds[t]``."""

    size: Array  # index 0 unused
    unit: float
    large: Array
    thresholds: Array

    def scaled(self, factor: float) -> "Prices":
        return Prices(self.size * factor, self.unit * factor, self.large * factor, self.thresholds)

    def of(self, problem: Problem) -> Array:
        """Return the price of every row."""
        price = problem.gpus * self.unit
        local = problem.kind == Kind.MACHINE
        price[local] = self.size[problem.gpus[local]]
        if len(self.thresholds):
            rack = problem.kind == Kind.RACK
            extra = np.concatenate([[0.0], np.cumsum(self.large)])
            price[rack] += extra[np.searchsorted(self.thresholds, problem.gpus[rack], side="right")]
        return price

    def machine_worth(self) -> Array:
        """Return what a machine with c free GPUs earns by its best pattern over selling them singly, by c."""
        worth = np.zeros(len(self.size))
        over = self.size - self.unit * np.arange(len(self.size))
        for free in range(1, len(worth)):
            sizes = np.arange(1, free + 1)
            worth[free] = max(0.0, float((over[sizes] + worth[free - sizes]).max()), worth[free - 1])
        return worth


@dataclass(frozen=True)
class Relaxation:
    """The optimum of the relaxation, to ``tolerance`` an app."""

    bound: float  # proven by `prices`
    value: float  # of the last restricted LP: at most the relaxation's optimum
    prices: Prices
    surplus: Array  # by app: value of its best row less its price
    rows: Array  # rows in the LP's optimum
    weight: Array  # their weights
    rounds: int


@dataclass(frozen=True)
class Classes:
    """The offer as the relaxation sees it."""

    count: Array  # machines by free GPUs
    total: int
    thresholds: Array
    large: Array  # most requests of at least each threshold

    @classmethod
    def of(cls, problem: Problem) -> "Classes":
        """Return the classes of a problem's offer."""
        offer = problem.offer
        thresholds = np.zeros(0, int)
        rack = problem.kind == Kind.RACK
        if rack.any():
            top = int(problem.gpus[rack].max())
            spread = np.geomspace(2, top, min(top - 1, THRESHOLDS)) if top >= 2 else np.zeros(0)
            thresholds = np.unique(np.round(spread).astype(int))
        large = np.array([(offer.rack_free // t).sum() for t in thresholds], float)
        return cls(np.bincount(offer.free, minlength=1), offer.total, thresholds, large)

    def bound(self, prices: Prices, surplus: Array) -> float:
        """Return the Lagrangean dual at ``prices``: an upper bound on the auction's value."""
        rent = float(self.count @ prices.machine_worth())
        return float(surplus.sum()) + prices.unit * self.total + rent + float(self.large @ prices.large)


def best_rows(problem: Problem, reduced: Array) -> tuple[Array, Array]:
    """Return each app's largest ``reduced`` value and the first row that has it."""
    best = np.maximum.reduceat(reduced, problem.start)
    hits = np.flatnonzero(reduced == best[problem.owner])
    _, first = np.unique(problem.owner[hits], return_index=True)
    return best, hits[first]


def relax(problem: Problem, tolerance: float = 2e-4, rounds: int = 30) -> Relaxation:
    """Return prices and the bound they prove, within ``tolerance`` an app of the relaxation's optimum."""
    classes = Classes.of(problem)
    master = _Master(problem, classes)
    clearing, columns = _first_columns(problem, classes)
    best: tuple[float, Prices, Array] | None = None
    done = 0
    while True:
        solved = master.solve(columns)
        if solved is None:
            return _linear(problem, classes, clearing)
        value, prices, weight = solved
        surplus, rows = best_rows(problem, problem.gain - prices.of(problem))
        bound = classes.bound(prices, surplus)
        if best is None or bound < best[0]:
            best = bound, prices, surplus
        done += 1
        if best[0] - value <= tolerance * problem.apps or done >= rounds:
            break
        fresh = np.setdiff1d(rows, columns)
        if not (master.add_patterns(prices) or len(fresh)):
            break
        columns = np.union1d(columns, fresh)
    used = weight > 1e-9
    return Relaxation(best[0], value, best[1], best[2], columns[used], weight[used], done)


def _linear(problem: Problem, classes: Classes, unit: float) -> Relaxation:
    """Return what equal prices for all GPUs prove and choose: the fallback should the LP solver fail."""
    sizes = np.arange(max(problem.largest, 1) + 1)
    prices = Prices(unit * sizes, unit, np.zeros(len(classes.thresholds)), classes.thresholds)
    surplus, rows = best_rows(problem, problem.gain - prices.of(problem))
    return Relaxation(classes.bound(prices, surplus), 0.0, prices, surplus, rows, np.ones(len(rows)), 0)


def _first_columns(problem: Problem, classes: Classes) -> tuple[float, Array]:
    """Return the price of a GPU at which demand meets the offer, and the best rows of every kind around it."""
    low, high = 0.0, float(problem.gain.max(initial=0.0)) + 1.0
    for _ in range(24):
        middle = (low + high) / 2.0
        _, rows = best_rows(problem, problem.gain - middle * problem.gpus)
        low, high = (middle, high) if problem.gpus[rows].sum() > classes.total else (low, middle)
    segment = problem.owner * 4 + np.where(problem.gpus == 0, 0, problem.kind + 1)
    starts = np.flatnonzero(np.diff(segment, prepend=-1))
    length = np.diff(np.append(starts, len(segment)))
    found = [problem.start]
    for factor in (0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3):
        reduced = problem.gain - factor * high * problem.gpus
        top = np.repeat(np.maximum.reduceat(reduced, starts), length)
        found.append(np.flatnonzero((reduced == top) & (reduced > 0.0)))
    return high, np.unique(np.concatenate(found))


class _Master:
    """The restricted LP. Rows: apps, sizes, machine classes, GPUs in total, thresholds."""

    def __init__(self, problem: Problem, classes: Classes):
        self._problem, self._classes = problem, classes
        self._most = problem.largest
        self._patterns: dict[tuple[int, tuple[int, ...]], None] = {}
        local = problem.kind == Kind.MACHINE
        self._sizes = frozenset(int(g) for g in np.unique(problem.gpus[local]))
        for free in np.flatnonzero(classes.count):
            for pattern in first_patterns(int(free), self._sizes):
                self._patterns[int(free), pattern] = None

    def solve(self, columns: Array) -> tuple[float, Prices, Array] | None:
        """Return the LP's value, its prices, and the weights of ``columns``; ``None`` if the solver gives up."""
        problem, classes, apps, most = self._problem, self._classes, self._problem.apps, self._most
        size0, class0 = apps - 1, apps + most - 1  # row of size s: size0 + s
        unit = apps + 2 * most
        gpus, kind = problem.gpus[columns], problem.kind[columns]
        number = np.arange(len(columns))
        local, other = kind == Kind.MACHINE, (kind != Kind.MACHINE) & (gpus > 0)
        at: list[Array] = [problem.owner[columns], size0 + gpus[local], np.full(other.sum(), unit)]
        who: list[Array] = [number, number[local], number[other]]
        what: list[Array] = [np.ones(len(columns)), np.ones(local.sum()), gpus[other].astype(float)]
        for index, threshold in enumerate(classes.thresholds):
            over = (kind == Kind.RACK) & (gpus >= threshold)
            at.append(np.full(over.sum(), unit + 1 + index))
            who.append(number[over])
            what.append(np.ones(over.sum()))
        for index, (free, pattern) in enumerate(self._patterns, len(columns)):
            sizes, counts = np.unique(pattern, return_counts=True)
            at.append(np.concatenate([size0 + sizes, [class0 + free, unit]]))
            who.append(np.full(len(sizes) + 2, index))
            what.append(np.concatenate([-counts, [1.0, sum(pattern)]]))
        width = len(columns) + len(self._patterns)
        height = unit + 1 + len(classes.thresholds)
        matrix = csc_array((np.concatenate(what), (np.concatenate(at), np.concatenate(who))), (height, width))
        machines = np.zeros(most)
        machines[: len(classes.count) - 1] = classes.count[1 : most + 1]
        limit = np.concatenate([np.ones(apps), np.zeros(most), machines, [classes.total], classes.large])
        cost = np.zeros(width)
        cost[: len(columns)] = -problem.gain[columns]
        found = linprog(cost, A_ub=matrix, b_ub=limit, method="highs-ds")
        if found.status != 0:
            return None
        dual = np.maximum(-found.ineqlin.marginals, 0.0)
        size = np.concatenate([[0.0], dual[apps : apps + most]])
        prices = Prices(size, float(dual[unit]), dual[unit + 1 :], classes.thresholds)
        return -float(found.fun), prices, found.x[: len(columns)]

    def add_patterns(self, prices: Prices) -> bool:
        """Add each class's best pattern at ``prices``; tell whether any was new."""
        if self._most <= PATTERN_LIMIT:
            return False
        before = len(self._patterns)
        worth = prices.machine_worth()
        over = prices.size - prices.unit * np.arange(len(prices.size))
        for free in np.flatnonzero(self._classes.count):
            left, pattern = int(free), []
            while left > 0 and worth[left] > 1e-12:
                gains = over[1 : left + 1] + worth[left - 1 :: -1][:left]
                cut = int(gains.argmax()) + 1
                if gains[cut - 1] < worth[left] - 1e-12:
                    left -= 1
                    continue
                pattern.append(cut)
                left -= cut
            if pattern:
                self._patterns[int(free), tuple(sorted(pattern))] = None
        return len(self._patterns) > before


@lru_cache(maxsize=256)
def first_patterns(free: int, sizes: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """Return patterns of at most ``free`` GPUs from ``sizes``: all of them, or equal parts on large machines."""
    if free <= PATTERN_LIMIT:
        return tuple(partitions(free, free, sizes))
    return tuple((s,) * k for s in sorted(sizes) for k in range(1, free // s + 1))


def partitions(room: int, largest: int, sizes: frozenset[int]) -> list[tuple[int, ...]]:
    """Return every non-empty multiset of ``sizes`` up to ``largest`` that sums to at most ``room``."""
    found: list[tuple[int, ...]] = []
    for size in range(1, min(room, largest) + 1):
        if size in sizes:
            found.append((size,))
            found.extend((size, *rest) for rest in partitions(room - size, size, sizes))
    return found
