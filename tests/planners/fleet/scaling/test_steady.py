"""Hysteresis: growth at once, shrinking only after the wish has lasted, and no flapping whatever comes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.scaling.steady import StabilizationWindow, StabilizedTarget

PATIENCE = 600.0


def follow(
    steady: StabilizationWindow, wishes: list[tuple[float, int]], start: int = 4
) -> list[tuple[float, StabilizedTarget]]:
    """Return (time, held) after each wish."""
    held, found = StabilizedTarget(start), []
    for at, wanted in wishes:
        held = steady.settle(held, wanted, at)
        found.append((at, held))
    return found


def counts(found: list[tuple[float, StabilizedTarget]]) -> list[int]:
    return [held.nodes for _, held in found]


def test_growth_is_immediate_and_shrinking_waits_for_the_wish_to_last() -> None:
    wishes = [(0.0, 9), (60.0, 3), (300.0, 3), (659.0, 3), (660.0, 3), (700.0, 3)]
    assert counts(follow(StabilizationWindow(PATIENCE, hold=0.0), wishes)) == [9, 9, 9, 9, 3, 3]


def test_it_shrinks_to_the_highest_wish_of_the_window() -> None:
    wishes = [(0.0, 2), (100.0, 3), (200.0, 1), (599.0, 1), (600.0, 1), (799.0, 1), (800.0, 1), (1200.0, 1)]
    # at 600 s the wish for 3 that held from 100 to 200 s counts; from 800 s on it does not, but 600 s must pass anew
    assert counts(follow(StabilizationWindow(PATIENCE, hold=0.0), wishes)) == [4, 4, 4, 4, 3, 3, 3, 1]


def test_a_single_higher_wish_starts_the_wait_again() -> None:
    wishes = [(0.0, 1), (590.0, 4), (591.0, 1), (1190.0, 1), (1191.0, 1)]
    assert counts(follow(StabilizationWindow(PATIENCE, hold=0.0), wishes)) == [4, 4, 4, 4, 1]


def test_nothing_shrinks_within_the_hold_after_a_change() -> None:
    wishes = [(0.0, 8), (1.0, 2), (300.0, 2), (999.0, 2), (1000.0, 2)]
    assert counts(follow(StabilizationWindow(100.0, hold=1000.0), wishes)) == [8, 8, 8, 8, 2]


def test_growth_may_be_slowed_and_small_wishes_ignored() -> None:
    slow = StabilizationWindow(PATIENCE, between_growths=50.0)
    assert counts(follow(slow, [(0.0, 5), (10.0, 6), (50.0, 7)])) == [5, 5, 7]
    lax = StabilizationWindow(0.0, hold=0.0, tolerance=0.25)
    assert counts(follow(lax, [(0.0, 3), (10.0, 3), (20.0, 2)])) == [4, 4, 2]


@given(
    st.integers(1, 50),
    st.integers(0, 50),
    st.lists(st.tuples(st.floats(0.0, 250.0), st.floats(0.0, 1.0)), min_size=1, max_size=60),
)
def test_a_bounded_oscillation_that_returns_in_time_never_shrinks_the_fleet(
    high: int, low: int, steps: list[tuple[float, float]]
) -> None:
    low = min(low, high)
    wishes, now = [(0.0, high)], 0.0
    for number, (gap, share) in enumerate(steps):
        now += gap  # every second wish is the peak: it returns within 500 s, less than the patience
        wishes.append((now, high if number % 2 else low + round(share * (high - low))))
    held = counts(follow(StabilizationWindow(PATIENCE), wishes, start=low))
    assert set(held) == {high}


@given(
    st.integers(4, 100),
    st.floats(0.01, 0.5),
    st.lists(st.tuples(st.floats(0.0, 5000.0), st.floats(0.0, 1.0)), min_size=1, max_size=60),
)
def test_an_oscillation_within_the_tolerance_settles_for_good(
    top: int, tolerance: float, steps: list[tuple[float, float]]
) -> None:
    bottom = top - int(tolerance * top)
    now, wishes = 0.0, [(0.0, bottom)]
    for gap, share in steps:
        now += gap
        wishes.append((now, bottom + round(share * (top - bottom))))
    held = counts(follow(StabilizationWindow(PATIENCE, tolerance=tolerance), wishes, start=bottom))
    assert all(before <= after for before, after in pairwise(held))
    assert len(set(held)) <= top - bottom + 1


@given(
    st.lists(st.tuples(st.floats(0.0, 400.0), st.integers(0, 30)), min_size=1, max_size=80),
    st.floats(0.0, 1000.0),
    st.floats(0.0, 1000.0),
    st.integers(0, 30),
)
def test_whatever_is_wished_for_it_does_not_flap(
    steps: list[tuple[float, int]], patience: float, hold: float, start: int
) -> None:
    now, wishes = 0.0, []
    for gap, wanted in steps:
        now += gap
        wishes.append((now, wanted))
    steady = StabilizationWindow(patience, hold)
    found = follow(steady, wishes, start)
    changed = -1e9
    before = start
    for number, (at, held) in enumerate(found):
        wanted = wishes[number][1]
        assert held.nodes >= wanted  # growth at once, so that no wish is left open
        assert held.reason
        if held.nodes < before:
            assert at - changed >= hold
            # every wish that held at some time of the window is at most what is kept
            window = [
                wish
                for here, (_, wish) in enumerate(wishes[: number + 1])
                if here == number or at - wishes[here + 1][0] < patience
            ]
            assert held.nodes == max(window)
        if held.nodes > before:
            assert held.nodes == wanted
        if held.nodes != before:
            changed = at
        before = held.nodes
    shrinks = sum(after < prior for prior, after in pairwise([start, *counts(found)]))
    if patience > 0:
        assert shrinks <= 1 + now / patience


def test_equal_wishes_give_equal_decisions() -> None:
    wishes = [(float(at * 70), (at * 7) % 11) for at in range(100)]
    assert follow(StabilizationWindow(), wishes) == follow(StabilizationWindow(), wishes)
    # what must be kept does not grow with the run
    assert max(len(held.wishes) for _, held in follow(StabilizationWindow(), wishes)) <= 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: StabilizationWindow(window=-1.0),
        lambda: StabilizationWindow(hold=float("inf")),
        lambda: StabilizationWindow(tolerance=1.0),
        lambda: StabilizationWindow().settle(StabilizedTarget(1), -1, 0.0),
        lambda: StabilizationWindow().settle(
            StabilizationWindow().settle(StabilizedTarget(1), 1, 10.0), 1, 9.0
        ),
    ],
)
def test_bad_numbers_are_refused(make: object) -> None:
    with pytest.raises(OptionError):
        make()  # type: ignore[operator]
