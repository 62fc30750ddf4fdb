"""Optimus on GPUs: gains, caps, budget, placement, and when it leaves a job alone."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.simulation.traces.cluster import gpu_node
from ebbflow.planners.errors import OptionError, PlanningError
from ebbflow.planners.model.capacity import Capacity, Notice
from ebbflow.planners.model.scheduling import App, View, gpus_of
from ebbflow.planners.scheduling.gangs.optimus import Optimus

RNG = np.random.default_rng(0)


class Times:
    """Seconds per iteration by number of GPUs."""

    def __init__(self, *times: float) -> None:
        self.times = times

    def iteration_time(self, gpus: int) -> float:
        return self.times[gpus - 1]


def app(id_: str, *times: float, remaining: float = 1.0, **fields) -> App:
    return App(id_, remaining=remaining, speed=Times(*times), max_gpus=len(times), **fields)


def decide(policy: Optimus, apps: list[App], *nodes: int, notices: tuple[Notice, ...] = ()):
    capacity = Capacity(1, tuple(gpu_node(f"n{at}", gpus) for at, gpus in enumerate(nodes)), notices)
    return policy.decide(View(0.0, apps, capacity), None, RNG).grants


def counts(grants) -> dict[str, int]:
    return {name: gpus_of(grant.placement) for name, grant in grants.items()}


def test_the_largest_gain_takes_the_next_gpu_and_the_first_of_equals():
    apps = [app("a", 10, 6, 5), app("b", 10, 5, 4.5), app("c", 10, 6, 5)]
    assert [counts(decide(Optimus(), apps, gpus)) for gpus in (4, 5, 6)] == [
        {"a": 1, "b": 2, "c": 1},
        {"a": 2, "b": 2, "c": 1},
        {"a": 2, "b": 2, "c": 2},
    ]


def test_remaining_iterations_weigh_gains():
    apps = [app("a", 10, 6, remaining=1), app("b", 1, 0.9, remaining=100)]
    assert counts(decide(Optimus(), apps, 3)) == {"a": 1, "b": 2}


def test_jobs_beyond_the_budget_get_nothing_and_are_told_why():
    grants = decide(Optimus(), [app(name, 2, 1) for name in "abc"], 2)
    assert counts(grants) == {"a": 1, "b": 1, "c": 0}
    assert "hold all GPUs" in grants["c"].reason


def test_a_gpu_that_does_not_help_is_never_looked_past_unless_asked_to():
    apps = [app("a", 10, 11, 4)]
    assert counts(decide(Optimus(), apps, 4)) == {"a": 1}
    assert counts(decide(Optimus(look_ahead=2), apps, 4)) == {"a": 3}


def test_jobs_whose_number_stays_keep_their_gpus_and_others_go_smallest_first():
    stays = app("stays", 5, 4, held=(("n1", 2),))
    small, large = app("small", 3), app("large", 9, 6, 4, held=(("n0", 1),))
    grants = decide(Optimus(), [large, stays, small], 4, 4)
    assert grants["stays"].placement == (("n1", 2),)
    assert grants["small"].placement == (("n0", 1),)
    assert grants["large"].placement == (("n0", 3),)


def test_a_node_with_a_notice_is_left():
    stays = app("a", 5, held=(("n0", 1),))
    assert decide(Optimus(), [stays], 1, 1, notices=(Notice("n0", 120.0),))["a"].placement == (("n1", 1),)


def test_a_resize_that_its_restart_eats_up_is_not_made():
    apps = [app("a", 10, 9.5, remaining=100, held=(("n0", 1),))]  # saves 50 s
    assert counts(decide(Optimus(restart_cost=30), apps, 2)) == {"a": 1}
    assert counts(decide(Optimus(restart_cost=20), apps, 2)) == {"a": 2}


def test_young_jobs_count_a_little_less():
    young = app("young", 10, 5, remaining=100)
    settled = app("settled", 10, 5.2, remaining=100, run_time=500.0)
    assert counts(decide(Optimus(), [young, settled], 3)) == {"young": 2, "settled": 1}
    assert counts(decide(Optimus(young_factor=0.95), [young, settled], 3)) == {"young": 1, "settled": 2}


def test_an_app_that_reports_no_speed_is_refused():
    with pytest.raises(PlanningError, match="speed of app a"):
        decide(Optimus(), [App("a")], 1)


@pytest.mark.parametrize(
    "options",
    [{"look_ahead": 0}, {"young_factor": 0}, {"young_factor": 2}, {"restart_cost": -1}, {"interval": 0}],
)
def test_bad_options_are_refused(options):
    with pytest.raises(OptionError):
        Optimus(**options)


convex = st.lists(st.floats(0.1, 100), min_size=1, max_size=4)


@given(st.lists(convex, min_size=1, max_size=3), st.integers(1, 7))
def test_with_shrinking_gains_the_sum_of_remaining_times_is_least(rows, budget):
    """Marginal gains are optimal for convex times, by exchange; checked against all allocations."""
    apps = []
    for at, drops in enumerate(rows):
        times = [1000.0]
        for drop in sorted(drops, reverse=True):
            times.append(times[-1] - drop)
        apps.append(app(str(at), *times))
    got = counts(decide(Optimus(), apps, budget))
    assert sum(got.values()) <= budget
    if budget < len(apps):
        assert [got[each.id] for each in apps] == [1] * budget + [0] * (len(apps) - budget)
        return

    def total(numbers) -> float:
        return sum(each.speed.iteration_time(gpus) for each, gpus in zip(apps, numbers, strict=True))

    options = product(*(range(1, each.max_gpus + 1) for each in apps))
    best = min(total(numbers) for numbers in options if sum(numbers) <= budget)
    assert total(got[each.id] for each in apps) == pytest.approx(best)
