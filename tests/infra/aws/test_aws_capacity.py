"""A fleet's nodes and what is told about them become one capacity, at once and in an outage too."""

import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.aws.capacity import AwsCapacity, merge_notices
from ebbflow.infra.aws.clients import Clients
from ebbflow.infra.aws.fleet.fleet import SpotFleet
from ebbflow.infra.aws.fleet.state import FolderStore
from ebbflow.infra.aws.notices import events
from ebbflow.infra.aws.notices.feed import NoticeFeed
from ebbflow.infra.aws.notices.store import NoticeFile, NoticeLog
from ebbflow.infra.errors import AwsUnavailableError, CredentialsError, EngineUnavailableError, StorageError
from ebbflow.planners.errors import OptionError
from ebbflow.planners.hazard import hazard
from ebbflow.planners.model import Node, Notice
from ebbflow.planners.model.fleet import Fleet, PoolState
from tests.aws.emulator import PoolShape
from tests.aws.faults import Faults
from tests.infra.aws.notice_samples import NODES, START, stream


def nodes(*names):
    return tuple(Node(name, 4, 8.0) for name in names)


class FakeFleet:
    """A fleet whose nodes a test sets, with the revisions of a real one."""

    def __init__(self, *names):
        self.pools = {"etl": nodes(*names)}
        self.draining = ()
        self.planned = len(names)
        self.known = {}
        self.revision = 1
        self.shown = None
        self.looks = 0
        self.error = None

    def observe(self):
        self.looks += 1
        if self.error is not None:
            raise self.error
        there = {node.id for pool in self.pools.values() for node in pool}
        told = tuple(n for _, n in sorted(self.known.items()) if n.node_id in there)
        if self.shown != (self.pools, told):
            self.revision += 1
            self.shown = (dict(self.pools), told)
        pools = tuple(
            PoolState(name, self.planned, self.planned, found, draining=self.draining)
            for name, found in sorted(self.pools.items())
        )
        return Fleet(self.revision, 0.0, pools, told)

    def take_notices(self, notices):
        self.known |= {notice.node_id: notice for notice in notices}
        self.revision += 1
        return self.revision


class FakeFeed:
    """A feed to which a test tells events."""

    def __init__(self):
        self.book = NoticeLog()
        self.listeners = []

    def tell(self, *told):
        for event in told:
            self.book = self.book.merged(event)
        for listener in self.listeners:
            listener(told)

    def notices(self):
        return self.book.notices()

    def ended(self):
        return frozenset(self.book.ended)

    def listen(self, heard):
        self.listeners.append(heard)


def warning(node, at=START):
    return events.Interruption(node, at, at + 120, "terminate")


@pytest.fixture
def feed():
    return FakeFeed()


def make(fleet, feed, clock=None, **options):
    return AwsCapacity(fleet, feed, **({"hazard": hazard, "clock": clock} | options))


def test_the_nodes_of_all_pools_count_or_those_of_some(feed, clock):
    fleet = FakeFleet("i-b", "i-a")
    fleet.pools["gpu"] = nodes("i-c")
    assert [n.id for n in make(fleet, feed, clock).capacity().nodes] == ["i-a", "i-b", "i-c"]
    assert [n.id for n in make(fleet, feed, clock, pools=["gpu"]).capacity().nodes] == ["i-c"]


def test_a_notice_is_a_revision_without_a_look_at_ec2(feed, clock):
    fleet = FakeFleet("i-a", "i-b")
    source = make(fleet, feed, clock)
    first = source.capacity()
    assert source.capacity().revision == first.revision == 1
    feed.tell(warning("i-a"))
    found = source.capacity()
    assert found.revision == 2
    assert found.notices == (Notice("i-a", START + 120),)
    assert [n.id for n in found.usable] == ["i-b"]
    assert fleet.looks == 1
    feed.tell(warning("i-a"))
    assert source.capacity().revision == 2


def test_the_notice_of_a_node_that_is_not_seen_yet_counts_from_its_first_sight(feed, clock):
    fleet = FakeFleet("i-a")
    source = make(fleet, feed, clock)
    source.capacity()
    feed.tell(warning("i-new"), warning("i-somebody-elses"))
    assert source.capacity().notices == ()
    fleet.pools = {"etl": nodes("i-a", "i-new")}
    found = source.look()
    assert found.notices == (Notice("i-new", START + 120),)
    assert [n.id for n in found.usable] == ["i-a"]


def test_a_node_that_is_said_to_have_ended_is_gone_before_ec2_says_so(feed, clock):
    source = make(FakeFleet("i-a", "i-b"), feed, clock)
    source.capacity()
    feed.tell(warning("i-a"), events.StateChange("i-a", START + 90, "shutting-down"))
    found = source.capacity()
    assert ([n.id for n in found.nodes], found.notices) == (["i-b"], ())


def test_the_fleet_is_told_of_notices_and_its_own_revision_is_shown(feed, clock):
    fleet = FakeFleet("i-a", "i-b")
    source = make(fleet, feed, clock)
    before = source.fleet()
    feed.tell(warning("i-a"), warning("i-other"))
    after = source.fleet()
    assert after.revision == fleet.revision == before.revision + 1
    assert after.notices == (Notice("i-a", START + 120),)
    assert after.pools == before.pools
    assert source.look().revision == 2
    assert source.fleet().notices == after.notices


