"""SCAR's bounds: its worked examples, and what the theorems say of any linear contraction."""

from itertools import combinations
from math import ceil, floor, inf, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.saving.rework import (
    envelope,
    error_from_step,
    estimate_contraction,
    expected_partial_norm,
    irreducible_error,
    kappa,
    kappa_infinite,
    log_aggregate,
    reduced_precision_norm,
    rework_after_recovery,
    rework_bound,
    rework_bound_infinite,
)

contractions = st.floats(0.05, 0.99)
perturbations = st.dictionaries(st.integers(0, 60), st.floats(0.0, 10.0), max_size=6)


def run(c: float, norms: dict[int, float], eps: float, start: float = 1.0) -> int:
    """Return the first iteration from which f(x) = c·x stays below ``eps``, pushed upwards as ``norms`` say."""
    x, iteration = start, 0
    while iteration <= max(norms, default=0) or x >= eps:
        x = c * (x + norms.get(iteration, 0.0))
        iteration += 1
    return iteration


def test_a_clean_run_takes_as_long_as_its_estimate() -> None:
    assert kappa(0.9, 1.0, 1e-3) == pytest.approx(65.563, abs=5e-4)
    assert run(0.9, {}, 1e-3) == 66


def test_one_perturbation_costs_what_the_bound_says() -> None:
    norms = {20: 0.3}
    assert np.exp(log_aggregate(0.9, norms)) == pytest.approx(2.46758, abs=5e-6)
    assert rework_bound(0.9, 1.0, norms) == pytest.approx(11.802, abs=5e-4)
    assert kappa(0.9, 1.0, 1e-3, log_aggregate(0.9, norms)) == pytest.approx(77.365, abs=5e-4)
    assert run(0.9, norms, 1e-3) == 78
    assert run(0.9, norms, 1e-3) - run(0.9, {}, 1e-3) == ceil(rework_bound(0.9, 1.0, norms))
    assert envelope(0.9, 1.0, norms, 100)[100] == pytest.approx(9.21037e-5, rel=1e-5)


def test_two_perturbations_add_up() -> None:
    norms = {5: 0.2, 10: 0.1}
    assert np.exp(log_aggregate(0.9, norms)) == pytest.approx(0.625499, abs=5e-7)
    assert rework_bound(0.9, 1.0, norms) == pytest.approx(4.61098, abs=5e-6)


def test_a_perturbation_in_every_step_leaves_an_error() -> None:
    assert irreducible_error(0.9, 0.01) == pytest.approx(0.09)
    assert kappa_infinite(0.9, 1.0, 0.2, 0.01) == pytest.approx(20.0546, abs=5e-5)
    assert rework_bound_infinite(0.9, 1.0, 0.2, 0.01) == pytest.approx(4.77908, abs=5e-6)
    assert kappa_infinite(0.9, 1.0, 0.08, 0.01) == rework_bound_infinite(0.9, 1.0, 0.08, 0.01) == inf


def test_a_late_perturbation_does_not_overflow() -> None:
    bound = rework_bound(0.5, 1.0, {5000: 1.0})
    assert bound == pytest.approx(5000.0, abs=1e-6)


@given(contractions, perturbations, st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_no_error_leaves_the_envelope(c: float, norms: dict[int, float], width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(rng.standard_normal((width, width)))
    matrix = turn * rng.uniform(-c, c, width) @ turn.T
    state = rng.standard_normal(width)
    bound = envelope(c, float(np.linalg.norm(state)), norms, 80)
    for iteration in range(80):
        push = rng.standard_normal(width)
        state = matrix @ (state + norms.get(iteration, 0.0) * push / np.linalg.norm(push))
        assert np.linalg.norm(state) <= bound[iteration + 1] * (1 + 1e-9) + 1e-300


@given(contractions, perturbations)
def test_pushes_away_from_the_optimum_reach_the_envelope(c: float, norms: dict[int, float]) -> None:
    bound, x = envelope(c, 1.0, norms, 80), 1.0
    for iteration in range(80):
        x = c * (x + norms.get(iteration, 0.0))
        assert x == pytest.approx(bound[iteration + 1], rel=1e-12)
    closed = 80 * log(c) + np.logaddexp(0.0, log_aggregate(c, norms))
    assert log(x) == pytest.approx(closed, rel=1e-9, abs=1e-9)


@given(contractions, perturbations, st.floats(1e-6, 0.5))
def test_no_run_takes_longer_than_its_estimate(c: float, norms: dict[int, float], eps: float) -> None:
    estimate = kappa(c, 1.0, eps, log_aggregate(c, norms))
    assert run(c, norms, eps) <= max(floor(estimate + 1e-9), max(norms, default=0)) + 1


@given(contractions, st.floats(1e-3, 1.0))
def test_a_constant_push_ends_at_the_irreducible_error(c: float, norm: float) -> None:
    x = 1.0
    for _ in range(5000):
        x = c * (x + norm)
    assert x == pytest.approx(irreducible_error(c, norm), rel=1e-9)


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=7), st.data())
def test_a_random_part_of_a_change_has_its_share_of_the_square(
    change: list[float], data: st.DataObject
) -> None:
    lost = data.draw(st.integers(0, len(change)))
    squares = [sum(change[i] ** 2 for i in some) for some in combinations(range(len(change)), lost)]
    whole = sum(value**2 for value in change)
    share = lost / len(change)
    assert np.mean(squares) == pytest.approx(share * whole, rel=1e-9, abs=1e-12)
    assert max(squares) <= whole * (1 + 1e-12)
    assert np.mean(np.sqrt(squares)) <= expected_partial_norm(sqrt(whole), share) * (1 + 1e-9) + 1e-12


