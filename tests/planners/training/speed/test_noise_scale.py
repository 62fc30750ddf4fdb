"""Noise of gradients from norms, and what learning rates make of it."""

from math import inf, nan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.goodput import (
    GradientStatistics,
    adascale,
    efficiency,
    legw,
    linear,
    square_root,
)
from ebbflow.planners.training.speed.noise_scale import (
    LEAST_VARIANCE,
    Average,
    GradientNoise,
    NormEstimate,
    from_difference,
    from_samples,
)


def test_two_gradients_of_the_worked_example():
    one, other = np.array([1.0, 3.0]), np.array([3.0, 1.0])
    local = (one @ one + other @ other) / 2
    mean = (one + other) / 2
    found = from_samples(local, mean @ mean, 2, 4)
    assert found == (6.0, 16.0)
    assert found.trace / found.sqr == pytest.approx(2.6667, abs=1e-4)
    assert from_difference(one, other, 4) == found


@pytest.mark.parametrize("samples", [2, 8])
def test_estimates_are_unbiased(samples):
    rng = np.random.default_rng(0)
    gradient, deviation, batch = np.linspace(-1, 1, 20), np.linspace(0.5, 2.0, 20), 16
    found = []
    for _ in range(4000):
        drawn = gradient + deviation / sqrt(batch) * rng.standard_normal((samples, 20))
        mean = drawn.mean(axis=0)
        found.append(from_samples((drawn**2).sum(axis=1).mean(), mean @ mean, samples, batch))
    sqr, trace = np.mean(found, axis=0)
    assert sqr == pytest.approx(gradient @ gradient, rel=0.02)
    assert trace == pytest.approx(deviation @ deviation, rel=0.02)


def test_noise_needs_two_samples():
    with pytest.raises(OptionError, match="two samples"):
        from_samples(1.0, 1.0, 1, 4)
    with pytest.raises(OptionError, match="equal shapes"):
        from_difference(np.ones(2), np.ones(3), 4)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), st.floats(0.0, 0.999))
def test_an_average_of_equal_values_is_that_value_from_the_start(values, factor):
    average = Average()
    for _ in values:
        average = average.add(values[0], factor)
        assert average.value == pytest.approx(values[0], abs=1e-9)


def test_a_larger_batch_weighs_more():
    small = GradientNoise(128).update(NormEstimate(1, 128), 128).update(NormEstimate(3, 128), 128)
    large = GradientNoise(128).update(NormEstimate(1, 128), 128).update(NormEstimate(3, 128), 128 * 500)
    assert small.statistics.sqr == pytest.approx(2.0, abs=0.01)
    assert large.statistics.sqr > 2.9
    assert small.statistics.var == pytest.approx(1.0)


def test_several_samples_replace_what_came_from_differences():
    noise = GradientNoise(128).update(NormEstimate(9, 900), 256, differenced=True)
    noise = noise.update(NormEstimate(1, 128), 256)
    assert noise.statistics == pytest.approx((1.0, 1.0))


def test_averages_stay_within_what_goodput_accepts():
    assert GradientNoise(128).statistics == (1.0, 0.0)
    assert GradientNoise(128).update(NormEstimate(-5, -5), 128).statistics == (0.0, LEAST_VARIANCE)
    kept = GradientNoise(128).update(NormEstimate(1, 128), 128)
    assert kept.update(NormEstimate(nan, 1), 128) is kept
    assert kept.update(NormEstimate(1, inf), 128) is kept
    with pytest.raises(OptionError, match="total > 0"):
        kept.update(NormEstimate(1, 1), 0)


def test_noise_scale_of_averages():
    noise = GradientNoise(128).update(NormEstimate(2.0, 512.0), 128)
    assert noise.statistics.noise_scale(128) == pytest.approx(256.0)


@given(st.floats(1.0, 1e3), st.floats(0.0, 1e3), st.floats(0.001, 1e3))
def test_adascale_is_the_gain(scale, var, sqr):
    known = GradientStatistics(sqr, var)
    assert 1 - 1e-9 <= adascale(scale, known) <= scale * (1 + 1e-9)
    assert adascale(scale, known) == pytest.approx(scale * float(efficiency(known, scale)))


def test_the_other_rules():
    assert square_root(16) == 4
    assert linear(16) == 16
    assert legw(16, progress=80, warmup=10) == pytest.approx(2.0)
    assert legw(16, progress=160, warmup=10) == legw(16, progress=9999, warmup=10) == 4
    assert legw(4, progress=0, warmup=0) == 2
    with pytest.raises(OptionError, match="scale must be > 0"):
        square_root(0)
