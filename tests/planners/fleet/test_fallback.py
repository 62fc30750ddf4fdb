from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.fallback import Fallback, amended
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.fleet import PoolState, Target

RULE = Fallback(after=300.0, hold=1800.0)


def nodes(spot: int, on_demand: int = 0) -> tuple[Node, ...]:
    found = [Node(f"s-{i}", 2, 7.0, market="spot") for i in range(spot)]
    return (*found, *(Node(f"o-{i}", 2, 7.0, market="on-demand") for i in range(on_demand)))


def pool(*there: Node, planned: int = 10, **more: object) -> PoolState:
    values: dict[str, object] = {"requested": planned, "max_nodes": 20, **more}
    return PoolState("etl", planned, nodes=there, **values)  # type: ignore[arg-type]


def wish(count: int = 10, **more: object) -> Target:
    return Target("etl", count, 5, "needed", **more)  # type: ignore[arg-type]


def test_with_spot_there_nothing_changes():
    assert amended(wish(), pool(*nodes(10)), 1e4, RULE) == wish()


def test_a_short_shortage_is_waited_for():
    short = pool(*nodes(6), short_since=1000.0)
    assert amended(wish(), short, 1299.0, RULE) == wish()


def test_after_some_minutes_the_missing_nodes_are_asked_for_on_demand():
    short = pool(*nodes(6), short_since=1000.0, short_why="UnfulfillableCapacity: no")
    found = amended(wish(), short, 1300.0, RULE)
    assert (found.nodes, found.on_demand, found.drain) == (10, 4, ())
    assert "300 s (UnfulfillableCapacity: no): 4 on-demand nodes instead" in found.reason


def test_nodes_that_are_about_to_leave_count_as_missing():
    short = pool(*nodes(7), short_since=1000.0, draining=("s-0",))
    found = amended(wish(), short, 1300.0, RULE, [Notice("s-1", 2e3), Notice("s-2", 2e3, "rebalance")])
    assert found.on_demand == 5


def test_what_is_asked_for_on_demand_already_is_not_asked_for_again():
    short = pool(*nodes(6, 1), on_demand=4, short_since=1000.0)
    assert amended(wish(), short, 9e9, RULE) == wish(on_demand=4)


def test_the_base_of_the_pool_and_of_the_target_stay():
    assert amended(wish(), pool(*nodes(8, 2), base=2, on_demand=2), 9e9, RULE).on_demand == 2
    assert amended(wish(on_demand=3), pool(*nodes(8, 2), base=2, on_demand=2), 9e9, RULE).on_demand == 3


def test_spot_is_tried_again_beside_what_there_is():
    held = pool(*nodes(6, 4), on_demand=4, on_demand_since=1000.0)
    assert amended(wish(), held, 2799.0, RULE) == wish(on_demand=4)
    found = amended(wish(), held, 2800.0, RULE)
    assert (found.nodes, found.on_demand, found.drain) == (14, 0, ())
    one = amended(wish(), held, 2800.0, replace(RULE, step=1))
    assert (one.nodes, one.on_demand) == (11, 3)


def test_while_it_is_tried_the_on_demand_nodes_stay():
    tried = pool(*nodes(6, 4), planned=14, on_demand=0, on_demand_since=1000.0, short_since=1000.0)
    found = amended(wish(), tried, 1200.0, RULE)
    assert (found.nodes, found.on_demand, found.drain) == (14, 0, ())


def test_as_many_on_demand_nodes_leave_as_spot_nodes_have_come():
    tried = pool(*nodes(8, 4), planned=14, on_demand=0, on_demand_since=1000.0, short_since=1000.0)
    found = amended(wish(), tried, 1200.0, RULE)
    assert (found.nodes, found.on_demand, found.drain) == (10, 0, ("o-0", "o-1"))


def test_the_attempt_ends_when_spot_stays_away():
    tried = pool(*nodes(6, 4), planned=14, on_demand=0, on_demand_since=1000.0, short_since=1000.0)
    found = amended(wish(), tried, 1300.0, RULE)
    assert (found.nodes, found.on_demand, found.drain) == (10, 4, ())


def test_without_room_one_node_is_exchanged():
    held = pool(*nodes(6, 4), max_nodes=10, on_demand=4, on_demand_since=0.0)
    found = amended(wish(), held, 1800.0, RULE)
    assert (found.nodes, found.on_demand, found.drain) == (10, 3, ("o-0",))


