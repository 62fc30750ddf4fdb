"""Volatility events and classes, and the profiles that they are counted on (QOOP, sections 5.9, 5.10, 10.5)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from tests.evaluation.qoop.profiles import PriceModel, Profile, shared, spot
from tests.evaluation.qoop.volatility import chain, events, regions, volatility, volatility_class

levels = st.lists(st.integers(0, 40).map(float), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("seen", "least", "count"),
    [
        ([10, 10, 10], 0.1, 0),
        ([10, 11], 0.1, 1),
        ([10, 10.9], 0.1, 0),
        ([10, 10.9, 11], 0.1, 1),  # a slow rise is one event
        ([10, 12, 10], 0.15, 2),  # the second is relative to 12
        ([10, 11, 12.1, 13.31], 0.1, 3),
        ([0, 1, 1], 0.1, 1),
        ([2, 0, 0, 3], 0.2, 2),
        ([20, 2, 4, 6, 8, 8], 0.2, 4),
    ],
)
def test_events_are_counted_from_the_end_of_the_one_before(
    seen: list[float], least: float, count: int
) -> None:
    assert events(seen, least) == count


def test_a_change_of_any_dimension_is_an_event() -> None:
    assert events([(10, 4), (10, 5), (10, 5), (12, 5)], 0.2) == 2


@pytest.mark.parametrize(
    ("to", "kind"),
    [(109.9, "low"), (110, "medium"), (120, "medium"), (120.1, "high"), (90, "medium"), (79, "high")],
)
def test_classes_at_their_borders(to: float, kind: str) -> None:
    assert volatility_class(volatility([100, 100, to])) == kind


def test_volatility_is_the_largest_change_of_any_later_level_over_an_earlier_one() -> None:
    assert volatility([10, 8, 12, 9]) == pytest.approx(0.5)
    assert volatility([10]) == 0
    assert volatility([0, 3]) == np.inf


@given(levels, st.sampled_from([0.1, 0.15, 0.2]))
def test_without_a_change_of_that_size_there_is_no_event_and_the_other_way_round(
    seen: list[float], least: float
) -> None:
    if volatility(seen) < least - 1e-6:
        assert events(seen, least) == 0
    if events(seen, least) > 0:
        assert volatility(seen) >= least - 1e-6


def test_regions_fall_into_the_class_of_what_they_show() -> None:
    flat, small, large = [100.0] * 30, [100.0, 115.0] * 15, [100.0, 150.0] * 15
    found = regions([Profile.every(60, flat), Profile.every(60, small), Profile.every(60, large)])
    assert {kind: len(rows) for kind, rows in found.items()} == {"low": 21, "medium": 21, "high": 21}
    joined = chain(np.random.default_rng(1), found["medium"], 25)
    assert joined.length == 30 * 60
    assert set(joined.levels) == {100.0, 115.0}
    with pytest.raises(OptionError, match="window"):
        regions([Profile.constant(5)])


def test_a_bidder_buys_two_a_minute_within_the_budget_and_loses_what_is_outbid() -> None:
    # 5 $/h buys 20 at 0.25; at 0.27 the bids of 0.2625 are lost and two are bought anew
    held = spot([0.25] * 12 + [0.27] + [0.26] * 2)
    assert [held.at(60 * m) for m in range(15)] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 20, 20, 2, 4, 6]
    assert max(spot([0.25] * 12, rule="sum-of-bids").levels) == 18  # 19 bids of 0.2625 sum to 4.99


@given(st.lists(st.floats(0.05, 0.6), min_size=1, max_size=40))
def test_no_instance_is_held_above_its_bid_or_beyond_the_budget_when_bought(trace: list[float]) -> None:
    held = spot(trace)
    for minute, price in enumerate(trace):
        before = held.at(60 * (minute - 1)) if minute else 0
        now = held.at(60 * minute)
        assert now <= before + 2
        if now > before:
            assert now * price <= 5 + 1e-9


def test_profiles_cut_join_and_sample() -> None:
    profile = Profile((0.0, 10.0, 20.0), (4.0, 2.0, 6.0), 30.0)
    assert profile.part(5, 10) == Profile((0.0, 5.0), (4.0, 2.0), 10.0)
    assert Profile.joined([profile.part(0, 10), profile.part(10, 20)]) == profile
    assert list(profile.sampled(10)) == [4, 2, 6]
    assert profile.mean == 4
    with pytest.raises(OptionError, match="increase"):
        Profile((0.0, 5.0, 5.0), (1.0, 2.0, 3.0), 9.0)


def test_prices_are_reproducible_and_reach_their_peak() -> None:
    model = PriceModel()
    trace = model.prices(np.random.default_rng(4))
    assert trace == model.prices(np.random.default_rng(4))
    assert max(trace) == pytest.approx(model.peak)
    assert trace.index(max(trace)) == pytest.approx(model.peak_at, abs=60)


def test_jobs_share_a_cluster_of_as_many_as_littles_law_says() -> None:
    found = shared(np.random.default_rng(2), np.array([1.0, 2.0, 3.0]), jobs=4000)
    active = 600 / np.array(found.profile.sampled(30))
    assert active.mean() == pytest.approx(25, rel=0.1)
    start, end = found.stays[3]
    assert found.seen_by(3)[0] == found.profile.at(start)
    assert end > start
