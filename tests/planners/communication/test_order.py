"""One order on all ranks whatever the order of submission, and one plan on all ranks whatever messages are lost."""

from collections import deque
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.communication.commit import (
    AHEAD,
    PLAIN,
    Coordinator,
    Decision,
    Participant,
    Prepare,
    ReplanRule,
    ReplanWatch,
    Vote,
    agreed,
)
from ebbflow.planners.communication.order import Launch, LaunchOrder, MotifQueue, UnknownCollectiveError
from ebbflow.planners.errors import OptionError

ORDER = LaunchOrder(
    {("a", 0): 0, ("b", 0): 1, ("a", 1): 1, ("c", 0): 2},
    {("a", 0): 0, ("b", 0): 0, ("a", 1): 1, ("c", 0): 0},
)
PLANNED = [Launch(0, "a", 0, 0), Launch(0, "b", 0, 0), Launch(1, "a", 1, 0), Launch(0, "c", 0, 0)]


@pytest.mark.parametrize("submitted", list(permutations("abc")))
def test_motifs_come_in_the_planned_order(submitted: tuple[str, ...]) -> None:
    queue = MotifQueue(ORDER)
    assert [one for op in submitted for one in queue.submit(op)] == PLANNED
    assert (queue.pending, queue.next) == (0, (1, 0))


@given(st.lists(st.permutations("abc"), min_size=1, max_size=4), st.data())
def test_iterations_may_overlap(iterations: list[list[str]], data: st.DataObject) -> None:
    """Each collective is submitted once an iteration, but a fast rank is iterations ahead with some."""
    left = {op: len(iterations) for op in "abc"}
    queue, came = MotifQueue(ORDER), []
    while any(left.values()):
        op = data.draw(st.sampled_from([op for op, n in left.items() if n]))
        left[op] -= 1
        came += queue.submit(op)
    assert came == [one._replace(iteration=i) for i in range(len(iterations)) for one in PLANNED]


def test_a_number_with_several_motifs_waits_for_all_of_them() -> None:
    queue = MotifQueue(ORDER)
    assert queue.submit("b") == []
    assert queue.submit("a") == PLANNED[:3]


def test_what_waits_is_given_out_before_another_plan_takes_over() -> None:
    queue = MotifQueue(ORDER)
    queue.submit("c")
    queue.submit("b")
    assert queue.flush() == [PLANNED[1], PLANNED[3]]
    assert queue.pending == 0


def test_an_unknown_collective_changes_nothing() -> None:
    queue = MotifQueue(ORDER)
    with pytest.raises(UnknownCollectiveError, match="the plan has no collective 'x'"):
        queue.submit("x")
    assert [one for op in "abc" for one in queue.submit(op)] == PLANNED


