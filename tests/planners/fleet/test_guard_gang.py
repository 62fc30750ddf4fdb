"""A gang passes the guard whole or not at all, and counts wherever its pool's nodes do."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.guard import NewNode, RunMoney, check
from ebbflow.planners.fleet.guard_gang import GangVerdict, check_gang
from ebbflow.planners.fleet.limits import Limits, PoolLimits, Quota
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.fleet import Fleet, PoolState, Target
from ebbflow.planners.model.gangs import MOST, GangRequest, GangTarget

NEW = {"etl": NewNode(0.5, 2.0), "gpu": NewNode(1.0, 4.0, gpus=4)}
RUN = GangRequest("run-1", "gpu", 4)


def node(name: str, price: float = 1.0, market: str = "spot", gpus: int = 4) -> Node:
    return Node(name, 4, 16.0, market=market, price=price, gpus=gpus)  # type: ignore[arg-type]


def pool(name: str, count: int = 0, planned: int | None = None, **options: Any) -> PoolState:
    gpus = 4 if name.startswith("gpu") else 0
    nodes = tuple(node(f"{name}-{at}", 1.0 if gpus else 0.5, gpus=gpus) for at in range(count))
    size = count if planned is None else planned
    return PoolState(name, size, size, nodes, **{"max_nodes": 100, **options})


def fleet(*pools: PoolState) -> Fleet:
    found = pools or (pool("etl", 4), pool("gpu", 2))
    return Fleet(7, 1000.0, tuple(sorted(found, key=lambda one: one.name)))


def asked(request: GangRequest = RUN, where: Fleet | None = None, **limits: Any) -> GangVerdict:
    run = limits.pop("run", None)
    new = limits.pop("new", NEW)
    return check_gang(request, where or fleet(), Limits(**limits), new=new, run=run)


# --- worked examples ---------------------------------------------------------------------------------------------


def test_what_breaks_no_limit_passes_for_the_revision_it_was_decided_for() -> None:
    assert asked() == GangVerdict(GangTarget(RUN, 7, "asked for", (("etl", 4), ("gpu", 2))))


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({"grow": 4}, 4),
        ({"nodes": 10}, 4),  # 6 are there
        ({"pools": {"gpu": PoolLimits(max_nodes=6)}}, 4),
        (
            {"pools": {"gpu": PoolLimits(max_nodes=6, min_nodes=6, min_on_demand_nodes=6)}},
            4,
        ),  # the leasts are the group's
        ({"teams": {"vision": Quota(("gpu",), nodes=6)}}, 4),
        ({"teams": {"vision": Quota(("gpu",), gpus=27)}}, 4),  # 8 of them are held, a node has 4
        ({"teams": {"vision": Quota(("gpu",), dollars_per_hour=6.5)}}, 4),
        ({"dollars_per_hour": 8.0}, 4),  # 2 + 2 are paid
        ({"dollars_per_run": 10.0, "run": RunMoney(2.0, 2 * 3600.0)}, 4),
    ],
)
def test_each_limit_refuses_a_gang_that_is_a_node_too_large_and_says_so(
    limits: dict[str, Any], fits: int
) -> None:
    assert asked(replace(RUN, size=fits), **limits).target is not None
    refused = asked(replace(RUN, size=fits + 1), **limits)
    assert refused.target is None
    (why,) = refused.reasons
    assert f"{fits} nodes instead of {fits + 1}" in why
    assert "a gang starts all-or-nothing" in why


def test_refusals_name_the_limit() -> None:
    def why(**limits: Any) -> str:
        return asked(**limits).reasons[0]

    assert "one decision launches at most 3" in why(grow=3)
    assert "all pools may have 9, the others have 6" in why(nodes=9)
    own = why(pools={"gpu": PoolLimits(max_nodes=5)})
    assert "the pool's limit is 5, of which the pool and its other gangs have 2" in own
    assert "team vision may have 5, its other pools have 2" in why(teams={"vision": Quota(("gpu",), nodes=5)})
    assert "team vision may have 20 GPUs" in why(teams={"vision": Quota(("gpu",), gpus=20)})
    assert "the limit is $7/h, other pools cost $4/h" in why(dollars_per_hour=7.0)
    assert "the run may cost $3" in why(dollars_per_run=3.0, run=RunMoney(0.0, 3600.0))
    assert "no pool 'tpu'; pools: etl, gpu" in asked(replace(RUN, pool="tpu")).reasons[0]


def test_a_gang_on_demand_is_not_made_a_spot_one_by_a_limit() -> None:
    firm = replace(RUN, market="on-demand")
    assert asked(firm, dollars_per_hour=20.0).target is not None  # 4 at $4/h beside 4
    refused = asked(firm, dollars_per_hour=19.0)
    assert "3 nodes instead of 4: the limit is $19/h" in refused.reasons[0]
    few = {"gpu": PoolLimits(max_on_demand_nodes=3)}
    assert "3 on-demand instead of 4: the most of the pool" in asked(firm, pools=few).reasons[0]
    assert asked(RUN, pools=few).target is not None
    taken = fleet(pool("etl", 4), replace(pool("gpu", 2), on_demand=2))  # the pool itself has all that it may
    full = asked(replace(firm, size=1), where=taken, pools={"gpu": PoolLimits(max_on_demand_nodes=2)})
    assert full.target is None
    assert "0 on-demand instead of 1: the most of the pool, 2" in full.reasons[0]


def test_without_a_price_no_gang_starts_under_a_limit_of_dollars_but_by_its_own() -> None:
    assert asked(new={}).target is not None
    refused = asked(new={}, dollars_per_hour=1000.0)
    assert "the price of a new node is not known" in refused.reasons[0]
    capped = replace(RUN, max_price=0.9)
    assert asked(capped, new={}, dollars_per_hour=7.7).target is not None  # 4 at $0.9/h beside 4
    assert asked(capped, new={}, dollars_per_hour=7.5).target is None
    assert asked(capped, dollars_per_hour=7.7).target is not None
    assert asked(RUN, dollars_per_hour=7.7).target is None


def test_without_knowing_its_gpus_no_gang_starts_under_a_limit_of_gpus() -> None:
    empty = fleet(pool("gpu"))
    team = {"vision": Quota(("gpu",), gpus=16)}
    refused = asked(where=empty, new={}, teams=team)
    assert (
        "how many GPUs a node of gpu has is not known, and team vision may have 16 GPUs" in refused.reasons[0]
    )
    assert asked(where=empty, teams=team).target is not None
    # what the pool's own nodes have is what the gang's will
    assert asked(new={}, teams=team).target is None
    assert asked(new={}, teams={"vision": Quota(("gpu",), gpus=24)}).target is not None


def test_a_gang_that_is_held_or_all_there_passes_whatever_the_limits() -> None:
    tight = Limits(dollars_per_hour=0.1, nodes=0, grow=1)
    there = fleet(pool("gpu", 2), pool("gpu/run-1", 4))
    assert check_gang(RUN, there, tight).target is not None
    starting = fleet(pool("gpu", 2), pool("gpu/run-1", 0, planned=4))
    assert check_gang(RUN, starting, tight).target is None
    assert check_gang(RUN, starting, tight, held=True).target == GangTarget(
        RUN, 7, "asked for: the gang exists already", (("gpu", 2),)
    )


def test_what_was_asked_for_before_does_not_count_twice() -> None:
    again = fleet(pool("etl", 4), pool("gpu", 2), pool("gpu/run-1", 0, planned=4))
    assert asked(where=again, nodes=10).target is not None
    assert asked(where=again, nodes=9).target is None
    assert asked(replace(RUN, name="run-2"), where=again, nodes=10).target is None


def test_gangs_count_for_ordinary_targets_started_or_not() -> None:
    for gang in (pool("gpu/run-1", 4), pool("gpu/run-1", 0, planned=4), pool("gpu/run-1", 1, planned=4)):
        where = fleet(pool("etl", 4), pool("gpu", 2), gang)

        def nodes(wanted: int, where: Fleet = where, name: str = "gpu", **limits: Any) -> int:
            target = check(Target(name, wanted, 7, "wanted"), where, Limits(**limits), new=NEW).target
            assert target is not None
            return target.nodes

        assert nodes(9, nodes=12) == 4
        assert nodes(9, pools={"gpu": PoolLimits(max_nodes=8)}) == 4
        assert nodes(9, teams={"vision": Quota(("gpu",), nodes=9)}) == 5
        assert nodes(9, teams={"vision": Quota(("gpu",), gpus=28)}) == 3
        assert nodes(9, teams={"vision": Quota(("gpu",), dollars_per_hour=9.5)}) == 5
        assert nodes(9, dollars_per_hour=11.0) == 5
        assert nodes(9, name="etl", dollars_per_hour=9.5) == 7
        assert nodes(9, name="etl", nodes=11) == 5
        assert nodes(9) == 9


def test_nodes_that_were_asked_for_count_although_the_pool_shrinks() -> None:
    shrinking = replace(pool("etl", 2, planned=1), requested=6)
    where = fleet(shrinking, pool("gpu", 2))
    assert asked(where=where, nodes=12).target is not None
    assert "the others have 8" in asked(where=where, nodes=11).reasons[0]
    assert asked(where=where, dollars_per_hour=9.0).target is not None  # 6 at 0.5, 2 + 4 at 1
    assert "other pools cost $5/h" in asked(where=where, dollars_per_hour=8.9).reasons[0]


def test_a_gang_on_demand_counts_among_the_pools_on_demand_nodes() -> None:
    where = fleet(pool("gpu", 2), pool("gpu/run-1", 0, planned=2, on_demand=2))
    limits = Limits(pools={"gpu": PoolLimits(max_on_demand_nodes=3)})
    target = check(Target("gpu", 4, 7, "wanted", 3), where, limits).target
    assert target is not None
    assert target.on_demand == 1
    dear = check(Target("etl", 9, 7, "wanted"), fleet(pool("etl", 4), where.pools[1]), Limits(), new=NEW)
    assert not dear.changed
    limit = Limits(dollars_per_hour=11.0)  # 2 + 2 at $4/h
    target = check(Target("etl", 9, 7, "w"), fleet(pool("etl", 4), where.pools[1]), limit, new=NEW).target
    assert target is not None
    assert target.nodes == 6


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"size": 1001},
        {"name": "Run_1"},
        {"name": ""},
        {"market": "reserved"},
        {"one_zone": False, "one_type": False},
        {"max_price": 0.0},
        {"max_price": float("nan")},
        {"max_price": inf},
        {"max_price": 1.0, "market": "on-demand"},
    ],
)
def test_impossible_gangs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        replace(RUN, **wrong)


# --- properties --------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[GangRequest, Fleet, Limits, dict[str, Any]]:
    pools = []
    for name in ("etl", "gpu", "gpu/old", "gpu/run-1"):
        if "/" in name and draw(st.booleans()):
            continue
        count = draw(st.integers(0, 5))
        nodes = tuple(
            node(
                f"{name}-{at}",
                draw(st.sampled_from([0.4, 1.0, 1.7])),
                draw(st.sampled_from(["spot", "spot", "on-demand"])),
                4 if name.startswith("gpu") else 0,
            )
            for at in range(count)
        )
        planned = max(count + draw(st.integers(-1, 3)), 0)
        firm = draw(st.sampled_from([0, planned]))
        pools.append(PoolState(name, planned, planned, nodes, on_demand=firm, max_nodes=40))
    market = draw(st.sampled_from(["spot", "on-demand"]))
    request = GangRequest(
        "run-1",
        "gpu",
        draw(st.integers(1, 9)),
        market,
        max_price=draw(st.sampled_from([None, 0.8])) if market == "spot" else None,
    )
    numbers = st.sampled_from([2, 5, 9, 14, 20, inf])
    dollars = st.sampled_from([5.0, 12.0, 25.0, inf])
    limits = Limits(
        dollars_per_hour=draw(dollars),
        dollars_per_run=draw(dollars),
        nodes=draw(numbers),
        grow=draw(numbers),
        pools={"gpu": PoolLimits(draw(st.integers(0, 2)), draw(numbers), max_on_demand_nodes=draw(numbers))},
        teams={
            "t": Quota(
                draw(st.sampled_from([("gpu",), ("etl", "gpu"), ("etl",)])),
                draw(numbers),
                draw(st.sampled_from([16, 40, inf])),
                draw(dollars),
            )
        },
    )
    options = {
        "new": draw(st.sampled_from([NEW, NEW, {}])),
        "run": draw(st.sampled_from([None, RunMoney(2.0, 7200.0), RunMoney(1.0), RunMoney(30.0, 60.0)])),
    }
    return request, Fleet(7, 1000.0, tuple(sorted(pools, key=lambda one: one.name))), limits, options


def _size(pools: list[PoolState]) -> int:
    return sum(max(one.planned, len(one.nodes)) for one in pools)


def _cost(pools: list[PoolState], new: dict[str, NewNode]) -> float:
    total = sum(n.price for one in pools for n in one.nodes)
    for one in pools:
        missing = max(one.planned - len(one.nodes), 0)
        firm = min(max(one.on_demand - sum(n.market == "on-demand" for n in one.nodes), 0), missing)
        price = new.get(one.name.partition("/")[0], NewNode())
        total += firm * (price.on_demand or 0.0) + (missing - firm) * (price.spot or 0.0)
    return total


def _broken(pools: list[PoolState], limits: Limits, new: dict[str, NewNode]) -> set[str]:
    """Return the limits that these pools are beyond, counted by hand."""
    gpu = [one for one in pools if one.name.partition("/")[0] == "gpu"]
    quota = limits.teams["t"]
    team = [one for one in pools if one.name.partition("/")[0] in quota.pools]
    firm = sum(max(o.on_demand, sum(n.market == "on-demand" for n in o.nodes)) for o in gpu)
    gpus = sum(n.gpus for one in team for n in one.nodes) + 4 * sum(
        max(o.planned - len(o.nodes), 0) for o in team if o in gpu
    )
    found = {
        "nodes": _size(pools) > limits.nodes,
        "pool": _size(gpu) > limits.pools["gpu"].max_nodes,
        "on-demand": firm > limits.pools["gpu"].max_on_demand_nodes,
        "quota": _size(team) > quota.nodes,
        "gpus": gpus > quota.gpus,
        "dollars": _cost(pools, new) > limits.dollars_per_hour + 1e-6,
        "team dollars": _cost(team, new) > quota.dollars_per_hour + 1e-6,
    }
    return {name for name, beyond in found.items() if beyond}


def _started(request: GangRequest, where: Fleet) -> list[PoolState]:
    """Return the pools once the gang is asked for."""
    there = next((one.nodes for one in where.pools if one.name == request.shown), ())
    size = max(request.size, len(there))
    firm = size if request.market == "on-demand" else 0
    kept = [one for one in where.pools if one.name != request.shown]
    return [*kept, PoolState(request.shown, size, size, there, on_demand=firm, max_nodes=size)]


def _there(request: GangRequest, where: Fleet) -> bool:
    return any(one.name == request.shown and len(one.nodes) >= request.size for one in where.pools)


@given(cases())
def test_a_gang_that_passes_breaks_no_limit_that_held(
    case: tuple[GangRequest, Fleet, Limits, dict[str, Any]],
) -> None:
    request, where, limits, options = case
    assume(not _there(request, where))
    if check_gang(request, where, limits, **options).target is None:
        return
    before = _broken([one for one in where.pools if one.name != request.shown], limits, options["new"])
    prices = {**options["new"]}
    after_pools = _started(request, where)
    if request.max_price is not None:  # its nodes cost no more than it allows
        cap = min(request.max_price, (prices.get("gpu") or NewNode()).spot or inf)
        there = after_pools[-1].nodes
        nodes = tuple(node(f"new-{at}", cap) for at in range(request.size - len(there)))
        after_pools[-1] = replace(after_pools[-1], nodes=(*there, *nodes))
    assert _broken(after_pools, limits, prices) <= before
    assert request.size <= limits.grow
    run = options["run"]
    if run is not None and limits.dollars_per_run < inf:
        assert run.spent < limits.dollars_per_run
        if run.seconds:
            cost = _cost(after_pools[-1:], prices) * run.seconds / 3600
            assert run.spent + cost <= limits.dollars_per_run + 1e-6


@given(cases())
def test_a_refusal_names_the_limit_and_a_larger_gang_is_refused_as_well(
    case: tuple[GangRequest, Fleet, Limits, dict[str, Any]],
) -> None:
    request, where, limits, options = case
    refused = check_gang(request, where, limits, **options)
    if refused.target is not None:
        assert refused == GangVerdict(replace(refused.target, request=request, revision=where.revision))
        return
    assert len(refused.reasons) == 1
    numbers = [limits.dollars_per_hour, limits.dollars_per_run, limits.nodes, limits.grow]
    own, quota = limits.pools["gpu"], limits.teams["t"]
    numbers += [own.max_nodes, own.max_on_demand_nodes, quota.nodes, quota.gpus, quota.dollars_per_hour]
    assert any(f"{one:g}" in refused.reasons[0] for one in numbers if one < inf)
    for size in {request.size + 1, request.size + 7, MOST}:
        assert check_gang(replace(request, size=size), where, limits, **options).target is None


@given(cases())
def test_a_gang_that_is_held_passes_and_a_gang_passes_where_nothing_is_limited(
    case: tuple[GangRequest, Fleet, Limits, dict[str, Any]],
) -> None:
    request, where, limits, options = case
    assert check_gang(request, where, limits, held=True, **options).target is not None
    assert check_gang(request, where, Limits(), **options).target is not None


@given(cases())
def test_a_target_beside_a_gang_is_what_it_is_beside_as_many_nodes_of_another_pool_of_the_team(
    case: tuple[GangRequest, Fleet, Limits, dict[str, Any]],
) -> None:
    """A gang is no way around: ``etl`` may grow beside it as it may beside an ordinary pool of the same size."""
    _, where, limits, options = case
    plain = {"gpu/old": "gpu-old", "gpu/run-1": "gpu-run"}
    quota = limits.teams["t"]
    pools = (*quota.pools, *plain.values()) if "gpu" in quota.pools else quota.pools
    renamed = replace(
        where, pools=tuple(replace(one, name=plain.get(one.name, one.name)) for one in where.pools)
    )
    wider = replace(limits, teams={"t": replace(quota, pools=pools)})
    new = {**options["new"], **{name: NEW["gpu"] for name in plain.values() if options["new"]}}
    target = Target("etl", 12, 7, "wanted")
    beside = check(target, where, limits, new=options["new"]).target
    ordinary = check(target, renamed, wider, new=new).target
    assert beside is not None
    assert ordinary is not None
    assert (beside.nodes, beside.drain) == (ordinary.nodes, ordinary.drain)
