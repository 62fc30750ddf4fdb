"""The auction as one mixed-integer programme without GPU ids, exact for the tree of machines, racks and cluster.

Machines of a rack with equally many free GPUs are one class, cut by patterns of machine-local sizes; rack requests
are counted by rack and size; everything together fits the offer. A machine that a row is anchored to is a class of
its own. Any solution can be unpacked: patterns first, then rack requests, then the rest.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csc_array

from ebbflow.planners.scheduling.auction.packing import Packing, pack
from ebbflow.planners.scheduling.auction.problem import Bundle, Kind, Problem, Solution
from ebbflow.planners.scheduling.auction.relaxation import partitions
from ebbflow.planners.scheduling.locality import Array

TIE = 1e-8  # what serving an app that would hold nothing is worth among equals; ρ and order less
SCALE = 1e5  # of the objective: HiGHS stops within an absolute 1e-6, which must be less than a tie


class _Rows:
    """Sparse constraints, built a coefficient at a time."""

    def __init__(self) -> None:
        self.at: list[int] = []
        self.who: list[int] = []
        self.what: list[float] = []
        self.limit: list[float] = []

    def new(self, limit: float) -> int:
        self.limit.append(limit)
        return len(self.limit) - 1

    def add(self, row: int, column: int, value: float) -> None:
        self.at.append(row)
        self.who.append(column)
        self.what.append(value)


def solve_exact(
    problem: Problem,
    before: Sequence[Bundle] = (),
    seconds: float = 60.0,
    ties: bool = True,
    gap: float = 1e-9,
    among: Array | None = None,
    nodes: int | None = None,
) -> Solution:
    """Return the optimum, or the best found within ``seconds`` of solver time, and the solver's bound.

    ``ties``: among equal optima serve apps that would otherwise hold nothing, then larger ρ, then earlier apps.
    ``among``: only these rows may be chosen; the bound holds for them. ``nodes``: most of the search tree.
    """
    columns = np.flatnonzero(problem.gpus > 0) if among is None else among[problem.gpus[among] > 0]
    if not len(columns):
        return Solution(problem.start.copy(), ({},) * problem.apps, 0.0, 0.0)
    model = _Model(problem, columns)
    worth = problem.gain[columns].astype(float)
    if ties:
        owner = problem.owner[columns]
        rank = np.empty(problem.apps)
        rank[np.lexsort((np.arange(problem.apps), -np.round(problem.start_rho, 12)))] = np.arange(
            problem.apps
        )
        worth = worth + TIE * (1.0 + 0.5 * (1.0 - rank[owner] / problem.apps))
    cost = np.zeros(model.width)
    cost[: len(columns)] = -worth * SCALE
    result = milp(
        cost,
        constraints=LinearConstraint(model.matrix, ub=model.limit),
        integrality=np.ones(model.width),
        bounds=Bounds(0.0, model.upper),
        options={"time_limit": seconds, "mip_rel_gap": gap} | ({"node_limit": nodes} if nodes else {}),
    )
    if result.x is None:  # nothing found in time: nobody wins is feasible, each app's best row is a bound
        loose = float(np.maximum.reduceat(problem.gain, problem.start).sum())
        return Solution(problem.start.copy(), ({},) * problem.apps, 0.0, loose)
    rows = problem.start.copy()
    for row in columns[result.x[: len(columns)] > 0.5]:
        rows[problem.owner[row]] = row
    bundles = _bundles(problem, model, rows, np.round(result.x).astype(int), before)
    value = problem.value(rows)
    return Solution(rows, bundles, value, max(value, -float(result.mip_dual_bound) / SCALE))


class _Model:
    def __init__(self, problem: Problem, columns: Array):
        offer = problem.offer
        self.patterns: list[tuple[int, int, int, tuple[int, ...]]] = []  # column, rack, free, sizes
        self.requests: list[tuple[int, int, int]] = []  # column, rack, size
        rows = _Rows()
        total = rows.new(offer.total)
        racks = [rows.new(int(free)) for free in offer.rack_free]
        apps = [rows.new(1.0) for _ in range(problem.apps)]
        kind, anchor = problem.kind, problem.anchor
        alone = {int(a) for a in anchor[columns][(kind[columns] == Kind.MACHINE) & (anchor[columns] >= 0)]}
        anchored = {machine: rows.new(int(offer.free[machine])) for machine in sorted(alone)}
        sizes: dict[int, int] = {}
        large: dict[int, int] = {}
        for column, row in enumerate(columns):
            gpus, where = int(problem.gpus[row]), int(anchor[row])
            rows.add(apps[problem.owner[row]], column, 1.0)
            if kind[row] == Kind.ANY:
                rows.add(total, column, gpus)
            elif where >= 0:
                rows.add(total, column, gpus)
                rows.add(racks[where if kind[row] == Kind.RACK else offer.rack[where]], column, gpus)
                if kind[row] == Kind.MACHINE:
                    rows.add(anchored[where], column, gpus)
            else:
                table = sizes if kind[row] == Kind.MACHINE else large
                if gpus not in table:
                    table[gpus] = rows.new(0.0)
                rows.add(table[gpus], column, 1.0)
        upper = [1.0] * len(columns)
        for (rack, free, machine), number in _classes(offer.rack, offer.free, alone).items():
            of_class = rows.new(number)
            for pattern in partitions(free, free, frozenset(sizes)):
                column = len(upper)
                self.patterns.append((column, rack, machine if machine >= 0 else -free, pattern))
                upper.append(number)
                used = sum(pattern)
                limits = [of_class, total, racks[rack]] + ([anchored[machine]] if machine >= 0 else [])
                for limit, value in zip(limits, [1, used, used, used], strict=False):
                    rows.add(limit, column, value)
                for size in pattern:
                    rows.add(sizes[size], column, -1.0)
        for rack, free in enumerate(offer.rack_free):
            for size, row in large.items():
                if size <= free:
                    column = len(upper)
                    self.requests.append((column, rack, size))
                    upper.append(free // size)
                    rows.add(row, column, -1.0)
                    rows.add(racks[rack], column, size)
                    rows.add(total, column, size)
        self.width = len(upper)
        self.upper = np.array(upper)
        self.limit = np.array(rows.limit)
        self.matrix = csc_array((rows.what, (rows.at, rows.who)), (len(rows.limit), self.width))


def _classes(rack: Array, free: Array, alone: set[int]) -> dict[tuple[int, int, int], int]:
    """Return how many machines there are by (rack, free GPUs, the machine itself if it stands alone)."""
    found: dict[tuple[int, int, int], int] = {}
    for machine, (r, f) in enumerate(zip(rack, free, strict=True)):
        if f:
            key = int(r), int(f), machine if machine in alone else -1
            found[key] = found.get(key, 0) + 1
    return found


def _bundles(
    problem: Problem, model: _Model, rows: Array, x: Array, before: Sequence[Bundle]
) -> tuple[Bundle, ...]:
    """Return bundles for ``rows``: where apps were before if that works, else as the solver cut the machines."""
    for keep in (True, False):
        packing, failed = pack(problem, rows, before, keep)
        if not failed:
            return tuple(packing.bundles)
    return tuple(_unpacked(problem, model, rows, x).bundles)


def _unpacked(problem: Problem, model: _Model, rows: Array, x: Array) -> Packing:
    offer = problem.offer
    packing = Packing(problem)
    whose = np.flatnonzero(problem.gpus[rows] > 0)

    def of(kind: Kind, anchored: bool) -> list[int]:
        return [int(a) for a in whose
                if problem.kind[rows[a]] == kind and (problem.anchor[rows[a]] >= 0) == anchored]  # fmt: skip

    for app in of(Kind.MACHINE, True):
        assert packing.place(int(rows[app]))
    slots: dict[int, list[int]] = {}
    uncut: dict[tuple[int, int], list[int]] = {}
    for column, rack, key, pattern in model.patterns:
        for _ in range(x[column]):
            if key >= 0:
                machine = key
            else:
                pool = uncut.setdefault(
                    (rack, -key), [int(m) for m in np.flatnonzero((offer.rack == rack) & (offer.free == -key))
                                   if not any(k == m for _, _, k, _ in model.patterns)]
                )  # fmt: skip
                machine = pool.pop()
            for size in pattern:
                slots.setdefault(size, []).append(machine)
    for app in of(Kind.MACHINE, False):
        size = int(problem.gpus[rows[app]])
        packing.set(app, int(rows[app]), {slots[size].pop(): size})
    for app in of(Kind.RACK, True):
        assert packing.place(int(rows[app]))
    rooms: dict[int, list[int]] = {}
    for column, rack, size in model.requests:
        rooms.setdefault(size, []).extend([rack] * x[column])
    for app in of(Kind.RACK, False):
        size = int(problem.gpus[rows[app]])
        packing.set(app, int(rows[app]), packing.inside(rooms[size].pop(), size))
    for app in of(Kind.ANY, False):
        assert packing.place(int(rows[app]))
    return packing
