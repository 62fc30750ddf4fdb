"""From plans to leases, one decision at a time."""

from dataclasses import replace

import pytest
from ledger_worlds import World, app, node

from ebbflow.planners.capacity.cycle_state import CycleState
from ebbflow.planners.capacity.leases import Moves, carry_out
from ebbflow.planners.capacity.values import DesiredAllocation, Plan, SchedulerInput, Settings, Team
from ebbflow.planners.model.ledger import AppEntered, Granted, Lease, Recalled
from ebbflow.planners.scheduling.live import live_policy

GANGS = Settings(policy=live_policy("best-effort"), lease_s=100, termination_grace_s=20)
ELASTIC = Settings(lease_s=100, termination_grace_s=20)


def world_of(settings: Settings, *specs, nodes=None, held=None) -> World:
    """Return a world whose apps hold ``held``: app -> list of (node, slot)."""
    world = World(settings, nodes or [node("n1", 4), node("n2", 4)])
    world.write([AppEntered(spec) for spec in specs])
    number = 0
    for id_, slots in (held or {}).items():
        leases = []
        for where, slot in slots:
            number += 1
            leases.append(Lease(number, id_, where, slot, world.now, world.now + 100, 1, 0.25))
        world.write([Granted(tuple(leases))])
    return world


def settle(
    world: World, wanted: dict[str, dict[str, int]], *, age: float = 0.0, until=float("inf"), **more
) -> Moves:
    plan = Plan(
        {
            id_: DesiredAllocation(tuple(sorted(where.items())), until, "test")
            for id_, where in wanted.items()
        },
        1,
        world.now - age,
    )
    scene = CycleState.of(SchedulerInput(world.now, world.state), world.settings)
    return carry_out(scene, plan, more.pop("silent", ()), more.pop("late", ()), **more)


def granted(moves: Moves) -> list[tuple[str, str, int]]:
    return [(lease.app, lease.node, lease.slot) for lease in moves.granted]


def recalled(moves: Moves) -> set[int]:
    return {number for numbers in moves.recalled.values() for number in numbers}


def test_slots_are_the_lowest_free_and_kept_ones_stay():
    world = world_of(ELASTIC, app("a", 2, 1, 4), app("b", 1), held={"b": [("n1", 1)]})
    moves = settle(world, {"a": {"n1": 2}, "b": {"n1": 1}})
    assert granted(moves) == [("a", "n1", 0), ("a", "n1", 2)]
    assert not recalled(moves)


def test_an_app_that_shrinks_on_a_node_gives_back_its_highest_slots():
    world = world_of(ELASTIC, app("a", 2, 1, 4), held={"a": [("n1", 0), ("n1", 1), ("n1", 3)]})
    moves = settle(world, {"a": {"n1": 1}})
    assert recalled(moves) == {2, 3}
    [(deadline, why)] = moves.recalled
    assert deadline == world.now + 20
    assert why == "preempted: its allocation is now 1 of n1"


def test_a_move_to_free_gpus_grants_and_recalls_at_once():
    world = world_of(GANGS, app("a", 2), held={"a": [("n1", 0), ("n1", 1)]})
    moves = settle(world, {"a": {"n2": 2}})
    assert granted(moves) == [("a", "n2", 0), ("a", "n2", 1)]
    assert recalled(moves) == {1, 2}


def test_an_app_works_on_where_it_is_until_its_new_place_is_free():
    held = {"a": [("n1", 0), ("n1", 1)], "b": [("n2", s) for s in range(4)]}
    world = world_of(GANGS, app("a", 2), app("b", 4), held=held)
    moves = settle(world, {"a": {"n2": 2}, "b": {}})
    assert recalled(moves) == {3, 4, 5, 6}
    assert not moves.granted
    assert "n2" in moves.waiting["a"]


def test_two_gangs_that_change_places_both_let_go_and_neither_holds_a_part():
    held = {"a": [("n1", s) for s in range(4)], "b": [("n2", s) for s in range(4)]}
    world = world_of(GANGS, app("a", 4), app("b", 4), held=held)
    plan = {"a": {"n2": 4}, "b": {"n1": 4}}
    moves = settle(world, plan)
    assert recalled(moves) == set(range(1, 9))
    world.write(list(moves.changes))
    # a has let go, b has not: b's new place is free, a's is not
    scene = CycleState.of(SchedulerInput(world.now, world.state), world.settings)
    scene.end(list(scene.held("a")))
    wanted = {id_: DesiredAllocation(tuple(where.items())) for id_, where in plan.items()}
    assert {lease[0] for lease in granted(carry_out(scene, Plan(wanted, 1, world.now), (), ()))} == {"b"}


