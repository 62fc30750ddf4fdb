"""The loop cycle by cycle, on a virtual clock and a real ledger."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from loopcases import START, FakeEvictor, FakeSource, Recorder, ScriptedApp, World, node, nodes, settings

from ebbflow.infra.errors import ClusterError, LedgerBusyError, LedgerUnavailableError, StaleLoopError
from ebbflow.planners.capacity.values import Scaling
from ebbflow.planners.model.fleet import Offer
from ebbflow.planners.model.ledger import Decided, Ended, Granted, LoopBegan, Recalled
from ebbflow.planners.model.prices import Machine, Series
from ebbflow.tasks.apps.loop_report import LOOP, LoopStatusRecord
from ebbflow.tasks.capacity import cycle as loop_module
from ebbflow.tasks.capacity.loop import CapacityLoop
from ebbflow.tasks.capacity.observation import FleetObservation
from ebbflow.tasks.capacity.status import look
from tests.evaluation.renting.fleet import SimulatedFleet, SimulatedPool
from tests.evaluation.renting.spot_supply import Supply
from tests.evaluation.renting.virtual_clock import VirtualClock


@pytest.fixture
def world(tmp_path):
    with World(tmp_path) as made:
        yield made


def test_an_app_gets_its_first_lease_and_the_ledger_says_why(world):
    world.begin()
    world.app("a", 2)
    world.step()
    assert world.gpus("a") == 2
    kinds = [type(event.change) for event in world.ledger.events()]
    assert kinds[0] is LoopBegan
    assert kinds.index(Granted) > 0
    decided = [e.change for e in world.ledger.events(kinds=[Decided]) if e.change.kind == "auction"]
    assert decided
    assert decided[-1].reason
    assert decided[-1].seconds > 0
    assert world.loop.metrics.latencies


def test_nodes_are_written_before_anything_is_granted_on_them(world):
    world.begin()
    world.app("a", 2)
    world.step()
    world.source.add(node("late", 4))
    world.app("b", 4)
    world.step(3)
    there: set[str] = set()
    for event in world.ledger.events():
        change = event.change
        if hasattr(change, "nodes"):
            there |= {one.id for one in change.nodes}
            there -= set(change.left)
        if isinstance(change, Granted):
            assert {lease.node for lease in change.leases} <= there
    assert world.gpus("b") > 0


def test_a_node_that_dies_takes_its_leases_with_it(world):
    world.begin()
    app = world.app("a", 4)
    world.step()
    assert app.nodes == ["n0", "n0", "n1", "n1"]
    world.source.take("n1")
    world.step()
    state = world.ledger.state()
    assert "n1" not in state.nodes
    assert {lease.node for lease in state.leases.values()} == {"n0"}
    assert world.ledger.events(kinds=[Ended])


def test_a_node_that_one_look_missed_gets_no_lease_before_its_app_has_let_go(world):
    world.begin()
    app = world.app("a", 4)
    world.step()
    before = {lease.number for lease in world.ledger.state().held("a")}
    for happens in (lambda: world.source.take("n1"), lambda: world.source.add(node("n1"))):
        happens()
        for _ in range(3):
            world.clock.sleep(0.2)
            world.loop.step()
    assert "n1" in world.ledger.state().nodes
    assert {lease.number for lease in world.ledger.state().held("a")} < before
    app.step()  # it has seen that its leases there are over, and nothing of it is left
    world.clock.sleep(1.0)
    world.loop.step()
    world.steps(2)
    assert world.gpus("a") == 4


def test_a_loop_that_was_suspended_ends_nothing_before_it_knows_that_it_leads(world):
    evictor = FakeEvictor()
    world.begin(evictor=evictor)
    world.clock.sleep(world.pace.leader_lease + 1)
    world.loop._hands.evict("a", "n0", "it was late before the loop was suspended")
    assert not evictor.asked
    world.loop.step()  # it renews its lead, and decides anew
    world.loop._hands.evict("a", "n0", "it is late")
    assert evictor.asked == [("a", "n0")]
    world.loop._lead.lost.set()
    world.loop._hands.evict("a", "n0", "it is late")
    assert len(evictor.asked) == 1


def test_an_end_by_force_whose_answer_was_lost_ends_no_lease_that_came_after(tmp_path):
    evictor = FakeEvictor(there=[("a", "n0")])
    with World(tmp_path, nodes(1)) as world:
        world.begin(evictor=evictor)
        world.app("a", 2, obeys=False)
        world.step()
        other = world.app("b", 2)
        while not evictor.asked:
            world.clock.sleep(0.5)
            for app in world.apps:
                app.step()
            world.loop.step()
        other.finish()  # so what the end by force frees is for the same app again
        world.apps.remove(other)
        real = world.loop._lead.leadership.write

        def torn(changes):
            real(changes)
            assert any(
                isinstance(one, Ended) and one.reason == "terminated by the lease enforcer" for one in changes
            )
            assert any(isinstance(one, Granted) for one in changes)
            raise LedgerUnavailableError("the answer is lost, for a test", unsure=True)

        world.loop._lead.leadership.write = torn
        with pytest.raises(LedgerUnavailableError):
            world.loop.step()
        world.loop._lead.leadership.write = real
        granted = set(world.ledger.state().leases)
        assert len(granted) == 2
        world.loop.step()
        world.loop.step()
        assert set(world.ledger.state().leases) == granted


def test_a_report_of_a_newer_version_is_left_out_and_ends_neither_loop_nor_app(world, tmp_path):
    world.begin()
    newer = world.app("a", 2)
    world.app("b", 2)
    world.step()
    world.apps.remove(newer)
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as other:
        for _ in range(60):
            body = json.dumps({"at": world.clock.now(), "mood": "fine"})
            other.execute(
                "UPDATE ledger_reports SET body = ?, at = ? WHERE app = 'a'", (body, world.clock.now())
            )
            other.commit()
            world.step()
    state = world.ledger.state()
    assert state.apps["a"].phase != "lost"
    assert world.gpus("a") == world.gpus("b") == 2
    view = look(world.ledger)
    assert [one for one in view.problems if "of a is ignored" in one and "mood" in one] == list(view.problems)
    assert LoopStatusRecord.of(world.ledger.reports([LOOP])[LOOP]).problems == view.problems


def test_a_notice_calls_leases_back_before_the_node_is_gone(world):
    world.begin()
    world.app("a", 4)
    world.step()
    world.source.notice("n1", 120.0)
    world.loop.step()
    (recalled,) = world.ledger.events(kinds=[Recalled])
    deadline = world.clock.now() + 120.0 - world.loop._cycles.parts.settings.drain_lead_s
    assert recalled.change.deadline <= deadline + 1
    state = world.ledger.state()
    assert {state.leases[number].node for number in recalled.change.leases} == {"n1"}


def test_a_gpu_is_granted_again_only_once_it_was_let_go(world):
    world.begin()
    stubborn = world.app("a", 4, obeys=False)
    world.step()
    world.app("b", 4)
    world.steps(6, 5.0)
    held = world.ledger.state().held("a")
    assert len(held) == 4  # it has not let go of any
    assert any(lease.recalled for lease in held)
    assert world.gpus("b") == 0
    stubborn.obeys = True
    world.steps(2, 5.0)
    assert world.gpus("b") == 2
    assert world.double_bookings() == []


def test_what_does_not_let_go_is_ended_by_force_and_only_then_ends(world):
    evictor = FakeEvictor(there=[("a", "n0"), ("a", "n1")])
    world.begin(evictor=evictor)
    world.app("a", 4, obeys=False)
    world.step()
    world.app("b", 4)
    evictor.broken = ClusterError("they do not die, for a test")
    world.steps(16, 5.0)
    assert evictor.asked
    # whatever could not be ended for certain is still held
    assert {("a", lease.node) for lease in world.ledger.state().held("a")} == set(evictor.there)
    evictor.broken = None
    world.steps(8, 5.0)
    assert world.gpus("b") > 0
    assert world.double_bookings() == []


def test_what_runs_without_a_lease_is_ended_at_the_start(world):
    world.begin()
    world.app("a", 2)
    world.step()
    world.loop.end()
    evictor = FakeEvictor(there=[("a", "n0"), ("a", "n7"), ("stranger", "n0")])
    world.begin(evictor=evictor)
    world.step()
    assert ("a", "n7") in evictor.asked
    assert all(app == "a" for app, _ in evictor.asked)  # others are not ours to judge
    assert ("a", "n0") not in evictor.asked


def test_a_second_loop_must_wait_and_a_first_that_was_taken_over_writes_nothing(world):
    first = world.begin()
    world.app("a", 1)
    world.step()
    with pytest.raises(LedgerBusyError):
        world.another().begin()
    second = world.another()
    second.begin(take_over=True)
    number = world.ledger.state().number
    world.source.take("n0")
    with pytest.raises(StaleLoopError):
        first.step()
    assert world.ledger.state().number == number
    second.step()
    assert "n0" not in world.ledger.state().nodes


def test_a_loop_that_ends_leaves_its_leases_and_frees_its_lead(world):
    world.begin()
    world.app("a", 2)
    world.step()
    world.loop.end()
    assert world.gpus("a") == 2
    assert LoopStatusRecord.of(world.ledger.reports()[LOOP]).phase == "stopped"
    world.begin()  # nobody has to wait
    world.step()
    assert world.gpus("a") == 2


def test_leases_go_on_while_their_app_wants_them(world):
    world.begin()
    world.app("a", 2)
    world.step()
    first = {lease.number for lease in world.ledger.state().held("a")}
    world.steps(12, 10.0)
    assert {lease.number for lease in world.ledger.state().held("a")} == first


def test_an_app_that_falls_silent_is_lost_and_its_gpus_go_to_others(world):
    recorder = Recorder()
    evictor = FakeEvictor(there=[("a", "n0"), ("a", "n1")])
    world.begin(evictor=evictor, listener=recorder)
    app = world.app("a", 4, more={"flow_run": "run-1", "resume": {"deployment": "x"}})
    world.step()
    world.apps.remove(app)  # its process is gone
    world.app("b", 4)
    world.steps(60, 5.0)
    state = world.ledger.state()
    assert state.apps["a"].phase == "lost"
    assert state.held("a") == ()
    assert world.gpus("b") == 4
    world.loop.end()
    lost = next(event for event in recorder.events if event.kind == "lost")
    assert (lost.payload["flow_run"], lost.payload["resume"]) == ("run-1", {"deployment": "x"})


def test_the_loop_tells_what_it_does(world):
    recorder = Recorder()
    world.begin(listener=recorder)
    world.app("a", 4)
    world.step()
    world.source.notice("n1", 120.0)
    world.step()
    world.loop.end()
    assert {"recovered", "changed", "auction", "revoked"} <= set(recorder.kinds())


def test_a_decision_for_nodes_that_have_left_meanwhile_is_dropped_once(world, monkeypatch):
    world.begin()
    world.step()
    world.app("a", 4)
    real, calls = loop_module.decide, []

    def slow(situation, *given):
        calls.append(situation.state.revision)
        if len(calls) < 3:  # while it is decided, a node leaves that the decision counts on
            world.source.take(f"n{len(calls) - 1}")
            world.loop._watch._capacity.look()
        return real(situation, *given)

    monkeypatch.setattr(loop_module, "decide", slow)
    world.loop.step()
    assert world.loop.metrics.dropped == 1
    assert world.gpus("a") == 0
    world.loop.step()  # never two in a row, or a busy cluster would get no decision at all
    assert world.loop.metrics.dropped == 1
    assert world.gpus("a") > 0


def test_a_policy_that_raises_does_not_end_the_loop_at_once(world, monkeypatch):
    world.begin()
    world.app("a", 2)
    real, left = loop_module.decide, [3]

    def fails(*given):
        left[0] -= 1
        if left[0] >= 0:
            raise ZeroDivisionError("a defect, for a test")
        return real(*given)

    monkeypatch.setattr(loop_module, "decide", fails)
    world.step(4.0)
    assert world.gpus("a") == 0
    world.steps(4, 6.0)
    assert world.gpus("a") == 2
    left[0] = 1000
    with pytest.raises(ZeroDivisionError):
        world.steps(20, 6.0)


class Fleet:
    """A simulated fleet that is also the source: what has arrived is the capacity."""

    def __init__(self, clock: VirtualClock, least: int = 0) -> None:
        times = tuple(START - 10_000.0 + 10_000.0 * i for i in range(200))
        pool = SimulatedPool("gpu", Machine("g5", 8, 32.0, gpus=2, on_demand=2.0), "z", least=least, most=6)
        supply = Supply(Series(times, (0.5,) * 200))
        self.fleet = SimulatedFleet(clock, [pool], {("z", "g5"): supply}, boot=30.0)
        self.broken = None

    def capacity(self):
        from ebbflow.planners.model.capacity import Capacity

        seen = self.fleet.observe()
        there = sorted((one for pool in seen.pools for one in pool.nodes), key=lambda one: one.id)
        return Capacity(seen.revision, tuple(there), seen.notices, seen.at)

    def rented(self):
        offer = Offer("g5", "z", "spot", 0.5, 8, 32.0, 2)
        return FleetObservation(self.observe(), {"gpu": (offer,)})

    def __getattr__(self, name):
        if self.broken is not None:
            raise self.broken
        return getattr(self.fleet, name)


SCALED = Scaling(
    pools={"gpu": "gpus"}, provision_time_s=30.0, scale_out_after_s=5.0, scale_in_idle_s=60.0, cooldown_s=30.0
)


def test_nodes_are_rented_for_apps_that_wait_and_given_back_when_idle(world):
    fleet = Fleet(world.clock)
    recorder = Recorder()
    world.begin(
        source=fleet, fleet=fleet, rented=fleet.rented, settings=settings(scaling=SCALED), listener=recorder
    )
    app = world.app("a", 4, more={"min_gpus": 4})
    world.steps(30, 5.0)
    assert world.gpus("a") == 4
    assert len(fleet.capacity().nodes) >= 2
    app.finish()
    world.apps.clear()
    world.steps(60, 5.0)
    assert fleet.capacity().nodes == ()
    assert world.ledger.state().leases == {}
    world.loop.end()
    assert "scaled" in recorder.kinds()


def test_nothing_is_scaled_by_what_was_seen_too_long_ago(world):
    fleet = Fleet(world.clock)
    world.begin(
        source=fleet,
        fleet=fleet,
        rented=fleet.rented,
        settings=settings(scaling=SCALED),
        pace=replace(world.pace, observation_max_age=20.0),
    )
    world.step()
    planned = fleet.fleet.observe().pools[0].planned
    fleet.broken = ClusterError("the provider is away, for a test")
    world.app("a", 4, more={"min_gpus": 4})
    world.steps(20, 5.0)
    assert fleet.fleet.observe().pools[0].planned == planned
    row = LoopStatusRecord.of(world.ledger.reports()[LOOP])
    assert row.fleet_age > 60.0
    assert any("the fleet has not answered" in problem for problem in row.problems)
    fleet.broken = None
    world.steps(40, 5.0)
    assert world.gpus("a") == 4


def test_a_target_that_a_crash_cut_off_is_decided_again(world):
    fleet = Fleet(world.clock)

    def killed(point):
        if point == "written" and world.loop._cycles.memory.at > 0 and armed:
            raise KeyboardInterrupt

    armed: list[int] = []
    world.begin(
        source=fleet, fleet=fleet, rented=fleet.rented, settings=settings(scaling=SCALED), point=killed
    )
    world.step()
    armed.append(1)
    world.app("a", 4, more={"min_gpus": 4})
    with pytest.raises(KeyboardInterrupt):
        world.steps(20, 5.0)
    assert fleet.fleet.observe().pools[0].planned == 0
    world.clock.sleep(60.0)  # its lead runs out
    world.begin(source=fleet, fleet=fleet, rented=fleet.rented, settings=settings(scaling=SCALED))
    world.steps(30, 5.0)
    assert world.gpus("a") == 4


def test_a_source_that_cannot_be_reached_counts_with_what_it_said_last(world):
    world.begin()
    world.app("a", 2)
    world.step()
    world.source.broken = ClusterError("away, for a test")
    world.app("b", 2)
    world.steps(5, 2.0)
    assert world.gpus("b") == 2
    row = LoopStatusRecord.of(world.ledger.reports()[LOOP])
    assert row.capacity_age >= 8.0
    assert row.problems


def test_a_capacity_that_was_never_seen_empties_no_ledger(world):
    world.begin()
    world.app("a", 2)
    world.step()
    world.loop.end()
    source = FakeSource(clock=world.clock)
    source.broken = ClusterError("away, for a test")
    world.begin(source=source)
    world.step()
    assert world.gpus("a") == 2
    assert set(world.ledger.state().nodes) == {"n0", "n1"}


def test_an_hour_of_an_idle_loop_writes_next_to_nothing(world):
    world.begin()
    world.app("a", 2)
    world.step()
    before = world.ledger.state().number
    world.steps(60, 60.0)
    written = world.ledger.state().number - before
    assert written < 400  # each auction, every 20 s, and what it extends


def test_apps_are_seen_that_enter_while_it_is_decided(world, monkeypatch):
    world.begin()
    world.step()
    real = loop_module.decide
    world.app("a", 1)

    def during(*given):
        if "b" not in world.ledger.state().apps:
            world.apps.append(ScriptedApp(world.ledger, "b", 1).enter())
        return real(*given)

    monkeypatch.setattr(loop_module, "decide", during)
    world.loop.step()
    assert world.gpus("b") == 0  # it was not there yet
    world.loop.step()
    assert world.gpus("b") == 1


def test_a_loop_needs_no_nodes_to_begin(tmp_path):
    with World(tmp_path, there=()) as world:
        world.begin()
        world.app("a", 1)
        world.step()
        assert world.gpus("a") == 0
        world.source.add(*nodes(1))
        world.step()
        assert world.gpus("a") == 1
        assert isinstance(world.loop, CapacityLoop)
