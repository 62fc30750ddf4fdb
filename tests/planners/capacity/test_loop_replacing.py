"""Nodes in place of those that leave: asked for at the notice, once, as many as are needed, within the limits."""

from dataclasses import replace
from math import inf

import pytest
from ledger_worlds import START, World, app, fleet_of, node, pool

from ebbflow.planners.capacity.replacements import AGAIN, Replacements, successors
from ebbflow.planners.capacity.values import Scaling, Settings
from ebbflow.planners.fleet.limits import Limits
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Offer, PoolState
from ebbflow.planners.model.ledger import Decided
from ebbflow.planners.scheduling.live import live_policy

RULES = Scaling(
    provision_time_s=20.0, scale_out_after_s=10.0, scale_in_idle_s=60.0, cooldown_s=30.0, fallback=None
)
GANGS = Settings(
    policy=live_policy("best-effort"), lease_s=60, interval_s=10, termination_grace_s=5, scaling=RULES
)
OFFERS = {"gpu": (Offer("local", "", "spot", 1.0, 8, 16.0, 2),)}


class Asking(World):
    """A world whose fleet starts other nodes before those with a notice are gone only when it is asked to."""

    asks = True


def names(cycle):
    return [notice.node_id for notice in cycle.replace]


def world_of(count=2, most=10, limits=None, **more):
    settings = replace(GANGS, limits=limits or Limits())
    nodes = tuple(node(f"n{i}", 2) for i in range(count))
    world = Asking(settings, list(nodes), fleet=fleet_of(pool("gpu", nodes, most=most, **more)))
    world.offers = OFFERS
    world.enter(app("a", 2 * count))
    world.steps(3)
    return world


def test_a_node_with_a_notice_gets_a_successor_at_once_and_only_one():
    world = world_of()
    world.notice("n0", 120.0)
    cycle = world.tick(0.1)
    assert names(cycle) == ["n0"]
    assert world.said("scaling") == ["gpu launches a replacement node for n0, which terminates in 120 s"]
    assert cycle.wake <= world.now + AGAIN
    world.now += AGAIN - 1.0
    assert names(world.cycle()) == []
    world.now += 1.0  # the request may have failed: what was done already is passed over by the fleet
    assert names(world.cycle()) == ["n0"]
    assert len(world.said("scaling")) == 1


def test_a_fleet_that_replaces_by_itself_is_not_asked():
    world = world_of()
    world.asks = False
    world.notice("n0", 120.0)
    cycle = world.tick(0.1)
    assert names(cycle) == []
    assert cycle.memory.replacing == {}


def test_a_full_pool_waits_until_the_node_is_gone_and_says_so_once():
    world = world_of(most=2)
    world.notice("n0", 120.0)
    assert names(world.tick(0.1)) == []
    world.steps(5)
    assert [why for why in world.said("guard") if "n0" in why] == [
        "n0 of gpu is not replaced before termination: max_nodes of the pool is 2"
    ]


@pytest.mark.parametrize(("dollars", "asked"), [(2.5, []), (3.0, ["n0"])])
def test_both_nodes_together_must_be_within_the_money(dollars, asked):
    world = world_of(limits=Limits(dollars_per_hour=dollars))
    world.notice("n0", 120.0)
    assert names(world.tick(0.1)) == asked


def state(count, planned=None, **more):
    nodes = tuple(node(f"n{i}", 2) for i in range(count))
    size = count if planned is None else planned
    return PoolState("gpu", size, size, nodes, max_nodes=20, **more)


def found(pool_, notices, size=None, drains=(), before=None, now=START, room=inf):
    sizes = {"gpu": pool_.planned if size is None else size}
    answer = successors(
        [pool_],
        notices,
        sizes,
        drains,
        before or {},
        now,
        1,
        {},
        lambda _, nodes: (int(min(nodes, room)), ["no money"]),
    )
    return answer, tuple(notice.node_id for notice in answer.now)


def test_those_that_leave_first_are_replaced_first_and_no_more_than_are_needed():
    notices = [Notice("n2", START + 50), Notice("n0", START + 90), Notice("n1", START + 70, "rebalance")]
    assert found(state(3), notices)[1] == ("n2", "n0")
    assert found(state(3), notices, size=2)[1] == ("n2",), "the pool is to be smaller"
    assert found(state(3), notices, size=1)[1] == ()
    assert found(state(3), notices, room=2)[1] == ("n2",), "one that stays, and one"
    assert found(state(3), notices, drains=("n2",))[1] == ("n0",), "who is not needed is not replaced"
    assert found(state(3, draining=("n0", "n2")), notices, size=1)[1] == ()
    twice, _ = found(state(3), [*notices, Notice("n0", START + 40)])
    assert twice.now == (Notice("n0", START + 40), Notice("n2", START + 50))


def test_what_has_come_in_place_of_a_node_is_counted():
    first, _ = found(state(2), [Notice("n0", START + 90)])
    assert dict(first.asked) == {"n0": START}
    later, _ = found(state(3, planned=2), [Notice("n0", START + 90)], before=first.asked, now=START + 30)
    assert later == Replacements()


def test_money_that_one_has_taken_is_not_given_twice():
    notices = [Notice("n0", START + 50), Notice("n1", START + 60)]
    first, names = found(state(3), notices[:1], room=3)
    assert names == ("n0",)
    second, names = found(state(3), notices, before=first.asked, now=START + 1, room=2)
    assert names == ()
    assert dict(second.asked) == {"n0": START}
    assert [change.kind for change in second.changes if isinstance(change, Decided)] == ["guard"]
    assert found(state(3), notices, before=first.asked, now=START + 1, room=3)[1] == ("n1",)
