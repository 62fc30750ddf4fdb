"""Bounded staleness and rotation under any order of completions."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.elastic.schedules import AsyncSchedule, BlockRotation, Release, SspSchedule
from ebbflow.planners.errors import OptionError


def test_bsp_releases_an_iteration_with_the_last_completion() -> None:
    schedule = SspSchedule(executors=3, iterations=4)
    assert [r.iteration for r in schedule.start()] == [0, 0, 0]
    assert schedule.finish(0) == []
    assert schedule.finish(0) == []
    assert schedule.finish(0) == [Release(0, 1), Release(1, 1), Release(2, 1)]


def test_staleness_two_starts_with_three_iterations() -> None:
    schedule = SspSchedule(executors=2, iterations=10, staleness=2)
    assert [r.iteration for r in schedule.start()] == [0, 0, 1, 1, 2, 2]
    assert schedule.finish(0) == []
    assert [r.iteration for r in schedule.finish(0)] == [3, 3]


@given(
    executors=st.integers(1, 5),
    iterations=st.integers(1, 7),
    staleness=st.integers(0, 4),
    data=st.data(),
)
def test_ssp_bounds_what_is_in_flight(
    executors: int, iterations: int, staleness: int, data: st.DataObject
) -> None:
    schedule = SspSchedule(executors, iterations, staleness)
    queues: list[deque[int]] = [deque() for _ in range(executors)]
    finished = [0] * executors
    released = list(schedule.start())
    ran: list[Release] = []
    while True:
        for release in released:
            queues[release.executor].append(release.iteration)
            # whoever is released at iteration i may count on all of i - s - 1
            assert min(finished) >= release.iteration - staleness
        ready = [e for e, q in enumerate(queues) if q]
        if not ready:
            break
        executor = data.draw(st.sampled_from(ready))
        iteration = queues[executor].popleft()
        assert iteration - min(finished) <= staleness
        finished[executor] += 1
        ran.append(Release(executor, iteration))
        released = schedule.finish(iteration)
    assert sorted(ran) == [(e, i) for e in range(executors) for i in range(iterations)]
    assert schedule.completed == iterations


def test_async_goes_on_alone() -> None:
    schedule = AsyncSchedule(executors=2, iterations=3)
    assert schedule.start() == [Release(0, 0), Release(1, 0)]
    assert schedule.finish(1, 0) == [Release(1, 1)]
    assert schedule.finish(1, 2) == []


def test_rotation_of_four_blocks() -> None:
    rotation = BlockRotation(executors=4, blocks=4)
    rounds = [[rotation.block(e, r) for e in range(4)] for r in range(4)]
    assert rounds == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]


@given(executors=st.integers(1, 12), more=st.integers(0, 5))
def test_rotation_is_a_latin_square(executors: int, more: int) -> None:
    rotation = BlockRotation(executors, executors + more)
    blocks = range(rotation.blocks)
    for round_ in blocks:
        assert len({rotation.block(e, round_) for e in range(executors)}) == executors
    for executor in range(executors):
        assert {rotation.block(executor, r) for r in blocks} == set(blocks)


@given(
    executors=st.integers(1, 5),
    more=st.integers(0, 3),
    epochs=st.integers(1, 3),
    barrier=st.booleans(),
    data=st.data(),
)
def test_no_block_is_ever_held_twice(
    executors: int, more: int, epochs: int, barrier: bool, data: st.DataObject
) -> None:
    rotation = BlockRotation(executors, executors + more, epochs, barrier)
    running = set(rotation.start())
    ran = set(running)
    while running:
        held = [rotation.block(*task) for task in running]
        assert len(set(held)) == len(held)
        if barrier:
            assert len({task.iteration for task in running}) == 1
        task = data.draw(st.sampled_from(sorted(running)))
        running.remove(task)
        released = rotation.finish(*task)
        assert barrier or len(released) <= 2
        assert not ran & set(released)
        assert len(set(released)) == len(released)
        ran |= set(released)
        running |= set(released)
    assert ran == {(e, r) for e in range(executors) for r in range(rotation.rounds)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SspSchedule(0, 1), "executors must be >= 1; got 0"),
        (lambda: SspSchedule(1, 1, -1), "staleness must be >= 0; got -1"),
        (lambda: AsyncSchedule(1, 0), "iterations must be >= 1; got 0"),
        (lambda: BlockRotation(4, 3), "got 3 blocks, 4 executors"),
    ],
)
def test_bad_schedules(make: "object", message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()  # type: ignore[operator]
