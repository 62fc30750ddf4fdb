"""Cycles of the capacity loop, told as short stories."""

from dataclasses import replace

import numpy as np
import pytest
from ledger_worlds import START, World, app, copied, node

from ebbflow.planners.capacity.decision import decide
from ebbflow.planners.capacity.values import Memory, SchedulerInput, Settings
from ebbflow.planners.model.ledger import AppMoved, AppReport, Decided, Ended, Extended, Granted, Recalled
from ebbflow.planners.model.scheduling import Decision, Grant
from ebbflow.planners.scheduling.live import live_policy

RIGID = Settings(policy=live_policy("best-effort"), lease_s=60, interval_s=30)


class Raises:
    name, elastic = "raises", True

    def decide(self, view, memory, rng):
        raise ZeroDivisionError("of my own")


class Twice:
    """Gives the same node to everybody."""

    name, elastic = "twice", True

    def decide(self, view, memory, rng):
        first = view.capacity.nodes[0]
        return Decision({one.id: Grant(((first.id, first.gpus),)) for one in view.apps})


class Vague:
    """Says when it wants to be asked again, why, or what it noted, in a form that is none."""

    name, elastic = "vague", True

    def __init__(self, **said):
        self.said = said

    def decide(self, view, memory, rng):
        reason = self.said.get("reason", "")
        rest = {name: value for name, value in self.said.items() if name != "reason"}
        return Decision({one.id: Grant((), reason=reason) for one in view.apps}, **rest)


def test_an_app_that_arrives_gets_leases_at_once_with_price_revision_and_reason():
    world = World(RIGID, [node("n1", 4, price=2.0)])
    world.enter(app("a", 3))
    cycle = world.step()
    granted = [change for change in cycle.changes if isinstance(change, Granted)]
    assert [(x.number, x.node, x.slot, x.app) for x in granted[0].leases] == [
        (1, "n1", 0, "a"),
        (2, "n1", 1, "a"),
        (3, "n1", 2, "a"),
    ]
    assert {(x.price, x.revision, x.until) for x in granted[0].leases} == {(0.5, 1, world.now + 60)}
    assert cycle.auction
    decided = next(change for change in cycle.changes if isinstance(change, Decided))
    assert decided.kind == "auction"
    assert decided.inputs["policy"] == "best-effort"
    assert decided.outcome["gpus"] == {"a": 3}
    assert "a gets 3 of n1" in decided.reason


def test_a_burst_of_arrivals_is_decided_on_once():
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("a", 1))
    world.step()
    world.enter(app("b", 1))
    first = world.tick(0.05)
    world.enter(app("c", 1))
    second = world.tick(0.05)
    assert not first.auction
    assert not second.auction
    assert second.wake == pytest.approx(world.now + 0.15)
    third = world.tick(0.16)
    assert third.auction
    assert world.placement("b") == world.placement("c") == {"n1": 1}


def test_leases_are_extended_before_they_end_and_end_when_nobody_is_there():
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("a", 2))
    for _ in range(200):
        cycle = world.step()
        assert all(lease.until > world.now for lease in world.state.leases.values())
    extended = [c for _, _, _, cycle in world.cycles for c in cycle.changes if isinstance(c, Extended)]
    assert 5 <= len(extended) <= 8  # half of a lease's time passes between two
    assert world.state.leases.keys() == {1, 2}
    world.finish("a")
    cycle = world.tick(1)
    assert any(isinstance(change, Ended) and change.leases == (1, 2) for change in cycle.changes)


def test_a_notice_calls_leases_back_in_time_and_moves_the_gang_elsewhere():
    world = World(RIGID, [node("n1", 4), node("n2", 4)])
    world.enter(app("a", 4))
    world.step()
    at = next(iter(world.placement("a")))
    other = {"n1": "n2", "n2": "n1"}[at]
    world.notice(at, 120)
    cycle = world.tick(0.1)
    recalled = [c for c in cycle.changes if isinstance(c, Recalled)]
    assert recalled[0].deadline == pytest.approx(world.now + 120 - 0.1 - 30, abs=0.2)
    assert not world.placement("a")
    world.tick(0.3)
    assert world.placement("a") == {other: 4}


