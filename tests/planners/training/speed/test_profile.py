"""Measurements of configurations: the first of each, or medians of the latest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.throughput import FirstMeasurements, MedianMeasurements, Observation


def test_the_first_measurement_counts():
    profile = FirstMeasurements()
    assert profile.add(Observation(1, 2, 8, 0.5, 0.1))
    assert not profile.add(Observation(1, 2, 8, 0.3, 0.1))
    assert profile.add(Observation(1, 2, 9, 0.4, 0.1))
    assert profile.observations == ((1, 2, 8, 0.5, 0.1), (1, 2, 9, 0.4, 0.1))


def test_the_median_of_the_latest_counts():
    profile = MedianMeasurements(window=3)
    for step, sync in ((9.0, 8.0), (0.5, 0.1), (0.6, 0.3), (0.9, 0.2)):
        assert profile.add(Observation(1, 2, 8, step, sync))
    assert profile.observations == (pytest.approx((1, 2, 8, 0.4 + 0.2, 0.2)),)


def test_medians_are_recalled_and_age():
    old = MedianMeasurements(window=2)
    old.add(Observation(1, 2, 8, 0.5, 0.1))
    new = MedianMeasurements(window=2)
    new.restore(old.observations)
    assert new.observations == (pytest.approx((1, 2, 8, 0.5, 0.1)),)
    for _ in range(2):
        new.add(Observation(1, 2, 8, 1.0, 0.2))
    assert new.observations == (pytest.approx((1, 2, 8, 1.0, 0.2)),)


def test_impossible_measurements_are_refused():
    with pytest.raises(OptionError, match="at least one measurement; got 0"):
        MedianMeasurements(window=0)
    for step, sync in ((0.1, 0.1), (0.1, -0.1), (float("nan"), 0.0)):
        with pytest.raises(OptionError, match="0 <= sync < step"):
            MedianMeasurements().add(Observation(1, 1, 8, step, sync))


@given(st.lists(st.tuples(st.floats(0.01, 10.0), st.floats(0.0, 5.0)), min_size=1, max_size=30))
def test_medians_stay_within_what_was_measured(times):
    profile = MedianMeasurements()
    for alone, sync in times:
        profile.add(Observation(1, 2, 8, alone + sync, sync))
    (found,) = profile.observations
    assert min(s for _, s in times) <= found.sync <= max(s for _, s in times)
    alone = found.step - found.sync
    assert min(a for a, _ in times) * (1 - 1e-6) <= alone <= max(a for a, _ in times) * (1 + 1e-6)
