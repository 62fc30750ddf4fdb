"""Waiting for capacity: what counts, and what is said to be short."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.capacity.need import Need, UsableCapacity, room, room_of
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import AppEntered, AppSpec, CapacityChanged, Event, Granted, Lease, Slot
from ebbflow.planners.model.ledger_state import State, fold

NODES = (Node("a", 4, 16.0, gpus=2), Node("b", 8, 32.0, gpus=4), Node("c", 2, 8.0))


def test_nodes_with_a_firm_notice_are_left_out_and_advised_ones_stay() -> None:
    notices = (Notice("b", 100.0), Notice("c", 100.0, "rebalance"))
    assert room(NODES, notices) == UsableCapacity(
        nodes=2, gpus=2, cores=6, memory=24.0, free_gpus=2, free_cores=6
    )


def test_gpus_that_are_booked_are_not_free_unless_their_node_leaves_anyway() -> None:
    booked = (Slot("a", 0), Slot("b", 1), Slot("gone", 0))
    assert room(NODES, booked=booked).free_gpus == 4
    assert room(NODES, (Notice("b", 1.0),), booked).free_gpus == 1


def test_what_is_short_is_told_with_what_there_is() -> None:
    seen = room(NODES, booked=(Slot("b", 0), Slot("b", 1)), used_cores=4)
    assert Need(nodes=3, gpus=4, cores=10, memory=56).lacking(seen) == ()
    assert Need(nodes=4, gpus=5, cores=11, memory=57.5).lacking(seen) == (
        "3 of 4 nodes",
        "4 of 5 GPUs free",
        "10 of 11 cores free",
        "56 of 57.5 GiB of memory",
    )
    assert Need(gpus=6, cores=14, free=False).lacking(seen) == ()


@pytest.mark.parametrize(
    "wrong", [{"nodes": -1}, {"memory": inf}, {"memory": nan}, {"gpus": True}, {"cores": "2"}, {}]
)
def test_a_need_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong), "at least one of")):
        Need(**wrong)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0.5, 512), st.integers(0, 8)), max_size=6),
    st.sets(st.integers(0, 5)),
    st.integers(1, 20),
)
def test_a_node_more_never_makes_anything_short(
    shapes: list[tuple[int, float, int]], leaving: set[int], wanted: int
) -> None:
    nodes = [Node(f"n{i}", cores, memory, gpus=gpus) for i, (cores, memory, gpus) in enumerate(shapes)]
    notices = [Notice(f"n{i}", 1.0) for i in leaving]
    before = room(nodes, notices)
    after = room([*nodes, Node("more", 1, 1.0, gpus=1)], notices)
    need = Need(nodes=wanted, gpus=wanted, cores=wanted, memory=wanted)
    assert len(need.lacking(after)) <= len(need.lacking(before))
    assert before.free_gpus <= before.gpus


def test_the_room_of_a_ledger_follows_its_changes() -> None:
    state = State()
    lease = Lease(1, "app", "b", 3, 0.0, 60.0, 1)
    changes = (
        CapacityChanged(1, NODES),
        AppEntered(AppSpec("app", "training", gpus=1)),
        Granted((lease,)),
        CapacityChanged(2, (), ("c",), (Notice("a", 9.0),)),
    )
    for number, change in enumerate(changes, 1):
        fold(state, Event(number, float(number), change))
    assert room_of(state) == UsableCapacity(nodes=1, gpus=4, cores=8, memory=32.0, free_gpus=3, free_cores=8)