def test_a_gang_keeps_its_other_nodes_until_it_is_decided_where_it_goes():
    world = World(RIGID, [node("n1", 2), node("n2", 2), node("n3", 2)])
    world.enter(app("a", 4))
    world.step()
    lost, kept = sorted(world.placement("a"))
    world.notice(lost, 120)
    world.tick(0.1)
    assert world.placement("a") == {kept: 2}
    world.tick(0.3)
    assert world.live("a") == 4
    assert lost not in world.placement("a")


def test_a_gang_that_has_no_other_place_gives_all_of_its_gpus_back():
    world = World(RIGID, [node("n1", 2), node("n2", 2)])
    world.enter(app("a", 4))
    world.step()
    world.notice("n1", 120)
    world.steps(10)
    assert not world.state.held("a")
    assert any("needs a gang of 4 GPUs (all-or-nothing); 2 exist" in why for why in world.said("guard"))


def test_a_node_that_left_ends_its_leases_and_says_who_lost_them():
    world = World(RIGID, [node("n1", 4), node("n2", 4)])
    world.enter(app("a", 4))
    world.step()
    at = next(iter(world.placement("a")))
    world.capacity(left=(at,))
    cycle = world.tick(1)
    assert any(isinstance(change, Ended) and change.reason == f"{at} is gone" for change in cycle.changes)
    assert world.said("recovery") == [f"{at} terminated while apps held its GPUs: a 4"]
    world.step()
    assert world.live("a") == 4


def missed(settings, **living):
    """Return a world in which one look did not see the only node, on which an app's processes live on."""
    world = World(settings, [node("n1", 4)])
    world.enter(app("a", 4), **living)
    world.step()
    world.enter(app("b", 4))
    world.step()
    world.apps["a"].fields["holds"] = tuple(world.state.leases)
    world.capacity(left=("n1",))
    assert any(isinstance(change, Ended) for change in world.tick(0.3).changes)
    assert not world.state.leases
    world.capacity(came=(node("n1", 4),))
    return world


def test_a_node_that_comes_back_is_closed_until_its_former_app_has_let_go():
    world = missed(RIGID)
    for _ in range(20):
        cycle = world.tick(0.3)
        assert not world.state.leases
        assert not cycle.evict
        assert cycle.wake <= world.now + 0.5  # a report alone wakes nobody
    del world.apps["a"].fields["holds"]
    world.step(0.3)
    assert world.live("a") == 4
    assert not world.memory.left


def test_a_node_that_comes_back_is_closed_until_its_app_has_spoken_after_the_leases_ended():
    world = missed(RIGID, dies=1.5)  # its last word is from before: it may have been about to start there
    world.apps["a"].fields.clear()
    world.reports["a"] = replace(world.reports["a"], holds=())
    world.memory = replace(
        world.memory,
        left={n: replace(one, reported=world.reports["a"].at) for n, one in world.memory.left.items()},
    )
    world.step(0.3)
    assert not world.state.leases
    world.reports["a"] = replace(world.reports["a"], at=world.now)
    world.step(0.3)
    assert world.state.leases


def test_who_does_not_let_go_of_a_node_that_is_back_is_ended_there_by_force():
    world = missed(replace(RIGID, termination_grace_s=6))
    began, evicted = world.now, []
    while not world.state.leases:
        evicted += [(one.app, one.node, world.now - began) for one in world.step(0.5).evict]
        assert world.now < began + 20
    [(name, at, after)] = evicted
    assert (name, at) == ("a", "n1")
    assert after >= 6


def test_a_node_that_is_back_and_out_of_reach_stays_closed_until_a_silent_apps_lease_and_the_grace_are_over():
    world = missed(replace(RIGID, termination_grace_s=6, heartbeat_timeout_s=5), dies=2)
    world.unreachable.add("n1")
    end = START + 1 + 60 + 6
    while not world.state.leases:
        assert world.now < end + 5
        world.step(0.5)
        if world.state.apps["a"].phase == "lost":
            world.enter(app("a", 4))  # it knows nothing of what its former self left there
    assert world.now >= end


