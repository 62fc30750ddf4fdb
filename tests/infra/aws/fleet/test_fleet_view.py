from dataclasses import replace
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.aws.fleet.groups import Group, Member
from ebbflow.infra.aws.fleet.instances import Instance
from ebbflow.infra.aws.fleet.state import FleetState, GangPlan, Plan
from ebbflow.infra.aws.fleet.view import KEPT, merged, observed, pools_of
from ebbflow.infra.aws.naming import MANAGED_BY_LOOP, TAG_GANG, Names
from ebbflow.planners.model.capacity import Node, Notice

NAMES = Names("lab")


def group(*ids: str, desired: int | None = None, base: int = 0, **states: str) -> Group:
    members = tuple(Member(i, states.get(i.replace("-", "_"), "InService"), True) for i in ids)
    size = len(ids) if desired is None else desired
    return Group("etl", NAMES.group("etl"), 0, 20, size, base, members, {}, True, {})


def instance(name: str, state: str = "running", gang: str = "", pool: str | None = "etl") -> Instance:
    tags = dict(NAMES.tags(MANAGED_BY_LOOP, role="spark-worker", pool=pool))
    return Instance(
        name, state, "m5.large", "us-east-1a", True, "10.0.0.1", tags | ({TAG_GANG: gang} if gang else {})
    )


def node(name: str, zone: str = "us-east-1a", price: float = 0.0) -> Node:
    return Node(name, 2, 7.0, instance_type="m5.large", zone=zone, price=price)


def look(
    state: FleetState, *ids: str, now: float = 100.0, ending=(), found: Group | None = None
) -> FleetState:
    instances = [instance(i) for i in ids]
    groups = {"etl": found or group(*ids)}
    return observed(state, groups, instances, [node(i) for i in ids], ending, now)


def test_the_first_look_adopts_what_is_there():
    state = look(FleetState("lab"), "i-1", "i-2", found=group("i-1", "i-2", base=1))
    assert state.plans == {"etl": Plan(2, 1, reason="found so")}
    assert state.revision == 1
    assert [seen.id for seen in state.seen] == ["i-1", "i-2"]


def test_the_revision_grows_when_and_only_when_nodes_or_their_notices_change():
    state = look(FleetState("lab"), "i-1", "i-2")
    same = look(state, "i-1", "i-2", now=500.0)
    assert same.revision == state.revision
    assert look(state, "i-1").revision == state.revision + 1
    assert look(state, "i-1", "i-2", "i-3").revision == state.revision + 1
    told = state.after(replace(state, notices=(Notice("i-1", 900.0),)))
    assert told.revision == state.revision + 1
    assert look(told, "i-1", "i-2").revision == told.revision
    foreign = state.after(replace(state, notices=(Notice("i-9", 900.0),)))
    assert foreign.revision == state.revision


def test_a_price_is_no_change_of_nodes():
    state = look(FleetState("lab"), "i-1")
    dearer = observed(state, {"etl": group("i-1")}, [instance("i-1")], [node("i-1", price=1.0)], (), 1.0)
    assert dearer.revision == state.revision


def test_a_notice_counts_from_the_first_look_at_its_node_and_goes_with_it():
    state = replace(FleetState("lab"), notices=(Notice("i-1", 300.0),))
    assert state.pending_notices() == ()
    seen = look(state, "i-1")
    assert seen.pending_notices() == (Notice("i-1", 300.0),)
    gone = look(seen, now=301.0)
    assert gone.notices == ()
    assert gone.revision == seen.revision + 1


def test_a_notice_of_a_node_that_never_comes_is_dropped_in_the_end():
    state = replace(FleetState("lab"), notices=(Notice("i-9", 300.0),))
    assert look(state, "i-1", now=300.0 + KEPT - 1).notices != ()
    assert look(state, "i-1", now=300.0 + KEPT).notices == ()


notices = st.builds(
    Notice,
    node_id=st.sampled_from(["i-1", "i-2"]),
    deadline=st.integers(0, 6).map(lambda n: 10.0 * n),
    kind=st.sampled_from(["interruption", "rebalance"]),
)


@given(st.lists(notices, max_size=5))
def test_notices_say_the_same_in_any_order_and_however_often(told):
    expected = merged((), told)
    assert merged(expected, told) == expected
    assert {merged((), order) for order in permutations(told)} == {expected}
    for name in {notice.node_id for notice in told}:
        (kept,) = (notice for notice in expected if notice.node_id == name)
        firm = [n.deadline for n in told if n.node_id == name and n.kind == "interruption"]
        weak = [n.deadline for n in told if n.node_id == name and n.kind == "rebalance"]
        assert kept.kind == ("interruption" if firm else "rebalance")
        assert kept.deadline == min(firm or weak)