def test_a_fleet_that_has_forgotten_a_notice_is_told_again(feed, clock):
    fleet = FakeFleet("i-a", "i-b")
    source = make(fleet, feed, clock)
    feed.tell(warning("i-a"))
    source.look()
    assert source.fleet().notices == (Notice("i-a", START + 120),)
    del fleet.pools["etl"]  # one look leaves the nodes out, and the fleet drops what it knew of them
    source.look()
    fleet.known.clear()
    fleet.pools["etl"] = nodes("i-a", "i-b")
    source.look()
    assert fleet.known.keys() == {"i-a"}  # told at once, not at the next look
    assert source.fleet().notices == (Notice("i-a", START + 120),)
    source.look()
    told = fleet.revision
    source.look()  # and not once more
    assert (source.fleet().revision, fleet.known.keys()) == (told, {"i-a"})


def test_a_fleet_that_cannot_keep_notices_hinders_nobody(feed, clock, caplog):
    fleet = FakeFleet("i-a")
    source = make(fleet, feed, clock)
    source.capacity()

    def full(_notices):
        raise StorageError("no space left")

    fleet.take_notices = full
    feed.tell(warning("i-a"))
    assert source.fleet().pools[0].nodes == nodes("i-a")
    assert source.capacity().usable == ()
    assert source.look().usable == ()
    assert "no space left" in caplog.text


@pytest.mark.parametrize("error", [AwsUnavailableError("away"), CredentialsError("expired")])
def test_in_an_outage_the_last_nodes_count_and_notices_go_on(feed, clock, caplog, error):
    fleet = FakeFleet("i-a", "i-b")
    source = make(fleet, feed, clock, refresh=5)
    source.capacity()
    fleet.error = error
    clock.sleep(6)
    found = source.capacity()
    assert (len(found.nodes), found.revision, fleet.looks) == (2, 1, 2)
    assert source.status().stale_since == clock.now()
    assert source.status().error == str(error)
    feed.tell(warning("i-b"))
    assert [n.id for n in source.capacity().usable] == ["i-a"]
    fleet.error = None
    fleet.pools = {"etl": nodes("i-a")}
    clock.sleep(6)
    assert [n.id for n in source.capacity().nodes] == ["i-a"]
    assert source.status().stale_since is None
    assert caplog.text.count("its last known nodes are used") == 1
    assert caplog.text.count("is available again after 6 s") == 1


def test_a_fleet_that_never_could_be_seen_is_an_error(feed, clock):
    fleet = FakeFleet("i-a")
    fleet.error = AwsUnavailableError("away")
    with pytest.raises(EngineUnavailableError, match="polling the fleet failed: away"):
        make(fleet, feed, clock).capacity()


def test_the_hazard_follows_what_is_lost_and_not_what_is_released(feed, clock):
    fleet = FakeFleet("i-a", "i-b", "i-c", "i-d")
    source = make(fleet, feed, clock, refresh=1800)
    assert source.capacity().hazard == hazard(0, 0.0)
    clock.sleep(1800)
    assert source.capacity().hazard == pytest.approx(hazard(0, 4 * 1800))
    feed.tell(warning("i-a"))  # announced
    source.release(["i-b"])
    fleet.draining = ("i-c",)
    source.look()
    fleet.pools = {"etl": nodes("i-d")}
    source.look()
    assert source.losses == 1
    fleet.pools = {"etl": ()}
    clock.sleep(3600)
    found = source.capacity()  # one more that vanished without a word
    assert source.losses == 2
    # its hour counts: when it went nobody knows
    assert found.hazard == pytest.approx(hazard(2, 4 * 1800 + 3600))


def test_of_two_notices_the_firmest_counts_then_the_earliest():
    weak, early, late = Notice("a", 1.0, "rebalance"), Notice("a", 5.0), Notice("a", 9.0)
    other = Notice("b", 3.0, "rebalance")
    assert merge_notices([late, other], [weak, early]) == (early, other)
    assert merge_notices([weak], []) == (weak,)


@given(stream(), st.lists(st.sampled_from(NODES), unique=True), st.integers(0, 3))
def test_however_it_comes_the_capacity_in_the_end_is_the_same(pair, there, split):
    happened, delivered = pair
    ends = []
    for order in (happened, delivered):
        told, fleet = FakeFeed(), FakeFleet(*there)
        source = make(fleet, told)
        source.capacity()
        at = min(split, len(order))
        told.tell(*order[:at])
        source.look()
        told.tell(*order[at:])
        ends.append(source.look())
    assert ends[0].same_nodes(ends[1])
    warned = {e.instance for e in happened if isinstance(e, events.Interruption)}
    ended = {e.instance for e in happened if isinstance(e, events.StateChange) and e.ended}
    assert {n.node_id for n in ends[0].notices} >= (warned & set(there)) - ended
    assert not {n.id for n in ends[0].nodes} & ended


