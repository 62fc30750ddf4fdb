"""When auctions are due, and when the loop wants to be woken."""

from dataclasses import replace
from math import inf

import pytest
from ledger_worlds import START, World, app, node

from ebbflow.planners.capacity.cycle_state import CycleState
from ebbflow.planners.capacity.leases import HEAD
from ebbflow.planners.capacity.triggers import due
from ebbflow.planners.capacity.values import DesiredAllocation, Plan, SchedulerInput, Settings
from ebbflow.planners.model.scheduling import Decision, Grant
from ebbflow.planners.scheduling.live import live_policy

GANGS = Settings(policy=live_policy("best-effort"), lease_s=60, interval_s=30, debounce_s=0.2)


class Leases:
    """Gives everybody a GPU for ten seconds, and says nothing of when it wants to be asked."""

    name, elastic = "leases", True

    def decide(self, view, memory, rng):
        first = view.capacity.nodes[0].id
        return Decision({one.id: Grant(((first, 1),), view.now + 10.0, "a turn") for one in view.apps})


class Impatient(Leases):
    """Wants to be asked again at once."""

    name = "impatient"

    def decide(self, view, memory, rng):
        return replace(super().decide(view, memory, rng), wake=view.now)


def auctions(world: World, seconds: int, step: float = 1.0) -> list[float]:
    """Return when auctions were held."""
    begin = world.now
    found = []
    for _ in range(int(seconds / step)):
        if world.tick(step).auction:
            found.append(round(world.now - begin, 3))
    return found


def test_auctions_are_held_after_the_period_when_nothing_happens():
    world = World(GANGS, [node("n1")])
    world.enter(app("a", 1))
    assert auctions(world, 100) == [1, 31, 61, 91]


def test_no_auction_is_held_for_nobody():
    world = World(GANGS, [node("n1")])
    world.tick(1)
    assert auctions(world, 100) == []
    assert world.cycles[-1][3].wake == inf


def test_the_end_of_a_lease_is_decided_on_and_its_holder_need_not_stop():
    world = World(replace(GANGS, policy=Leases()), [node("n1")])
    world.enter(app("a", 1))
    assert auctions(world, 35) == [1, 11, 21, 31]
    [lease] = world.state.leases.values()
    assert lease.number == 1
    assert lease.until == START + 31.0 + 10.0 + 60.0 + HEAD  # the policy's word, and the grace to save


def test_a_policy_that_wants_to_be_asked_at_once_does_not_keep_the_loop_busy():
    world = World(replace(GANGS, policy=Impatient()), [node("n1")])
    world.enter(app("a", 1))
    assert len(auctions(world, 10, 0.1)) <= 11


def test_fifty_changes_a_second_are_answered_a_few_times():
    world = World(GANGS, [node("n1", 8)])
    world.tick(1)
    begin, held = world.now, 0
    for number in range(50):
        world.enter(app(f"a{number}", 1))
        held += world.tick(0.02).auction
    assert world.now - begin < 1.01
    assert 3 <= held <= 6


def test_the_loop_wakes_for_what_is_due_next_and_no_earlier():
    world = World(GANGS, [node("n1", 4)])
    world.enter(app("a", 1))
    cycle = world.tick(1)
    assert cycle.wake == world.now + 5.0  # to see whether the app still speaks
    world.notice("n1", 100)
    cycle = world.tick(1)
    assert cycle.wake == world.now + 0.2  # what has changed is to be decided on


def test_a_loop_that_wakes_when_it_asked_to_misses_nothing():
    """Driven by its own ``wake`` alone, the loop extends, ends and finds what is lost in time."""
    world = World(GANGS, [node("n1", 4), node("n2", 4)])
    world.enter(app("a", 2))
    world.enter(app("b", 2), dies=50)
    count = 0
    while world.now < world.state.apps["a"].entered + 300:
        cycle = world.cycles[-1][3] if world.cycles else None
        world.tick(max((cycle.wake if cycle else world.now) - world.now, 0.01))
        count += 1
    assert count < 200
    assert world.state.apps["b"].phase == "lost"
    assert world.live("a") == 2
    assert not world.state.held("b")


@pytest.mark.parametrize(
    ("age", "complete", "expected"), [(24, False, False), (26, False, True), (26, True, False)]
)
def test_a_plan_that_cannot_be_carried_out_is_made_anew(age, complete, expected):
    rules = replace(GANGS, interval_s=1000, termination_grace_s=5, plan_timeout_s=20)
    world = World(rules, [node("n1", 4)])
    world.enter(app("a", 4))
    world.tick(1)
    plan = Plan({"a": DesiredAllocation((("n1", 4),))}, 1, world.now - age, complete)
    memory = replace(world.memory, plan=plan)
    scene = CycleState.of(SchedulerInput(world.now, world.state, world.reports), rules)
    assert due(scene, memory, memory.seen).now is expected
