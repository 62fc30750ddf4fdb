"""Which nodes leave: by their order, and never the last copy of anything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import nodes, pool

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.scaling.scale_in import NodeUse, leaving, may_end, with_drains
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.fleet import Target

IDS = tuple("abcdef")


def use(busy: float = 0.0, *holds: str, work: float = 0.0) -> NodeUse:
    return NodeUse(busy, work, frozenset(holds))


def test_those_that_leave_anyway_go_first_then_idle_then_the_most_expensive_per_work() -> None:
    there = (*nodes("a", "b", "c", price=1.0), *nodes("d", "e", price=3.0), *nodes("f", price=1.0))
    uses = {
        "a": use(5.0),
        "b": use(0.0, work=1.0),
        "c": use(9.0),
        "d": use(0.0, work=2.0),  # 1.5 $ a unit
        "e": use(0.0, work=6.0),  # 0.5
        "f": use(2.0),
    }
    notices = [Notice("c", 100.0, "rebalance"), Notice("f", 100.0)]
    assert leaving(there, 6, uses, notices=notices).drain == ("f", "c", "d", "b", "e", "a")
    assert leaving(there, 2, uses, notices=notices, draining=["a"]).drain == ("f", "a")


def test_the_last_copy_stays_and_the_reason_names_it() -> None:
    uses = {"a": use(0.0, "x", "y"), "b": use(0.0, "x"), "c": use()}
    found = leaving(nodes("a", "b", "c"), 3, uses)
    assert found.drain == ("b", "c")
    assert found.kept == {"a": "it holds the last copy of y"}
    alone = leaving(nodes("a"), 1, uses)
    assert alone.kept == {"a": "it holds the last copy of x and of 1 more"}
    assert leaving(nodes("a", "b", "c"), 3, uses, elsewhere=["x", "y"]).drain == ("a", "b", "c")


def test_a_copy_on_a_node_that_is_interrupted_is_none() -> None:
    uses = {"a": use(0.0, "x"), "b": use(0.0, "x")}
    found = leaving(nodes("a", "b"), 2, uses, notices=[Notice("b", 60.0)])
    assert found.drain == ("b",)
    assert "last copy of x" in found.kept["a"]


def test_a_node_that_an_interruption_takes_counts_although_it_is_not_drained() -> None:
    uses = {"a": use(0.0, "x")}
    found = leaving(nodes("a", "b", "c"), 1, uses, notices=[Notice("a", 60.0)])
    assert (found.drain, found.anyway) == ((), 1)
    target = with_drains(
        Target("etl", 2, 0, "less", 0), pool(3), {"n00": use(0.0, "x")}, notices=[Notice("n00", 9.0)]
    )
    assert (target.nodes, target.drain) == (2, ())


def test_the_on_demand_base_stays() -> None:
    there = (*nodes("a", "b", market="on-demand"), *nodes("c"))
    found = leaving(there, 3, {}, on_demand=1)
    assert found.drain == ("a", "c")
    assert found.kept == {"b": "one of the 1 on-demand nodes that stay"}


def test_a_target_stays_larger_where_not_so_many_may_leave() -> None:
    uses = {"n00": use(0.0, "x"), "n01": use(0.0, "y"), "n02": use()}
    target = with_drains(Target("etl", 1, 4, "less"), pool(3), uses)
    assert (target.nodes, target.drain) == (2, ("n02",))
    assert "n00 is not drained: it holds the last copy of x" in target.reason
    grown = Target("etl", 5, 4, "more")
    assert with_drains(grown, pool(3), uses) is grown
    with pytest.raises(OptionError, match="pool other"):
        with_drains(Target("other", 1, 0, ""), pool(3), {})


def test_nodes_end_only_when_they_are_idle_and_what_they_hold_is_elsewhere() -> None:
    there = nodes("a", "b", "c", "d")
    uses = {"a": use(1.0), "b": use(0.0, "x"), "c": use(0.0, "x", "y"), "d": use(0.0, "y")}
    # b and c both leave, so x has no copy that stays; y has one on d
    assert may_end(["a", "b", "c"], there, uses) == ()
    assert may_end(["c"], there, uses) == ("c",)
    assert may_end(["a", "b", "c"], there, uses, elsewhere=["x"]) == ("b", "c")
    assert may_end(["gone"], there, uses) == ("gone",)


@given(
    st.lists(st.sampled_from(IDS), min_size=1, max_size=6, unique=True),
    st.data(),
    st.integers(0, 8),
    st.integers(0, 3),
)
def test_nothing_loses_its_last_copy_whatever_leaves(
    ids: list[str], data: st.DataObject, count: int, on_demand: int
) -> None:
    there = [
        Node(id_, 1, 1.0, price=data.draw(st.sampled_from([0.0, 1.0, 2.0])), market=market)
        for id_ in ids
        for market in [data.draw(st.sampled_from(["spot", "on-demand"]))]
    ]
    things = st.frozensets(st.sampled_from("xyz"), max_size=3)
    uses = {id_: NodeUse(data.draw(st.floats(0, 5)), 0.0, data.draw(things)) for id_ in ids}
    notices = [
        Notice(id_, 1.0, data.draw(st.sampled_from(["interruption", "rebalance"]))) for id_ in ids[::2]
    ]
    draining = ids[1::3]
    safe = data.draw(things)
    found = leaving(
        there, count, uses, notices=notices, draining=draining, elsewhere=safe, on_demand=on_demand
    )
    assert found == leaving(
        there[::-1],
        count,
        uses,
        notices=notices[::-1],
        draining=draining,
        elsewhere=safe,
        on_demand=on_demand,
    )
    assert len(found.drain) + found.anyway <= count
    assert len(set(found.drain)) == len(found.drain)
    firm = {notice.node_id for notice in notices if notice.kind == "interruption"}
    stay = [id_ for id_ in ids if id_ not in found.drain and id_ not in firm]
    kept = frozenset().union(safe, *(uses[id_].holds for id_ in stay))
    for id_ in found.drain:
        assert uses[id_].holds <= kept
    rented = sum(node.market == "on-demand" for node in there)
    left = sum(node.market == "on-demand" for node in there if node.id not in found.drain)
    assert left >= min(rented, on_demand)
    if not found.kept:
        assert len(found.drain) == min(count, len(ids))


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(OptionError, match="count"):
        leaving((), -1, {})
