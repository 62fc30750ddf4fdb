"""Loss curves and parameter-server speeds: worked examples, and truth recovered from clean data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.tuning.convergence import LossCurve, LossModel, smoothed
from tests.evaluation.optimus.ps_speed import SAMPLE_PLAN, MeasuredSpeed, PsSpeed, Sample, fit_speed

SEQ2SEQ = LossModel(0.21, 1.07, 0.07)


@pytest.mark.parametrize(
    ("k", "loss"),
    [(0, 1.0046), (1, 0.8513), (5, 0.5417), (10, 0.3855), (20, 0.2598), (50, 0.1564), (100, 0.1153)],
)
def test_loss_of_the_papers_curve(k, loss):
    assert SEQ2SEQ.loss(k) == pytest.approx(loss, abs=5e-5)


@pytest.mark.parametrize(("delta", "first"), [(0.05, 5), (0.03, 8), (0.02, 10), (0.01, 17), (0.005, 26)])
def test_convergence_of_the_papers_curve(delta, first):
    assert SEQ2SEQ.converges_at(delta, patience=1) == first
    assert SEQ2SEQ.converges_at(delta) == first + 2
    assert SEQ2SEQ.loss(first) - SEQ2SEQ.loss(first + 1) == pytest.approx(SEQ2SEQ.decrease(first))
    assert SEQ2SEQ.remaining(first - 1, delta) == 3
    assert SEQ2SEQ.remaining(1000, delta) == 0
    assert SEQ2SEQ.remaining(0, delta, most=4) == 4


def curve(model: LossModel, points: int, scale: float = 1.0) -> LossCurve:
    made = LossCurve()
    for k in range(points):
        made.add(k, scale * model.loss(k))
    return made


@given(
    st.floats(0.02, 1),
    st.floats(1, 3),
    st.floats(0, 0.3),
    st.integers(12, 60),
    st.floats(0.1, 100),
)
def test_clean_curves_are_recovered(beta0, beta1, beta2, points, scale):
    truth = LossModel(beta0, beta1, beta2)
    fitted = curve(truth, points, scale).fit()
    assert fitted is not None
    first = truth.loss(0)
    for k in (0, points, 3 * points):
        assert fitted.loss(k) * first == pytest.approx(truth.loss(k), rel=0.01, abs=0.002)
    assert fitted.beta2 >= 0
    assert fitted.scale == pytest.approx(scale * first)
    assert fitted.r2 > 0.999


def test_predicted_epoch_on_a_clean_curve_is_exact():
    truth = LossModel(0.21, 1.0, 0.0)  # starts at 1: nothing to normalise
    fitted = curve(truth, 30).fit()
    assert fitted is not None
    assert fitted.converges_at(0.01) == truth.converges_at(0.01)


def test_noise_and_an_outlier_are_survived():
    rng = np.random.default_rng(3)
    truth = LossModel(0.21, 1.0, 0.05)
    noisy = LossCurve()
    for k in range(40):
        loss = truth.loss(k) * (1 + rng.normal(0, 0.01))
        noisy.add(k, 3.0 * truth.loss(0) / 3.2 if k == 20 else loss)
    fitted = noisy.fit()
    assert fitted is not None
    assert fitted.converges_at(0.01) == pytest.approx(truth.converges_at(0.01), abs=4)


def test_outliers_are_replaced_by_the_mean_of_their_neighbours():
    assert smoothed(np.array([5.0, 4, 30, 3, 2])).tolist() == [5, 4, 3.5, 3, 2]
    assert smoothed(np.array([5.0, 4, 3.5, 3, 2])).tolist() == [5, 4, 3.5, 3, 2]


def test_not_ready_with_few_points_or_without_a_fall():
    assert curve(SEQ2SEQ, 4).fit() is None
    rising = LossCurve()
    for k in range(10):
        rising.add(k, 1 + k)
    assert rising.fit() is None
    level = LossCurve()
    for k in range(10):
        level.add(k, 2.0)
    assert level.fit() is None
    assert level.flat(0.01)
    assert not rising.flat(0.01)


def test_a_new_learning_rate_starts_a_new_curve():
    made = curve(SEQ2SEQ, 10)
    made.restart()
    assert len(made) == 0
    assert made.fit() is None


@pytest.mark.parametrize(("step", "loss"), [(0, 1), (2, 0), (2, -1), (2, float("nan")), (float("inf"), 1)])
def test_bad_points_are_refused(step, loss):
    made = LossCurve()
    made.add(1, 1.0)
    with pytest.raises(OptionError):
        made.add(step, loss)


def test_long_histories_are_thinned():
    fitted = curve(LossModel(0.01, 1.0, 0.1), 5000).fit()
    assert fitted is not None
    assert fitted.loss(5000) * 1.1 == pytest.approx(LossModel(0.01, 1.0, 0.1).loss(5000), rel=0.01)


positive = st.floats(0.01, 5)


@given(st.sampled_from(["synchronous", "asynchronous"]), st.lists(positive, min_size=5, max_size=5))
def test_speeds_are_recovered_from_the_sample_plan(mode, theta):
    batch = 8.0
    truth = PsSpeed(mode, tuple(theta[: 5 if mode == "synchronous" else 4]), batch)
    fitted = fit_speed([Sample(p, w, truth.speed(p, w)) for p, w in SAMPLE_PLAN], mode, batch)
    assert fitted is not None
    assert fitted.identifiable
    assert min(fitted.theta) >= 0
    for p, w in [(3, 5), (8, 8), (1, 10)]:
        assert fitted.speed(p, w) == pytest.approx(truth.speed(p, w), rel=1e-4)


def test_the_papers_resnet50_forms():
    asynchronous = PsSpeed("asynchronous", (2.83, 3.92, 0, 0.11))
    assert asynchronous.speed(2, 4) == pytest.approx(4 / (2.83 + 3.92 * 2 + 0.11 * 2))
    synchronous = PsSpeed("synchronous", (1.02, 2.78, 4.92, 0, 0.02), batch=1)
    assert synchronous.speed(2, 4) == pytest.approx(1 / (1.02 / 4 + 2.78 + 4.92 * 2 + 0.02 * 2))


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_samples_with_equal_counts_do_not_tell_costs_apart(mode):
    truth = PsSpeed(mode, (1, 2, 3, 0.1, 0.2)[: 5 if mode == "synchronous" else 4], 8)
    fitted = fit_speed([Sample(n, n, truth.speed(n, n)) for n in range(1, 9)], mode, 8)
    assert fitted is not None
    assert fitted.speed(5, 5) == pytest.approx(truth.speed(5, 5), rel=1e-3)
    with pytest.raises(OptionError, match="say nothing about 2 servers and 5 workers"):
        fitted.speed(2, 5)


def test_too_few_pairs_are_not_fitted_and_measurements_override():
    assert fit_speed([Sample(1, 1, 2.0)] * 9, "synchronous") is None
    truth = PsSpeed("asynchronous", (1, 1, 1, 1))
    fitted = fit_speed([Sample(p, w, truth.speed(p, w)) for p, w in SAMPLE_PLAN], "asynchronous")
    assert fitted is not None
    known = MeasuredSpeed(fitted, {(2, 2): 7.0})
    assert known(2, 2) == 7.0
    assert known(4, 8) == pytest.approx(truth.speed(4, 8), rel=1e-6)


@pytest.mark.parametrize("sample", [Sample(1, 1, 0.0), Sample(1, 1, -1.0), Sample(0, 1, 1.0)])
def test_bad_samples_are_refused(sample):
    with pytest.raises(OptionError):
        fit_speed([sample, *[Sample(p, w, 1.0) for p, w in SAMPLE_PLAN]], "synchronous")
