"""What Pollux maximises: a power mean of the apps' speed-ups over their fair share.

Pollux, OSDI 2021, section 4.2 (equations 3.11 and 3.12 of the thesis). An app's term depends on its row of the
allocation only through the GPUs, whether they lie on one node or on several, and whether the row is the present one;
so a table per app holds all of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App, View

RESTART_DELAY = 30.0  # s
FLOOR = 1e-3  # added to every speed-up, so that an app without GPUs has a power
TIE_BREAK = 1e-9  # factor where a restart costs all: of equal scores, the one in which more run
MOST_NODES = 16  # of one app
LARGEST = 1e300
NEAR_ZERO = 1e-6  # of an exponent: the mean is taken as the geometric one

Array = NDArray[np.float64]
Matrix = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Objective:
    """The exponent of the mean and what a restart is held to cost."""

    p: float = -1.0  # 1: throughput; 0: geometric mean; -1: harmonic; the lower, the more even
    restart_delay: float = RESTART_DELAY  # s
    charge_first_start: bool = (
        True  # as the authors' scheduler does; False: a waiting app starts free of charge
    )
    avoid_interference: bool = True  # at most one app that spans nodes on each node (section 4.2.1)

    def __post_init__(self) -> None:
        if not (np.isfinite(self.p) and self.restart_delay >= 0):
            raise OptionError(
                f"p must be finite and restart_delay >= 0 s; got {self.p} and {self.restart_delay}"
            )

    def cost(self, value: Array) -> Array:
        """Return the term of the mean, turned so that less is better."""
        shifted = value + FLOOR
        if abs(self.p) < NEAR_ZERO:
            return np.asarray(-np.log(shifted))
        return np.asarray(np.minimum(shifted**self.p, LARGEST) * (1.0 if self.p < 0 else -1.0))

    def mean(self, cost: Array, weight: Array) -> Array:
        """Return the power mean that ``cost`` (..., apps) amounts to."""
        total = np.asarray(cost @ (weight / weight.sum()))
        if abs(self.p) < NEAR_ZERO:
            return np.asarray(np.exp(-total))
        return np.asarray((total if self.p < 0 else -total) ** (1.0 / self.p))


def power_mean(values: Sequence[float], p: float, weights: Sequence[float] | None = None) -> float:
    """Return (Σ w x**p / Σ w) ** (1 / p), the geometric mean for ``p = 0``.

    >>> round(power_mean([1, 2, 4], -1), 5)
    1.71429

    Raises ``OptionError``.
    """
    x = np.asarray(values, float)
    w = np.ones(len(x)) if weights is None else np.asarray(weights, float)
    if not len(x) or len(w) != len(x) or x.min() < 0 or w.min() < 0 or w.sum() <= 0:
        raise OptionError("a power mean needs values >= 0 and as many weights >= 0, not all 0")
    w = w / w.sum()
    with np.errstate(divide="ignore"):
        return float(np.exp(w @ np.log(x)) if abs(p) < NEAR_ZERO else (w @ x**p) ** (1.0 / p))


def reallocation_factor(age: float, restarts: int, delay: float = RESTART_DELAY) -> float:
    """Return what a restart leaves of a speed-up: (age - restarts * delay) / (age + delay), at least 0."""
    return max(age - restarts * delay, 0.0) / (age + delay) if age + delay > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Problem:
    """One round: who may hold how much, and what every possible row is worth.

    ``J`` apps in the order in which the present view has them, ``N`` nodes, GPU counts up to ``K``.
    """

    ids: tuple[str, ...]  # J
    nodes: tuple[str, ...]  # N
    room: NDArray[np.int16]  # (N,) GPUs
    current: Matrix  # (J, N)
    caps: NDArray[np.int16]  # (J,) most GPUs
    least: NDArray[np.int16]  # (J,) fewest GPUs, if any
    pinned: NDArray[np.bool_]  # (J,) rows that stay as they are
    order: NDArray[np.intp]  # (J,) apps as repairs serve them: pinned, least service, earliest
    weight: Array  # (J,)
    changed: Array  # (J, 2, K + 1) cost on one or several nodes of a row that is new; inf: not allowed
    kept: Array  # (J,) cost of the present row; inf: not allowed any more
    objective: Objective
    most_nodes: int = MOST_NODES

    def costs(self, rows: NDArray[Any]) -> Array:
        """Return the weighted cost of every app under matrices (..., J, N) that are feasible; shape (..., J)."""
        gpus = rows.sum(axis=-1)
        several = ((rows > 0).sum(axis=-1) > 1).astype(np.intp)
        found = self.changed[np.arange(len(self.ids)), several, gpus]
        same = (rows == self.current).all(axis=-1)
        return np.where(same & np.isfinite(self.kept), self.kept, found)

    def fitness(self, rows: NDArray[Any]) -> Array:
        """Return the power mean of matrices (..., J, N); shape (...)."""
        return self.objective.mean(self.costs(rows) / self.weight, self.weight)

    def feasible(self, rows: NDArray[Any]) -> bool:
        """Tell whether one matrix (J, N) keeps every rule: room, caps, and interference avoidance."""
        gpus, spread = rows.sum(axis=1), (rows > 0).sum(axis=1)
        free = ~self.pinned
        return bool(
            (rows >= 0).all()
            and (rows.sum(axis=0) <= self.room).all()
            and (gpus <= self.caps)[free].all()
            and ((gpus == 0) | (gpus >= self.least))[free].all()
            and (spread <= self.most_nodes)[free].all()
            and (not self.objective.avoid_interference or ((rows[spread > 1] > 0).sum(axis=0) <= 1).all())
            and (rows[self.pinned] == self.current[self.pinned]).all()
        )


def problem_of(view: View, objective: Objective, pinned: frozenset[str] = frozenset()) -> Problem:
    """Return the round that ``view`` asks for.

    Usable nodes with GPUs count. An app whose nodes left in part is not charged for a restart that is forced on it.

    Raises ``OptionError``.
    """
    nodes = [n for n in view.capacity.usable if n.gpus > 0]
    place = {n.id: i for i, n in enumerate(nodes)}
    room = np.array([n.gpus for n in nodes], np.int16)
    total = int(room.sum())
    apps = view.apps
    current = np.zeros((len(apps), len(nodes)), np.int16)
    caps = np.array([most_gpus(app, total) for app in apps], np.int16)
    width = int(max(caps.max(initial=0), *(sum(g for _, g in a.held) for a in apps), 0)) if apps else 0
    changed = np.full((len(apps), 2, width + 1), np.inf)
    kept = np.full(len(apps), np.inf)
    weight = np.array([app.weight for app in apps], float)
    if apps and not (weight > 0).all():
        bad = next(a for a in apps if not a.weight > 0)
        raise OptionError(f"weight must be > 0; app {bad.id} has {bad.weight}")
    fair = ceil(total / len(apps)) if apps else 0
    share = len(nodes) / total if total else 0.0
    largest = int(room.max(initial=0))
    for j, app in enumerate(apps):
        lost = False
        for node, gpus in app.held:
            if node in place:
                current[j, place[node]] = gpus
            else:
                lost = True
        held = int(current[j].sum())
        cap = int(caps[j])
        values = speedups(app, cap, held, fair) * share
        factor = 1.0
        if not lost and (app.held or objective.charge_first_start):
            factor = reallocation_factor(view.now - app.arrival, app.restarts, objective.restart_delay)
        cost = objective.cost(values * max(factor, TIE_BREAK))
        changed[j, 0, : 1 + min(cap, largest)] = cost[0, : 1 + min(cap, largest)]
        changed[j, 1, 2 : 1 + cap] = cost[1, 2 : 1 + cap]
        if app.min_gpus > 1:
            changed[j, :, 1 : app.min_gpus] = np.inf
        spread = int((current[j] > 0).sum())
        allowed = held <= cap and (held == 0 or held >= app.min_gpus)
        if not lost and (allowed or app.id in pinned):
            kept[j] = objective.cost(values[min(spread, 2) // 2, held : held + 1])[0]
    fixed = np.array([app.id in pinned and current[j].any() for j, app in enumerate(apps)], bool)
    order = sorted(
        range(len(apps)), key=lambda j: (not fixed[j], apps[j].service, apps[j].arrival, apps[j].number)
    )
    return Problem(
        tuple(app.id for app in apps),
        tuple(n.id for n in nodes),
        room,
        current,
        caps,
        np.array([max(app.min_gpus, 1) for app in apps], np.int16),
        fixed,
        np.array(order, np.intp),
        weight,
        changed * weight[:, None, None],
        kept * weight,
        objective,
    )


def most_gpus(app: App, total: int) -> int:
    """Return the GPUs that ``app`` may get now: at most twice the most it ever held, so that its model can follow."""
    return max(min(max(2 * app.most_gpus, 1, app.min_gpus), app.max_gpus, total), 0)


def speedups(app: App, cap: int, held: int, fair: int) -> Array:
    """Return goodput over that of the fair share on one node, (2, GPUs + 1): on one node, on several.

    An app without a model is taken to scale perfectly.
    """
    most = max(cap, held)
    counts = np.arange(most + 1)
    if app.goodput is None:
        return np.tile(counts / max(fair, 1), (2, 1))
    nodes = np.concatenate((np.minimum(counts, 1), np.minimum(counts, 2), [1]))
    found = app.goodput.best(nodes, np.concatenate((counts, counts, [fair])))
    base = float(found[-1])
    if not base > 0:  # the fair share is more than the app's largest batch can use
        base = float(app.goodput.best(np.ones(fair, int), np.arange(1, fair + 1)).max(initial=0.0))
    if not base > 0:
        return np.zeros((2, most + 1))
    return np.asarray(found[:-1].reshape(2, most + 1) / base)


def indexed(population: Mapping[str, Mapping[str, int]], problem: Problem) -> Matrix:
    """Return one allocation (app id to node id to GPUs) as a matrix; what is not in the problem is left out."""
    place = {node: i for i, node in enumerate(problem.nodes)}
    rows = np.zeros(problem.current.shape, np.int16)
    for j, app in enumerate(problem.ids):
        for node, gpus in population.get(app, {}).items():
            if node in place:
                rows[j, place[node]] = gpus
    return rows
