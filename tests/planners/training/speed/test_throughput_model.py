"""Pollux's speed model: worked examples, invariants, and what a fit recovers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import approx_fprime

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.throughput import (
    FLOOR,
    START,
    Observation,
    ThroughputParameters,
    _Loss,
    fit,
    gradient_time,
    iteration_time,
    rms_log_error,
    step_time,
    sync_time,
    throughput,
)

EXAMPLE = ThroughputParameters(
    alpha_grad=0.1,
    beta_grad=0.01,
    alpha_local=0.05,
    beta_local=0.01,
    alpha_node=0.2,
    beta_node=0.02,
    gamma=1.0,
)
times = st.floats(1e-4, 2.0)
parameters = st.builds(ThroughputParameters, times, times, times, times, times, times, st.floats(1.0, 10.0))
configurations = st.tuples(st.integers(1, 16), st.integers(1, 64), st.integers(1, 1000)).filter(
    lambda c: c[0] <= c[1]
)


@pytest.mark.parametrize(
    ("nodes", "gpus", "batch", "passes", "grad", "sync", "expected"),
    [
        (1, 1, 10, 0, 0.2, 0.0, (0.2, 0.2, 0.2)),
        (1, 2, 10, 0, 0.2, 0.05, (0.25, 0.206155, 0.2)),
        (1, 4, 10, 0, 0.2, 0.07, (0.27, 0.211896, 0.200001)),
        (2, 4, 10, 0, 0.2, 0.24, (0.44, 0.312410, 0.243620)),
        (2, 8, 20, 1, 0.3, 0.32, (0.92, 0.738634, 0.633781)),
    ],
)
def test_times_of_the_worked_examples(nodes, gpus, batch, passes, grad, sync, expected):
    assert gradient_time(EXAMPLE, batch) == pytest.approx(grad)
    assert sync_time(EXAMPLE, nodes, gpus) == pytest.approx(sync, abs=1e-7)
    for gamma, seconds in zip((1.0, 2.0, 10.0), expected, strict=True):
        found = iteration_time(EXAMPLE._replace(gamma=gamma), nodes, gpus, batch, passes)
        assert found == pytest.approx(seconds, abs=1e-6)


@given(parameters, configurations)
def test_a_step_takes_between_the_longer_part_and_their_sum(theta, where):
    nodes, gpus, batch = where
    grad, sync = gradient_time(theta, batch), sync_time(theta, nodes, gpus)
    step = step_time(theta, nodes, gpus, batch)
    assert max(grad, sync) * (1 - 1e-12) <= step <= (grad + sync) * (1 + 1e-12)


@given(parameters, configurations, st.floats(1.0, 10.0), st.floats(1.0, 10.0))
def test_more_overlap_never_takes_longer(theta, where, one, other):
    low, high = sorted((one, other))
    slow = step_time(theta._replace(gamma=low), *where)
    fast = step_time(theta._replace(gamma=high), *where)
    assert fast <= slow * (1 + 1e-12)


def test_throughput_counts_every_pass():
    seconds = float(iteration_time(EXAMPLE, 2, 8, 20, 1))
    assert throughput(EXAMPLE, 2, 8, 20, 1) == pytest.approx(320 / seconds)


def test_functions_broadcast():
    found = iteration_time(EXAMPLE, np.array([[1], [2]]), np.array([4, 8]), 10)
    assert found.shape == (2, 2)
    assert found[1, 0] == pytest.approx(0.44, abs=1e-6)


def synthetic(theta: ThroughputParameters, where) -> list[Observation]:
    return [
        Observation(
            nodes,
            gpus,
            batch,
            float(step_time(theta, nodes, gpus, batch)),
            float(step_time(theta, nodes, gpus, batch) - gradient_time(theta, batch)),
        )
        for nodes, gpus, batch in where
    ]


EVERYWHERE = [(n, k, m) for n, k in ((1, 1), (1, 2), (1, 4), (2, 4), (2, 8), (4, 16)) for m in (10, 40, 160)]


def drawn(seed: int) -> ThroughputParameters:
    rng = np.random.default_rng(seed)
    return ThroughputParameters(*(np.array(EXAMPLE) * np.exp(rng.normal(0, 0.7, 7))))._replace(
        gamma=float(rng.uniform(1, 4))
    )


@pytest.mark.parametrize(
    "theta", [*(EXAMPLE._replace(gamma=g) for g in (1.0, 1.5, 3.0)), *(drawn(seed) for seed in range(5))]
)
def test_a_fit_of_noiseless_times_predicts_them_within_one_percent(theta):
    found = fit(synthetic(theta, EVERYWHERE))
    for where in EVERYWHERE:
        assert step_time(found, *where) == pytest.approx(float(step_time(theta, *where)), rel=0.01)


def test_what_was_never_measured_is_believed_free():
    alone = fit(synthetic(EXAMPLE, [(1, 1, 10), (1, 1, 20)]))
    assert (alone.alpha_local, alone.beta_local) == (FLOOR, FLOOR)
    pair = fit(synthetic(EXAMPLE, [(1, 1, 10), (1, 2, 20)]))
    assert pair.alpha_local > 0.01
    assert pair.beta_local == FLOOR
    assert pair.alpha_node == pytest.approx(1.1 * pair.alpha_local)
    spread = fit(synthetic(EXAMPLE, [(1, 1, 10), (2, 4, 20)]))
    assert (spread.alpha_local, spread.beta_local) == (FLOOR, FLOOR)
    assert spread.alpha_node > 0.01


def test_with_one_batch_size_half_of_the_pass_is_constant():
    found = fit([Observation(1, 1, 128, 0.2, 0.1)])
    assert found.alpha_grad == pytest.approx(0.05)
    assert found.beta_grad == pytest.approx(0.05 / 128, rel=0.03)
    assert found.gamma == pytest.approx(1.001, abs=1e-3)


def test_the_gradient_of_the_loss_is_exact():
    theta = EXAMPLE._replace(gamma=1.7)
    seen = [
        o._replace(step=o.step * f) for o, f in zip(synthetic(theta, EVERYWHERE), [1.1, 0.8] * 9, strict=True)
    ]
    loss = _Loss(seen)
    for x in (np.array(START), np.array(START) * 1.3, np.array([0.3, 0.002, 0.05, 0.02, 0.01, 0.03, 4.0])):
        numeric = approx_fprime(x, lambda v: loss(v)[0], 1e-7)
        assert loss(x)[1] == pytest.approx(numeric, rel=2e-4, abs=2e-5)


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [Observation(2, 1, 8, 1.0, 0.1)],
        [Observation(1, 1, 8, 1.0, 1.0)],
        [Observation(1, 1, 8, float("nan"), 0.1)],
        [Observation(1, 1, 0, 1.0, 0.1)],
    ],
)
def test_impossible_observations_are_refused(bad):
    with pytest.raises(OptionError, match="observation"):
        fit(bad)


def test_error_of_logarithms():
    assert rms_log_error([0.20, 0.25], [0.25, 0.25]) == pytest.approx(0.157786, abs=1e-6)
