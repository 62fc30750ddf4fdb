"""The abstract online planner: worked examples and the two theorems."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from tests.evaluation.qoop.competitive import (
    AbstractQEP,
    Mode,
    OnlineGreedyPlanner,
    copies_fitting,
    copies_time,
    filter_qeps,
    lower_bound_adversary,
    offline_copies_time,
)

THIN, THICK = AbstractQEP(1, 100), AbstractQEP(2, 2)
PAIR = (THIN, THICK)

# --- worked examples of the thesis, section 2.2 (QOOP, section 7) ----------------------------------------


def test_a_wrong_start_without_switching_does_a_hundred_units_of_work_instead_of_four() -> None:
    assert copies_time(THICK, [2, 2]) == 2
    assert THICK.work == 4
    assert copies_time(THIN, [2, 2]) == inf
    assert THIN.work == 100


def test_the_other_start_without_switching_stalls_for_ever() -> None:
    assert copies_time(THICK, [2] + [1] * 10_000) == inf


def test_switching_without_backtracking_alternates_for_ever() -> None:
    """One unit after a step on the thick plan, two after one on the thin plan; switching loses all."""
    left, allocation, steps, current = 0.0, 2.0, 0, None
    while steps < 1000:
        wanted = THICK if allocation >= THICK.a else THIN
        if wanted is not current:
            current, left = wanted, wanted.work
        left -= wanted.per_step(allocation)
        assert left > 0
        allocation, steps = (1.0 if wanted is THICK else 2.0), steps + 1
    # instead of switching back, finishing the thin plan takes about 100 steps and units more
    assert copies_time(THIN, [1] * 100) == 100


def test_with_backtracking_the_third_step_finishes_and_one_unit_is_wasted() -> None:
    planner = OnlineGreedyPlanner(PAIR)
    assert [planner.qeps[planner.step(a) or 0] for a in (2, 1, 2)] == [THICK, THIN, THICK]
    assert planner.done
    assert planner.remaining == [99, 0]


def test_two_units_then_one_for_ever_takes_101_steps_against_99_and_199() -> None:
    allocations = [2] + [1] * 300
    assert OnlineGreedyPlanner(PAIR).run(allocations) == 101
    assert copies_time(THIN, allocations) == 99
    assert offline_copies_time(PAIR, allocations, 1) == 99
    assert offline_copies_time(PAIR, allocations, 2) == 199


def test_the_filter_keeps_both_plans_of_the_example() -> None:
    assert filter_qeps(PAIR) == PAIR


def test_forced_onto_the_thin_plan_first_the_online_planner_never_finishes() -> None:
    planner = OnlineGreedyPlanner(PAIR)
    planner.step(2, plan=0)
    assert planner.run([2] + [0] * 1000) == inf
    assert offline_copies_time(PAIR, [2, 2] + [0] * 1000, 1) == 2


def test_forced_onto_the_thick_plan_first_the_online_planner_never_finishes() -> None:
    planner = OnlineGreedyPlanner(PAIR)
    planner.step(2, plan=1)
    assert planner.run([1] * 99 + [0] * 1000) == inf
    assert copies_time(THIN, [2] + [1] * 99 + [0] * 1000) == 99


# --- the filter and the model (QOOP, section 6) ------------------------------------------------------------

CHAIN = tuple(AbstractQEP(a, b) for a, b in ((1, 56), (2, 19), (4, 6), (7, 2), (8, 1)))


def test_the_filter_compares_with_the_last_retained_plan_not_the_neighbour() -> None:
    assert [q.work for q in CHAIN] == [56, 38, 24, 14, 8]
    assert filter_qeps(CHAIN) == (CHAIN[0], CHAIN[2], CHAIN[4])
    assert OnlineGreedyPlanner(CHAIN).run([16, 16]) == 1
    neighbour_rule = [CHAIN[0]]
    assert all(b.work > a.work / 2 for a, b in pairwise(CHAIN))
    assert OnlineGreedyPlanner(neighbour_rule).run([16, 16]) == inf
    assert copies_time(CHAIN[4], [16, 16], 4) == 2


def test_whole_tasks_break_the_factor_of_two_that_the_fluid_model_keeps() -> None:
    plans = [AbstractQEP(2, 300), AbstractQEP(3, 100), AbstractQEP(6, 25)]
    allocations = [6.0] * 24 + [2.0] * 100 + [4.0, 3.0] * 300
    assert OnlineGreedyPlanner(plans, "whole-task").run(allocations) == 323
    assert offline_copies_time(plans, allocations, 2, "whole-task") == 276
    assert offline_copies_time(plans, allocations, 2.5, "whole-task") == 326
    assert OnlineGreedyPlanner(plans).run(allocations) == 210
    assert offline_copies_time(plans, allocations, 2) == 255


def test_without_the_filter_greedy_is_far_from_the_optimum() -> None:
    """Ten plans of nearly equal work, and allocations that step down just before each completes."""
    plans = [AbstractQEP(i, (5040 - 12 * i) / i) for i in range(1, 11)]
    planner = OnlineGreedyPlanner(plans, filtered=False)
    allocations = []
    for allocation in range(10, 0, -1):
        while planner.remaining[allocation - 1] > allocation:
            planner.step(allocation)
            allocations.append(allocation)
    assert not planner.done
    assert copies_fitting(plans, allocations) == pytest.approx(9.9, abs=0.05)
    assert OnlineGreedyPlanner(plans).run(allocations) < inf


@pytest.mark.parametrize("demands", [[2, 1], [1, 1], [0, 1], []])
def test_plans_must_be_ordered_by_demand(demands: list[int]) -> None:
    with pytest.raises(OptionError, match="strictly increasing"):
        filter_qeps([AbstractQEP(a, 1) for a in demands])


# --- theorem 2.1 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "copies"), [(2, 1.492), (3, 1.744), (4, 1.872), (5, 1.936), (6, 1.968)])
def test_the_adversary_lets_the_optimum_fit_nearly_two_copies(m: int, copies: float) -> None:
    run = lower_bound_adversary(m)
    assert run.copies == pytest.approx(copies, abs=5e-4)
    assert run.copies < 2 - 2 ** -(m - 1)
    assert OnlineGreedyPlanner(run.qeps).run(run.allocations) == len(run.allocations)


@pytest.mark.parametrize("preferred", [0, 1, 2])
def test_no_preference_escapes_the_adversary(preferred: int) -> None:
    class Stubborn(OnlineGreedyPlanner):
        """Runs a preferred plan whenever it fits."""

        def choose(self, allocation: float) -> int | None:
            fits = self.qeps[preferred].a <= allocation
            return preferred if fits else super().choose(allocation)

    assert lower_bound_adversary(4, planner=Stubborn).copies >= 1.87


def test_the_adversary_refuses_a_planner_that_idles() -> None:
    class Idle(OnlineGreedyPlanner):
        def choose(self, allocation: float) -> int | None:
            return None

    with pytest.raises(OptionError, match="idles on 4 units"):
        lower_bound_adversary(2, planner=Idle)
    with pytest.raises(OptionError, match="m must be >= 1"):
        lower_bound_adversary(0)


# --- theorem 2.2 -------------------------------------------------------------------------------------------

allocations_ = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30)), min_size=1, max_size=25).map(
    lambda runs: [float(a) for a, times in runs for _ in range(times)]
)


@st.composite
def any_plans(draw: st.DrawFn) -> list[AbstractQEP]:
    demands = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6, unique=True).map(sorted))
    return [AbstractQEP(a, draw(st.integers(1, 60))) for a in demands]


@st.composite
def separated_plans(draw: st.DrawFn) -> list[AbstractQEP]:
    """Plans that each have at most half the work of the one before."""
    demands = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6, unique=True).map(sorted))
    plans, work = [], float(draw(st.integers(20, 600)))
    for a in demands:
        plans.append(AbstractQEP(a, work / a))
        work *= draw(st.floats(0.2, 0.499))
    return plans


@given(separated_plans(), allocations_)
def test_with_separated_plans_the_planner_is_two_competitive(
    plans: list[AbstractQEP], allocations: list[float]
) -> None:
    assert filter_qeps(plans) == tuple(plans)
    assert OnlineGreedyPlanner(plans).run(allocations) <= offline_copies_time(plans, allocations, 2)


@given(any_plans(), allocations_)
def test_with_any_plans_the_planner_is_four_competitive(
    plans: list[AbstractQEP], allocations: list[float]
) -> None:
    assert OnlineGreedyPlanner(plans).run(allocations) <= offline_copies_time(plans, allocations, 4)


@given(st.integers(1, 5), st.data())
def test_whole_tasks_in_powers_of_two_are_two_competitive(m: int, data: st.DataObject) -> None:
    scale = data.draw(st.sampled_from([1, 2, 4]))
    plans = [AbstractQEP(2**i, scale * 2 ** (2 * (m - i))) for i in range(m)]
    powers = st.tuples(st.sampled_from([0.0] + [2.0**i for i in range(m)]), st.integers(1, 40))
    runs = data.draw(st.lists(powers, max_size=25))
    allocations = [a for a, times in runs for _ in range(times)]
    online = OnlineGreedyPlanner(plans, "whole-task").run(allocations)
    assert online <= offline_copies_time(plans, allocations, 2, "whole-task")


@given(any_plans(), allocations_)
def test_adversarial_steps_downwards_keep_the_ratio_of_four(
    plans: list[AbstractQEP], allocations: list[float]
) -> None:
    """Starve whatever is about to finish: allocations fall just below its demand."""
    planner = OnlineGreedyPlanner(plans)
    played: list[float] = []
    for wanted in allocations:
        allocation = wanted
        chosen = planner.choose(allocation)
        while chosen is not None and chosen > 0 and planner.remaining[chosen] <= allocation:
            allocation = planner.qeps[chosen].a - 1
            chosen = planner.choose(allocation)
        planner.step(allocation)
        played.append(allocation)
        if planner.done:
            break
    if planner.done:
        assert len(played) <= offline_copies_time(plans, played, 4)
    else:
        assert copies_fitting(plans, played) < 4


@given(any_plans(), allocations_, st.sampled_from(["fluid", "whole-task"]))
def test_deciding_only_when_the_allocation_changes_changes_nothing(
    plans: list[AbstractQEP], allocations: list[float], mode: Mode
) -> None:
    lazy = OnlineGreedyPlanner(plans, mode).run_lazily(allocations)
    assert lazy == OnlineGreedyPlanner(plans, mode).run(allocations)


@given(any_plans())
def test_the_filter_halves_the_work_and_keeps_something_at_most_twice_as_costly(
    plans: list[AbstractQEP],
) -> None:
    kept = filter_qeps(plans)
    assert kept[0] == plans[0]
    assert all(b.work <= a.work / 2 for a, b in pairwise(kept))
    for qep in plans:
        assert any(k.a <= qep.a and k.work <= 2 * qep.work for k in kept)
