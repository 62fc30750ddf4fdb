"""Partial checkpoints: what is chosen, how much is written, how old it gets, and who adopts what is lost."""

from itertools import combinations
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.saving.partial import (
    CheckpointSchedule,
    PartialCheckpoints,
    PrioritySelection,
    RandomSelection,
    RoundRobinSelection,
    assign_lost_blocks,
    drain_or_recover,
    expected_rework,
    selection,
)
from ebbflow.planners.training.saving.rework import rework_after_recovery

RNG = np.random.default_rng(0)
strategies = st.sampled_from(["priority", "round", "random"])
fractions = st.sampled_from([1.0, 1 / 2, 1 / 4, 1 / 8])
amounts = st.floats(0.0, 100.0)


def saved_each_time(plan: PartialCheckpoints, iterations: int, seed: int = 0) -> list[list[int]]:
    """Return what ``plan`` saves in ``iterations``, with distances drawn anew each time."""
    rng = np.random.default_rng(seed)
    due = [i for i in range(1, iterations + 1) if plan.due(i)]
    return [plan.choose(i, rng.random(len(plan.sizes)), rng) for i in due]


def test_the_largest_distances_go_first_and_equal_ones_by_id() -> None:
    distances, sizes = [0.1, 0.9, 0.3, 0.9], [1.0] * 4
    assert PrioritySelection().select(distances, sizes, 2.0, RNG) == [1, 3]
    assert PrioritySelection().select(distances, sizes, 1.0, RNG) == [1]
    assert PrioritySelection().select([1.0, inf], [1.0, 1.0], 1.0, RNG) == [1]


def test_density_ranks_the_square_by_size() -> None:
    distances, sizes = [3.0, 2.0], [9.0, 1.0]
    assert PrioritySelection().select(distances, sizes, 1.0, RNG) == [0]
    assert PrioritySelection(density=True).select(distances, sizes, 1.0, RNG) == [1]


@given(st.lists(amounts, min_size=1, max_size=7), st.data())
def test_no_other_blocks_leave_less_unsaved(distances: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(distances)))
    chosen = PrioritySelection().select(distances, [2.0] * len(distances), 2.0 * count, RNG)
    assert len(chosen) == count
    total = sum(d**2 for d in distances)
    left = total - sum(distances[i] ** 2 for i in chosen)
    best = min(total - sum(distances[i] ** 2 for i in s) for s in combinations(range(len(distances)), count))
    assert left == pytest.approx(best, abs=1e-9)


@given(strategies, st.lists(st.floats(0.5, 50.0), min_size=1, max_size=30), st.floats(-5.0, 500.0))
def test_a_budget_is_kept_to_half_a_block(strategy: str, sizes: list[float], budget: float) -> None:
    rng = np.random.default_rng(1)
    chosen = selection(strategy).select(rng.random(len(sizes)), sizes, budget, rng)  # type: ignore[arg-type]
    assert len(set(chosen)) == len(chosen)
    if budget <= 0:
        assert chosen == []
        return
    spent = sum(sizes[i] for i in chosen)
    assert len(chosen) == 1 or spent - sizes[chosen[-1]] / 2 <= budget * (1 + 1e-9)
    assert chosen


@pytest.mark.parametrize(
    ("fraction", "interval", "each"), [(1.0, 8, 16), (0.5, 4, 8), (0.25, 2, 4), (0.125, 1, 2)]
)
def test_smaller_checkpoints_come_more_often(fraction: float, interval: int, each: int) -> None:
    schedule = CheckpointSchedule(8, fraction)
    assert schedule.interval == interval
    assert [i for i in range(17) if schedule.due(i)] == list(range(interval, 17, interval))
    plan = PartialCheckpoints(schedule, [4.0] * 16)
    assert {len(ids) for ids in saved_each_time(plan, 16)} == {each}


def test_an_uneven_interval_writes_the_same_volume() -> None:
    schedule = CheckpointSchedule(10, 1 / 8)
    assert schedule.interval == 1
    assert schedule.share == pytest.approx(0.1)


@given(strategies, fractions, st.lists(st.floats(1.0, 50.0), min_size=2, max_size=40), st.integers(1, 6))
def test_a_period_writes_everything_once_whatever_the_fraction(
    strategy: str, fraction: float, sizes: list[float], periods: int
) -> None:
    plan = PartialCheckpoints(CheckpointSchedule(16, fraction), sizes, selection(strategy), max_age=inf)  # type: ignore[arg-type]
    written = sum(sizes[i] for ids in saved_each_time(plan, 16 * periods) for i in ids)
    assert abs(written - periods * sum(sizes)) <= max(sizes) + 1e-6