@pytest.mark.parametrize(
    ("numbers", "channels", "message"),
    [
        ({("a", 0): 1}, {("a", 0): 0}, "0, 1, 2, ... without a gap"),
        ({("a", 0): 0}, {}, "each motif a number and a channel"),
    ],
)
def test_an_order_that_is_none_is_refused(numbers: Any, channels: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LaunchOrder(numbers, channels)


def test_orders_are_made_of_a_list() -> None:
    order = LaunchOrder.in_order([("b", 0, 1), ("a", 0, 0)])
    queue = MotifQueue(order)
    assert queue.submit("a") == []
    assert [one.op for one in queue.submit("b")] == ["b", "a"]


# --- two-phase commit ---------------------------------------------------------------------------------------


def test_all_say_yes() -> None:
    coordinator = Coordinator(1, "d", frozenset({0, 1}), deadline=10.0)
    ranks = [Participant(0), Participant(1)]
    votes = [
        rank.prepare(coordinator.prepare(), iteration) for rank, iteration in zip(ranks, (3, 5), strict=True)
    ]
    assert coordinator.vote(votes[0]) is None
    decision = coordinator.vote(votes[1])
    assert decision == Decision(1, commit=True, activate_at=5 + AHEAD)
    ranks[0].decide(decision)
    assert (ranks[0].newest(12), ranks[0].newest(13), ranks[1].newest(13)) == (PLAIN, 1, PLAIN)
    assert agreed(rank.newest(13) for rank in ranks) == PLAIN  # one has not heard of it
    ranks[1].decide(decision)
    assert agreed(rank.newest(13) for rank in ranks) == 1


def test_one_no_or_silence_is_an_abort() -> None:
    refused = Coordinator(1, "d", frozenset({0, 1}), deadline=10.0)
    assert refused.vote(Vote(1, 1, False, 3, "no collective x")) == Decision(
        1, commit=False, reason="rank 1: no collective x"
    )
    assert refused.vote(Vote(1, 0, True, 3)) == refused.decision
    silent = Coordinator(1, "d", frozenset({0, 1}), deadline=10.0)
    silent.vote(Vote(1, 0, True, 3))
    assert silent.tick(9.9) is None
    assert silent.tick(10.0) == Decision(1, commit=False, reason="no vote of ranks [1]")
    assert silent.phase == "aborted"


def test_a_version_is_of_one_plan() -> None:
    rank = Participant(0)
    assert rank.prepare(Prepare(1, "d"), 0).yes
    assert rank.prepare(Prepare(1, "d"), 0).yes  # asked again
    assert rank.prepare(Prepare(1, "other"), 0).reason == "another plan has this version"
    rank.prepare(Prepare(2, "e"), 0)
    rank.decide(Decision(2, commit=True, activate_at=4))
    assert rank.prepare(Prepare(1, "d"), 0).reason == "a later plan is committed"


@given(st.data())
def test_no_iteration_is_run_by_two_plans_whatever_is_lost_or_comes_late(data: st.DataObject) -> None:
    """Messages are lost, repeated and reordered, ranks are iterations apart, the coordinator dies at any time."""
    count = data.draw(st.integers(1, 3))
    ranks = [Participant(i) for i in range(count)]
    at = [0] * count
    waits: deque[tuple[int, object]] = deque()
    coordinator = Coordinator(1, "d1", frozenset(range(count)), deadline=20.0)
    waits.extend((i, coordinator.prepare()) for i in range(count))
    version, ran = 1, dict[int, int]()
    for now in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["deliver", "lose", "repeat", "step", "tick", "replace"]))
        if action == "step":  # all ranks pass a boundary together, as the agreement is a collective
            at = [max(at) + 1] * count
            chosen = agreed(rank.newest(at[0]) for rank in ranks)
            assert all(chosen == PLAIN or chosen in rank.prepared for rank in ranks)
            assert chosen >= ran.get(at[0] - 1, PLAIN)
            ran[at[0]] = chosen
        elif action == "tick":
            decision = coordinator.tick(float(now))
            waits.extend((i, decision) for i in range(count) if decision)
        elif action == "replace":  # it dies, another one takes over with a version of its own
            version += 1
            coordinator = Coordinator(version, f"d{version}", frozenset(range(count)), deadline=now + 20.0)
            waits.extend((i, coordinator.prepare()) for i in range(count))
        elif waits:
            index = data.draw(st.integers(0, len(waits) - 1))
            rank, message = waits[index]
            if action != "repeat":
                del waits[index]
            if action == "lose":
                continue
            if isinstance(message, Prepare):
                waits.append((-1, ranks[rank].prepare(message, at[rank])))
            elif isinstance(message, Decision):
                ranks[rank].decide(message)
            elif isinstance(message, Vote) and (decision := coordinator.vote(message)):
                waits.extend((i, decision) for i in range(count))


# --- re-planning --------------------------------------------------------------------------------------------


def test_waits_above_the_limit_three_times_in_a_row_are_a_reason() -> None:
    watch = ReplanWatch(ReplanRule())
    waits = [0.5, 0.5, 0.06, 0.06, 0.04, 0.06, 0.06, 0.06]
    reasons = [watch.observe(waited, 1.0, now=float(i)) for i, waited in enumerate(waits)]
    assert reasons[:-1] == [""] * 7
    assert reasons[-1] == "ranks waited 6% of an iteration for the planned order, 3 times in a row (limit 5%)"


def test_searches_are_spaced_and_a_change_of_plans_begins_anew() -> None:
    watch = ReplanWatch(ReplanRule(times=1, warm_up=0))
    assert watch.observe(0.5, 1.0, now=0.0)
    assert not watch.observe(0.5, 1.0, now=29.0)
    assert watch.observe(0.5, 1.0, now=30.0)
    later = ReplanWatch(ReplanRule(times=1, warm_up=2))
    later.changed()
    assert [bool(later.observe(0.5, 1.0, now=float(i))) for i in range(3)] == [False, False, True]


@pytest.mark.parametrize("given", [{"share": 0.0}, {"times": 0}, {"spacing": float("nan")}])
def test_a_rule_that_is_none_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="must be"):
        ReplanRule(**given)
