"""Measures of a run on numbers worked out by hand."""

from math import isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.simulation.metrics import (
    JobResult,
    as_dict,
    finish_time_fairness,
    jain,
    mean_active,
    summary,
)
from ebbflow.infra.simulation.usage import Steps, Usage
from ebbflow.planners.errors import OptionError


def job(arrival: float, finish: float, alone: float = 10, gpus: int = 1, **fields) -> JobResult:
    return JobResult("j", arrival, arrival, finish, restarts=0, gpus=gpus, alone=alone, **fields)


# one job alone for 10 s, two jobs for 10 s, the second alone for 10 s
PAIR = [job(0, 20, alone=10), job(10, 30, alone=16, gpus=2)]


def test_mean_active_jobs_count_the_job_itself():
    assert mean_active(PAIR) == [1.5, 1.5]
    assert mean_active([job(0, 10)]) == [1]


@pytest.mark.parametrize(
    ("contention", "gpus", "expected"),
    [
        ("static", 1, [20 / 20, 20 / 32]),
        ("static", 4, [2, 20 / 16]),
        ("lifetime", 4, [20 / 15, 20 / 24]),
        ("share", 4, [2, 20 / 16]),
        ("share", 2, [2, 20 / (16 * 1.5)]),
    ],
)
def test_finish_time_fairness(contention, gpus, expected):
    assert finish_time_fairness(PAIR, gpus, contention) == pytest.approx(expected)


def test_jobs_that_were_rejected_still_contend():
    assert finish_time_fairness(PAIR, 1, submitted=4) == pytest.approx([20 / 40, 20 / 64])


def test_unknown_ways_to_compare_are_refused():
    with pytest.raises(OptionError, match="contention"):
        finish_time_fairness(PAIR, 1, "other")
    with pytest.raises(OptionError, match="gpus"):
        finish_time_fairness(PAIR, 0)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=20))
def test_jains_index_lies_between_one_over_n_and_one(values):
    assert 1 / len(values) - 1e-9 <= jain(values) <= 1 + 1e-9
    assert jain([7.0] * len(values)) == pytest.approx(1)


def test_jains_index_of_one_taker():
    assert jain([1, 0, 0, 0]) == 0.25
    assert isnan(jain([]))


def test_summary():
    jobs = [
        job(0, 10, rho=1.0, gpu_seconds=10, score=1.0),
        job(5, 25, rho=1.04, gpu_seconds=30, score=0.5),
        job(5, 45, rho=2.0, gpu_seconds=0, score=1.0),
        job(10, 40, rho=nan),
    ]
    figures = summary(jobs, gpu_hours=3, dollars=4, policy_seconds=5)
    assert figures["avg_jct_s"] == 25
    assert figures["p50_jct_s"] == 25
    assert figures["p90_jct_s"] == pytest.approx(37)
    assert figures["p99_jct_s"] == pytest.approx(39.7)
    assert figures["max_jct_s"] == 40
    assert figures["makespan_s"] == 45
    assert figures["worst_rho"] == 2
    assert figures["unfair_pct"] == pytest.approx(100 / 3)
    assert figures["jain_rho"] == pytest.approx(4.04**2 / (3 * (1 + 1.04**2 + 4)))
    assert figures["placement_score"] == pytest.approx(25 / 40)
    assert (figures["gpu_hours"], figures["dollars"], figures["policy_seconds"]) == (3, 4, 5)


def test_summary_of_nothing_has_the_same_fields():
    empty = summary([], gpu_hours=0, dollars=0, policy_seconds=0)
    assert set(empty) == set(summary([job(0, 1)], gpu_hours=0, dollars=0, policy_seconds=0))
    assert isnan(empty["avg_jct_s"])


def test_json_fields_of_a_job():
    assert as_dict(job(1, 2)) == {
        "name": "j",
        "arrival": 1,
        "start": 1,
        "finish": 2,
        "restarts": 0,
        "rho": None,
    }


def test_steps_hold_values_between_changes():
    steps = Steps()
    for at, value in [(10, 2), (20, 2), (30, 5), (30, 4), (40, 4), (50, 0)]:
        steps.set(at, value)
    assert (steps.times, steps.values) == ([10, 30, 50], [2, 4, 0])
    assert steps.sampled([0, 10, 29, 30, 60]) == [0, 2, 2, 4, 0]
    assert steps.integral(0, 100) == 2 * 20 + 4 * 20
    assert steps.integral(20, 40) == 2 * 10 + 4 * 10
    steps.set(60, 1)
    steps.set(60, 0)
    assert steps.times == [10, 30, 50]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=20),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_integrals_are_sums_of_values(changes, start, end):
    steps = Steps()
    for at, value in sorted(changes, key=lambda change: change[0]):
        steps.set(at, value)
    low, high = sorted((start, end))
    assert steps.integral(low, high) == sum(steps.at(second) for second in range(low, high))


def test_utilisation():
    usage = Usage()
    usage.capacity.set(0, 4)
    usage.held.set(5, 2)
    assert usage.utilisation(0, 10) == 0.25
    assert Usage().utilisation(0, 10) == 0