@given(fractions, st.integers(1, 5), st.integers(0, 9))
def test_round_robin_saves_each_block_once_in_a_period(fraction: float, times: int, seed: int) -> None:
    plan = PartialCheckpoints(CheckpointSchedule(8, fraction), [1.0] * 8 * times, RoundRobinSelection())
    chosen = saved_each_time(plan, 16, seed)
    flat = [block for ids in chosen for block in ids]
    half = len(flat) // 2
    assert sorted(flat[:half]) == sorted(flat[half:]) == list(range(8 * times))
    assert flat[:half] == flat[half:]


@given(strategies, fractions, st.integers(0, 9))
def test_what_is_saved_never_grows_older(strategy: str, fraction: float, seed: int) -> None:
    plan = PartialCheckpoints(CheckpointSchedule(8, fraction), [1.0, 2.0, 5.0, 3.0], selection(strategy))  # type: ignore[arg-type]
    rng, before = np.random.default_rng(seed), plan.saved.copy()
    for iteration in range(1, 40):
        if plan.due(iteration):
            chosen = plan.choose(iteration, rng.random(4), rng)
            assert all(plan.saved[block] == iteration for block in chosen)
        assert (plan.saved >= before).all()
        assert set(plan.saved.tolist()) <= set(range(iteration + 1))
        before = plan.saved.copy()


@pytest.mark.parametrize(("fraction", "age"), [(1.0, 4.0), (0.5, 6.0), (0.25, 7.0), (0.125, 7.5)])
def test_blocks_chosen_at_random_are_older(fraction: float, age: float) -> None:
    schedule = CheckpointSchedule(8, fraction)
    assert schedule.mean_age("random") == age
    assert schedule.mean_age("round") == 4.0


@pytest.mark.parametrize("strategy", ["round", "random"])
@pytest.mark.parametrize("fraction", [1.0, 1 / 4, 1 / 8])
def test_ages_in_a_long_run_are_those_of_the_formula(strategy: str, fraction: float) -> None:
    schedule = CheckpointSchedule(16, fraction)
    plan = PartialCheckpoints(schedule, [1.0] * 32, selection(strategy), max_age=inf)  # type: ignore[arg-type]
    rng, ages = np.random.default_rng(2), []
    for iteration in range(1, 4001):
        # Half an iteration on average lies between the moment and the iteration before it.
        ages.append(iteration - 0.5 - plan.saved.mean())
        if plan.due(iteration):
            plan.choose(iteration, np.zeros(32), rng)
    expected = schedule.mean_age(strategy)  # type: ignore[arg-type]
    assert np.mean(ages[200:]) == pytest.approx(expected, rel=0.02)


def test_a_huge_block_is_paid_for_later() -> None:
    plan = PartialCheckpoints(CheckpointSchedule(8, 1 / 8), [70.0, 10.0, 10.0, 10.0])
    chosen = [plan.choose(i, [9.0, 3.0, 2.0, 1.0], RNG) for i in (1, 2, 3, 4, 5)]
    assert chosen == [[0], [], [], [], []]
    assert plan.debt == pytest.approx(70 - 5 * 12.5)
    assert plan.choose(6, [0.0, 3.0, 2.0, 1.0], RNG) == [1]


def test_blocks_that_hardly_change_are_saved_in_the_end() -> None:
    plan = PartialCheckpoints(CheckpointSchedule(4, 1 / 4), [1.0] * 4, max_age=10)
    chosen = {i: plan.choose(i, [3.0, 2.0, 1.0, 0.0], RNG) for i in range(1, 24)}
    late = {10: [1], 11: [2], 12: [3], 20: [1], 21: [2], 22: [3]}
    assert chosen == {i: late.get(i, [0]) for i in range(1, 24)}


def test_a_notice_saves_what_time_is_left_for_and_makes_no_debt() -> None:
    plan = PartialCheckpoints(CheckpointSchedule(16, 1 / 8), [1.0] * 16)
    assert plan.choose(3, range(16), RNG, budget=5.0) == [15, 14, 13, 12, 11]
    assert plan.debt == 0.0


def test_a_failed_write_makes_the_block_old_again() -> None:
    plan = PartialCheckpoints(CheckpointSchedule(4, 1 / 4), [1.0] * 4)
    assert plan.choose(1, [4.0, 3.0, 2.0, 1.0], RNG) == [0]
    assert plan.choose(2, [0.0, 3.0, 2.0, 1.0], RNG) == [1]
    plan.undo({0: 0})
    assert plan.saved.tolist() == [0, 2, 0, 0]


