"""The search behind Pollux: an exact bound on GPU counts, then ruin and recreate on placements.

An app's term depends on how many GPUs it has and on whether they lie on one node, so GPU counts alone are a knapsack
that dynamic programming solves; its value bounds every allocation. Nodes then say whether the counts can be placed.
Where they cannot, a few apps at a time are taken off and put back in another order (Schrimpf et al. 2000), until the
bound is met or nothing gets better.
"""

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ebbflow.planners.scheduling.goodput.objective import Array, Matrix, Problem

Row = tuple[tuple[int, int], ...]  # (node, GPUs), by node
NONE = (inf, 0)


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """How long to search."""

    rounds: int = 120  # of ruin and recreate
    patience: int = 40  # rounds without gain after which to stop
    tolerance: float = 1e-4  # gap to the bound, relative, that is good enough


def local_search(
    problem: Problem, rng: np.random.Generator, effort: SearchBudget | None = None
) -> tuple[Matrix, float]:
    """Return the best allocation found (J, N), and the bound on the total cost.

    The result is feasible and never worse than the present allocation, where that is feasible.
    """
    effort = effort or SearchBudget()
    if not problem.ids or not problem.nodes:
        return np.zeros_like(problem.current), 0.0
    layout = _Layout(problem)
    movable = [j for j in range(len(problem.ids)) if not problem.pinned[j]]
    bound = layout.start(movable)
    best, found = layout.total(), layout.copy()
    stale = 0
    for _ in range(effort.rounds):
        if stale >= effort.patience or best <= bound + effort.tolerance * abs(bound):
            break
        layout.ruin_and_recreate(movable, rng)
        cost = layout.total()
        if cost < best - 1e-12 * abs(best):
            best, found, stale = cost, layout.copy(), 0
        else:
            layout.restore(found)
            stale += 1
    return layout.matrix(), bound


def knapsack(cost: Array, gpus: int) -> tuple[float, list[int]]:
    """Return the least total cost of (apps, GPUs + 1) choices that use at most ``gpus`` GPUs, and the choices."""
    width = min(cost.shape[1], gpus + 1)
    table = np.full(gpus + width, inf)
    table[width - 1 :] = 0.0  # (width - 1) entries in front of "0 GPUs left" that no choice can use
    before = sliding_window_view(table, width)[:, ::-1]  # what is left to the others, by GPUs and choice
    every = np.arange(gpus + 1)
    choices = []
    for row in cost[:, :width]:
        possible = np.flatnonzero(row < inf)
        most = int(possible[-1]) + 1 if possible.size else 1
        tried = before[:, :most] + row[:most]
        choice = tried.argmin(axis=1)
        choices.append(choice)
        table[width - 1 :] = tried[every, choice]
    left, picked = gpus, []
    for choice in reversed(choices):
        picked.append(int(choice[left]))
        left -= picked[-1]
    return float(table[-1]), picked[::-1]


