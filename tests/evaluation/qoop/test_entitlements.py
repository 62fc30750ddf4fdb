"""Weighted max-min fair shares and their rounding to whole cores."""

from math import ceil, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.query.shares import entitlements, whole_cores

names = st.text("abcdefgh", min_size=1, max_size=2)
weights = st.dictionaries(names, st.floats(0.1, 10), min_size=1, max_size=8)
limits = st.dictionaries(names, st.one_of(st.just(inf), st.floats(0, 50)), max_size=8)


def test_equal_queries_get_equal_shares() -> None:
    assert entitlements({"a": 1, "b": 1, "c": 1}, 12) == {"a": 4, "b": 4, "c": 4}


def test_weights_divide_the_total() -> None:
    assert entitlements({"a": 1, "b": 3}, 8) == {"a": 2, "b": 6}


def test_what_a_limited_query_leaves_goes_to_the_others_by_weight() -> None:
    given_out = entitlements({"a": 1, "b": 1, "c": 2}, 12, {"a": 1})
    assert given_out == pytest.approx({"a": 1, "b": 11 / 3, "c": 22 / 3})


def test_a_query_freed_of_its_limit_by_the_others_weight_is_filled_before_it() -> None:
    # b is above its limit only once a has left something
    assert entitlements({"a": 1, "b": 1, "c": 1}, 12, {"a": 2, "b": 4.5}) == {"a": 2, "b": 4.5, "c": 5.5}


def test_nobody_gets_more_than_can_be_used() -> None:
    assert entitlements({"a": 1, "b": 1}, 10, {"a": 2, "b": 3}) == {"a": 2, "b": 3}
    assert entitlements({}, 10) == {}


@pytest.mark.parametrize(
    ("weights_", "total", "limits_", "message"),
    [
        ({"a": 0.0}, 1.0, {}, "weight of a"),
        ({"a": inf}, 1.0, {}, "weight of a"),
        ({"a": 1.0}, -1.0, {}, "total must"),
        ({"a": 1.0}, inf, {}, "total must"),
        ({"a": 1.0}, 1.0, {"a": -0.5}, "limit of a"),
    ],
)
def test_impossible_inputs_are_named(
    weights_: dict[str, float], total: float, limits_: dict[str, float], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        entitlements(weights_, total, limits_)


@given(weights, st.floats(0, 100), limits)
def test_shares_sum_to_what_there_is_or_can_be_used(
    weights_: dict[str, float], total: float, limits_: dict[str, float]
) -> None:
    out = entitlements(weights_, total, limits_)
    usable = sum(limits_.get(q, inf) for q in weights_)
    assert sum(out.values()) == pytest.approx(min(total, usable), abs=1e-9)
    assert all(0 <= out[q] <= limits_.get(q, inf) for q in weights_)


@given(weights, st.floats(0.1, 100), limits)
def test_nobody_below_the_limit_has_less_per_weight_than_anybody(
    weights_: dict[str, float], total: float, limits_: dict[str, float]
) -> None:
    out = entitlements(weights_, total, limits_)
    level = {query: out[query] / weight for query, weight in weights_.items()}
    for query in weights_:
        if out[query] < limits_.get(query, inf) - 1e-9:
            assert all(level[query] >= other - 1e-6 for other in level.values())


def test_largest_remainders_are_rounded_up_and_ties_go_by_order() -> None:
    assert whole_cores({"a": 1.2, "b": 1.7, "c": 1.1}, 4) == {"a": 1, "b": 2, "c": 1}
    assert whole_cores({"a": 2.5, "b": 2.5}, 5) == {"a": 3, "b": 2}
    assert whole_cores({"b": 2.5, "a": 2.5}, 5) == {"b": 3, "a": 2}


def test_nobody_starves_while_there_is_a_core_for_each() -> None:
    assert whole_cores({"a": 3.9, "b": 0.05, "c": 0.05}, 4) == {"a": 2, "b": 1, "c": 1}


def test_with_too_few_cores_the_first_in_order_are_served() -> None:
    assert whole_cores({"a": 0.2, "b": 0.9, "c": 0.9}, 2) == {"a": 1, "b": 1, "c": 0}
    assert whole_cores({"c": 0.9, "a": 0.2, "b": 0.9}, 2) == {"c": 1, "a": 1, "b": 0}


def test_a_query_that_can_use_nothing_gets_nothing() -> None:
    assert whole_cores({"a": 0.0, "b": 3.0}, 3) == {"a": 0, "b": 3}
    assert whole_cores({"a": 0.0}, 3) == {"a": 0}


def test_impossible_cores_are_named() -> None:
    with pytest.raises(OptionError, match="total_cores"):
        whole_cores({"a": 1.0}, -1)
    with pytest.raises(OptionError, match="share of a"):
        whole_cores({"a": -1.0}, 1)


@given(weights, st.integers(0, 40), limits)
def test_whole_cores_sum_to_the_shares_starve_nobody_and_stay_within_one_of_them(
    weights_: dict[str, float], total: int, limits_: dict[str, float]
) -> None:
    shares = entitlements(weights_, total, limits_)
    out = whole_cores(shares, total)
    served = [q for q in shares if shares[q] > 0]
    if total >= len(served):
        assert all(out[q] >= 1 for q in served)
        assert sum(out.values()) == min(total, max(ceil(sum(shares.values()) - 1e-9), len(served)))
        # nobody exceeds the share by a whole core; what the starving were given comes from the largest
        assert all(out[q] <= ceil(shares[q] + 1e-9) or out[q] == 1 for q in served)
    else:
        assert sum(out.values()) == total
    assert all(out[q] == 0 for q in shares if shares[q] == 0)
