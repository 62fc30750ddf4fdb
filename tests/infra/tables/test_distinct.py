"""Estimators of distinct values."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.tables.statistics import estimate, frequencies, jackknife, shlosser, skewed


def sample(values: np.ndarray, n: int, seed: int = 1) -> np.ndarray:
    chosen = np.random.default_rng(seed).choice(values, n, replace=False)
    return np.array(sorted(Counter(chosen.tolist()).values()), np.int64)


def test_a_sample_without_repeats_is_a_key() -> None:
    assert estimate(np.ones(1000, np.int64), 50_000) == pytest.approx(50_000)


def test_values_of_types_that_extend_others_are_counted() -> None:
    texts = pa.array(['{"a": 1}', "[]", None, "[]"], pa.string())
    counts = frequencies(pa.chunked_array([pa.ExtensionArray.from_storage(pa.json_(pa.string()), texts)]))
    assert counts is not None
    assert sorted(counts.tolist()) == [1, 2]


def test_the_jackknife_formula_by_hand() -> None:
    # n = 10, d = 7, f1 = 5, N = 100: 70 / (10 - 5 + 0.5)
    assert jackknife(np.array([1, 1, 1, 1, 1, 2, 3]), 100) == pytest.approx(70 / 5.5)


def test_shlossers_formula_by_hand() -> None:
    # q = 0.1, f1 = 5, f2 = 1, f3 = 1
    missed = 0.9 * 5 + 0.81 + 0.729
    kept = 0.1 * (5 + 2 * 0.9 + 3 * 0.81)
    assert shlosser(np.array([1, 1, 1, 1, 1, 2, 3]), 100) == pytest.approx(7 + 5 * missed / kept)


@pytest.mark.parametrize("distinct", [50, 3_000, 40_000])
def test_equally_frequent_values_are_estimated_within_15_percent(distinct: int) -> None:
    values = np.random.default_rng(0).integers(0, distinct, 200_000)
    counts = sample(values, 10_000)
    assert not skewed(counts)
    assert estimate(counts, len(values)) == pytest.approx(len(np.unique(values)), rel=0.15)


@pytest.mark.parametrize("exponent", [1.2, 1.6, 2.0, 3.0])
def test_skewed_values_are_estimated_within_a_factor_of_two(exponent: float) -> None:
    values = np.random.default_rng(0).zipf(exponent, 200_000).clip(max=10**6)
    counts = sample(values, 10_000)
    true = len(np.unique(values))
    assert skewed(counts)
    assert true / 2 < estimate(counts, len(values)) < true * 2


@given(st.lists(st.integers(1, 50), max_size=200), st.floats(0, 1e6))
def test_estimates_lie_between_what_was_seen_and_the_population(counts: list[int], population: float) -> None:
    array = np.array(counts, np.int64)
    assert len(counts) <= estimate(array, population) <= max(population, array.sum())


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_a_sample_of_everything_is_exact(counts: list[int]) -> None:
    array = np.array(counts, np.int64)
    assert estimate(array, float(array.sum())) == pytest.approx(len(counts))