class _Layout:
    """Who sits where, and what it costs, while it is being changed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        apps, nodes = problem.current.shape
        self.room = int(problem.room.sum())
        self.kept = problem.kept.tolist()
        self.current: list[Row] = [_row(problem.current[j]) for j in range(apps)]
        local, spread = problem.changed[:, 0], problem.changed[:, 1]
        self.local, self.spread = local.tolist(), spread.tolist()
        self.best_local, self.best_spread = _prefix_best(local), _prefix_best(spread)
        self.choice = np.minimum(local, spread)  # (J, K + 1) the best of all rows with so many GPUs
        held = problem.current.sum(axis=1)
        every = np.arange(apps)
        self.choice[every, held] = np.minimum(self.choice[every, held], problem.kept)
        self.avoid = problem.objective.avoid_interference
        self.whole = _whole_nodes(problem, self.choice) if self.avoid else self.choice
        self.least: list[float] = self.choice.min(
            axis=1
        ).tolist()  # what each would cost alone on the cluster
        self.held = held.tolist()
        self.free: list[int] = problem.room.tolist()
        self.taken = [False] * nodes  # whether a distributed app is there
        self.rows: list[Row] = [()] * apps
        self.cost: list[float] = [0.0] * apps
        for j in range(apps):
            self._put(j, self.current[j] if problem.pinned[j] else ())

    def start(self, movable: list[int]) -> float:
        """Lay out the best of three starts: the present allocation, and what either knapsack suggests."""
        room = sum(self.free)
        bound, wish = knapsack(self.choice[movable], room) if movable else (0.0, [])
        bound += sum(self.cost[j] for j in range(len(self.rows)) if self.problem.pinned[j])
        empty = self.copy()
        self._place(movable, wish, self.choice, keep_first=True)
        self._polish(movable)
        best, found = self.total(), self.copy()
        if best <= bound + 1e-9 * abs(bound):
            return bound
        for attempt in ("present", "whole nodes"):
            self.restore(empty)
            if attempt == "present":
                for j in movable:
                    if self._keepable(j):
                        self._put(j, self.current[j])
            else:
                self._place(movable, knapsack(self.whole[movable], room)[1], self.whole, keep_first=True)
            self._polish(movable)
            cost = self.total()
            if cost < best:
                best, found = cost, self.copy()
        self.restore(found)
        return bound

    def total(self) -> float:
        """Return the sum over all apps."""
        return sum(self.cost)

    def copy(self) -> tuple[list[int], list[bool], list[Row], list[float]]:
        """Return what ``restore`` takes back."""
        return self.free.copy(), self.taken.copy(), self.rows.copy(), self.cost.copy()

    def restore(self, kept: tuple[list[int], list[bool], list[Row], list[float]]) -> None:
        """Go back to a copy."""
        self.free, self.taken, self.rows, self.cost = (part.copy() for part in kept)  # type: ignore[assignment]

    def matrix(self) -> Matrix:
        """Return the rows as a matrix (J, N)."""
        found = np.zeros(self.problem.current.shape, np.int16)
        for j, row in enumerate(self.rows):
            for node, gpus in row:
                found[j, node] = gpus
        return found

    def ruin_and_recreate(self, movable: list[int], rng: np.random.Generator) -> None:
        """Take some apps off and put them back otherwise: those of a few nodes, with some that could gain."""
        kind, nodes, extra = rng.integers(3), int(rng.integers(1, 4)), int(rng.integers(1, 3))
        chosen: set[int] = set()
        if kind < 2:
            picked = set(rng.permutation(len(self.free))[:nodes].tolist())
            chosen.update(j for j in movable if any(node in picked for node, _ in self.rows[j]))
        else:
            chosen.update(movable[i] for i in rng.integers(len(movable), size=nodes + 1).tolist())
        regret = sorted(movable, key=lambda j: self.least[j] - self.cost[j])
        likely = regret[: 4 * extra]
        chosen.update(likely[i] for i in rng.integers(len(likely), size=extra).tolist())
        some = sorted(chosen)
        for j in some:
            self._put(j, ())
        shuffled = [some[i] for i in rng.permutation(len(some)).tolist()]
        table = self.whole if rng.integers(2) else self.choice
        if rng.integers(2):  # the first is told how much to take, whatever the knapsack would say
            most, one_node = int(rng.integers(table.shape[1])), bool(rng.integers(2))
            self._put(shuffled[0], self._best_row(shuffled[0], most, one_node))
            del shuffled[0]
        wish = knapsack(table[shuffled], sum(self.free))[1]
        self._place(shuffled, wish, table, keep_first=bool(rng.integers(2)))
        self._polish(shuffled)
        self._polish(movable)

    def _place(self, some: list[int], wish: list[int], table: Array, keep_first: bool) -> None:
        """Give apps that hold nothing the GPUs that ``table`` wishes them, or the best that is left up to that."""
        waiting = []
        for j, gpus in zip(some, wish, strict=True):
            present = self.held[j] <= gpus and self.kept[j] <= table[j, gpus]
            if keep_first and present and self._keepable(j):
                self._put(j, self.current[j])
            else:
                waiting.append((gpus, j))
        if keep_first:
            waiting.sort(key=lambda entry: -entry[0])
        for gpus, j in waiting:
            self._put(j, self._best_row(j, gpus))

    def _polish(self, some: list[int]) -> None:
        """Move one app after the other to its best row given the others, until none moves."""
        moved = True
        while moved:
            moved = False
            for j in some:
                before, row = self.cost[j], self.rows[j]
                if before <= self.least[j]:
                    continue
                self._put(j, ())
                self._put(j, self._best_row(j, self.room))
                if self.cost[j] < before - 1e-12 * abs(before):
                    moved = True
                else:
                    self._put(j, ())
                    self._put(j, row)

    def _best_row(self, j: int, most: int, one_node: bool = False) -> Row:
        """Return the cheapest row of at most ``most`` GPUs that fits now; none if that is as good."""
        largest = max(self.free)
        local = self.best_local[j][min(most, largest, len(self.local[j]) - 1)]
        if one_node:
            return self._local_row(local[1])
        open_room = [f for f, taken in zip(self.free, self.taken, strict=True) if f and not taken]
        spread = NONE
        if len(open_room) > 1:
            limit = self.problem.most_nodes
            if len(open_room) > limit:
                open_room = sorted(open_room, reverse=True)[:limit]
            spread = self.best_spread[j][min(most, sum(open_room), len(self.spread[j]) - 1)]
        present = self.kept[j] if self.held[j] <= most else inf
        if present <= min(local[0], spread[0]) and self._keepable(j):
            return self.current[j]
        if local[0] <= spread[0]:
            return self._local_row(local[1])
        return self._spread_row(spread[1])

    def _local_row(self, gpus: int) -> Row:
        """Return the node that fits ``gpus`` most tightly; of equals, one that a distributed app uses already."""
        if not gpus:
            return ()
        fits = [
            (free, not taken, node)
            for node, (free, taken) in enumerate(zip(self.free, self.taken, strict=True))
            if free >= gpus
        ]
        return ((min(fits)[2], gpus),)

    def _spread_row(self, gpus: int) -> Row:
        """Return the emptiest nodes without a distributed app, at least two, the last as tight as possible."""
        nodes = sorted((-f, n) for n, f in enumerate(self.free) if f and not self.taken[n])
        row: list[tuple[int, int]] = []
        left = gpus
        while left:
            most = left if row else left - 1
            at = 0
            if -nodes[0][0] >= most and row:
                at = max(i for i, (f, _) in enumerate(nodes) if -f >= most)
            free, node = nodes.pop(at)
            row.append((node, min(-free, most)))
            left -= row[-1][1]
        return tuple(sorted(row))

    def _keepable(self, j: int) -> bool:
        """Tell whether an app that holds nothing now can have its present row back."""
        row = self.current[j]
        if self.kept[j] == inf:
            return False
        several = len(row) > 1
        return all(self.free[n] >= g and not (several and self.taken[n]) for n, g in row)

    def _put(self, j: int, row: Row) -> None:
        """Give ``j`` ``row`` in place of what it has."""
        old = self.rows[j]
        for node, gpus in old:
            self.free[node] += gpus
            if len(old) > 1 and self.avoid:
                self.taken[node] = False
        for node, gpus in row:
            self.free[node] -= gpus
            if len(row) > 1 and self.avoid:
                self.taken[node] = True
        self.rows[j] = row
        if row == self.current[j] and self.kept[j] < inf:
            self.cost[j] = self.kept[j]
        elif len(row) > 1:
            self.cost[j] = self.spread[j][sum(g for _, g in row)]
        else:
            self.cost[j] = self.local[j][row[0][1] if row else 0]


def _row(counts: NDArray[np.int16]) -> Row:
    return tuple((int(n), int(counts[n])) for n in np.flatnonzero(counts))


def _whole_nodes(problem: Problem, choice: Array) -> Array:
    """Return ``choice`` where a distributed app pays for whole nodes, for no other such app can use the rest."""
    local, spread = problem.changed[:, 0], problem.changed[:, 1]
    node, width = int(problem.room.max()), choice.shape[1]
    found = local.copy()
    for most in range(node, width, node):
        several = np.where(np.isfinite(spread), choice, inf)[:, most - node + 1 : most + 1].min(axis=1)
        found[:, most] = np.minimum(found[:, most], several)
    every, held = np.arange(len(choice)), problem.current.sum(axis=1)
    wide = (problem.current > 0).sum(axis=1) > 1
    paid = np.minimum(np.where(wide, -(-held // node) * node, held), width - 1)
    found[every, paid] = np.minimum(found[every, paid], problem.kept)
    return found


def _prefix_best(cost: Array) -> list[list[tuple[float, int]]]:
    """Return for every app and GPU count the cheapest of all smaller counts or itself, with that count."""
    found = []
    for row in cost.tolist():
        best, prefix = NONE, []
        for gpus, value in enumerate(row):
            if value < best[0]:
                best = (value, gpus)
            prefix.append(best)
        found.append(prefix)
    return found
