"""The simulated fleet: who gets a node when, at what price, and when it is taken back."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.protocols import FleetControl
from ebbflow.infra.simulation.traces.rows import SpotRow
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Fleet, PoolState, Target
from ebbflow.planners.model.prices import Machine, Series
from tests.evaluation.renting.fleet import SimulatedFleet
from tests.evaluation.renting.fleet_pool import SimulatedPool
from tests.evaluation.renting.spot_supply import PresenceTrace, Stay, Supply
from tests.evaluation.renting.virtual_clock import VirtualClock

BEGIN = 1_578_000_000.0
GPU = Machine("p3.2xlarge", 8, 61.0, 1, on_demand=3.06)
PLACE = "us-west-2a", "p3.2xlarge"
CALM = Supply(Series.constant(1.0))
POOL = SimulatedPool("gpu", GPU, "us-west-2a", most=10)


def prices(*changes: tuple[float, float]) -> Series:
    return Series(tuple(BEGIN + at for at, _ in changes), tuple(price for _, price in changes))


def trace(*stays: tuple[float, float], length: float = 10_000.0) -> PresenceTrace:
    return PresenceTrace(tuple(Stay(*stay) for stay in stays), length)


class World:
    """A fleet of one pool and its clock."""

    def __init__(self, supply: Supply = CALM, pool: SimulatedPool = POOL, seed: int = 0) -> None:
        self.clock = VirtualClock(BEGIN)
        self.fleet = SimulatedFleet(self.clock, [pool], {PLACE: supply}, seed=seed)
        self.control: FleetControl = self.fleet

    def ask(self, nodes: int, on_demand: int = 0, drain: tuple[str, ...] = ()) -> None:
        revision = self.control.observe().revision
        applied = self.control.apply(Target("gpu", nodes, revision, "test", on_demand, drain))
        assert not applied.refused

    def at(self, seconds: float) -> Fleet:
        self.clock.until(BEGIN + seconds)
        return self.control.observe()

    def pool(self, seconds: float) -> PoolState:
        return self.at(seconds).pools[0]


def ids(pool: PoolState) -> list[str]:
    return [node.id for node in pool.nodes]


def test_nodes_work_after_they_have_booted_and_are_paid_for_from_the_grant() -> None:
    world = World()
    world.ask(2, on_demand=1)
    assert world.pool(119.0).nodes == ()
    assert world.pool(119.0).short_since == BEGIN
    pool = world.pool(120.0)
    assert [node.market for node in pool.nodes] == ["on-demand", "spot"]
    assert [node.price for node in pool.nodes] == [3.06, 1.0]
    assert pool.short_since is None
    world.at(3600.0)
    assert world.fleet.dollars() == pytest.approx(4.06)


def test_a_request_waits_for_a_price_at_or_below_the_limit() -> None:
    world = World(Supply(prices((0, 4.0), (600, 3.06))))
    world.ask(1)
    pool = world.pool(599.0)
    assert pool.nodes == ()
    assert pool.short_why == "the price is above the limit of $3.06/h"
    assert ids(world.pool(720.0)) == ["gpu-00001"]


def test_a_price_above_the_limit_takes_nodes_back_two_minutes_later_but_not_on_demand_ones() -> None:
    world = World(Supply(prices((0, 1.0), (1000, 2.0), (2000, 1.0))), replace(POOL, limit=1.5))
    world.ask(2, on_demand=1)
    before = world.at(999.0)
    told = world.at(1000.0)
    assert told.revision == before.revision + 1
    assert told.notices == (Notice("gpu-00002", BEGIN + 1120.0),)
    assert ids(told.pools[0]) == ["gpu-00001", "gpu-00002"]
    gone = world.at(1120.0)
    assert ids(gone.pools[0]) == ["gpu-00001"]
    assert gone.notices == ()
    assert ids(world.pool(2119.0)) == ["gpu-00001"]
    assert ids(world.pool(2120.0)) == ["gpu-00001", "gpu-00003"]
    bill = world.fleet.bills()[0]
    assert bill.interrupted
    assert bill.dollars == pytest.approx((1000 * 1.0 + 120 * 2.0) / 3600)


def test_a_node_lives_the_life_of_one_of_the_trace() -> None:
    world = World(Supply(Series.constant(1.0), trace((0, 1000), (500, 3000)), BEGIN))
    world.ask(2)
    assert ids(world.pool(120.0)) == ["gpu-00001"]
    assert world.pool(120.0).short_why == "there is no capacity"
    assert ids(world.pool(620.0)) == ["gpu-00001", "gpu-00002"]
    assert world.at(879.0).notices == ()
    assert world.at(880.0).notices == (Notice("gpu-00001", BEGIN + 1000.0),)
    assert ids(world.pool(1000.0)) == ["gpu-00002"]
    # the trace is repeated, and gives another node then
    assert ids(world.pool(9999.0)) == []
    assert ids(world.pool(10_120.0)) == ["gpu-00003"]


def test_a_node_that_the_trace_takes_soon_is_not_given_out() -> None:
    world = World(Supply(Series.constant(1.0), trace((0, 100), (50, 5000)), BEGIN))
    world.ask(1)
    assert world.fleet.next_change() == BEGIN + 50
    assert ids(world.pool(170.0)) == ["gpu-00001"]


def test_nodes_of_one_trace_are_never_given_twice() -> None:
    stays = trace(*((0, 2000 + at) for at in range(5)))
    world = World(Supply(Series.constant(1.0), stays, BEGIN))
    world.ask(8)
    assert len(world.pool(200.0).nodes) == 5
    assert len({notice.deadline for notice in world.at(1990.0).notices}) == 5


def test_a_smaller_target_cancels_what_has_not_arrived_and_ends_nothing_else() -> None:
    world = World()
    world.ask(1)
    world.at(120.0)
    world.ask(4)
    world.ask(1)
    assert ids(world.pool(1000.0)) == ["gpu-00001"]
    world.ask(0, drain=("gpu-00001",))
    pool = world.pool(2000.0)
    assert (pool.planned, pool.draining, ids(pool)) == (0, ("gpu-00001",), ["gpu-00001"])
    applied = world.control.terminate(["gpu-00001", "gpu-00009"])
    assert [str(ask) for ask in applied.asked] == ["end gpu-00001"]
    assert [refusal.of for refusal in applied.refused] == ["gpu-00009"]
    assert world.pool(3000.0).nodes == ()
    assert not world.fleet.bills()[-1].interrupted


def test_a_node_that_is_ended_within_the_plan_is_replaced() -> None:
    world = World()
    world.ask(2)
    world.at(120.0)
    applied = world.control.terminate(["gpu-00001"])
    assert str(applied.asked[0]) == "end gpu-00001, which is replaced"
    assert ids(world.pool(240.0)) == ["gpu-00002", "gpu-00003"]


def test_a_pool_never_falls_below_its_least() -> None:
    world = World(pool=replace(POOL, least=1))
    world.at(120.0)
    applied = world.control.terminate(["gpu-00001"])
    assert "below its 1 nodes" in applied.refused[0].why
    revision = world.control.observe().revision
    applied = world.control.apply(Target("gpu", 0, revision, "less"))
    assert "may have 1 to 10" in applied.refused[0].why


def test_targets_of_another_revision_and_of_unknown_pools_are_refused() -> None:
    world = World()
    revision = world.control.observe().revision
    applied = world.control.apply(Target("gpu", 3, revision + 1, "early"))
    assert not applied.asked
    assert "decided for revision" in applied.refused[0].why
    with pytest.raises(OptionError, match="pool must be one of gpu"):
        world.control.apply(Target("cpu", 1, revision, "wrong"))


def test_a_dry_run_says_what_it_would_ask_and_changes_nothing() -> None:
    world = World()
    revision = world.control.observe().revision
    applied = world.control.apply(Target("gpu", 3, revision, "look", 1), dry_run=True)
    assert [str(ask) for ask in applied.asked] == ["gpu: 3 nodes", "gpu: 1 nodes on-demand at least"]
    assert world.pool(500.0).planned == 0


def test_notices_that_others_bring_are_kept_until_firmer_ones_come() -> None:
    world = World(Supply(prices((0, 1.0), (1000, 5.0))))
    world.ask(1)
    first = world.at(200.0).revision
    advice = Notice("gpu-00001", BEGIN + 900.0, "rebalance")
    assert world.control.take_notices([advice, Notice("other", 0.0)]) == first + 1
    assert world.control.take_notices([advice]) == first + 1
    assert world.at(300.0).notices == (advice,)
    assert world.at(1000.0).notices == (Notice("gpu-00001", BEGIN + 1120.0),)
    assert world.at(1200.0).notices == ()


def test_a_place_without_prices_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"no price of p3\.2xlarge in us-west-2b"):
        SimulatedFleet(VirtualClock(BEGIN), [replace(POOL, zone="us-west-2b")], {PLACE: CALM})
    late = Supply(prices((10.0, 1.0)))
    with pytest.raises(WorkloadError, match="no price"):
        SimulatedFleet(VirtualClock(BEGIN), [POOL], {PLACE: late})
    with pytest.raises(OptionError, match="unique"):
        SimulatedFleet(VirtualClock(BEGIN), [POOL, POOL], {PLACE: CALM})


STEPS = st.lists(
    st.tuples(st.floats(1.0, 900.0), st.integers(0, 6), st.integers(0, 6), st.booleans()),
    min_size=1,
    max_size=25,
)


@given(st.integers(0, 10**6), STEPS)
def test_whatever_is_asked_the_fleet_is_consistent_and_repeats_itself(
    seed: int, steps: list[tuple[float, int, int, bool]]
) -> None:
    rng = np.random.default_rng(seed)
    starts = sorted(float(at) for at in rng.uniform(0, 4000, 6))
    stays = [(at, at + float(rng.uniform(10, 3000))) for at in starts]
    levels = [(float(at), float(rng.uniform(0.5, 2.0))) for at in sorted(rng.uniform(0, 8000, 8))]
    supply = Supply(prices((0.0, 1.0), *levels), trace(*stays, length=7500.0), BEGIN - 100.0)

    def played() -> list[object]:
        world = World(supply, replace(POOL, limit=1.5), seed)
        now, seen = 0.0, []
        fleet = world.control.observe()
        for gap, nodes, on_demand, ends in steps:
            world.ask(nodes, min(on_demand, nodes))
            now += gap
            before, fleet = fleet, world.at(now)
            pool = fleet.pools[0]
            told = {notice.node_id for notice in fleet.notices}
            assert told <= set(ids(pool))
            assert len([id_ for id_ in ids(pool) if id_ not in told]) <= max(
                nodes, len(before.pools[0].nodes)
            )
            changed = (ids(before.pools[0]), before.notices) != (ids(pool), fleet.notices)
            assert fleet.revision >= before.revision + changed
            if ends and pool.nodes:
                world.control.terminate([pool.nodes[0].id])
            seen.append((fleet, world.fleet.dollars()))
        assert all(bill.dollars >= 0 and bill.end >= bill.start for bill in world.fleet.bills())
        assert [dollars for _, dollars in seen] == sorted(dollars for _, dollars in seen)
        return seen

    assert played() == played()


def test_a_trace_of_rows_has_the_stays_of_its_nodes() -> None:
    rows = [
        SpotRow(0, "add", "a"),
        SpotRow(1000, "add", "b"),
        SpotRow(4000, "remove", "a"),
        SpotRow(9000, "add", "c"),
        SpotRow(9500, "remove", "c"),
    ]
    found = PresenceTrace.of(rows)
    assert found.stays == (Stay(0.0, 4.0), Stay(1.0, 9.5), Stay(9.0, 9.5))
    assert found.length == 9.5
    supply = Supply(Series.constant(1.0), found, 100.0)
    assert [slot.number for slot in supply.slots(109.2)] == [1, 2]
    assert supply.next_slot(109.2) == 109.5
    assert [(slot.lap, slot.number, slot.end) for slot in supply.slots(110.0)] == [(1, 0, 113.5)]
    with pytest.raises(WorkloadError, match="must have nodes"):
        PresenceTrace((), 1.0)


def test_turns_are_where_the_price_crosses_the_limit() -> None:
    supply = Supply(Series((0.0, 10.0, 20.0, 30.0, 40.0), (1.0, 2.0, 3.0, 2.0, 2.5)))
    assert supply.turns(2.0) == (20.0, 30.0, 40.0)
    assert supply.turns(5.0) == ()


def test_a_virtual_clock_moves_only_when_somebody_waits() -> None:
    clock = VirtualClock(10.0)
    clock.sleep(-1.0)
    clock.sleep(5.0)
    assert clock.now() == 15.0
    with pytest.raises(OptionError, match="time cannot go"):
        clock.until(14.0)
