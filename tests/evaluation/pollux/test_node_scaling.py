"""The policy that rents nodes for one job, and Pollux without interference avoidance."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.planners.errors import PlanningError
from ebbflow.planners.model.scheduling import App, View, gpus_of
from ebbflow.planners.scheduling.goodput.genetic import Genetic, genetic_search
from ebbflow.planners.scheduling.goodput.objective import Objective, Problem, problem_of
from ebbflow.planners.scheduling.goodput.search import local_search
from tests.evaluation.pollux.node_scaling import NodeScaling
from tests.planners.scheduling.goodput_rounds import cluster, concave, problems

RNG = np.random.default_rng(0)


def app(held: int = 0, power: float = 0.95) -> App:
    placement = tuple((f"n{at:02}", 4) for at in range(held))
    return App("job", max_gpus=64, held=placement, goodput=concave(power, 1.0))


def test_it_starts_on_one_node_and_grows_by_no_more_than_it_explores() -> None:
    first = replace(app(), goodput=None)
    decision = NodeScaling().decide(View(0.0, [first], cluster(16, 4)), None, RNG)
    assert gpus_of(decision.grants["job"].placement) == 4
    grown = NodeScaling().decide(View(60.0, [app(1)], cluster(16, 4)), None, RNG)
    assert gpus_of(grown.grants["job"].placement) == 8
    free = NodeScaling(explore=16).decide(View(60.0, [app(1)], cluster(16, 4)), None, RNG)
    assert gpus_of(free.grants["job"].placement) == 64


def test_it_keeps_its_nodes_where_another_does_not_pay() -> None:
    held = app(3, power=0.3)
    decision = NodeScaling().decide(View(60.0, [held], cluster(16, 4)), None, RNG)
    assert decision.grants["job"].placement is held.held


def test_it_serves_one_job() -> None:
    with pytest.raises(PlanningError, match="one job"):
        NodeScaling().decide(View(0.0, [app(), replace(app(), id="b")], cluster(2, 4)), None, RNG)


def _beside(rows: np.ndarray) -> int:
    """Return the most apps on several nodes that share one."""
    spread = (rows > 0).sum(axis=1) > 1
    return int((rows[spread] > 0).sum(axis=0).max(initial=0))


def test_without_avoidance_spread_apps_share_a_node_and_the_fitness_is_higher() -> None:
    apps = [
        App(f"a{j}", number=j, arrival=-1000.0, max_gpus=12, most_gpus=6, goodput=concave(0.95, 0.99))
        for j in range(2)
    ]
    view = View(0.0, apps, cluster(3, 4))
    found = {}
    for avoid in (True, False):
        problem = problem_of(view, Objective(avoid_interference=avoid))
        rows, _ = local_search(problem, np.random.default_rng(1))
        assert problem.feasible(rows)
        found[avoid] = float(problem.fitness(rows)), rows
        genetic, _, _ = genetic_search(
            problem, np.random.default_rng(1), Genetic(population=40, generations=40)
        )
        assert problem.feasible(genetic)
    assert _beside(found[True][1]) <= 1
    assert _beside(found[False][1]) == 2
    assert found[False][0] > found[True][0]


@settings(max_examples=30, deadline=None)
@given(problems(), st.integers(0, 5))
def test_what_avoids_is_feasible_for_what_does_not(problem: Problem, seed: int) -> None:
    free = replace(problem, objective=Objective(avoid_interference=False))
    rows, _ = local_search(problem, np.random.default_rng(seed))
    assert problem.feasible(rows)
    assert free.feasible(rows)
    others, bound = local_search(free, np.random.default_rng(seed))
    assert free.feasible(others)
    assert float(free.costs(others).sum()) >= bound - 1e-9 * abs(bound)
