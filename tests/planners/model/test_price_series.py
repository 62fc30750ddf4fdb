"""Prices over time: what a stay costs by them, and that pieces put together are the whole."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.prices import Machine, Series, offers_of

STEPS = Series((0.0, 1800.0, 5400.0), (1.0, 3.0, 2.0))


@st.composite
def histories(draw: st.DrawFn) -> Series:
    times = draw(st.lists(st.integers(0, 10_000), min_size=1, max_size=12, unique=True))
    prices = draw(st.lists(st.integers(1, 50), min_size=len(times), max_size=len(times)))
    return Series(tuple(map(float, sorted(times))), tuple(price / 10 for price in prices))


def test_a_stay_costs_each_price_for_as_long_as_it_held() -> None:
    assert STEPS.dollars(0.0, 7200.0) == pytest.approx(0.5 * 1 + 1.0 * 3 + 0.5 * 2)
    assert STEPS.dollars(900.0, 2700.0) == pytest.approx(0.25 * 1 + 0.25 * 3)
    assert STEPS.mean(900.0, 2700.0) == pytest.approx(2.0)
    assert STEPS.dollars(6000.0, 9600.0) == pytest.approx(2.0)
    assert STEPS.dollars(100.0, 100.0) == STEPS.dollars(100.0, 50.0) == 0.0
    assert Series.constant(4.0).dollars(-7200.0, 0.0) == 8.0


def test_a_stay_before_the_first_price_has_no_cost_that_is_known() -> None:
    with pytest.raises(OptionError, match="prices begin at 0; asked for -1 to 5"):
        STEPS.dollars(-1.0, 5.0)
    with pytest.raises(OptionError, match="prices begin at 0; asked for 0 to inf"):
        STEPS.dollars(0.0, inf)
    with pytest.raises(OptionError, match="prices are none"):
        Series((), ()).dollars(0.0, 1.0)


@given(histories(), st.lists(st.integers(0, 20_000), min_size=3, max_size=3))
def test_two_halves_cost_as_much_as_the_whole(series: Series, moments: list[int]) -> None:
    first = series.times[0]
    start, middle, end = (first + moment for moment in sorted(moments))
    parts = series.dollars(start, middle) + series.dollars(middle, end)
    assert parts == pytest.approx(series.dollars(start, end))
    # added up second by second
    inside = [start, *(time for time in series.times if start < time < end), end]
    slow = sum(series.at(a) * (b - a) / 3600 for a, b in pairwise(inside))
    assert series.dollars(start, end) == pytest.approx(slow)


@given(histories(), st.lists(st.integers(-100, 11_000), max_size=4))
def test_windows_that_meet_give_the_history_back(series: Series, cuts: list[int]) -> None:
    edges = [-200.0, *map(float, sorted(cuts)), 12_000.0]
    found = Series((), ())
    for start, end in pairwise(edges):
        # a price that held at the start is told with every window
        found = found.joined(series.between(start, end))
    assert [found.at(time) for time in series.times] == list(series.prices)
    assert set(found.times) <= set(series.times)
    assert all(a != b for a, b in pairwise(found.prices))


def test_the_newer_word_about_a_moment_counts() -> None:
    assert STEPS.joined(Series((1800.0, 9000.0), (4.0, 5.0))) == Series(
        (0.0, 1800.0, 5400.0, 9000.0), (1.0, 4.0, 2.0, 5.0)
    )


def test_offers_have_what_is_known_of_prices_and_no_more() -> None:
    machines = [Machine("b", 4, 16.0, on_demand=1.0), Machine("a", 2, 8.0, gpus=1)]
    found = offers_of(machines, {"a": ["z2", "z1"], "b": ["z1"]}, {("z1", "a"): 0.3, ("z9", "b"): 0.1})
    assert [(one.instance_type, one.zone, one.market, one.price) for one in found] == [
        ("a", "z1", "spot", 0.3),
        ("b", "z1", "on-demand", 1.0),
    ]
    assert (found[0].cores, found[0].memory, found[0].gpus, found[0].interruptions) == (2, 8.0, 1, 0.0)
