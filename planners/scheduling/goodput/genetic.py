"""Pollux's own search: a genetic algorithm over allocation matrices (OSDI 2021, section 4.2.1; thesis, appendix A).

Every step works on the whole population at once, an array (population, apps, nodes).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.goodput.objective import Matrix, Problem

CROSSOVER = 0.9  # share of pairs that exchange rows
RESET = 0.1  # chance of a row to become the present one
THIN = 0.1  # chance of a row to lose entries, and of each of its entries to be lost


@dataclass(frozen=True, slots=True)
class Genetic:
    """The size of the search, and how long to continue."""

    population: int = 100
    generations: int = 100
    patience: int = 100  # generations without gain after which to stop

    def __post_init__(self) -> None:
        if self.population < 2 or self.generations < 0 or self.patience < 1:
            raise OptionError(
                "a genetic search needs population >= 2, generations >= 0 and patience >= 1; "
                f"got {self.population}, {self.generations}, {self.patience}"
            )


@dataclass(frozen=True, slots=True)
class Population:
    """Matrices (P, J, N) and what their rows and columns stand for: what one round hands to the next."""

    ids: tuple[str, ...]
    nodes: tuple[str, ...]
    matrices: Matrix

    def carried_to(self, problem: Problem) -> Matrix:
        """Return the matrices for the apps and nodes of ``problem``; what is new there holds nothing."""
        rows = {app: j for j, app in enumerate(self.ids)}
        columns = {node: n for n, node in enumerate(self.nodes)}
        j = [(new, rows[app]) for new, app in enumerate(problem.ids) if app in rows]
        n = [(new, columns[node]) for new, node in enumerate(problem.nodes) if node in columns]
        found = np.zeros((len(self.matrices), *problem.current.shape), np.int16)
        if j and n:
            (to_j, from_j), (to_n, from_n) = zip(*j, strict=True), zip(*n, strict=True)
            every = range(len(found))
            found[np.ix_(every, to_j, to_n)] = self.matrices[np.ix_(every, from_j, from_n)]
        return found


def genetic_search(
    problem: Problem,
    rng: np.random.Generator,
    size: Genetic | None = None,
    before: Population | None = None,
) -> tuple[Matrix, Population, list[float]]:
    """Return the best matrix found (J, N), the last population, and the best fitness after every generation.

    The present allocation and one GPU for each app are among the first matrices, so the result is never worse.
    """
    size = size or Genetic()
    if not problem.ids or not problem.nodes:
        return (
            np.zeros_like(problem.current),
            Population(problem.ids, problem.nodes, problem.current[None]),
            [],
        )
    first = [problem.current[None], one_gpu_each(problem)[None]]
    if before is not None:
        first.append(before.carried_to(problem))
    population = unique(repair(problem, np.concatenate(first), rng))
    cost = problem.costs(population).sum(axis=-1)
    trace = [float(cost.min())]
    stale = 0
    for _ in range(size.generations):
        children = crossed(population[tournament(cost, size.population, rng)], rng)
        children = repair(problem, mutated(problem, children, rng), rng)
        population = unique(np.concatenate((population, children)))
        cost = problem.costs(population).sum(axis=-1)
        if len(population) > size.population:
            best = np.argpartition(cost, size.population)[: size.population]
            population, cost = population[best], cost[best]
        stale = stale + 1 if cost.min() >= trace[-1] else 0
        trace.append(float(cost.min()))
        if stale >= size.patience:
            break
    weight = problem.weight.sum()
    fitness = [float(problem.objective.mean(np.array([c / weight]), np.ones(1))) for c in trace]
    return population[cost.argmin()], Population(problem.ids, problem.nodes, population), fitness


def tournament(cost: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return ``count`` parents, an even number: of two random matrices each time the better."""
    pairs = rng.integers(len(cost), size=(count + count % 2, 2))
    first, second = pairs[:, 0], pairs[:, 1]
    return np.where(cost[first] <= cost[second], first, second)