def test_a_silent_app_is_ended_by_force_then_its_leases_end_then_it_is_lost():
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("a", 2), dies=5)
    order = []
    for _ in range(60):
        cycle = world.tick(1)
        if cycle.evict:
            order.append("evict")
        order += [type(c).__name__ for c in cycle.changes if isinstance(c, Ended | AppMoved | Extended)]
    assert order == ["evict", "Ended", "AppMoved"]
    assert world.state.apps["a"].phase == "lost"
    assert not world.state.leases


def test_an_app_that_comes_back_after_its_loss_gets_gpus_again():
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("a", 2), dies=5)
    world.steps(60)
    assert world.state.apps["a"].phase == "lost"
    world.enter(app("a", 2))
    world.steps(2)
    assert world.live("a") == 2
    world.steps(60)
    assert world.state.apps["a"].phase != "lost"


def test_what_a_silent_app_holds_on_a_node_out_of_reach_ends_only_after_its_lease_and_the_grace():
    world = World(RIGID, [node("n1", 4)])
    world.unreachable.add("n1")
    world.enter(app("a", 4), dies=5)
    world.steps(4)
    world.enter(app("b", 4))
    until = max(lease.until for lease in world.state.held("a"))
    while world.state.held("a"):
        assert world.now < until + 60 + 5
        world.step()
    assert world.now >= until + 60
    world.step()
    assert world.live("b") == 4


def test_who_does_not_let_go_in_time_is_ended_by_force_on_that_node_only():
    world = World(RIGID, [node("n1", 2), node("n2", 2), node("n3", 2)])
    world.enter(app("a", 4), deaf=5)
    world.steps(3)
    lost = min(world.placement("a"))
    world.steps(3)
    world.notice(lost, 60)
    evicted = set()
    for _ in range(52):
        evicted |= {(one.app, one.node) for one in world.tick(1).evict}
    assert evicted == {("a", lost)}
    assert world.live("a") == 4


def test_no_clock_jump_and_no_outage_makes_anybody_silent():
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("a", 2))
    world.steps(3)
    report = world.reports["a"]
    world.now += 3600  # the loop and the app's reports were both away
    cycle = world.cycle()
    assert not cycle.evict
    world.now -= 7200
    assert world.reports["a"] == report
    cycle = world.cycle()
    assert not cycle.evict
    world.now += 7200
    world.steps(5)
    assert world.live("a") == 2
    assert world.state.apps["a"].phase != "lost"


def test_a_new_loop_takes_over_what_is_there_without_moving_anything():
    world = World(RIGID, [node("n1", 4), node("n2", 4)])
    for id_, gpus in (("a", 3), ("b", 4), ("c", 1)):
        world.enter(app(id_, gpus))
        world.step()
    before = {id_: world.placement(id_) for id_ in "abc"}
    world.now += 300  # all leases have passed their end meanwhile
    for living in world.apps.values():
        world.report(living)
    world.memory = Memory()
    cycle = world.cycle()
    assert {id_: world.placement(id_) for id_ in "abc"} == before
    assert not any(isinstance(c, Granted | Recalled | Ended) for c in cycle.changes)
    assert all(lease.until > world.now for lease in world.state.leases.values())


@pytest.mark.parametrize("policy", [Raises(), Twice()])
def test_a_broken_policy_stops_nothing_and_says_what_it_did(policy):
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("a", 2))
    world.step()
    world.settings = replace(RIGID, policy=policy)
    world.enter(app("b", 2))
    world.steps(120)
    assert world.placement("a") == {"n1": 2}
    assert not world.placement("b")
    failed = [why for why in world.said("auction") if policy.name in why]
    assert len(failed) == 1
    assert ("ZeroDivisionError: of my own" in failed[0]) == (policy.name == "raises")
    world.settings = RIGID
    world.steps(40)
    assert world.live("b") == 2