def test_losing_half_of_four_blocks() -> None:
    change = np.array([1.0, 2.0, 2.0, 4.0])
    assert np.linalg.norm(change) == 5.0
    assert np.linalg.norm(change[[0, 3]]) == pytest.approx(4.1231, abs=5e-5)
    pairs = [change[list(pair)] @ change[list(pair)] for pair in combinations(range(4), 2)]
    assert np.mean(pairs) == 12.5 == pytest.approx(expected_partial_norm(5.0, 0.5) ** 2)


def test_a_recovery_is_a_perturbation_of_the_present_error() -> None:
    # c^T·W is the error that a clean run has at T, so both ways to ask agree.
    assert rework_after_recovery(0.9, 0.9**20, 0.6, 0.25) == pytest.approx(rework_bound(0.9, 1.0, {20: 0.3}))


def test_the_contraction_is_the_worst_factor_of_any_step() -> None:
    assert estimate_contraction([[1.0, 0.5, 0.4], [0.3, 0.1]]) == pytest.approx(0.8)
    assert estimate_contraction([[1.0, 0.5, 1e-18, 9e-19]], floor=1e-12) == pytest.approx(0.5)
    with pytest.raises(OptionError, match=r"every step must come closer.*1\.5"):
        estimate_contraction([[1.0, 1.5]])
    with pytest.raises(OptionError, match="at least one step"):
        estimate_contraction([[1.0]])


@given(contractions, st.floats(0.1, 10.0), st.integers(0, 2**32 - 1))
def test_a_step_tells_how_far_the_optimum_can_be(c: float, size: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    state = size * rng.standard_normal(4)
    factors = rng.uniform(-c, c, 4)
    assert np.linalg.norm(state) <= error_from_step(c, float(np.linalg.norm(state - factors * state))) * (
        1 + 1e-9
    )


def test_a_mantissa_bounds_the_perturbation_by_rounding() -> None:
    assert reduced_precision_norm(8, 4.0) == pytest.approx(4 / 128)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rework_bound(1.0, 1.0, {}), "contraction must be between 0 and 1; got 1.0"),
        (lambda: rework_bound(0.9, 0.0, {}), "error must be finite and > 0; got 0.0"),
        (lambda: rework_bound(0.9, 1.0, {-1: 1.0}), "steps of perturbations must be >= 0; got -1"),
        (
            lambda: rework_bound(0.9, 1.0, {1: -2.0}),
            r"norms of perturbations must be finite and >= 0; got -2\.0",
        ),
        (lambda: kappa(0.9, 1.0, 0.0), "eps must be finite and > 0; got 0.0"),
        (
            lambda: kappa_infinite(0.9, 0.05, 0.2, 0.01),
            r"error must exceed the irreducible error 0\.09; got 0\.05",
        ),
        (lambda: expected_partial_norm(1.0, 1.5), "lost must be a fraction from 0 to 1; got 1.5"),
        (lambda: irreducible_error(0.9, -1.0), "norm must be finite and >= 0; got -1.0"),
        (lambda: reduced_precision_norm(0, 1.0), "bits must be >= 1; got 0"),
    ],
)
def test_bad_values_are_named(call, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        call()