def test_waiting_ends_with_the_next_revision_or_in_time(feed):
    source = make(FakeFleet("i-a"), feed)
    begun = time.monotonic()
    assert source.wait(1, 0.2).revision == 1
    assert time.monotonic() - begun >= 0.15
    teller = threading.Timer(0.1, feed.tell, [warning("i-a")])
    teller.start()
    begun = time.monotonic()
    assert source.wait(1, 300).revision == 2
    assert time.monotonic() - begun < 150
    teller.join()


def test_a_thread_looks_at_once_when_a_node_ends_or_one_is_missing(feed):
    fleet = FakeFleet("i-a", "i-b")
    with make(fleet, feed, refresh=600) as source:
        first = source.wait(0, 150)
        fleet.pools = {"etl": nodes("i-a")}
        feed.tell(events.StateChange("i-b", START, "terminated"))
        second = source.wait(first.revision, 150)
        assert [n.id for n in second.nodes] == ["i-a"]
        deadline = time.monotonic() + 150
        while len(source.fleet().pools[0].nodes) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        fleet.pools = {"etl": nodes("i-a", "i-c")}
        feed.tell(events.StateChange("i-c", START, "running"))
        assert [n.id for n in source.wait(second.revision, 150).nodes] == ["i-a", "i-c"]
        looks = fleet.looks
        feed.tell(events.StateChange("i-foreign", START, "terminated"))
        feed.tell(events.StateChange("i-foreign", START, "running"))
        time.sleep(1.3)
        assert fleet.looks == looks


def test_a_thread_hands_notices_to_the_fleet(feed):
    fleet = FakeFleet("i-a")
    with make(fleet, feed, refresh=600) as source:
        source.capacity()
        feed.tell(warning("i-a"))
        deadline = time.monotonic() + 150
        while "i-a" not in fleet.known:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert source.fleet().notices


def test_a_refresh_below_a_second_is_refused(feed):
    with pytest.raises(OptionError, match="refresh must be >= 1 s; got 0"):
        make(FakeFleet(), feed, refresh=0)


@pytest.fixture
def lab(aws_account):
    return aws_account.cluster("lab", PoolShape("etl", size=3))


@pytest.fixture
def source(lab, tmp_path):
    clients = Clients(lab.settings.region, lab.account.emulator.url, attempts=1)
    fleet = SpotFleet(lab.settings, clients, FolderStore(tmp_path, "lab"))
    told = NoticeFeed(clients, lab.settings.notice_queue_url, NoticeFile(tmp_path / "notices.json"), wait=2)
    with told, make(fleet, told, refresh=600) as source:
        yield source
        lab.account.faults(Faults())


def test_a_notice_is_a_revision_long_before_the_fleet_is_looked_at_again(lab, source):
    first = source.capacity()
    assert len(first.usable) == 3
    for node in first.nodes:
        before = source.capacity()
        lab.account.interrupt([node.id], end=False)
        after = source.wait(before.revision, 150)
        assert node.id in {n.node_id for n in after.notices}
    assert source.capacity().usable == ()
    assert source.capacity().at >= first.at


def test_a_notice_is_a_revision_though_ec2_fails(lab, source, monkeypatch):
    first = source.capacity()

    def away(*_, **__):
        raise AwsUnavailableError("away")

    monkeypatch.setattr(source._control, "observe", away)
    lab.account.interrupt([first.nodes[0].id], end=False)
    after = source.wait(first.revision, 150)
    assert [n.node_id for n in after.notices] == [first.nodes[0].id]
    assert replace(after, revision=1, notices=(), at=0.0, hazard=0.0) == replace(
        first, revision=1, at=0.0, hazard=0.0
    )


def test_an_interruption_takes_the_node_and_its_notice_away_and_brings_another(lab, source):
    first = source.capacity()
    gone = first.nodes[0].id
    lab.account.interrupt([gone], seconds=0.5)
    found, deadline = first, time.monotonic() + 20
    while gone in {n.id for n in found.nodes} or len(found.usable) < 3:
        assert time.monotonic() < deadline
        found = source.wait(found.revision, 1)
    assert found.notices == ()
    assert source.losses == 1


def test_a_notice_is_kept_although_a_look_of_ec2_leaves_its_node_out(lab, tmp_path, monkeypatch, feed):
    clients = Clients(lab.settings.region, lab.account.emulator.url)
    fleet = SpotFleet(lab.settings, clients, FolderStore(tmp_path, "lab"))
    source = make(fleet, feed, refresh=600)
    name = source.capacity().nodes[0].id
    feed.tell(warning(name, time.time()))
    assert [n.node_id for n in source.fleet().notices] == [name]
    ours = fleet._instances.ours
    with monkeypatch.context() as patch:
        patch.setattr(fleet._instances, "ours", lambda: [i for i in ours() if i.id != name])
        assert name not in {n.id for n in source.look().nodes}
    assert [n.node_id for n in source.look().notices] == [name]
    # the fleet's own record has it again, so that whoever else looks at it knows
    assert [n.node_id for n in fleet.observe().notices] == [name]
    assert source.fleet().revision == fleet.observe().revision
