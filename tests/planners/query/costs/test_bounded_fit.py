"""Least squares within bounds, against SciPy's."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from ebbflow.planners.query.costs.bounded_fit import bounded_ridge


@given(
    st.integers(1, 12),
    st.integers(1, 7),
    st.integers(0, 2**31),
    st.floats(1e-3, 1.0),
    st.floats(0.1, 10.0),
    st.booleans(),
)
def test_the_minimum_is_scipys(
    count: int, kinds: int, seed: int, pull: float, centre: float, sparse: bool
) -> None:
    generator = np.random.default_rng(seed)
    parts = generator.random((count, kinds)) * 10.0 ** generator.integers(-3, 1, (count, kinds))
    if sparse:  # stages that do one kind of work, and others that do the same: collinear but for the ridge
        parts *= generator.random((count, kinds)) < 0.3
    target = generator.random(count) * 10.0 ** generator.integers(-2, 3, count)
    found = bounded_ridge(parts, target, pull, centre, (0.1, 10.0))
    rows = np.vstack([parts, pull * np.eye(kinds)])
    wanted = np.concatenate([target, np.full(kinds, pull * centre)])

    def loss(x: np.ndarray) -> float:
        return float(np.sum((rows @ x - wanted) ** 2))

    oracle = np.clip(lsq_linear(rows, wanted, bounds=(0.1, 10.0), method="bvls").x, 0.1, 10.0)
    assert np.all((found >= 0.1) & (found <= 10.0))
    assert loss(found) <= loss(oracle) * (1.0 + 1e-9) + 1e-12


def test_examples_by_hand() -> None:
    one = bounded_ridge(np.array([[1.0]]), np.array([3.0]), 1.0, 1.0, (0.1, 10.0))
    assert np.allclose(one, [2.0])  # half way between what was measured and the prior
    held = bounded_ridge(np.array([[1.0, 0.0]]), np.array([500.0]), 1e-3, 1.0, (0.1, 10.0))
    assert np.allclose(held, [10.0, 1.0])  # the bound holds the first; nothing is known of the second
