"""Pollux's objective: power means, what a restart costs, speed-ups and limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Notice
from ebbflow.planners.model.scheduling import App, View
from ebbflow.planners.scheduling.goodput.objective import (
    Objective,
    most_gpus,
    power_mean,
    problem_of,
    reallocation_factor,
    speedups,
)
from tests.planners.scheduling.goodput_rounds import Table, cluster, concave, problems

speeds = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("values", "p", "expected"),
    [
        ([1, 2, 4], 1, 2.33333),
        ([1, 2, 4], -1, 1.71429),
        ([1, 2, 4], -10, 1.11601),
        ([1, 2, 4], 0, 2.0),
        ([0.5, 4], 1, 2.25),
        ([0.5, 4], -1, 0.88889),
        ([0, 4], -1, 0.0),
    ],
)
def test_power_means_of_the_worked_examples(values, p, expected):
    assert power_mean(values, p) == pytest.approx(expected, abs=1e-5)


@given(speeds, st.floats(-10, 10), st.floats(-10, 10))
def test_a_power_mean_lies_between_the_extremes_and_grows_with_p(values, one, other):
    low, high = sorted((one, other))
    assert min(values) * (1 - 1e-6) <= power_mean(values, low) <= max(values) * (1 + 1e-6)
    assert power_mean(values, low) <= power_mean(values, high) * (1 + 1e-6)


@given(speeds, st.floats(-10, 10), st.floats(1.0, 2.0))
def test_a_power_mean_grows_with_each_value(values, p, factor):
    more = [values[0] * factor, *values[1:]]
    assert power_mean(more, p) >= power_mean(values, p) * (1 - 1e-9)


def test_weights_count_like_repetitions():
    assert power_mean([1, 4], -1, [2, 1]) == pytest.approx(power_mean([1, 1, 4], -1))
    with pytest.raises(OptionError, match="power mean needs"):
        power_mean([1, 2], 1, [1])


@pytest.mark.parametrize(
    ("age", "restarts", "expected"),
    [(0, 0, 0), (60, 0, 0.66667), (600, 1, 0.90476), (600, 10, 0.47619), (3600, 8, 0.92562), (90, 3, 0)],
)
def test_what_a_restart_leaves(age, restarts, expected):
    assert reallocation_factor(age, restarts) == pytest.approx(expected, abs=1e-5)


@given(st.floats(0, 1e6), st.integers(0, 100), st.floats(0, 1e4))
def test_a_restart_costs_more_the_younger_and_the_more_often_moved(age, restarts, older):
    factor = reallocation_factor(age, restarts)
    assert 0 <= factor < 1
    assert reallocation_factor(age + older, restarts) >= factor
    assert reallocation_factor(age, restarts + 1) <= factor


def test_speedups_are_relative_to_the_fair_share_on_one_node():
    app = App("a", max_gpus=8, most_gpus=4, goodput=concave(0.5, 0.8))
    found = speedups(app, 8, 0, 4)
    assert found[0] == pytest.approx(np.sqrt(np.arange(9)) / 2)
    assert found[1, 2:] == pytest.approx(0.8 * np.sqrt(np.arange(2, 9)) / 2)
    app.goodput = None
    assert speedups(app, 8, 0, 4)[0] == pytest.approx(np.arange(9) / 4)


def test_a_fair_share_that_the_app_cannot_use_counts_as_the_best_it_can():
    few = Table((0.0, 1.0, 2.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0, 0.0))
    assert speedups(App("a", max_gpus=2, goodput=few), 2, 0, 4)[0].tolist() == [0.0, 0.5, 1.0]


def test_an_app_may_double_what_it_ever_held():
    assert most_gpus(App("a", max_gpus=64), 64) == 1
    assert most_gpus(App("a", max_gpus=64, most_gpus=4), 64) == 8
    assert most_gpus(App("a", max_gpus=6, most_gpus=4), 64) == 6
    assert most_gpus(App("a", max_gpus=64, most_gpus=48), 64) == 64
    assert most_gpus(App("a", min_gpus=4, max_gpus=8), 64) == 4
    assert most_gpus(App("a", max_gpus=64), 0) == 0


def round_of(*apps: App, capacity: Capacity | None = None, **options) -> tuple:
    view = View(600.0, apps, capacity or cluster(2, 4))
    return view, problem_of(view, Objective(**options))


def test_the_score_of_the_public_scheduler():
    """1 / mean(1 / (v + 0.001)), v = speed-up * nodes / GPUs, less for rows that change."""
    running = App("a", max_gpus=8, most_gpus=4, held=(("n00", 4),), restarts=1, goodput=concave(0.5))
    waiting = App("b", arrival=540.0, max_gpus=8)
    _, problem = round_of(running, waiting)
    rows = np.array([[4, 0], [0, 1]])
    v = np.array([1.0 * 2 / 8, 0.25 * 2 / 8 * 60 / 90])
    assert problem.fitness(rows) == pytest.approx(1 / np.mean(1 / (v + 1e-3)))
    moved = np.array([[0, 4], [1, 0]])
    v[0] *= 570 / 630
    assert problem.fitness(moved) == pytest.approx(1 / np.mean(1 / (v + 1e-3)))
    none = np.array([[4, 0], [0, 0]])
    assert problem.fitness(none) == pytest.approx(1 / np.mean([1 / 0.251, 1 / 1e-3]))


def test_nothing_is_charged_for_the_present_row():
    app = App("a", max_gpus=8, most_gpus=4, held=(("n00", 4),), restarts=19, goodput=concave(0.5))
    _, problem = round_of(app)
    kept, moved = problem.costs(np.array([[[4, 0]], [[0, 4]]]))
    assert problem.fitness(np.array([[4, 0]])) == pytest.approx(0.5**0.5 * 0.25 + 1e-3)
    assert kept[0] < moved[0]


def test_waiting_apps_can_start_free_of_charge():
    app = App("a", arrival=600.0, max_gpus=8)
    _, charged = round_of(app)
    _, free = round_of(app, charge_first_start=False)
    rows = np.array([[1, 0]])
    assert charged.fitness(rows) == pytest.approx(1e-3, rel=1e-3)
    assert free.fitness(rows) == pytest.approx(0.125 * 0.25 + 1e-3)


def test_a_node_that_left_is_not_charged_to_its_app():
    app = App("a", max_gpus=8, most_gpus=8, held=(("n00", 4), ("gone", 4)), restarts=19, goodput=concave(1.0))
    _, problem = round_of(app)
    assert problem.fitness(np.array([[0, 4]])) == pytest.approx(0.5 * 0.25 + 1e-3)


def test_nodes_about_to_leave_do_not_count():
    capacity = Capacity(0, cluster(2, 4).nodes, (Notice("n00", 700.0),))
    _, problem = round_of(App("a", max_gpus=8), capacity=capacity)
    assert problem.nodes == ("n01",)


def test_the_order_of_repairs_is_least_service_first():
    apps = [App("a", 0, 5.0, service=9.0), App("b", 1, 4.0, service=1.0), App("c", 2, 3.0, service=1.0)]
    _, problem = round_of(*apps)
    assert problem.order.tolist() == [2, 1, 0]


@given(problems())
def test_the_present_allocation_is_feasible_and_its_cost_the_kept_one(problem):
    assert problem.feasible(problem.current)
    assert problem.costs(problem.current) == pytest.approx(problem.kept)


def test_what_cannot_be_is_refused():
    with pytest.raises(OptionError, match="p must be finite"):
        Objective(p=float("inf"))
    with pytest.raises(OptionError, match="weight must be > 0; app a"):
        round_of(App("a", weight=0.0))
