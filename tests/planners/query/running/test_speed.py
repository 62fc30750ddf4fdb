"""What a run tells of its own speed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.model import Measured, Work
from ebbflow.planners.model.capacity import ARRIVAL
from ebbflow.planners.query.costs.fitting import q_error
from ebbflow.planners.query.plan.state import RunningStage
from ebbflow.planners.query.running.speed import RunSpeed, with_rows
from tests.planners.query.replanning_cases import share, stage

amounts = st.floats(0.0, 1e9)


def test_stages_are_not_slow_for_cores_whose_executors_were_starting() -> None:
    """One core works and three come: after 10 s a stage of 22 core-seconds is where it should be."""
    running = [RunningStage(stage("A", tasks=22), 0.0, 22, 22 * 10 // 22)]
    told = {}
    for absent in (0.0, 3.0):
        speed = RunSpeed()
        speed.seen(replace(share(4), absent=absent), 0.0)
        told[absent] = speed.drift(running, 10.0)
    assert told[0.0] > told[3.0]
    speed.seen(share(1), 4.0)  # they have gone before they were there
    assert speed.drift(running, 10.0) < told[3.0]


def test_absent_cores_arrive_counted_from_the_newest_share() -> None:
    speed = RunSpeed()
    speed.seen(replace(share(4), absent=3.0), 0.0)
    assert [speed.arrival(at) for at in (0.0, 2.0, ARRIVAL, 9.0)] == [ARRIVAL, ARRIVAL - 2.0, 0.0, 0.0]
    speed.seen(replace(share(5), absent=1.0), 4.0)
    assert speed.arrival(ARRIVAL) == 4.0


def test_the_error_is_that_of_finished_stages_without_what_they_waited_or_lost_to_cold_cores() -> None:
    speed = RunSpeed()
    assert speed.error == q_error([])
    one = replace(stage("A", tasks=4, duration=2.0), waiting=2.0, warm_up=3.0)  # 6 core-seconds of work
    speed.finished(one, Measured("native", Work(), 6.0, 3.0, 4, 4.0))
    speed.finished(one, Measured("native", Work(), 12.0, 3.0, 4, 4.0, cold=2.0))
    speed.finished(one, Measured("native", Work(), 18.0, 3.0, 4, 4.0))
    speed.finished(stage("B", duration=0.0), Measured("native", Work(), 18.0, 3.0, 4, 4.0))
    assert speed.error == q_error([1.0, 1.0, 3.0])
    assert [one.task_seconds for one in speed.comparable] == [6.0, 12.0, 18.0]


def test_stages_of_less_than_a_second_are_no_measure_of_those_that_take_longer() -> None:
    speed = RunSpeed()
    short = stage("A", tasks=1, duration=0.1)
    speed.finished(short, Measured("native", Work(), 0.9, 0.9, 1, 4.0))
    assert (speed.error, speed.comparable) == (q_error([]), [])
    speed.finished(short, Measured("native", Work(), 2.0, 2.0, 1, 4.0))
    speed.finished(stage("A", tasks=4, duration=1.0), Measured("native", Work(), 0.5, 0.5, 4, 4.0))
    assert speed.error == q_error([20.0, 0.125])


def test_no_stage_meets_a_cold_core_before_that_is_there() -> None:
    speed = RunSpeed()
    speed.seen(replace(share(4), absent=3.0, cold=3.5), 0.0)
    assert [speed.cold_since(at) for at in (0.0, ARRIVAL)] == [3.5, 3.5]
    speed.warmed(replace(share(4), absent=3.0, cold=3.2), 1.0)
    assert speed.cold_since(0.0) == 3.2
    speed.seen(share(1), 2.0)
    assert [round(speed.cold_since(at), 9) for at in (0.0, 1.5, 2.0)] == [0.5, 0.2, 0.0]


def test_the_work_of_a_stage_is_that_of_the_rows_it_made() -> None:
    """A join was to make a thousand rows, from 1,500 that its last join emits before they are filtered."""
    work = Work(scanned_rows=5.0, joined_rows=1500.0, written_bytes=8000.0)
    done = Measured("native", work, 2.0, 3.0, 4, 6.0)
    seen = with_rows(done, replace(stage("A"), rows=1000.0), 100_000)
    assert seen == replace(done, work=replace(work, joined_rows=100_500.0, written_bytes=800_000.0))


def test_groups_are_not_what_a_join_emits() -> None:
    work = Work(joined_rows=1500.0, aggregated_rows=1500.0, written_bytes=80.0)
    seen = with_rows(Measured("native", work, 2.0, 3.0, 4, 6.0), replace(stage("A"), rows=10.0), 5)
    assert seen.work == replace(work, written_bytes=40.0)


@given(amounts, amounts, st.integers(1, 10**9), st.integers(0, 10**9))
def test_times_stay_and_as_many_rows_as_expected_change_nothing(
    joined: float, written: float, expected: int, made: int
) -> None:
    done = Measured("native", Work(joined_rows=joined, written_bytes=written), 2.0, 3.0, 4, 6.0)
    planned = replace(stage("A"), rows=float(expected))
    assert with_rows(done, planned, expected).work.vector() == pytest.approx(done.work.vector())
    seen = with_rows(done, planned, made)
    assert replace(seen, work=done.work) == done
    assert all(amount >= 0.0 for amount in seen.work.vector())