def test_a_deadline_that_moves_by_a_second_is_no_news():
    known = (Notice("i-1", 100.0),)
    assert merged(known, [Notice("i-1", 99.0)]) == known
    assert merged(known, [Notice("i-1", 98.0)]) == (Notice("i-1", 98.0),)
    assert merged(known, [Notice("i-1", 200.0)]) == known


def test_a_shortage_has_a_beginning_and_an_end():
    short = look(FleetState("lab"), "i-1", now=10.0, found=group("i-1", desired=3))
    assert short.short == {"etl": 10.0}
    assert look(short, "i-1", "i-2", now=20.0, found=group("i-1", "i-2", desired=3)).short == {"etl": 10.0}
    assert look(short, "i-1", "i-2", "i-3", now=30.0).short == {}


def test_an_instance_that_starts_is_no_node_yet_and_no_shortage():
    found = group("i-1", "i-2", i_2="Pending")
    state = observed(
        FleetState("lab"),
        {"etl": found},
        [instance("i-1"), instance("i-2", "pending")],
        [node("i-1")],
        (),
        1.0,
    )
    assert [seen.id for seen in state.seen] == ["i-1"]
    assert state.short == {}


def test_named_nodes_are_forgotten_when_they_are_gone():
    state = look(FleetState("lab"), "i-1", "i-2")
    plan = replace(state.plans["etl"], nodes=0, drain=("i-2", "i-1"))
    state = replace(state, plans={"etl": plan})
    assert look(state, "i-1").plans["etl"].drain == ("i-1",)


def shown(state: FleetState, instances: list[Instance], now: float) -> dict[str, tuple[int, int, int]]:
    """Return what is planned, there and on-demand of what is no group."""
    groups = {"etl": group("i-1", desired=2)}
    nodes = [node(i.id) for i in instances if i.state == "running"]
    state = observed(state, groups, instances, nodes, (), now)
    pools = pools_of(state, groups, instances, nodes, {"etl": 1}, {"etl": "no capacity"}, now)
    assert [pool.name for pool in pools] == sorted(pool.name for pool in pools)
    assert (pools[0].planned, pools[0].short_since, pools[0].base) == (2, now, 1)
    assert [pool.purpose for pool in pools] == [""] * len(pools)
    serving = pools_of(state, groups, instances, nodes, {"etl": 1}, {}, now, {"etl"})
    assert serving[0].purpose == "aggregators"
    rest = {pool.name: (pool.planned, len(pool.nodes), pool.on_demand) for pool in pools[1:]}
    assert all(pool.planned == pool.requested == pool.max_nodes == pool.min_nodes for pool in pools[1:])
    return rest


def test_gangs_and_what_has_no_pool_are_pools_of_fixed_size():
    there = [instance("i-1"), instance("i-2", gang="run"), instance("i-3", pool=None)]
    asked = GangPlan("etl", 3, "spot", "t", "asked", 0.0)
    state = replace(FleetState("lab"), gangs={"next": asked})
    assert shown(state, there, 5.0) == {"etl/next": (3, 0, 0), "etl/run": (1, 1, 0), "unassigned": (1, 1, 0)}


def test_nodes_of_a_gang_count_from_the_request_on_until_they_end():
    plan = GangPlan("etl", 3, "on-demand", "t", "held", 100.0, nodes=("i-2", "i-3", "i-4"))
    state = replace(FleetState("lab"), gangs={"run": plan})

    def of(now: float, *states: str, phase: str = "held") -> tuple[int, int, int]:
        there = [
            replace(instance(f"i-{at}", word, gang="run"), spot=False) for at, word in enumerate(states, 2)
        ]
        gangs = {"run": replace(plan, phase=phase)}
        return shown(replace(state, gangs=gangs), [instance("i-1"), *there], now)["etl/run"]

    assert of(101.0) == (3, 0, 3)  # not listed yet
    assert of(120.0, "pending", "pending") == (3, 0, 3)
    assert of(400.0, "pending", "running", "running") == (3, 2, 3)
    assert of(400.0, "running", "running", "shutting-down") == (2, 2, 2)  # never filled up again
    assert of(400.0, "shutting-down") == (0, 0, 0)  # shown until it is forgotten, so that it can be returned
    assert of(400.0, phase="asked") == (3, 0, 3)  # until repair has settled it
    assert of(101.0, phase="ending") == (3, 0, 3)  # its request may have been carried out
    assert of(400.0, "running", phase="ending") == (1, 1, 1)
    assert of(400.0, phase="ending") == (0, 0, 0)