def crossed(parents: Matrix, rng: np.random.Generator) -> Matrix:
    """Return children: each pair of parents exchanges the rows before a random cut."""
    half = len(parents) // 2
    one, other = parents[:half], parents[half:]
    cut = rng.integers(parents.shape[1], size=half)
    swap = (np.arange(parents.shape[1]) < cut[:, None]) & (rng.random((half, 1)) < CROSSOVER)
    mask = swap[:, :, None]
    return np.concatenate((np.where(mask, other, one), np.where(mask, one, other)))


def mutated(problem: Problem, population: Matrix, rng: np.random.Generator) -> Matrix:
    """Return the population with rows reset to the present ones, entries dropped, and free GPUs given out."""
    count, apps = population.shape[:2]
    reset = rng.random((count, apps, 1), dtype=np.float32) < RESET
    found = np.where(reset, problem.current, population)
    thin = rng.random((count, apps, 1), dtype=np.float32) < THIN
    thin = thin & (rng.random(found.shape, dtype=np.float32) < THIN)
    found = np.where(thin, 0, found)
    free = problem.room - found.sum(axis=1)  # (P, N)
    there = found > 0
    beside = 1.0 / np.maximum(there.sum(axis=1, keepdims=True), 1)
    chance = np.float32(1.0 / apps) + np.where(there, beside * (1.0 - 1.0 / apps), 0.0)
    grow = (rng.random(found.shape, dtype=np.float32) < chance) & (free > 0)[:, None, :]
    span = problem.room - found + 1
    higher = found + np.floor(rng.random(found.shape, dtype=np.float32) * span).astype(np.int16)
    return np.where(grow, higher, found).astype(np.int16)


def repair(problem: Problem, population: Matrix, rng: np.random.Generator) -> Matrix:
    """Return the population with every matrix made feasible; feasible ones stay as they are.

    In this order: pinned rows are restored; on every node only the first distributed app stays; caps cut nodes in
    random order; the room of nodes goes to earlier apps; rows under their least are given up. "First" and
    "earlier" mean pinned, then least attained service.
    """
    order = problem.order
    found = population[:, order].copy()
    pinned = problem.pinned[order]
    found[:, pinned] = problem.current[order][pinned]
    if problem.objective.avoid_interference:
        spread = ((found > 0).sum(axis=2) > 1)[:, :, None] & (found > 0)
        found[spread & (np.cumsum(spread, axis=1) > 1)] = 0
    shuffle = rng.permutation(found.shape[2])
    mixed = found[:, :, shuffle]
    caps = np.where(pinned, np.iinfo(np.int16).max, problem.caps[order])[:, None]
    limit = np.where(pinned, found.shape[2], problem.most_nodes)[:, None]
    held = np.cumsum(mixed, axis=2, dtype=np.int32)
    mixed = np.clip(caps - (held - mixed), 0, mixed)
    mixed[np.cumsum(mixed > 0, axis=2) > limit] = 0
    found[:, :, shuffle] = mixed
    taken = np.cumsum(found, axis=1, dtype=np.int32)
    found = np.clip(problem.room - (taken - found), 0, found).astype(np.int16)
    short = (found.sum(axis=2) < problem.least[order]) & ~pinned
    found[short] = 0
    result = np.empty_like(found)
    result[:, order] = found
    return result


def one_gpu_each(problem: Problem) -> Matrix:
    """Return the present allocation and, while room lasts, the least that each further app takes."""
    rows = problem.current.copy()
    free = problem.room - rows.sum(axis=0)
    for j in problem.order.tolist():
        least = int(problem.least[j])
        if not rows[j].any() and problem.caps[j] >= least and free.max() >= least:
            node = int(free.argmax())
            rows[j, node] = least
            free[node] -= least
    return rows


def unique(population: Matrix) -> Matrix:
    """Return the population without repetitions, in order of first appearance."""
    first = {matrix.tobytes(): at for at, matrix in reversed(list(enumerate(population)))}
    return population[sorted(first.values())]
