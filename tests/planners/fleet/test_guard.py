"""What no target may break: money, floors and ceilings, quotas, last copies, deadlines, revisions and steps."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.guard import GuardResult, NewNode, RunMoney, check, closed, open_nodes
from ebbflow.planners.fleet.limits import Limits, PoolLimits, Quota
from ebbflow.planners.fleet.scaling.scale_in import NodeUse
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.fleet import Fleet, PoolState, Target

NEW = {"etl": NewNode(0.5, 2.0), "gpu": NewNode(1.0, 4.0, gpus=4)}


def node(id_: str, price: float = 0.5, market: str = "spot", gpus: int = 0) -> Node:
    return Node(id_, 4, 16.0, market=market, price=price, gpus=gpus)  # type: ignore[arg-type]


def pool(name: str = "etl", count: int = 4, **options: Any) -> PoolState:
    nodes = options.pop("nodes", tuple(node(f"{name}-{at}") for at in range(count)))
    return PoolState(
        name, **{"planned": len(nodes), "requested": len(nodes), "max_nodes": 100, "nodes": nodes, **options}
    )


def fleet(*pools: PoolState, notices: tuple[Notice, ...] = (), revision: int = 7) -> Fleet:
    return Fleet(revision, 1000.0, tuple(sorted(pools or (pool(),), key=lambda one: one.name)), notices)


def want(nodes: int, name: str = "etl", **options: Any) -> Target:
    return Target(name, nodes, options.pop("revision", 7), "wanted", **options)


def passed(verdict: GuardResult) -> Target:
    assert verdict.target is not None
    return verdict.target


def size(verdict: GuardResult) -> tuple[int, int, tuple[str, ...]]:
    found = passed(verdict)
    return found.nodes, found.on_demand, found.drain


# --- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (want(5, revision=6), "decided for revision 6; the fleet is at revision 7"),
        (want(5, revision=8), "decided for revision 8; the fleet is at revision 7"),
        (want(5, "cpu"), "no pool 'cpu'; pools: etl"),
        (want(-1), "got 0 on-demand of -1 nodes"),
        (want(2, on_demand=3), "got 3 on-demand of 2 nodes"),
    ],
)
def test_stale_and_senseless_targets_are_refused(target: Target, said: str) -> None:
    verdict = check(target, fleet(), Limits())
    assert verdict.target is None
    assert verdict.changed
    assert said in verdict.reasons[0]


def test_what_breaks_no_rule_passes_as_it_is() -> None:
    target = want(3, drain=("etl-2",))
    assert check(target, fleet(), Limits()) == GuardResult(target, False)


# --- nodes -------------------------------------------------------------------------------------------------------


def test_growth_and_loss_of_one_decision_are_bounded() -> None:
    limits = Limits(grow=3, shrink=2)
    assert size(check(want(20), fleet(), limits)) == (7, 0, ())
    names = tuple(f"etl-{at}" for at in range(4))
    verdict = check(want(0, drain=names), fleet(), limits)
    assert size(verdict) == (2, 0, ("etl-0", "etl-1"))
    assert "2 nodes instead of 0: one decision terminates at most 2 nodes" in verdict.reasons
    # an exchange of nodes is bounded as well
    assert size(check(want(4, drain=names), fleet(), limits)) == (4, 0, ("etl-0", "etl-1"))


def test_requests_that_have_not_arrived_are_no_loss() -> None:
    waiting = fleet(pool(planned=30))
    assert size(check(want(4), waiting, Limits(shrink=2))) == (4, 0, ())


def test_floors_of_the_pool_and_of_the_limits() -> None:
    drain = ("etl-0", "etl-1", "etl-2")
    assert size(check(want(1, drain=drain), fleet(pool(min_nodes=3)), Limits())) == (3, 0, ("etl-0",))
    own = Limits(pools={"etl": PoolLimits(min_nodes=2, min_on_demand_nodes=1)})
    assert size(check(want(1, drain=drain), fleet(), own)) == (2, 1, ("etl-0", "etl-1"))
    assert size(check(want(0), fleet(pool(count=0, base=1)), Limits())) == (0, 0, ())
    assert size(check(want(3), fleet(pool(count=0, base=2)), Limits())) == (3, 2, ())


def test_ceilings_of_pool_limits_all_pools_and_on_demand() -> None:
    assert size(check(want(9), fleet(pool(max_nodes=6)), Limits())) == (6, 0, ())
    own = Limits(pools={"etl": PoolLimits(max_nodes=5, max_on_demand_nodes=1)})
    assert size(check(want(9, on_demand=4), fleet(), own)) == (5, 1, ())
    verdict = check(want(9), fleet(pool(), pool("gpu", 3, planned=5)), Limits(nodes=12))
    assert size(verdict) == (7, 0, ())
    assert "all pools may have 12, the others have 5" in verdict.reasons[0]


def test_quotas_count_all_pools_of_a_team() -> None:
    both = fleet(pool(), pool("gpu", nodes=tuple(node(f"g{at}", 1.0, gpus=4) for at in range(2))))
    team = {"vision": Quota(("etl", "gpu"), nodes=8)}
    assert size(check(want(9), both, Limits(teams=team))) == (6, 0, ())
    gpus = {"vision": Quota(("gpu",), gpus=18)}
    verdict = check(want(9, "gpu"), both, Limits(teams=gpus))
    assert size(verdict) == (4, 0, ())
    assert "team vision may have 18 GPUs" in verdict.reasons[0]
    assert not check(want(9), both, Limits(teams=gpus)).changed  # another pool
    money = {"vision": Quota(("etl", "gpu"), dollars_per_hour=6.0)}
    assert size(check(want(9), both, Limits(teams=money), new=NEW)) == (8, 0, ())


def test_a_ceiling_below_what_is_there_drains_the_dearest_that_may_leave() -> None:
    nodes = (node("a", 0.4), node("b", 0.9), node("c", 0.7), node("d", 0.8))
    uses = {"b": NodeUse(holds=frozenset({"x"}))}
    verdict = check(want(4), fleet(pool(nodes=nodes, max_nodes=2)), Limits(), uses=uses)
    assert size(verdict) == (2, 0, ("d", "c"))
    assert "d, c drained: 2 nodes must stay" in verdict.reasons


# --- last copies and notices -------------------------------------------------------------------------------------


def test_the_last_copy_of_anything_is_not_drained() -> None:
    uses = {"etl-0": NodeUse(holds=frozenset({"x"})), "etl-1": NodeUse(holds=frozenset({"x", "y"}))}
    target = want(2, drain=("etl-0", "etl-1"))
    verdict = check(target, fleet(), Limits(), uses=uses)
    # etl-0 goes, so etl-1 holds the last x, as it does the last y; another leaves in its place
    assert size(verdict) == (2, 0, ("etl-0", "etl-2"))
    assert "etl-1 is not drained: it holds the last copy of x" in verdict.reasons
    assert size(check(target, fleet(), Limits(), uses=uses, elsewhere=["x", "y"])) == (2, 0, target.drain)
    away = fleet(pool(), pool("gpu", 1))
    more = {**uses, "gpu-0": NodeUse(holds=frozenset({"x", "y"}))}
    assert not check(target, away, Limits(), uses=more).changed


def test_a_copy_on_a_node_that_leaves_anyway_does_not_count() -> None:
    uses = {"etl-0": NodeUse(holds=frozenset({"x"})), "etl-1": NodeUse(holds=frozenset({"x"}))}
    told = fleet(notices=(Notice("etl-1", 1100.0),))
    verdict = check(want(0, drain=("etl-0", "etl-1", "etl-2", "etl-3")), told, Limits(), uses=uses)
    assert size(verdict) == (1, 0, ("etl-1", "etl-2", "etl-3"))
    assert "etl-0 is not drained: it holds the last copy of x" in verdict.reasons
    draining = fleet(pool(draining=("etl-1",)))
    again = check(want(3, drain=("etl-0",)), draining, Limits(), uses=uses)
    assert "etl-0" not in passed(again).drain


def test_nodes_that_leave_are_not_counted_as_there() -> None:
    told = fleet(notices=(Notice("etl-0", 1100.0), Notice("etl-1", 1100.0, "rebalance")))
    # 3 stay, so 4 is one more, and nothing is to be drained
    assert size(check(want(4), told, Limits())) == (4, 0, ())


def test_drained_nodes_must_be_the_pools_own() -> None:
    verdict = check(want(3, drain=("etl-0", "gpu-0")), fleet(pool(), pool("gpu", 1)), Limits())
    assert size(verdict) == (3, 0, ("etl-0",))
    assert verdict.reasons == ("gpu-0 is not in the pool: not drained",)
    assert passed(verdict).reason == "wanted; guard: gpu-0 is not in the pool: not drained"


def test_no_new_work_on_nodes_that_leave() -> None:
    told = fleet(
        pool(draining=("etl-3",)),
        notices=(Notice("etl-0", 1100.0), Notice("etl-1", 900.0), Notice("etl-2", 1100.0, "rebalance")),
    )
    assert closed(told) == {
        "etl-0": "it terminates in 100 s",
        "etl-1": "its deadline has passed",
        "etl-3": "it is being drained",
    }
    good, why = open_nodes(told, 7, ["etl-3", "etl-2", "etl-0", "gone"])
    assert good == ("etl-2",)
    assert why == (
        "etl-3 is cordoned: it is being drained",
        "etl-0 is cordoned: it terminates in 100 s",
        "gone is cordoned: no such node",
    )
    assert open_nodes(told, 6, ["etl-2"]) == (
        (),
        ("rejected: decided for revision 6; the fleet is at revision 7",),
    )


# --- money -------------------------------------------------------------------------------------------------------


def test_dollars_per_hour_bound_growth_by_what_nodes_cost() -> None:
    both = fleet(pool(), pool("gpu", 2, planned=3))  # 2.00 + 1.00 + a node of 1.00 to come
    limits = Limits(dollars_per_hour=6.0)
    verdict = check(want(20), both, limits, new=NEW)
    assert size(verdict) == (8, 0, ())  # 4 more at 0.50
    assert "the limit is $6/h, other pools cost $2/h" in verdict.reasons[0]
    # spot nodes rather than fewer nodes
    assert size(check(want(20, on_demand=2), both, limits, new=NEW)) == (8, 0, ())
    assert size(check(want(6, on_demand=2), both, Limits(dollars_per_hour=6.5), new=NEW)) == (6, 1, ())
    firm = replace(limits, pools={"etl": PoolLimits(min_on_demand_nodes=1)})
    assert size(check(want(20, on_demand=2), both, firm, new=NEW)) == (5, 1, ())


def test_without_a_price_a_pool_with_a_limit_of_dollars_does_not_grow() -> None:
    verdict = check(want(5), fleet(), Limits(dollars_per_hour=100.0))
    assert size(verdict) == (4, 0, ())
    assert "the price of a new node is not known" in verdict.reasons[0]
    assert check(want(5), fleet(), Limits()).target == want(5)


def test_nodes_that_leave_are_paid_until_they_are_gone() -> None:
    told = fleet(notices=(Notice("etl-0", 1100.0),))
    assert size(check(want(4), told, Limits(dollars_per_hour=2.0), new=NEW)) == (3, 0, ())
    assert size(check(want(4), told, Limits(dollars_per_hour=2.5), new=NEW)) == (4, 0, ())
    # a smaller budget takes no node because of the one that leaves anyway
    assert size(check(want(3), told, Limits(dollars_per_hour=1.5), new=NEW)) == (3, 0, ())


def test_no_exchange_that_cannot_be_paid_for_leaves_a_pool_below_its_least() -> None:
    limits = Limits(dollars_per_hour=2.0, pools={"etl": PoolLimits(min_nodes=4)})
    verdict = check(want(4, drain=("etl-0",)), fleet(), limits, new=NEW)
    assert size(verdict) == (4, 0, ())
    assert verdict.reasons == ("etl-0 not drained: its replacement node exceeds the budget",)


def test_a_price_that_rises_above_the_budget_drains_as_few_as_needed_step_by_step() -> None:
    dear = fleet(pool(nodes=tuple(node(f"n{at}", 1.0) for at in range(8))))
    assert size(check(want(8), dear, Limits(dollars_per_hour=5.5)))[0] == 5
    verdict = check(want(8), dear, Limits(dollars_per_hour=1.0, shrink=3))
    assert size(verdict) == (5, 0, ("n0", "n1", "n2"))


def test_money_goes_before_the_floor_and_the_last_copy_before_money() -> None:
    limits = Limits(dollars_per_hour=1.0, pools={"etl": PoolLimits(min_nodes=4)})
    assert size(check(want(4), fleet(), limits))[0] == 2
    uses = {f"etl-{at}": NodeUse(holds=frozenset({f"x{at}"})) for at in range(3)}
    verdict = check(want(4), fleet(), limits, uses=uses)
    assert size(verdict) == (3, 0, ("etl-3",))
    assert "3 nodes: no further node can be drained now" in verdict.reasons


def test_dollars_per_run() -> None:
    limits = Limits(dollars_per_run=10.0)

    def of(run: RunMoney, nodes: int = 20) -> int:
        return size(check(want(nodes), fleet(), limits, new=NEW, run=run))[0]

    assert of(RunMoney(4.0, 2 * 3600.0)) == 6  # $3/h
    assert of(RunMoney(4.0)) == 20  # nobody knows how long
    assert of(RunMoney(9.0, 2 * 3600.0), 4) == 1  # $0.50/h
    assert of(RunMoney(10.0)) == 0
    assert of(RunMoney(10.0, 0.0)) == 0
    verdict = check(want(20), fleet(), limits, new=NEW, run=RunMoney(4.0, 7200.0))
    assert "the run may cost $10, $4 are spent, 2 h remain" in verdict.reasons[0]


def test_a_price_of_a_new_node_must_be_one() -> None:
    with pytest.raises(OptionError, match="spot must be >= 0"):
        NewNode(-1.0)


# --- properties --------------------------------------------------------------------------------------------------

COPIES = ["x", "y", "z"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Target, Fleet, dict[str, Any]]:
    states = []
    notices = []
    uses = {}
    for name in ("etl", "gpu"):
        nodes = tuple(
            node(
                f"{name}-{at}",
                draw(st.sampled_from([0.5, 0.7, 1.3])),
                draw(st.sampled_from(["spot", "spot", "on-demand"])),
                draw(st.sampled_from([0, 4])),
            )
            for at in range(draw(st.integers(0, 7)))
        )
        for one in nodes:
            if draw(st.integers(0, 5)) == 0:
                notices.append(Notice(one.id, 1100.0, draw(st.sampled_from(["interruption", "rebalance"]))))
            if draw(st.integers(0, 2)) == 0:
                uses[one.id] = NodeUse(holds=frozenset(draw(st.sets(st.sampled_from(COPIES), max_size=2))))
        planned = max(0, len(nodes) + draw(st.integers(-2, 4)))
        least = draw(st.integers(0, 3))
        states.append(
            PoolState(
                name,
                planned,
                planned,
                nodes,
                on_demand=draw(st.integers(0, 2)),
                min_nodes=least,
                max_nodes=least + draw(st.integers(0, 12)),
                base=draw(st.integers(0, 2)),
                draining=tuple(one.id for one in nodes if draw(st.integers(0, 6)) == 0),
            )
        )
    count = draw(st.integers(0, 14))
    own = [one.id for one in states[0].nodes]
    target = Target(
        "etl",
        count,
        7,
        "wanted",
        draw(st.integers(0, count)),
        tuple(draw(st.lists(st.sampled_from([*own, "gpu-0", "gone"]), max_size=6))),
    )
    numbers = st.sampled_from([1, 2, 3, 5, 8, inf])
    least = draw(st.integers(0, 2))
    limits = Limits(
        dollars_per_hour=draw(st.sampled_from([0.5, 2.0, 4.0, 9.0, inf])),
        dollars_per_run=draw(st.sampled_from([3.0, 20.0, inf])),
        nodes=draw(st.sampled_from([0, 4, 9, inf])),
        grow=draw(numbers),
        shrink=draw(numbers),
        pools={
            "etl": PoolLimits(least, least + draw(numbers), draw(st.integers(0, least)), 2 + draw(numbers))
        },
        teams={
            "t": Quota(
                ("etl", "gpu"),
                draw(st.sampled_from([3, 8, inf])),
                draw(st.sampled_from([8, 20, inf])),
                draw(st.sampled_from([1.0, 5.0, inf])),
            )
        },
    )
    options: dict[str, Any] = {
        "limits": limits,
        "new": draw(st.sampled_from([{}, NEW, {"etl": NewNode(spot=0.5)}])),
        "uses": uses,
        "elsewhere": frozenset(draw(st.sets(st.sampled_from(COPIES)))),
        "run": draw(
            st.sampled_from([None, RunMoney(2.0, 3600.0), RunMoney(5.0, None), RunMoney(25.0, 60.0)])
        ),
    }
    return target, Fleet(7, 1000.0, tuple(states), tuple(notices)), options


def _gone(where: Fleet) -> set[str]:
    told = {one.node_id for one in where.notices if one.kind == "interruption"}
    return told | {id_ for state in where.pools for id_ in state.draining}


@given(cases())
def test_a_change_has_its_reason_replays_and_passes_again_unchanged(
    case: tuple[Target, Fleet, dict[str, Any]],
) -> None:
    target, where, options = case
    verdict = check(target, where, **options)
    first = passed(verdict)
    assert verdict.changed == (replace(first, reason="") != replace(target, reason=""))
    assert verdict.reasons or not verdict.changed
    assert check(target, where, **options) == verdict
    again = check(first, where, **options)
    assert again.target == first
    assert not again.changed


@given(cases())
def test_no_rule_is_broken_unless_a_stronger_one_demands_it(
    case: tuple[Target, Fleet, dict[str, Any]],
) -> None:
    target, where, options = case
    limits: Limits = options["limits"]
    state, other = where.pools
    found = passed(check(target, where, **options))
    gone = _gone(where)
    assert 0 <= found.on_demand <= found.nodes
    assert found.on_demand <= limits.pools["etl"].max_on_demand_nodes
    # last copies: each name that a node of the fleet holds is left on a node that stays, or in storage
    drain = set(found.drain)
    before = {
        name
        for s in where.pools
        for n in s.nodes
        if n.id not in gone
        for name in options["uses"].get(n.id, NodeUse()).holds
    }
    after = {
        name
        for s in where.pools
        for n in s.nodes
        if n.id not in gone | drain
        for name in options["uses"].get(n.id, NodeUse()).holds
    }
    assert before <= after | options["elsewhere"]
    # steps
    fresh = [id_ for id_ in found.drain if id_ not in gone]
    assert len(fresh) <= limits.shrink
    assert set(found.drain) <= {n.id for n in state.nodes}
    own = limits.pools["etl"]
    floor = max(state.min_nodes, own.min_nodes, own.min_on_demand_nodes)
    stay = [n for n in state.nodes if n.id not in gone | drain]
    assert found.nodes <= max(state.planned + limits.grow, floor, len(state.nodes))
    asked_back = [id_ for id_ in state.draining if options["uses"].get(id_, NodeUse()).holds]
    if found.nodes <= len(stay) + len(asked_back):
        return  # nothing is added: what is there may be more than the rules allow, for now
    others = max(other.planned, len(other.nodes))
    assert found.nodes <= min(state.max_nodes, own.max_nodes)
    assert found.nodes + others <= limits.nodes
    assert found.nodes + others <= limits.teams["t"].nodes
    # what is added has a price, and is paid for within the limit with all that is there
    capped = limits.dollars_per_hour < inf
    if capped:
        new = options["new"]["etl"]
        added = found.nodes - len(stay)
        have = sum(n.market == "on-demand" for n in stay)
        more = min(max(found.on_demand - have, 0), added)
        rate = sum(n.price for n in (*state.nodes, *other.nodes))
        rate += more * (new.on_demand or 0.0) + (added - more) * (new.spot or 0.0)
        assert rate <= limits.dollars_per_hour + 1e-6


@given(cases())
def test_repeated_decisions_bring_a_fleet_within_its_limits(
    case: tuple[Target, Fleet, dict[str, Any]],
) -> None:
    """With nothing that holds it back, ask, let what was drained leave, and ask again."""
    target, where, options = case
    options = {**options, "uses": {}}
    limits: Limits = options["limits"]
    state, other = where.pools
    state = replace(state, draining=(), base=0)
    own = replace(limits.pools["etl"], min_on_demand_nodes=0)
    options["limits"] = replace(limits, pools={"etl": own})
    target = replace(target, drain=(), on_demand=0)
    for _ in range(12):
        now = Fleet(7, 1000.0, (state, replace(other, draining=())), ())
        found = passed(check(target, now, **options))
        left = tuple(n for n in state.nodes if n.id not in found.drain)
        state = replace(state, planned=found.nodes, nodes=left)
    room = limits.dollars_per_hour - sum(n.price for n in other.nodes)
    assert len(state.nodes) <= min(state.max_nodes, own.max_nodes)
    assert sum(n.price for n in state.nodes) <= max(room, 0.0) + 1e-6
