"""What every ``FleetControl`` does: simulated, on this machine, and as Auto Scaling groups of the emulated AWS."""

import time
from dataclasses import replace

import pytest

from ebbflow.infra.errors import NotOursError
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Target
from ebbflow.planners.model.prices import Machine, Series
from tests.evaluation.renting.fleet import BOOT, SimulatedFleet, SimulatedPool
from tests.evaluation.renting.spot_supply import Supply
from tests.evaluation.renting.virtual_clock import VirtualClock
from tests.infra.local_fleet.quick_provider import QuickFleet

POOL, MOST = "etl", 12
START = 1_700_000_000.0
DRY, DEAR = 10_000.0, 9.0  # the simulated market is dry for so long, s, from each multiple of twice that on
TIMEOUT = 90.0  # seconds of the wall for the emulated one


class SimulatedWorld:
    """Time is turned by hand; there is no spot capacity while the price is high."""

    def __init__(self):
        times = tuple(START + DRY * i for i in range(20))
        prices = tuple(0.05 if i % 2 == 0 else DEAR for i in range(20))
        self.clock = VirtualClock(START)
        pool = SimulatedPool(POOL, Machine("m5.large", 2, 8.0, on_demand=0.1), "us-east-1a", most=MOST)
        place = pool.zone, pool.machine.instance_type
        self.fleet = SimulatedFleet(self.clock, [pool], {place: Supply(Series(times, prices))})

    def dry(self):
        at = START + DRY * (1 + 2 * ((self.clock.now() - START) // (2 * DRY)))
        self.clock.until(max(self.clock.now(), at))
        self.fleet.observe()
        self.clock.sleep(300)  # until those that were there are gone

    def wet(self):
        self.clock.until(START + 2 * DRY * (1 + (self.clock.now() - START) // (2 * DRY)))

    def lose(self, count):
        self.dry()
        self.fleet.observe()
        self.wet()

    def settle(self, count):
        self.clock.sleep(2 * BOOT)
        return self.fleet.observe()

    def now(self):
        return self.clock.now()


class LocalWorld:
    """Nodes of this machine: the supervisor and the file are real, the machines are not (see ``local_fleet``)."""

    def __init__(self, folder):
        self.quick = QuickFleet(folder, [LocalPool(POOL, "gpu", cores=2, max_nodes=MOST)])
        self.fleet = self.quick.fleet

    def dry(self):
        self.fleet.outage(POOL, 3600)

    def wet(self):
        self.fleet.outage(POOL, 0)

    def lose(self, count):
        for node in self.fleet.observe().pools[0].nodes[:count]:
            self.fleet.kill(node.id)

    def settle(self, count):
        self.quick.until(lambda state: sum(node.visible for node in state.nodes) == count, TIMEOUT)
        return self.fleet.observe()

    def now(self):
        return self.quick.clock.now()


class AwsWorld:
    """Auto Scaling groups of the emulated AWS."""

    def __init__(self, account, folder):
        from tests.aws.emulator import PoolShape

        self.account, self.folder = account, folder
        self.cluster = account.groups("lab", PoolShape(POOL, most=MOST))
        self.fleet = self.restarted()

    def restarted(self):
        from tests.aws.controller import spot_fleet

        return spot_fleet(self.cluster.settings, self.account.emulator.url, self.folder)

    def strangers(self):
        other = self.account.groups("other")
        group = other.names.group(POOL)
        self.account.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=1)
        return [*self.account.strangers(1), other.nodes(POOL)[0]["id"]]

    def dry(self):
        self.account.configure(most={"spot": 0})

    def wet(self):
        self.account.configure(most={"spot": None})

    def lose(self, count):
        self.account.take([node.id for node in self.fleet.observe().pools[0].nodes[:count]])

    def settle(self, count):
        deadline = time.monotonic() + TIMEOUT
        while len((seen := self.fleet.observe()).pools[0].nodes) != count:
            assert time.monotonic() < deadline, f"{count} nodes did not arrive: {seen}"
            time.sleep(0.05)
        return seen

    def now(self):
        return time.time()


@pytest.fixture
def emulated(aws_account, tmp_path):
    """Return the world of the emulated AWS, for what a simulation has not: other processes, and other owners."""
    world = AwsWorld(aws_account, tmp_path)
    yield world
    world.fleet.close()
    assert aws_account.state()["errors"] == []


@pytest.fixture
def local(tmp_path):
    world = LocalWorld(tmp_path)
    yield world
    world.quick.close()


@pytest.fixture(params=["simulated", "local", "aws"])
def world(request):
    if request.param == "simulated":
        return SimulatedWorld()
    return request.getfixturevalue("local" if request.param == "local" else "emulated")


def _pool(fleet):
    (pool,) = fleet.observe().pools
    return pool


def _apply(world, nodes, drain=(), **options):
    revision = world.fleet.observe().revision
    return world.fleet.apply(Target(POOL, nodes, revision, "a test wants it", drain=tuple(drain)), **options)


def _grown(world, nodes):
    _apply(world, nodes)
    return world.settle(nodes)


def test_planned_nodes_are_requested_at_once_and_observed_when_they_have_arrived(world):
    world.dry()
    applied = _apply(world, 4)
    assert [(ask.kind, ask.value) for ask in applied.asked if ask.kind == "size"] == [("size", 4)]
    pool = _pool(world.fleet)
    assert (pool.planned, pool.requested, len(pool.nodes)) == (4, 4, 0)
    assert pool.short_since is not None
    assert pool.short_since <= world.now()
    before = world.fleet.observe()
    world.wet()
    after = world.settle(4)
    assert after.revision > before.revision
    (pool,) = after.pools
    assert [n.id for n in pool.nodes] == sorted(n.id for n in pool.nodes)
    assert {(n.market, n.cores) for n in pool.nodes} == {("spot", 2)}
    assert pool.short_since is None


def test_a_revision_is_the_same_as_long_as_nodes_and_notices_are(world):
    first = _grown(world, 3)
    again = world.fleet.observe()
    assert again.revision == first.revision
    assert again.pools[0].nodes == first.pools[0].nodes
    world.lose(1)
    assert world.fleet.observe().revision > first.revision


def test_a_target_for_an_old_revision_is_dropped(world):
    old = world.fleet.observe().revision
    _grown(world, 3)
    applied = world.fleet.apply(Target(POOL, 9, old, "too late"))
    assert applied.asked == ()
    assert str(old) in applied.refused[0].why
    assert _pool(world.fleet).planned == 3


def test_a_size_outside_the_pools_limits_is_moved_to_them_and_said_so(world):
    applied = _apply(world, MOST + 5)
    assert _pool(world.fleet).planned == MOST
    assert [refusal.of for refusal in applied.refused] == [POOL]
    assert str(MOST) in applied.refused[0].why


def test_an_unknown_pool_is_an_error(world):
    with pytest.raises(OptionError, match="nowhere"):
        world.fleet.apply(Target("nowhere", 1, world.fleet.observe().revision, "a test wants it"))


def test_a_smaller_target_ends_nothing_and_named_nodes_leave_when_they_are_ended(world):
    nodes = [n.id for n in _grown(world, 5).pools[0].nodes]
    drain = nodes[1], nodes[3]
    _apply(world, 3, drain)
    (pool,) = world.settle(5).pools
    assert (pool.planned, pool.draining) == (3, drain)
    world.fleet.terminate(drain)
    (pool,) = world.settle(3).pools
    assert [n.id for n in pool.nodes] == [nodes[0], nodes[2], nodes[4]]
    assert (pool.planned, pool.requested, pool.draining) == (3, 3, ())


def test_a_smaller_target_cancels_what_has_not_arrived(world):
    _grown(world, 2)
    world.dry()
    _apply(world, 6)
    _apply(world, 3)
    world.wet()
    (pool,) = world.settle(3).pools
    assert (pool.planned, pool.requested) == (3, 3)


def test_a_node_within_the_plan_that_is_ended_is_replaced(world):
    first = [n.id for n in _grown(world, 3).pools[0].nodes]
    world.fleet.terminate(first[:1])
    (pool,) = world.settle(3).pools
    assert first[0] not in {n.id for n in pool.nodes}
    assert set(first[1:]) <= {n.id for n in pool.nodes}


def test_ending_a_node_twice_is_ending_it_once(world):
    nodes = [n.id for n in _grown(world, 3).pools[0].nodes]
    _apply(world, 2, nodes[:1])
    world.fleet.terminate(nodes[:1])
    world.settle(2)
    applied = world.fleet.terminate(nodes[:1])
    assert applied.asked == ()
    assert [refusal.of for refusal in applied.refused] == nodes[:1]
    assert [n.id for n in world.settle(2).pools[0].nodes] == nodes[1:]


def test_nodes_of_others_are_never_ended_nor_seen(emulated):
    ours = [n.id for n in _grown(emulated, 2).pools[0].nodes]
    strangers = emulated.strangers()
    assert not set(strangers) & {n.id for pool in emulated.fleet.observe().pools for n in pool.nodes}
    for stranger in strangers:
        with pytest.raises(NotOursError, match=stranger):
            emulated.fleet.terminate([ours[0], stranger])
    assert [n.id for n in emulated.fleet.observe().pools[0].nodes] == ours
    assert set(strangers) <= {i["id"] for i in emulated.account.alive()}


def test_a_lost_node_is_replaced(world):
    before = {n.id for n in _grown(world, 4).pools[0].nodes}
    world.lose(2)
    (pool,) = world.settle(4).pools
    assert {n.id for n in pool.nodes} != before
    assert pool.planned == 4


def test_a_notice_makes_a_revision_and_the_firmest_and_then_the_earliest_counts(world):
    first = _grown(world, 2)
    node = first.pools[0].nodes[0].id
    advice = Notice(node, world.now() + 60, "rebalance")
    firm, earlier = Notice(node, world.now() + 120), Notice(node, world.now() + 90)
    revision = world.fleet.take_notices([advice])
    assert revision > first.revision
    assert world.fleet.take_notices([advice]) == revision
    revision = world.fleet.take_notices([firm])
    assert world.fleet.take_notices([advice, firm]) == revision
    revision = world.fleet.take_notices([earlier])
    seen = world.fleet.observe()
    assert (seen.revision, seen.notices) == (revision, (earlier,))
    assert world.fleet.take_notices([firm, Notice("i-ffffffffffffffff0", world.now() + 60)]) == revision


def test_a_dry_run_says_what_it_would_ask_and_asks_nothing(world):
    nodes = [n.id for n in _grown(world, 3).pools[0].nodes]
    before = world.fleet.observe()
    applied = _apply(world, 7, dry_run=True)
    assert applied.dry_run
    assert [(ask.of, ask.value) for ask in applied.asked if ask.kind == "size"] == [(POOL, 7)]
    ended = world.fleet.terminate(nodes[:1], dry_run=True)
    assert [ask.of for ask in ended.asked] == nodes[:1]
    world.fleet.repair(dry_run=True)
    assert replace(world.fleet.observe(), at=before.at) == before


def test_a_whole_fleet_needs_no_repair(world):
    _grown(world, 3)
    world.fleet.repair()
    assert world.fleet.repair().asked == ()
    assert len(_pool(world.fleet).nodes) == 3


def test_a_restart_forgets_nothing(emulated):
    first = _grown(emulated, 4)
    nodes = [n.id for n in first.pools[0].nodes]
    _apply(emulated, 3, nodes[:1])
    notice = Notice(nodes[1], emulated.now() + 90)
    revision = emulated.fleet.take_notices([notice])
    emulated.fleet.close()
    emulated.fleet.close()
    emulated.fleet = emulated.restarted()
    emulated.fleet.repair()
    after = emulated.fleet.observe()
    assert (after.revision, after.notices) == (revision, (notice,))
    assert (after.pools[0].planned, after.pools[0].draining) == (3, (nodes[0],))
    assert [n.id for n in after.pools[0].nodes] == nodes
