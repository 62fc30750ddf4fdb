"""The loop's parts one by one."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopcases import FakeEvictor, FakeSource, Recorder, node, until

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import AwsError, ClusterError, LedgerUnavailableError
from ebbflow.infra.protocols import ApplyResult, ProviderCall, Refusal
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.fleet import Fleet, Offer, PoolState, Target
from ebbflow.tasks.apps.loop_report import LoopStatusRecord
from ebbflow.tasks.capacity.actuator import ActionExecutor, EvictionResult, RemoteEvictor, ScaleResult
from ebbflow.tasks.capacity.events import of_done
from ebbflow.tasks.capacity.intervals import LoopIntervals
from ebbflow.tasks.capacity.listeners import EventDispatcher, LoopEvent
from ebbflow.tasks.capacity.loop import Outage
from ebbflow.tasks.capacity.metrics import LoopMetrics, percentile
from ebbflow.tasks.capacity.observation import Watch, look_at
from tests.evaluation.renting.virtual_clock import VirtualClock

PACE = LoopIntervals()


class FakeFleet:
    """Answers what it is asked, when ``go`` is set."""

    def __init__(self):
        self.calls, self.go, self.broken = [], threading.Event(), None
        self.go.set()

    def _did(self, what):
        self.go.wait(150)
        self.calls.append(what)
        if self.broken is not None:
            raise self.broken
        return ApplyResult(1, (ProviderCall("size", "gpu", 3),), (Refusal("gpu", "too many"),))

    def observe(self):
        if self.broken is not None:
            raise self.broken
        return Fleet(1, 0.0, ())

    def apply(self, target, *, dry_run=False):
        return self._did(target.nodes)

    def terminate(self, ids, *, dry_run=False):
        return self._did(tuple(ids))

    def repair(self, *, dry_run=False):
        return self._did("repair")


# --- hands ------------------------------------------------------------------------------------------------------


def test_hands_without_threads_do_it_at_once():
    fleet, evictor = FakeFleet(), FakeEvictor()
    hands = ActionExecutor(fleet, evictor, SystemClock())
    hands.scale([Target("gpu", 3, 1, "more")])
    hands.terminate(["n1"])
    hands.evict("a", "n1", "late")
    assert fleet.calls == [3, ("n1",)]
    first, second, third = hands.done()
    assert (first.applied.revision, second.what, third) == (
        1,
        "end n1, drained",
        EvictionResult("a", "n1", True, "late"),
    )
    assert hands.done() == []


def test_hands_do_not_take_twice_what_is_under_way():
    fleet, wake = FakeFleet(), threading.Event()
    fleet.go.clear()
    hands = ActionExecutor(fleet, FakeEvictor(), SystemClock(), wake)
    hands.start()
    for nodes in (1, 2, 3):
        hands.scale([Target("gpu", nodes, 1, "more")])
    assert hands.waiting == 1
    fleet.go.set()
    until(lambda: not hands.waiting, "the first target")
    hands.scale([Target("gpu", 4, 1, "more")])
    until(lambda: not hands.waiting, "the second target")
    assert fleet.calls == [1, 4]
    assert wake.wait(150)
    hands.close(150)


def test_a_slow_eviction_does_not_delay_the_fleet():
    class Slow(FakeEvictor):
        def evict(self, app, node):
            held.wait(150)
            return True

    held, fleet = threading.Event(), FakeFleet()
    hands = ActionExecutor(fleet, Slow(), SystemClock())
    hands.start()
    hands.evict("a", "n0", "late")
    hands.scale([Target("gpu", 1, 1, "more")])
    until(lambda: fleet.calls == [1] and hands.waiting == 1, "the target, but not the eviction")
    held.set()
    until(lambda: not hands.waiting, "the eviction")
    hands.close(150)


def test_what_waits_is_not_begun_when_another_may_lead():
    class Begun(FakeFleet):
        def apply(self, target, *, dry_run=False):
            begun.set()
            return super().apply(target)

    begun, sure = threading.Event(), [True]
    fleet, evictor = Begun(), FakeEvictor()
    fleet.go.clear()
    hands = ActionExecutor(fleet, evictor, SystemClock(), None, lambda: sure[0])
    hands.start()
    hands.scale([Target("gpu", 1, 1, "more"), Target("etl", 2, 1, "more")])
    hands.terminate(["n1"])
    assert begun.wait(150)
    sure[0] = False  # it was suspended for longer than its lead
    hands.evict("a", "n0", "late")
    fleet.go.set()
    until(lambda: not hands.waiting, "the rest")
    assert fleet.calls == [1]
    assert not evictor.asked
    left = {one.what for one in hands.done() if isinstance(one, ScaleResult) and "another loop" in one.error}
    assert left == {"evict a n0", "target etl", "end n1"}
    hands.close(150)


@pytest.mark.parametrize("error", [AwsError("no"), OptionError("no"), ZeroDivisionError("a defect")])
def test_what_fails_is_told_and_ends_no_thread(error):
    fleet = FakeFleet()
    hands = ActionExecutor(fleet, FakeEvictor(broken=ClusterError("still there")), SystemClock())
    hands.start()
    fleet.broken = error
    hands.scale([Target("gpu", 1, 1, "more")])
    hands.evict("a", "n0", "late")
    until(lambda: not hands.waiting, "the failures")
    done = hands.done()
    assert any(isinstance(one, ScaleResult) and one.error for one in done)
    assert any(isinstance(one, EvictionResult) and not one.done and "still there" in one.why for one in done)
    fleet.broken = None
    hands.scale([Target("gpu", 2, 1, "more")])
    until(lambda: fleet.calls[-1:] == [2], "the next target")
    hands.close(150)


def test_without_anybody_to_evict_nothing_is_certain():
    hands = ActionExecutor(None, None, SystemClock())
    hands.evict("a", "n0", "late")
    hands.repair()
    (done,) = hands.done()
    assert isinstance(done, EvictionResult)
    assert not done.done


def test_what_was_refused_and_asked_is_told():
    done = [
        ScaleResult(
            "gpu: 3 nodes", ApplyResult(1, (ProviderCall("size", "gpu", 3),), (Refusal("gpu", "too many"),))
        )
    ]
    assert [event.kind for event in of_done(done, 1.0)] == ["scaled", "rejected"]


class Remote:
    def __init__(self, *statuses):
        self.statuses, self.asked = list(statuses), []

    def stop_torch(self, node, name):
        self.asked.append((node, name))
        return type("Outcome", (), {"status": self.statuses.pop(0)})()


@pytest.mark.parametrize(
    ("statuses", "services", "expected"),
    [
        (["done"], ("s1",), True),
        (["gone"], ("s1", "s2"), True),
        (["absent"], ("s1",), False),
        ([], (), False),
    ],
)
def test_remote_evictions_say_what_is_certain(statuses, services, expected):
    remote = Remote(*statuses)
    assert RemoteEvictor(remote, lambda _: services).evict("a", "i-1") is expected


def test_a_remote_eviction_that_fails_raises():
    with pytest.raises(AwsError, match="could not be stopped"):
        RemoteEvictor(Remote("failed"), lambda _: ("s1",)).evict("a", "i-1")


# --- announcing -------------------------------------------------------------------------------------------------


def event(number: int) -> LoopEvent:
    return LoopEvent("changed", str(number), float(number))


def test_events_arrive_in_order():
    recorder = Recorder()
    announcer = EventDispatcher(recorder)
    for number in range(100):
        announcer.notify(event(number))
    announcer.close(150)
    assert [one.text for one in recorder.events] == [str(number) for number in range(100)]


def test_what_a_slow_listener_has_no_room_for_is_dropped_and_counted():
    release, recorder = threading.Event(), Recorder()

    class Slow:
        def on_event(self, one):
            release.wait(150)
            recorder.on_event(one)

    announcer = EventDispatcher(Slow(), max_queued=10)
    for number in range(100):
        announcer.notify(event(number))  # never blocks
    assert announcer.dropped >= 88
    release.set()
    announcer.close(150)
    assert len(recorder.events) == 100 - announcer.dropped


def test_a_listener_that_raises_hears_the_next_event():
    recorder = Recorder()

    class Failing:
        def on_event(self, one):
            recorder.on_event(one)
            raise ZeroDivisionError

    announcer = EventDispatcher(Failing())
    announcer.notify(event(1))
    announcer.notify(event(2))
    announcer.close(150)
    assert (len(recorder.events), announcer.failed) == (2, 2)


# --- looking ----------------------------------------------------------------------------------------------------


def test_a_failed_look_leaves_what_was_seen_and_its_age():
    clock = VirtualClock(1000.0)
    source = FakeSource(node("n0"), clock=clock)
    watch = Watch(source, None, PACE, clock)
    assert [one.id for one in watch.take().capacity.nodes] == ["n0"]
    source.broken = ClusterError("away")
    clock.sleep(50.0)
    sight = watch.take()
    assert [one.id for one in sight.capacity.nodes] == ["n0"]
    assert sight.age(clock.now()) == 50.0
    assert "away" in sight.problems[0]
    looks = source.looks
    watch.take()
    assert source.looks == looks  # one that fails is not asked again at once
    clock.sleep(60.0)
    source.broken = None
    sight = watch.take()
    assert (sight.age(clock.now()), sight.problems) == (0.0, ())


def test_a_source_that_hides_its_outage_tells_when_it_was_answered():
    clock = VirtualClock(1000.0)
    watch = Watch(FakeSource(node("n0"), clock=clock), None, PACE, clock, answered=lambda: 970.0)
    assert watch.take().age(clock.now()) == 30.0


def test_a_fleet_that_is_too_old_scales_nothing():
    clock, fleet = VirtualClock(1000.0), FakeFleet()
    watch = Watch(FakeSource(node("n0"), clock=clock), fleet, PACE, clock)
    assert watch.take().fresh(clock.now(), 60.0) is not None
    fleet.broken = AwsError("away")
    clock.sleep(61.0)
    sight = watch.take()
    assert sight.rented is not None
    assert sight.fresh(clock.now(), 60.0) is None


def test_a_fleet_that_knows_its_offers_is_asked_for_them():
    class Offering(FakeFleet):
        def observe(self):
            return Fleet(1, 0.0, (PoolState("gpu", 0, 0, ()),))

        def offers(self, pool):
            return (Offer("g5", "z", "spot", 0.5, 8, 32.0, 2),)

    assert look_at(Offering()).offers["gpu"][0].gpus == 2
    assert look_at(FakeFleet()).offers == {}


def test_a_watch_whose_first_look_shows_a_defect_can_be_ended():
    fleet = FakeFleet()
    fleet.broken = ZeroDivisionError("a defect")
    watch = Watch(FakeSource(node("n0")), fleet, PACE, SystemClock())
    with pytest.raises(ZeroDivisionError):
        watch.start(threading.Event())
    watch.stop()


def test_a_look_that_was_under_way_when_another_was_asked_for_is_followed_by_it():
    clock, began, go = SystemClock(), threading.Event(), threading.Event()
    go.set()

    class Slow(FakeFleet):
        def observe(self):
            self.calls.append("look")
            began.set()
            go.wait(150)
            return Fleet(1, 0.0, ())

    fleet = Slow()
    watch = Watch(FakeSource(node("n0")), fleet, LoopIntervals(fleet_poll_interval=1000.0), clock)
    watch.start(threading.Event())
    began.clear()
    go.clear()
    watch.refresh()
    assert began.wait(150)  # the second look
    watch.refresh()
    go.set()
    until(lambda: len(fleet.calls) == 3, "the third look")
    watch.stop()


def test_each_change_is_stamped_once():
    clock = VirtualClock(1000.0)
    source = FakeSource(node("n0"), clock=clock)
    watch = Watch(source, None, PACE, clock)
    assert len(watch.take().changed) == 1
    clock.sleep(1.0)
    source.add(node("n1"))
    assert watch.take().changed == (1001.0,)
    clock.sleep(1.0)
    assert watch.take().changed == ()


# --- outages and figures ----------------------------------------------------------------------------------------


def test_an_outage_is_waited_for_with_growing_pauses_within_bounds():
    clock = VirtualClock(1000.0)
    outage = Outage(100.0, clock)
    pauses = []

    def wait_on():
        while True:
            pauses.append(outage.failed(LedgerUnavailableError("away")))
            clock.sleep(pauses[-1])

    with pytest.raises(LedgerUnavailableError):
        wait_on()
    assert 100.0 <= clock.now() - 1000.0 <= 106.0
    assert pauses[0] <= 0.1
    assert max(pauses) <= 5.0
    assert outage.count == 1


def test_outages_are_counted_with_their_seconds():
    clock = VirtualClock(1000.0)
    outage = Outage(100.0, clock)
    assert outage.answered() is None
    for seconds in (3.0, 4.0):
        outage.failed(LedgerUnavailableError("away"))
        clock.sleep(seconds)
        assert outage.answered() == seconds
    assert (outage.count, outage.away) == (2, 7.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.floats(0, 1))
def test_a_percentile_is_the_least_value_that_enough_do_not_exceed(values, share):
    found = percentile(values, share)
    assert found in values
    assert sum(one <= found for one in values) >= share * len(values) - 1e-3
    below = [one for one in values if one < found]
    assert len(below) < max(share * len(values), 1e-9) + 1e-3 or not below


def test_figures_stay_small():
    metrics = LoopMetrics()
    for number in range(100):
        metrics.saw([0.0] * 1000, float(number))
    assert metrics.changes == 100_000
    assert len(metrics.latencies) <= 4096
    assert metrics.to_dict()["latency_s"]["worst"] == 99.0


def test_a_status_row_survives_the_ledger(tmp_path):
    from ebbflow.infra.ledger import Ledger

    row = LoopStatusRecord(3, "me", "themis", 5.0, problems=("one",), metrics={"cycles": 2})
    with Ledger.open(str(tmp_path / "l.db")) as ledger:
        ledger.report("_loop", row.report(9.0))
        assert LoopStatusRecord.of(ledger.reports()["_loop"]) == row


@pytest.mark.parametrize(
    "changes",
    [{"poll_interval": 0.0}, {"leader_lease": 0.1}, {"batch_delay": -1.0}, {"ledger_timeout": float("nan")}],
)
def test_a_pace_that_cannot_be_kept_is_refused(changes):
    with pytest.raises(OptionError, match="must be"):
        LoopIntervals(**changes)
