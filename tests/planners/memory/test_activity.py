"""Smoothed activity: the worked examples of the source's parameters, and its bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.activity import ExponentialMovingAverage, seconds_to_cross

RATES = st.floats(0, 1e6)


@pytest.mark.parametrize(
    ("rate", "seconds", "value"),
    [
        (20, None, 20.0), (21, 14, 20.076), (25, 8, 20.806), (40, 4, 23.616), (50, 3, 24.4), (100, 2, 36.0),
        (101, 1, 20.2), (200, 1, 40.0),
    ],
)  # fmt: skip
def test_a_constant_rate_crosses_the_threshold(rate: float, seconds: int | None, value: float) -> None:
    assert seconds_to_cross(rate, 20, 0.2) == seconds
    average = ExponentialMovingAverage(0.2, 0.0)
    seen = [average.update(rate) for _ in range(seconds or 500)]
    assert seen[-1] == pytest.approx(value, abs=5e-4)
    assert [n for n, one in enumerate(seen, 1) if one > 20 + 1e-9] == ([seconds] if seconds else [])


@pytest.mark.parametrize(
    ("seconds", "value"), [(1, 8.0), (2, 14.4), (5, 26.893), (10, 35.705), (20, 39.539), (30, 39.95)]
)
def test_an_average_that_starts_at_nothing_lags(seconds: int, value: float) -> None:
    average = ExponentialMovingAverage(0.2, 0.0)
    for _ in range(seconds):
        average.update(40.0)
    assert average.value == pytest.approx(value, abs=1e-3)


def test_without_an_initial_value_the_first_measurement_is_the_value() -> None:
    average = ExponentialMovingAverage(0.2)
    assert average.value == 0.0
    assert (average.update(40.0), average.update(50.0)) == (40.0, 42.0)


@given(st.floats(0.01, 1), st.none() | RATES, st.lists(RATES, min_size=1, max_size=50))
def test_an_average_stays_within_what_it_was_given(
    alpha: float, initial: float | None, measured: list[float]
) -> None:
    average = ExponentialMovingAverage(alpha, initial)
    given_values = list(measured) if initial is None else [initial, *measured]
    for one in measured:
        average.update(one)
    slack = 1e-9 * max(given_values)
    assert min(given_values) - slack <= average.value <= max(given_values) + slack


@given(st.floats(0.05, 1), st.floats(0, 100), st.floats(0.01, 200))
def test_the_closed_form_agrees_with_the_average(alpha: float, threshold: float, rate: float) -> None:
    seconds = seconds_to_cross(rate, threshold, alpha)
    average = ExponentialMovingAverage(alpha, 0.0)
    values = [average.update(rate) for _ in range(seconds or 300)]
    slack = 1e-6 * max(rate, threshold, 1)
    if seconds is None:
        assert max(values) <= threshold + slack
    else:
        assert values[-1] > threshold - slack
        assert len(values) == 1 or values[-2] <= threshold + slack


@pytest.mark.parametrize("alpha", [0, -0.1, 1.1, float("nan")])
def test_a_weight_outside_its_range_is_refused(alpha: float) -> None:
    with pytest.raises(OptionError, match="alpha must be above 0 and at most 1"):
        ExponentialMovingAverage(alpha)
    with pytest.raises(OptionError, match="alpha must be above 0 and at most 1"):
        seconds_to_cross(1, 1, alpha)