@pytest.mark.parametrize("said", [{"wake": None}, {"notes": {"gap": "wide"}}, {"notes": 3}, {"reason": None}])
def test_a_policy_that_says_what_makes_no_sense_stops_nothing(said):
    world = World(replace(RIGID, policy=Vague(**said)), [node("n1", 4)])
    world.enter(app("a", 2))
    world.steps(3)
    assert any("policy vague" in why for why in world.said("auction"))
    world.settings = RIGID
    world.steps(20)
    assert world.live("a") == 2


def test_an_app_that_could_not_be_ended_and_speaks_again_keeps_what_it_has():
    world = World(Settings(lease_s=100, termination_grace_s=20), [node("n1", 4)])
    world.unreachable.add("n1")
    living = world.enter(app("a", 2, 1, 4))
    world.steps(5)
    held = set(world.state.leases)
    living.dies = world.now - START
    world.steps(20)
    assert any("is not schedulable" in why for why in world.said("guard"))
    assert set(world.state.leases) == held
    living.dies = float("inf")
    world.report(living)
    world.tick(0.05)  # before the next auction
    world.steps(5)
    assert held <= set(world.state.leases)
    assert not any(isinstance(event.change, Recalled) for event in world.events)


def test_equal_inputs_give_equal_cycles_and_change_nothing_that_they_are_given():
    world = World(Settings(interval_s=5), [node("n1", 4), node("n2", 4)])
    for id_, gpus in (("a", 2), ("b", 4), ("c", 1)):
        world.enter(app(id_, gpus, 1, 2 * gpus), work=100.0 * gpus)
        world.steps(3)
    world.notice("n1", 100)
    world.steps(120)
    assert len(world.cycles) > 100
    for situation, memory, dice, cycle in world.cycles:
        rng = np.random.default_rng()
        rng.bit_generator.state = dice
        state = copied(situation.state)
        again = decide(situation, world.settings, memory, rng)
        assert again.changes == cycle.changes
        assert (again.targets, again.evict, again.wake, again.end) == (
            cycle.targets,
            cycle.evict,
            cycle.wake,
            cycle.end,
        )
        assert situation.state == state


def test_an_empty_cluster_asks_for_nothing_and_sleeps():
    cycle = decide(SchedulerInput(START, World(RIGID, []).state), RIGID, Memory(), np.random.default_rng(0))
    assert cycle.changes == ()
    assert cycle.wake == float("inf")


def test_an_app_out_of_the_ledgers_sight_that_reports_is_ignored():
    world = World(RIGID, [node("n1", 4)])
    world.reports["stranger"] = AppReport(world.now, (7,), (8,), "running")
    assert world.step().changes == ()


def test_queries_hold_no_gpus_and_are_found_lost():
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("q", 0, kind="query"), dies=3)
    world.steps(40)
    assert world.state.apps["q"].phase == "lost"
    assert not world.state.leases
    assert not any(
        cycle.auction and cycle.changes and i > 3 for i, (_, _, _, cycle) in enumerate(world.cycles[:10])
    )


def test_gpus_that_an_app_gives_back_unasked_are_not_given_again_before_the_next_auction():
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("a", 2))
    world.step()
    granted = 0
    for _ in range(65):
        held = tuple(lease.number for lease in world.state.held("a"))
        world.apps["a"].fields = {"holds": (), "released": held}
        cycle = world.tick(1)
        granted += any(isinstance(change, Granted) for change in cycle.changes)
    assert granted == 2  # once each period


def test_of_many_apps_only_those_whose_share_changed_are_told_of_between_two_periods():
    world = World(RIGID, [node("n1", 60)])
    for number in range(55):
        world.enter(app(f"a{number}", 1))
    world.step()
    world.enter(app("late", 1))
    world.step()
    world.steps(30)
    first, second, third = (e.change for e in world.events if isinstance(e.change, Decided))
    assert len(first.inputs["apps"]) == len(first.outcome["gpus"]) == 55
    assert list(second.inputs["apps"]) == ["late"]
    assert second.inputs["others"] == 55
    assert second.outcome["gpus"] == {"late": 1}
    assert len(third.inputs["apps"]) == 56