def test_the_dearest_on_demand_node_leaves_first():
    some = [replace(node, price=price) for node, price in zip(nodes(0, 3), (1.0, 3.0, 2.0), strict=True)]
    tried = pool(*nodes(9), *some, planned=13, on_demand=0, on_demand_since=1000.0)
    assert amended(wish(), tried, 1200.0, RULE).drain == ("o-1", "o-2")


def test_a_pool_that_shrinks_needs_fewer_on_demand_nodes():
    held = pool(*nodes(6, 4), on_demand=4, on_demand_since=1000.0)
    found = amended(wish(3, drain=("s-0", "s-1", "s-2", "s-3", "s-4", "s-5", "o-0")), held, 1100.0, RULE)
    assert (found.nodes, found.on_demand) == (3, 3)


def test_values_outside_their_rules_are_refused():
    for wrong in ({"after": -1.0}, {"hold": float("nan")}, {"step": 0}):
        with pytest.raises(OptionError):
            Fallback(**wrong)
    with pytest.raises(OptionError, match="'gpu'"):
        amended(Target("gpu", 1, 1, "x"), pool(), 0.0)


@dataclass
class World:
    """A pool whose group starts what it can: spot nodes up to ``spot``, on-demand nodes up to the base."""

    wanted: int = 10
    max_nodes: int = 20
    spot: int = 100
    base: int = 0  # that was asked for
    size: int = 10
    now: float = 0.0
    there: list[Node] = field(default_factory=list)
    state: PoolState | None = None
    since: float = 0.0
    short: float | None = None
    draining: tuple[str, ...] = ()
    made: int = 0
    changes: int = 0

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.there = [n for n in self.there if n.id not in self.draining]
        self.draining = ()
        spot = [n for n in self.there if n.market == "spot"]
        for lost in spot[self.spot :]:
            self.there.remove(lost)
        while len(self.there) < self.size and self._start():
            pass
        if len(self.there) >= self.size:
            self.short = None
        elif self.short is None:
            self.short = self.now
        state = pool(
            *self.there,
            planned=self.size,
            max_nodes=self.max_nodes,
            on_demand=self.base,
            on_demand_since=self.since,
            short_since=self.short,
        )
        target = amended(wish(self.wanted), state, self.now, RULE)
        assert target.on_demand <= target.nodes <= self.max_nodes
        assert {*target.drain} <= {n.id for n in self.there if n.market == "on-demand"}
        assert len(self.there) - len(target.drain) >= min(self.wanted, len(self.there)) - 1
        if self.max_nodes > self.wanted:
            assert len(self.there) - len(target.drain) >= min(self.wanted, len(self.there))
        if target.on_demand != self.base:
            self.since, self.base = self.now, target.on_demand
            self.changes += 1
        self.draining = target.drain
        self.size = target.nodes

    def _start(self) -> bool:
        self.made += 1
        count = {market: sum(n.market == market for n in self.there) for market in ("spot", "on-demand")}
        if count["on-demand"] < self.base:
            self.there.append(Node(f"o-{self.made}", 2, 7.0, market="on-demand"))
        elif count["spot"] < self.spot:
            self.there.append(Node(f"s-{self.made}", 2, 7.0, market="spot"))
        else:
            return False
        return True

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 30)):
            self.step(30.0)

    @property
    def markets(self) -> tuple[int, int]:
        spot = sum(node.market == "spot" for node in self.there)
        return spot, len(self.there) - spot


@pytest.mark.parametrize("max_nodes", [10, 20])
def test_a_dry_market_costs_minutes_and_then_all_is_as_before(max_nodes):
    world = World(max_nodes=max_nodes)
    world.run(600)
    assert world.markets == (10, 0)
    world.spot = 3
    world.run(RULE.after + 60)
    assert world.markets == (3, 7)
    world.run(3 * 3600)
    assert len(world.there) >= 9
    world.spot = 100
    world.run((7 if max_nodes == 10 else 2) * (RULE.hold + RULE.after))
    assert world.markets == (10, 0)
    assert (world.size, world.base) == (10, 0)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(10, 200)), min_size=1, max_size=6),
    st.sampled_from([10, 11, 20]),
)
def test_whatever_the_market_does_nodes_come_back_and_nothing_flaps(phases, max_nodes):
    world = World(max_nodes=max_nodes)
    for spot, steps in phases:
        world.spot = spot
        before = world.changes
        world.run(30.0 * steps)
        # one change for a shortage, then at most two in every attempt
        assert world.changes - before <= 2 + 2 * (30 * steps / RULE.hold + 1)
    world.run(RULE.after + 60)
    assert len(world.there) >= 9
    world.spot = 100
    world.run(11 * (RULE.hold + RULE.after))
    assert world.markets == (10, 0)
    assert world.size == 10
