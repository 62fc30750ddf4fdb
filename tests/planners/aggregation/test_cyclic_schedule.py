"""Cycles, runs and losses as the thesis' examples have them; a late request delays nobody else."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.aggregation.cyclic_schedule import (
    CyclicSchedule,
    busy_time,
    duration_upper_bound,
    execution_cycle,
    free_time,
    local_duration,
    performance_loss,
    runs_per_cycle,
)
from ebbflow.planners.aggregation.model import AggregationTask
from ebbflow.planners.errors import OptionError

ITERATION = st.integers(1, 200)


@pytest.mark.parametrize(
    ("jobs", "cycle", "busy", "free"),
    [
        ([(6, 2)], 6, 2, 4),
        ([(12, 3)], 12, 3, 9),
        ([(6, 2), (12, 3)], 12, 7, 5),
        ([(5, 1), (12, 3)], 12, 5, 7),
    ],
)
def test_cyclic_execution(jobs: list[tuple[int, int]], cycle: int, busy: int, free: int) -> None:
    assert execution_cycle(iteration for iteration, _ in jobs) == cycle
    assert (busy_time(cycle, jobs), free_time(cycle, jobs)) == (busy, free)


@pytest.mark.parametrize(
    ("cycle", "iteration", "runs", "duration", "loss", "accepted"),
    [
        (12, 6, 2, 6, 0, True),
        (11, 10, 1, 11, Fraction(1, 11), True),
        (10, 9, 1, 10, Fraction(1, 10), False),
        (20, 9, 2, 10, Fraction(1, 10), False),
        (12, 5, 2, 6, Fraction(1, 6), False),
        (37, 10, 3, Fraction(37, 3), Fraction(7, 37), False),
        (19, 10, 1, 19, Fraction(9, 19), False),
        (100, 9, 11, Fraction(100, 11), Fraction(1, 100), True),
    ],
)
def test_losses(
    cycle: int, iteration: int, runs: int, duration: Fraction, loss: Fraction, accepted: bool
) -> None:
    assert runs_per_cycle(cycle, iteration) == runs
    assert local_duration(cycle, iteration) == duration
    assert performance_loss(cycle, iteration) == loss
    assert (loss < Fraction(1, 10)) is accepted


@given(ITERATION, ITERATION)
def test_a_loss_is_bounded_by_the_runs(one: int, other: int) -> None:
    iteration, cycle = sorted((one, other))
    loss, runs = performance_loss(cycle, iteration), cycle // iteration
    assert 0 <= loss < Fraction(1, runs + 1)
    assert (cycle % iteration == 0) == (loss == 0)
    assert cycle < 9 * iteration or loss < Fraction(1, 10)
    assert loss == (local_duration(cycle, iteration) - iteration) / local_duration(cycle, iteration)


@given(st.lists(ITERATION, min_size=1), ITERATION)
def test_a_cycle_only_grows_with_trainings(iterations: list[int], more: int) -> None:
    assert execution_cycle([*iterations, more]) >= execution_cycle(iterations)


def test_the_bound_of_durations_follows_trainings_over_aggregators() -> None:
    """A training that is stretched on one aggregator stretches those beside it on another."""
    bound = duration_upper_bound(
        {"i": 20_000, "j": 10_000, "l": 10_500}, {"A0": {"i", "j"}, "A1": {"j", "l"}}
    )
    assert bound == {"i": 20_000, "j": 20_000, "l": 20_000}
    assert performance_loss(10_500, 10_000) < Fraction(1, 20)


@given(st.dictionaries(st.sampled_from("abcde"), ITERATION, min_size=1), st.data())
def test_the_bound_ends_and_holds_each_local_estimate(
    iterations: dict[str, int], data: st.DataObject
) -> None:
    jobs = sorted(iterations)
    served = data.draw(st.lists(st.sets(st.sampled_from(jobs), min_size=1), min_size=1, max_size=4))
    bound = duration_upper_bound(iterations, dict(enumerate(served)))
    assert max(bound.values()) <= max(iterations.values())
    assert all(bound[job] >= own for job, own in iterations.items())
    for some in served:  # it holds on each aggregator: nothing is stretched any further
        cycle = max(bound[job] for job in some)
        assert all(local_duration(cycle, bound[job]) <= bound[job] for job in some)


def _task(job: str, execution: int, tensor: str = "t") -> AggregationTask:
    return AggregationTask(job, tensor, execution)


def test_slots_of_a_cycle() -> None:
    schedule = CyclicSchedule([_task("J1", 2), _task("J2", 3)], {"J1": 6, "J2": 12})
    assert schedule.slots("J1", "t") == (0, 6)
    assert schedule.slots("J2", "t") == (2,)


def test_a_late_request_takes_free_time_or_its_next_slot() -> None:
    schedule = CyclicSchedule([_task("a", 2), _task("b", 5), _task("c", 1)], {"a": 10, "b": 10, "c": 10})
    assert schedule.admit("a", "t", 0) == (0, False, False)
    assert schedule.slots("b", "t") == (2,)
    assert schedule.admit("c", "t", 0) == (7, False, False)
    # 10 - 3 leaves 7, of which c has reserved 1: but there are no 5 in one piece
    assert schedule.admit("b", "t", 3) == (12, True, True)
    assert schedule.admit("a", "t", 11) == (18, True, False)  # behind both slots that are to come


def test_a_late_request_runs_in_the_free_end_of_its_cycle() -> None:
    schedule = CyclicSchedule([_task("a", 2), _task("b", 3)], {"a": 10, "b": 10})
    assert schedule.admit("b", "t", 0) == (2, False, False)
    assert schedule.admit("a", "t", 1) == (5, True, False)
    assert schedule.admit("a", "t", 8) == (10, False, False)


def test_what_a_schedule_does_not_take() -> None:
    with pytest.raises(OptionError, match="at least one task"):
        CyclicSchedule([], {})
    with pytest.raises(OptionError, match="fit its cycle of 6 us, and need 7 us"):
        CyclicSchedule([_task("a", 7)], {"a": 6})
    with pytest.raises(OptionError, match="no slot"):
        CyclicSchedule([_task("a", 1)], {"a": 6}).admit("b", "t", 0)
    with pytest.raises(OptionError, match="at most the cycle of 5"):
        runs_per_cycle(5, 6)


@given(st.data())
def test_a_late_request_delays_only_its_training_and_by_a_cycle_at_most(data: st.DataObject) -> None:
    """Requests come with any delay; what is executed never overlaps, and what was in time has its slot."""
    jobs = data.draw(st.dictionaries(st.sampled_from("abc"), st.integers(8, 30), min_size=1))
    tasks = [
        _task(job, data.draw(st.integers(1, 2)), str(i))
        for job in jobs
        for i in range(data.draw(st.integers(1, 2)))
    ]
    cycle = max(jobs.values())
    if sum(cycle // jobs[task.job_id] * task.execution_us for task in tasks) > cycle:
        return
    schedule = CyclicSchedule(tasks, jobs)
    executed: list[tuple[Fraction, Fraction]] = []
    due = dict.fromkeys(((task.job_id, task.tensor_id) for task in tasks), Fraction(0))
    length = {(task.job_id, task.tensor_id): task.execution_us for task in tasks}
    for _ in range(25):
        key = min(due, key=lambda key: (due[key], key))
        now = due[key]
        job, tensor = key
        start, late, postponed = schedule.admit(job, tensor, now)
        slots = {start - start // cycle * cycle} & set(schedule.slots(job, tensor))
        assert now <= start
        assert slots or (late and not postponed)
        assert not late or start - now <= cycle
        executed.append((Fraction(start), Fraction(start) + length[key]))
        due[key] = executed[-1][1] + data.draw(st.integers(0, 40))
    executed.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(executed))
