"""Both searches of Pollux: rules of an allocation, best results on small rounds, never worse than before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App, View
from ebbflow.planners.scheduling.goodput.genetic import (
    Genetic,
    Population,
    crossed,
    genetic_search,
    mutated,
    one_gpu_each,
    repair,
    unique,
)
from ebbflow.planners.scheduling.goodput.objective import Objective, problem_of
from ebbflow.planners.scheduling.goodput.search import SearchBudget, knapsack, local_search
from tests.planners.scheduling.goodput_rounds import cluster, concave, every_matrix, problems

SMALL = Genetic(population=20, generations=15)
seeds = st.integers(0, 2**32 - 1)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def total(problem, rows) -> float:
    return float(problem.costs(rows).sum())


@given(problems(), seeds)
def test_the_local_search_keeps_every_rule_and_its_bound(problem, seed):
    rows, bound = local_search(problem, generator(seed), SearchBudget(rounds=10))
    assert problem.feasible(rows)
    assert total(problem, rows) >= bound - 1e-9 * abs(bound)
    assert total(problem, rows) <= total(problem, problem.current) + 1e-9 * abs(bound)


@given(problems(), seeds)
def test_equal_generators_give_equal_allocations(problem, seed):
    one, other = (local_search(problem, generator(seed), SearchBudget(rounds=10))[0] for _ in range(2))
    assert (one == other).all()


@given(problems(most_apps=3, nodes=2, gpus=2), seeds)
def test_the_local_search_finds_the_best_of_all_allocations_of_a_small_round(problem, seed):
    best = problem.costs(every_matrix(problem)).sum(axis=1).min()
    rows, bound = local_search(problem, generator(seed))
    assert bound <= best + 1e-9 * abs(best)
    assert total(problem, rows) == pytest.approx(best, rel=1e-3)


@settings(max_examples=15, derandomize=True)
@given(problems(most_apps=3, nodes=2, gpus=2), seeds)
def test_the_genetic_search_does_too(problem, seed):
    best = problem.costs(every_matrix(problem)).sum(axis=1).min()
    rows, _, _ = genetic_search(problem, generator(seed), Genetic(population=60, generations=40))
    assert problem.feasible(rows)
    assert total(problem, rows) == pytest.approx(best, rel=1e-3)


@settings(max_examples=25, derandomize=True)
@given(problems(most_apps=8), seeds)
def test_the_local_search_is_no_worse_than_the_genetic_one(problem, seed):
    genetic, _, _ = genetic_search(problem, generator(seed), Genetic(population=40, generations=40))
    rows, _ = local_search(problem, generator(seed))
    # of some problems that were drawn the genetic search finds up to 1.4 % more
    assert total(problem, rows) <= total(problem, genetic) + 2e-2 * abs(total(problem, genetic))


@settings(max_examples=20)
@given(problems(), seeds)
def test_the_best_of_a_population_never_gets_worse(problem, seed):
    rows, population, trace = genetic_search(problem, generator(seed), SMALL)
    assert trace == sorted(trace)
    assert problem.feasible(rows)
    assert problem.fitness(rows) == pytest.approx(trace[-1], rel=1e-6)
    assert problem.fitness(rows) >= problem.fitness(problem.current) * (1 - 1e-9)
    assert len(population.matrices) <= SMALL.population


def arbitrary(problem, seed: int, count: int = 30) -> np.ndarray:
    shape = (count, *problem.current.shape)
    rng = generator(seed)
    return (rng.integers(0, 5, size=shape) * (rng.random(shape) < 0.5)).astype(np.int16)


@given(problems(), seeds)
def test_repair_makes_any_matrix_feasible(problem, seed):
    repaired = repair(problem, arbitrary(problem, seed), generator(seed))
    assert all(problem.feasible(matrix) for matrix in repaired)


@given(problems(), seeds)
def test_repair_leaves_feasible_matrices_alone(problem, seed):
    once = repair(problem, arbitrary(problem, seed), generator(seed))
    assert (repair(problem, once, generator(seed + 1)) == once).all()


@given(problems(), seeds)
def test_mutation_and_crossover_keep_entries_within_nodes(problem, seed):
    population = repair(problem, arbitrary(problem, seed), generator(seed))
    children = mutated(problem, crossed(population, generator(seed)), generator(seed))
    assert children.shape == population.shape
    assert (children >= 0).all()
    assert (children <= problem.room).all()


def test_crossover_takes_every_row_from_one_parent():
    parents = np.stack([np.full((6, 2), i, np.int16) for i in range(10)])
    children = crossed(parents, generator())
    for i in range(5):
        for child in (children[i], children[i + 5]):
            assert set(child[:, 0].tolist()) <= {i, i + 5}
    assert (children[:5] + children[5:] == np.arange(5)[:, None, None] * 2 + 5).all()


def pinned_round(**pinned):
    apps = [
        App("old", 0, 0.0, max_gpus=8, most_gpus=8, held=(("n00", 4), ("n01", 4)), goodput=concave(0.1)),
        App("new", 1, 100.0, max_gpus=8, most_gpus=8, goodput=concave(1.0)),
    ]
    return problem_of(View(3600.0, apps, cluster(2, 4)), Objective(), **pinned)


def test_pinned_apps_stay_where_they_are():
    free, fixed = pinned_round(), pinned_round(pinned=frozenset({"old"}))
    assert local_search(free, generator())[0][1].sum() > 0
    for rows in (local_search(fixed, generator())[0], genetic_search(fixed, generator(), SMALL)[0]):
        assert rows.tolist() == [[4, 4], [0, 0]]


def test_only_distributed_apps_make_way_for_distributed_apps():
    apps = [App(name, i, max_gpus=8, most_gpus=8) for i, name in enumerate("abc")]
    problem = problem_of(View(60.0, apps, cluster(2, 4)), Objective())
    matrix = np.array([[[1, 1], [1, 1], [1, 0]]], np.int16)
    assert repair(problem, matrix, generator())[0].tolist() == [[1, 1], [0, 0], [1, 0]]


def test_too_little_is_nothing():
    apps = [App("a", min_gpus=3, max_gpus=8, most_gpus=8)]
    problem = problem_of(View(60.0, apps, cluster(2, 4)), Objective())
    matrices = np.array([[[1, 1]], [[2, 1]]], np.int16)
    assert repair(problem, matrices, generator()).sum(axis=(1, 2)).tolist() == [0, 3]


def test_every_app_gets_a_gpu_first():
    apps = [App(str(i), i, max_gpus=8, service=float(-i)) for i in range(5)]
    problem = problem_of(View(60.0, apps, cluster(1, 4)), Objective())
    assert one_gpu_each(problem)[:, 0].tolist() == [0, 1, 1, 1, 1]


def test_a_population_is_carried_to_other_apps_and_nodes():
    before = Population(("a", "b"), ("n00", "n01"), np.arange(8, dtype=np.int16).reshape(2, 2, 2))
    apps = [App("b"), App("c")]
    problem = problem_of(View(60.0, apps, cluster(3, 9)), Objective())
    found = before.carried_to(problem)
    assert found[:, 0].tolist() == [[2, 3, 0], [6, 7, 0]]
    assert not found[:, 1].any()


def test_repetitions_are_dropped_in_order():
    matrices = np.array([[[1]], [[2]], [[1]], [[3]]], np.int16)
    assert unique(matrices)[:, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("bad", [{"population": 1}, {"generations": -1}, {"patience": 0}])
def test_a_search_without_size_is_refused(bad):
    with pytest.raises(OptionError, match="genetic search needs"):
        Genetic(**bad)


def knapsack_by_force(cost: np.ndarray, gpus: int) -> float:
    best = np.zeros(gpus + 1)
    for row in cost:
        best = np.array(
            [min(best[g - k] + row[k] for k in range(min(g + 1, len(row)))) for g in range(gpus + 1)]
        )
    return float(best[gpus])


@given(seeds, st.integers(1, 6), st.integers(0, 12), st.integers(1, 15))
def test_the_knapsack_is_exact(seed, apps, gpus, width):
    cost = generator(seed).random((apps, width))
    cost[generator(seed + 1).random(cost.shape) < 0.2] = np.inf
    cost[:, 0] = 1.0
    value, choice = knapsack(cost, gpus)
    assert value == pytest.approx(knapsack_by_force(cost, gpus))
    assert sum(choice) <= gpus
    assert sum(row[k] for row, k in zip(cost, choice, strict=True)) == pytest.approx(value)


def test_fragmented_gpus_are_brought_together():
    """Two apps of two GPUs on two nodes leave two and two; a third wants a whole node."""
    apps = [
        App("a", 0, 0.0, max_gpus=2, most_gpus=2, held=(("n00", 2),), goodput=concave(1.0, 0.01)),
        App("b", 1, 0.0, max_gpus=2, most_gpus=2, held=(("n01", 2),), goodput=concave(1.0, 0.01)),
        App("c", 2, 0.0, max_gpus=4, most_gpus=4, goodput=concave(1.0, 0.01)),
    ]
    problem = problem_of(View(36000.0, apps, cluster(2, 4)), Objective())
    rows, bound = local_search(problem, generator())
    assert sorted(rows[2].tolist()) == [0, 4]
    assert total(problem, rows) < bound * 1.01


def test_distributed_apps_share_by_whole_nodes():
    """GPU counts alone suggest 11, 11 and 10, which would need a node for two distributed apps."""
    curve = concave(0.9, 1.0, 32)
    apps = [App(n, i, 0.0, max_gpus=32, most_gpus=32, goodput=curve) for i, n in enumerate("abc")]
    apps[0].held = tuple((f"n{i:02}", 4) for i in range(8))
    problem = problem_of(View(1e7, apps, cluster(8, 4)), Objective())
    rows, bound = local_search(problem, generator())
    assert sorted(rows.sum(axis=1).tolist()) == [8, 12, 12]
    assert total(problem, rows) < bound * 1.05


def test_no_app_spreads_over_more_than_sixteen_nodes():
    app = App("a", max_gpus=64, most_gpus=32, goodput=concave(1.0, 1.0))
    problem = problem_of(View(1e6, [app], cluster(20, 2)), Objective())
    for rows in (local_search(problem, generator())[0], genetic_search(problem, generator(), SMALL)[0]):
        assert problem.feasible(rows)
        assert (rows > 0).sum() <= 16
    assert local_search(problem, generator())[0].sum() == 32
