"""Ideal times and drains: the published figures."""

from math import inf

import pytest

from ebbflow.planners.errors import OptionError
from tests.benchmarks.elastic_estimates import completion_time, drain_time, give_back, ideal_scale_out_time


@pytest.mark.parametrize(
    ("trigger", "before", "after", "ideal"),
    [
        (40.0, 157.0, 107.0, 119.7),
        (44.0, 157.0, 107.0, 121.0),
        (55.0, 183.0, 101.0, 125.6),
        (58.0, 183.0, 101.0, 127.0),
    ],
)
def test_ideal_scale_out(trigger: float, before: float, after: float, ideal: float) -> None:
    assert ideal_scale_out_time(trigger, trigger / before, after) == pytest.approx(ideal, abs=0.1)


def test_drain_of_lda_workers() -> None:
    bandwidth = 2.0e9 / 8
    assert drain_time(4.6 * 2**30, bandwidth, efficiency=1.0, task=0.0) == pytest.approx(19.8, abs=0.1)
    assert drain_time(4.6 * 2**30, bandwidth, task=0.0) == pytest.approx(43.0, abs=0.1)
    assert drain_time(0.0, bandwidth) == 1.0


def test_a_job_that_lends_nodes() -> None:
    # 100 minutes on 16 nodes, of which 4 are away for 30 minutes from minute 60 on
    assert completion_time(1600, [(0, 16), (60, 12), (90, 16)]) == pytest.approx(107.5)
    # killed and started again instead
    assert 90 + completion_time(1600, [(0, 16)]) == pytest.approx(190)
    assert completion_time(10, [(0, 1), (5, 0)]) == inf
    assert completion_time(5, [(0, 1), (5, 0)]) == 5


def test_give_back() -> None:
    assert give_back(12, 1.0, 6.0) == 2  # LDA's servers: from 6 to 1 GiB
    assert give_back(12, 300.0, 370.0) == 10  # its workers
    assert give_back(4, 9.0, 6.0) == 4


def test_bad_values() -> None:
    with pytest.raises(OptionError, match=r"done must be in \[0, 1\]; got 1.5"):
        ideal_scale_out_time(1, 1.5, 1)
    with pytest.raises(OptionError, match="bandwidth must be > 0"):
        drain_time(1, 0)
    with pytest.raises(OptionError, match="current must be >= 1"):
        give_back(0, 1, 1)
    with pytest.raises(OptionError, match="start at 0"):
        completion_time(1, [(1, 1)])
