"""How many aggregators trainings need, and who pays them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.aggregation.demand import (
    AggregationDemand,
    RunDemand,
    ServingNode,
    aggregators_needed,
    shares,
)
from ebbflow.planners.errors import OptionError


def serving(name: str, tensors: int = 1, **use: float) -> ServingNode:
    return ServingNode(name, f"node-{name}", tensors, use=use)


def test_a_training_that_arrives_needs_as_many_as_it_begins_on_and_shares_them() -> None:
    demand = AggregationDemand((RunDemand("a", 2), RunDemand("b", 3)))
    found = aggregators_needed(demand)
    assert (found.count, found.reason, found.run) == (3, "b begins on 3 aggregators", "b")


def test_placed_trainings_need_the_aggregators_that_have_tensors() -> None:
    runs = (RunDemand("a", 2, placed=True), RunDemand("b", 3, placed=True))
    demand = AggregationDemand(runs, (serving("x"), serving("y"), serving("z", 0)))
    assert aggregators_needed(demand).count == 2
    assert aggregators_needed(demand, leaving=["node-y"]).count == 1, "its tensors go to others"


def test_nobody_needs_none_and_a_placed_training_one_at_least() -> None:
    assert aggregators_needed(AggregationDemand(nodes=(serving("x"),))).count == 0
    alone = AggregationDemand((RunDemand("a", 2, placed=True),))
    assert aggregators_needed(alone).count == 1
    assert aggregators_needed(alone, without=["a"]).count == 0, "it has no GPUs"


def test_one_lacking_aggregator_is_tolerated_for_a_period_and_two_are_not() -> None:
    def need(lacking: int, lacked_s: float) -> int:
        demand = AggregationDemand((RunDemand("a", 3, True, lacking),), (serving("x"),))
        return aggregators_needed(demand, lacked_s=lacked_s, patience_s=60.0).count

    assert need(1, 59.0) == 1
    assert need(1, 60.0) == 2
    assert need(2, 0.0) == 3


def test_a_training_about_to_get_its_gpus_counts_before_it_has_come() -> None:
    assert aggregators_needed(AggregationDemand(), [RunDemand("a", 2)]).count == 2


def test_nodes_are_paid_as_they_are_used_and_idle_ones_by_all() -> None:
    demand = AggregationDemand(
        nodes=(serving("x", a=3.0, b=1.0), serving("y", b=4.0), serving("z", 0)),
    )
    costs = {"node-x": 0.8, "node-y": 0.5, "node-z": 0.8}
    found = shares(demand, costs)
    assert found == pytest.approx({"a": 0.6 + 0.3, "b": 0.2 + 0.5 + 0.5})
    assert shares(AggregationDemand(), {"node-x": 1.0}) == {"": 1.0}


uses = st.dictionaries(st.sampled_from("abc"), st.floats(0.0, 10.0), max_size=3)
nodes = st.lists(uses, max_size=4).map(
    lambda found: tuple(ServingNode(f"x{i}", f"n{i}", len(use), use=use) for i, use in enumerate(found))
)


@given(nodes, st.dictionaries(st.sampled_from(["n0", "n1", "n2", "n9"]), st.floats(0.0, 100.0)))
def test_all_that_nodes_cost_is_paid_and_nobody_pays_who_uses_none(
    found: tuple[ServingNode, ...], costs: dict[str, float]
) -> None:
    paid = shares(AggregationDemand(nodes=found), costs)
    assert sum(paid.values()) == pytest.approx(sum(costs.values()))
    users = {run for one in found for run, amount in one.use.items() if amount > 0}
    assert set(paid) <= users | {""}
    assert not users or "" not in paid


runs = st.builds(RunDemand, st.sampled_from("abcd"), st.integers(1, 5), st.booleans(), st.integers(0, 3))


@given(st.lists(runs, max_size=4, unique_by=lambda one: one.run), nodes, st.floats(0, 200), st.integers(0, 3))
def test_the_need_grows_with_lacking_ones_and_ends_with_the_last_training(
    some: list[RunDemand], found: tuple[ServingNode, ...], lacked_s: float, threshold: int
) -> None:
    def need(of: list[RunDemand], lacked: float) -> int:
        demand = AggregationDemand(tuple(of), found)
        return aggregators_needed(demand, lacked_s=lacked, patience_s=100.0, threshold=threshold).count

    now = need(some, lacked_s)
    assert now <= need(some, 200.0)
    assert (now == 0) == (not some)
    begins = max((one.servers for one in some if not one.placed), default=0)
    used = sum(1 for one in found if one.tensors)
    assert max(begins, used if some else 0) <= now
    assert now <= max(begins, max(used, 1) + sum(one.lacking for one in some))


def test_a_training_without_aggregators_and_a_negative_cost_are_refused() -> None:
    with pytest.raises(OptionError, match="at least 1 aggregator"):
        RunDemand("a", 0)
    with pytest.raises(OptionError, match="at least 0 dollars"):
        shares(AggregationDemand(), {"n": -1.0})