@given(strategies, fractions, st.integers(1, 30))
def test_a_restored_plan_goes_on_as_the_first_would_have(strategy: str, fraction: float, until: int) -> None:
    def fresh() -> PartialCheckpoints:
        schedule = CheckpointSchedule(8, fraction)
        return PartialCheckpoints(schedule, [3.0, 1.0, 4.0, 1.0, 5.0], selection(strategy))  # type: ignore[arg-type]

    first, second = fresh(), fresh()
    saved_each_time(first, until)
    second.restore(first.state())
    for iteration in range(until + 1, until + 20):
        if first.due(iteration):
            far = np.random.default_rng(iteration).random(5)
            choices = [
                plan.choose(iteration, far, np.random.default_rng(iteration)) for plan in (first, second)
            ]
            assert choices[0] == choices[1]
    assert first.state() == second.state()


def test_lost_blocks_go_to_the_least_loaded() -> None:
    assert assign_lost_blocks({7: 3.0, 8: 1.0, 9: 1.0}, {"a": 0.0, "b": 2.0}) == {7: "a", 8: "b", 9: "a"}
    assert assign_lost_blocks({4: 1.0}, {3: 5.0, 2: 5.0}) == {4: 2}
    assert assign_lost_blocks({}, {}) == {}
    with pytest.raises(OptionError, match="2 blocks are lost and no node survives"):
        assign_lost_blocks({1: 1.0, 2: 1.0}, {})


@given(st.dictionaries(st.integers(0, 99), st.floats(0.1, 10.0)), st.lists(amounts, min_size=1, max_size=6))
def test_no_survivor_gets_much_more_than_the_others(lost: dict[int, float], loads: list[float]) -> None:
    adopted = assign_lost_blocks(lost, dict(enumerate(loads)))
    assert set(adopted) == set(lost)
    after = list(loads)
    for block, node in adopted.items():
        after[node] += lost[block]
    for node in set(adopted.values()):
        smallest = min(lost[b] for b, n in adopted.items() if n == node)
        assert after[node] - smallest <= min(after) + 1e-9


def test_the_price_of_losses_is_the_hazard_times_the_mean_bound_of_a_period() -> None:
    schedule = CheckpointSchedule(4, 1 / 4)
    history = [9.0, 1.0, 2.0, 3.0, 4.0]
    bounds = [rework_after_recovery(0.9, 2.0, far, 0.5) for far in history[-4:]]
    price = expected_rework(0.01, schedule, history, contraction=0.9, error=2.0, lost=0.5)
    assert price == pytest.approx(0.01 * np.mean(bounds))
    assert expected_rework(0.01, schedule, history, contraction=0.9, error=2.0, lost=0.25) < price


def test_a_node_is_drained_when_that_is_cheaper_and_in_time() -> None:
    assert drain_or_recover(10.0, 0.5, drain=4.0, restore=2.0, notice=120.0) == "drain"
    assert drain_or_recover(1.0, 0.5, drain=4.0, restore=2.0, notice=120.0) == "recover"
    assert drain_or_recover(10.0, 0.5, drain=4.0, restore=2.0, notice=3.0) == "recover"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: CheckpointSchedule(0), "period must be >= 1 iteration; got 0"),
        (lambda: CheckpointSchedule(8, 0.0), "fraction must be above 0 and at most 1; got 0.0"),
        (lambda: CheckpointSchedule(8).mean_age("priority"), "known for round and random; got 'priority'"),  # type: ignore[arg-type]
        (lambda: selection("best"), "strategies are priority, round, random; got 'best'"),  # type: ignore[arg-type]
        (lambda: PartialCheckpoints(CheckpointSchedule(8), []), "there must be one at least"),
        (
            lambda: PartialCheckpoints(CheckpointSchedule(8), [1.0], max_age=4),
            "at least the period of 8 .*; got 4",
        ),
        (lambda: PrioritySelection().select([float("nan")], [1.0], 1.0, RNG), "no NaN"),
        (
            lambda: PrioritySelection().select([1.0], [1.0, 2.0], 1.0, RNG),
            r"one a block; got \(1,\) and \(2,\)",
        ),
        (lambda: RandomSelection().select([1.0], [0.0], 1.0, RNG), "sizes of blocks must be finite and > 0"),
        (
            lambda: RoundRobinSelection((0, 1)).select([1.0], [1.0], 1.0, RNG),
            "each of 1 blocks once; it has 2",
        ),
        (
            lambda: expected_rework(-1.0, CheckpointSchedule(8), [1.0], contraction=0.9, error=1.0),
            "hazard must be",
        ),
        (
            lambda: expected_rework(1.0, CheckpointSchedule(8), [], contraction=0.9, error=1.0),
            "one iteration at least",
        ),
    ],
)
def test_bad_values_are_named(call, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        call()
