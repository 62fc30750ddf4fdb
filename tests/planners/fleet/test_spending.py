"""What nodes have cost by EC2's rules, and what they will cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.spending import Cost, UsageInterval, bill, extremes, forecast, spent
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.prices import Series

PRICES = Series((0.0, 3600.0), (1.0, 3.0))
SPOT = Node("s", 4, 16.0, instance_type="m", zone="z", market="spot")
LISTED = Node("o", 4, 16.0, instance_type="m", zone="z", market="on-demand")


def prices(node: Node) -> Series:
    assert node.market == "spot"
    return PRICES


def listed(node: Node) -> float | None:
    return {"m": 5.0}.get(node.instance_type)


def dollars(*stays: UsageInterval, now: float = 36_000.0) -> float:
    return spent(stays, prices, listed, now).dollars


def test_spot_is_billed_by_the_second_at_the_price_of_the_moment() -> None:
    assert dollars(UsageInterval(SPOT, 1800.0, 5400.0)) == pytest.approx(0.5 + 1.5)
    assert dollars(UsageInterval(SPOT, 0.0, 61.0)) == pytest.approx(61 / 3600)
    cost = spent([UsageInterval(SPOT, 1800.0, 5400.0)], prices, listed, 9000.0)
    assert cost == Cost(pytest.approx(2.0), pytest.approx(5.0), pytest.approx(1.0), 0.0)
    assert cost.saved == pytest.approx(0.6)


def test_at_least_a_minute_is_billed() -> None:
    assert dollars(UsageInterval(SPOT, 0.0, 1.0)) == pytest.approx(60 / 3600)
    assert dollars(UsageInterval(LISTED, 0.0, 1.0)) == pytest.approx(5 * 60 / 3600)
    # a node that has just come: the minute is owed already
    assert dollars(UsageInterval(SPOT, 100.0), now=110.0) == pytest.approx(60 / 3600)
    assert dollars(UsageInterval(SPOT, 100.0), now=99.0) == 0.0


def test_interrupted_within_the_first_hour_is_free_ended_by_the_owner_is_not() -> None:
    free = spent([UsageInterval(SPOT, 0.0, 3599.0, interrupted=True)], prices, listed, 9000.0)
    assert (free.dollars, free.node_hours) == (0.0, 0.0)
    assert free.free_hours == pytest.approx(3599 / 3600)
    assert dollars(UsageInterval(SPOT, 0.0, 3599.0)) == pytest.approx(3599 / 3600)
    assert dollars(UsageInterval(SPOT, 0.0, 3600.0, interrupted=True)) == pytest.approx(1.0)
    assert dollars(UsageInterval(LISTED, 0.0, 1800.0, interrupted=True)) == pytest.approx(2.5)
    # it is not over yet: until then it is billed
    assert dollars(UsageInterval(SPOT, 0.0, 1800.0, interrupted=True), now=900.0) == pytest.approx(0.25)


def test_on_demand_costs_its_list_price_or_else_its_own() -> None:
    assert dollars(UsageInterval(LISTED, 0.0), now=7200.0) == pytest.approx(10.0)
    other = Node("o", 4, 16.0, instance_type="x", market="on-demand", price=2.0)
    cost = spent([UsageInterval(other, 0.0, 3600.0)], prices, listed, 7200.0)
    assert cost.dollars == pytest.approx(2.0)
    nameless = Node("o", 4, 16.0, instance_type="x", market="on-demand")
    with pytest.raises(OptionError, match="o: the on-demand price of x is not known"):
        spent([UsageInterval(nameless, 0.0, 3600.0)], prices, listed, 7200.0)


def test_an_unknown_list_price_makes_the_comparison_unknown_and_nothing_else() -> None:
    other = Node("s", 4, 16.0, instance_type="x", market="spot")
    cost = spent(
        [UsageInterval(SPOT, 0.0, 3600.0), UsageInterval(other, 0.0, 3600.0)], prices, listed, 7200.0
    )
    assert cost.dollars == pytest.approx(2.0)
    assert cost.list_dollars is None
    assert cost.saved is None


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000), st.booleans()), max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_what_jobs_pay_for_their_parts_is_what_the_pool_pays(
    spans: list[tuple[int, int, bool]], weights: list[int]
) -> None:
    stays = [UsageInterval(SPOT, float(a), float(a + b), taken) for a, b, taken in spans]
    whole = spent(stays, prices, listed, 20_000.0)
    total = Cost()
    for weight in weights:
        mine = [
            UsageInterval(one.node, one.start, one.end, one.interrupted, weight / sum(weights))
            for one in stays
        ]
        total = total.plus(spent(mine, prices, listed, 20_000.0))
    assert total.dollars == pytest.approx(whole.dollars)
    assert total.node_hours == pytest.approx(whole.node_hours)
    assert total.list_dollars == pytest.approx(whole.list_dollars)


@given(st.integers(0, 9000), st.integers(0, 9000), st.lists(st.integers(0, 30_000), min_size=2, max_size=2))
def test_time_makes_nothing_cheaper(start: int, seconds: int, moments: list[int]) -> None:
    stay = UsageInterval(SPOT, float(start), float(start + seconds))
    early, late = sorted(moments)
    assert dollars(stay, now=float(early)) <= dollars(stay, now=float(late)) + 1e-12


def test_what_is_to_come_costs_the_present_price_within_what_was_seen() -> None:
    # prices known for 2 h: 1 h at 1, 1 h at 3; any half hour lay between them
    found = forecast([UsageInterval(SPOT, 0.0)], prices, listed, 7200.0, 1800.0)
    assert (found.expected, found.least, found.most) == pytest.approx((1.5, 0.5, 1.5))
    assert found.list_dollars == pytest.approx(2.5)
    # no two hours were cheaper than the two that are known, on average 2, but 3 may last
    long = forecast([UsageInterval(SPOT, 0.0)], prices, listed, 7200.0, 7200.0)
    assert (long.expected, long.least, long.most) == pytest.approx((6.0, 4.0, 6.0))
    held = forecast([UsageInterval(LISTED, 0.0)], prices, listed, 7200.0, 7200.0)
    assert (held.expected, held.least, held.most) == pytest.approx((10.0, 10.0, 10.0))


def test_only_nodes_that_are_there_will_cost_anything() -> None:
    stays = [
        UsageInterval(SPOT, 0.0, 3600.0),
        UsageInterval(SPOT, 9000.0),
        UsageInterval(SPOT, 0.0, part=0.5),
    ]
    assert forecast(stays, prices, listed, 7200.0, 3600.0).expected == pytest.approx(1.5)
    with pytest.raises(OptionError, match="seconds must be >= 0; got -1"):
        forecast([], prices, listed, 0.0, -1.0)


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(1, 3000),
    st.integers(0, 3000),
)
def test_no_window_of_the_past_lies_outside_the_range(
    steps: list[tuple[int, int]], seconds: int, later: int
) -> None:
    times = np.cumsum([gap for gap, _ in steps]).astype(float)
    series = Series(tuple(times), tuple(price / 10 for _, price in steps))
    now = float(times[-1] + later)
    low, high = extremes(series, now, float(seconds))
    length = min(float(seconds), now - series.times[0])
    if length > 0:
        for at in np.linspace(series.times[0], now - length, 23):
            mean = series.mean(float(at), float(at) + length)
            assert low - 1e-9 <= mean <= high + 1e-9
    assert min(series.prices) - 1e-9 <= low <= series.at(now) <= high <= max(series.prices) + 1e-9


def test_a_constant_price_has_no_range() -> None:
    assert extremes(Series.constant(2.0), 100.0, 3600.0) == (2.0, 2.0)
    assert extremes(Series((0.0,), (2.0,)), 0.0, 3600.0) == (2.0, 2.0)


def test_a_bill_says_what_was_spent_what_will_be_and_what_on_demand_would_cost() -> None:
    found = bill([UsageInterval(SPOT, 0.0)], prices, listed, 7200.0, seconds=3600.0)
    assert found.dollars == pytest.approx(4.0 + 3.0)
    assert found.on_demand == pytest.approx(15.0)
    assert str(found) == (
        "$4.00 so far for 2 node-hours; $7.00 in all expected ($5.00 to $7.00 by past prices); $15.00 on-demand"
    )
    unknown = bill([UsageInterval(SPOT, 0.0)], prices, lambda _: None, 7200.0)
    assert unknown.on_demand is None
    assert str(unknown).endswith("on-demand prices are not known")


def test_stays_that_make_no_sense_are_refused() -> None:
    with pytest.raises(OptionError, match="s: end must not be before start"):
        UsageInterval(SPOT, 5.0, 4.0)
    with pytest.raises(OptionError, match=r"s: part must be 0 to 1; got 1\.5"):
        UsageInterval(SPOT, 5.0, part=1.5)
    with pytest.raises(OptionError, match="prices begin at 0"):
        spent([UsageInterval(SPOT, -5.0, 4.0)], prices, listed, 10.0)
