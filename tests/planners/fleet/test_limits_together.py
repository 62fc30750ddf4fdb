"""Limits that two people have written: both hold."""

from dataclasses import fields
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.fleet.limits import Limits, PoolLimits, Quota

MOST = st.just(inf) | st.integers(1, 20).map(float)
POOLS = st.builds(
    lambda least, more, on_demand: PoolLimits(least, least + more, min(on_demand, least + more), inf),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(0, 3),
)
LIMITS = st.builds(
    Limits,
    MOST,
    MOST,
    MOST,
    MOST,
    MOST,
    st.dictionaries(st.sampled_from("abc"), POOLS, max_size=3),
    st.dictionaries(st.sampled_from("xy"), st.just(Quota(("a",), 3)), max_size=2),
)


@given(LIMITS, LIMITS)
def test_nothing_is_allowed_that_one_of_them_forbids(one: Limits, other: Limits) -> None:
    both = one.also(other)
    for field in fields(Limits)[:5]:
        assert getattr(both, field.name) == min(getattr(one, field.name), getattr(other, field.name))
    for name in {*one.pools, *other.pools}:
        found = both.pools[name]
        for limits in (one, other):
            given_ = limits.pools.get(name, PoolLimits())
            assert found.max_nodes <= given_.max_nodes
            assert found.max_on_demand_nodes <= given_.max_on_demand_nodes
        assert found.min_nodes <= found.max_nodes
        assert found.min_on_demand_nodes <= min(found.max_nodes, found.max_on_demand_nodes)
    assert set(both.teams) == {*one.teams, *other.teams}
    assert both.also(other) == both


def test_of_a_least_and_a_most_that_contradict_each_other_the_most_wins() -> None:
    one = Limits(pools={"gpu": PoolLimits(min_nodes=4, min_on_demand_nodes=2)})
    both = one.also(Limits(pools={"gpu": PoolLimits(max_nodes=3, max_on_demand_nodes=1)}))
    assert both.pools["gpu"] == PoolLimits(3, 3, 1, 1)
    assert one.also(Limits()) == one