def test_a_gang_that_loses_a_part_to_others_gives_all_back_and_is_granted_whole_later():
    held = {"a": [("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1)], "c": [("n3", 0), ("n3", 1)]}
    nodes = [node("n1", 2), node("n2", 2), node("n3", 2)]
    world = world_of(GANGS, app("a", 4), app("b", 2), app("c", 2), nodes=nodes, held=held)
    moves = settle(world, {"a": {"n1": 2, "n3": 2}, "b": {"n2": 2}, "c": {}})
    assert recalled(moves) == {1, 2, 3, 4, 5, 6}


def test_an_elastic_app_starts_on_what_is_free_and_takes_the_rest_later():
    world = world_of(ELASTIC, app("a", 4, 2, 4), app("b", 2, 1, 4), held={"b": [("n1", 0), ("n1", 1)]})
    moves = settle(world, {"a": {"n1": 4}, "b": {}})
    assert granted(moves) == [("a", "n1", 2), ("a", "n1", 3)]
    assert recalled(moves) == {1, 2}


def test_an_elastic_app_does_not_start_on_fewer_than_it_can_run_on():
    world = world_of(ELASTIC, app("a", 4, 3, 4), app("b", 2, 1, 4), held={"b": [("n1", 0), ("n1", 1)]})
    moves = settle(world, {"a": {"n1": 4}, "b": {}})
    assert not moves.granted


def test_an_elastic_app_that_runs_waits_for_its_whole_share_for_a_while_only():
    held = {"a": [("n1", 0)], "b": [("n1", 1), ("n1", 2)]}
    world = world_of(ELASTIC, app("a", 4, 1, 4), app("b", 2, 1, 4), held=held)
    wanted = {"a": {"n1": 4}, "b": {}}
    assert not settle(world, wanted).granted
    assert granted(settle(world, wanted, age=21)) == [("a", "n1", 3)]


def test_leases_end_with_the_policys_word_and_the_grace():
    world = world_of(ELASTIC, app("a", 2, 1, 4), held={"a": [("n1", 0)]})
    moves = settle(world, {"a": {"n1": 1}}, until=world.now + 500)
    assert list(moves.extended) == [(world.now + 530, "test")]
    assert not settle(
        world, {"a": {"n1": 1}}, until=world.now + 60
    ).extended  # the lease is that long already


def test_without_the_policys_word_leases_are_extended_when_half_of_their_time_is_over():
    world = world_of(ELASTIC, app("a", 2, 1, 4), held={"a": [("n1", 0)]})
    early = settle(world, {"a": {"n1": 1}})
    assert not early.extended
    assert early.refresh == world.now + 50
    world.now += 51
    late = settle(world, {"a": {"n1": 1}})
    assert list(late.extended) == [(world.now + 100, "test")]
    assert late.refresh == world.now + 50


def test_leases_of_silent_apps_are_neither_extended_nor_called_back():
    world = world_of(ELASTIC, app("a", 2, 1, 4), held={"a": [("n1", 0)]})
    world.now += 90
    moves = settle(world, {"a": {"n1": 1}}, silent={"a"})
    assert moves.changes == []


def test_a_nearer_deadline_calls_back_again_a_later_one_does_not():
    world = world_of(ELASTIC, app("a", 2, 1, 4), held={"a": [("n1", 0)]})
    world.write([Recalled((1,), world.now + 20)])
    world.notice("n1", 20)  # to be empty in 15 s: a quarter is left for the end
    assert settle(world, {}).recalled == {(world.now + 15, "n1 terminates in 20 s"): [1]}
    world.write([Recalled((1,), world.now + 10)])
    assert not settle(world, {}).recalled


def test_a_team_is_granted_no_more_than_its_quota_while_an_app_of_it_waits_for_its_new_place():
    rules = replace(ELASTIC, teams={"red": Team(gpus=4)})
    held = {"a": [("n1", s) for s in range(3)], "c": [("n3", 0)]}
    nodes = [node("n1", 4), node("n2", 4), node("n3", 1)]
    red = (app("a", 3, 1, 4, team="red"), app("b", 3, 3, 3, team="red"))
    world = world_of(rules, *red, app("c", 1), nodes=nodes, held=held)
    plan = {"b": {"n2": 3}, "a": {"n3": 1}, "c": {}}
    assert not settle(world, plan).granted  # a still works on three
    world = world_of(replace(rules, teams={"red": Team(gpus=6)}), *red, app("c", 1), nodes=nodes, held=held)
    assert len(settle(world, plan).granted) == 3


@pytest.mark.parametrize("price", [0.0, 3.0])
def test_prices_are_those_of_a_gpu_of_the_node(price):
    world = world_of(GANGS, app("a", 1), nodes=[node("n1", 4, price=price)])
    assert settle(world, {"a": {"n1": 1}}).granted[0].price == price / 4


def test_under_a_policy_of_gangs_an_app_that_could_use_fewer_still_starts_whole():
    world = world_of(GANGS, app("a", 4, 1, 8), app("b", 2), held={"b": [("n1", 0), ("n1", 1)]})
    moves = settle(world, {"a": {"n1": 4}, "b": {}})
    assert not moves.granted
    assert "a" in moves.waiting


def test_an_app_that_moves_goes_at_once_and_not_in_parts():
    held = {"a": [("n1", 0), ("n1", 1), ("n1", 2)], "b": [("n2", 0), ("n2", 1)]}
    world = world_of(ELASTIC, app("a", 4, 1, 8), app("b", 2), held=held)
    moves = settle(world, {"a": {"n2": 4}, "b": {}}, age=1000)
    assert not moves.granted
    assert recalled(moves) == {4, 5}


def test_gpus_that_others_are_leaving_already_are_waited_for():
    """Nobody else has to give way for what will be free in any case."""
    held = {"a": [("n1", 0), ("n1", 1)], "b": [("n1", 2), ("n1", 3)]}
    world = world_of(ELASTIC, app("a", 2, 1, 4), app("b", 2), app("c", 2), held=held)
    world.write([Recalled((3, 4), world.now + 20)])
    # a is to move to a place that is not free; its own is wanted by nobody that b's does not serve
    world.capacity(came=(node("n3", 2),))
    world.write([Granted((Lease(9, "b", "n3", 0, world.now, world.now + 100, 1),))])
    moves = settle(world, {"a": {"n3": 2}, "b": {}, "c": {"n1": 2}})
    assert recalled(moves) == {9}
    late = settle(world, {"a": {"n3": 2}, "b": {}, "c": {"n1": 2}}, late={3, 4})
    assert recalled(late) == {1, 2, 9}
