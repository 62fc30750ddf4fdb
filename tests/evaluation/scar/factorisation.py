"""Factorisation of a dense matrix by alternating least squares; blocks are rows of L and columns of R."""

import numpy as np
from numpy.typing import NDArray

from tests.evaluation.scar.problems import States, block_norms

ROWS, COLUMNS, RANK = 200, 150, 5


class Factorisation:
    """Ratings of 200 users for 150 items, what is not rated counting as 0, by 5 factors: 350 blocks of 5 numbers.

    An iteration computes L from R, then R from L, so that a loss of L alone costs nothing. The loss is the
    Frobenius norm of X − L·R.
    """

    name = "MF"
    chunk = 128
    look_every = 1

    def __init__(self, *, seed: int = 0) -> None:
        rng = np.random.default_rng([seed, 2])
        self.matrix = ratings(rng)
        self.squared = float((self.matrix**2).sum())
        self.offsets = np.arange(0, (ROWS + COLUMNS) * RANK + 1, RANK)
        self.first = rng.random((1, int(self.offsets[-1])))

    def start(self) -> States:
        return self.first.copy()

    def advance(self, states: States, iteration: int, streams: NDArray[np.int64]) -> States:
        _, right = self._factors(states)
        left = _solve(_products(self.matrix, right), right)
        right = _solve(_products(self.matrix.T, left), left)
        runs = len(states)
        return np.concatenate([left.reshape(runs, -1), right.reshape(runs, -1)], axis=1)

    def loss(self, states: States) -> NDArray[np.float64]:
        left, right = self._factors(states)
        cross = np.einsum("rik,rik->r", left, _products(self.matrix, right))
        own = np.einsum("rkl,rkl->r", _gram(left), _gram(right))
        return np.asarray(np.sqrt(np.maximum(self.squared - 2 * cross + own, 0.0)))

    def distances(self, now: States, saved: States) -> NDArray[np.float64]:
        return block_norms(self, now - saved)

    def _factors(self, states: States) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        runs = len(states)
        return (
            states[:, : ROWS * RANK].reshape(runs, ROWS, RANK),
            states[:, ROWS * RANK :].reshape(runs, COLUMNS, RANK),
        )


def ratings(rng: np.random.Generator) -> NDArray[np.float64]:
    """Return ratings of half a star to 5: popular items have more, busy users give more, 30 each on average."""
    taste = rng.standard_normal((ROWS, RANK)) @ rng.standard_normal((RANK, COLUMNS)) / np.sqrt(RANK)
    noise = 0.5 * rng.standard_normal((ROWS, COLUMNS))
    stars = np.clip(np.round(2 * (3.5 + taste + noise)) / 2, 0.5, 5.0)
    popular = (np.arange(COLUMNS) + 10.0) ** -0.8
    busy = rng.lognormal(0.0, 0.8, ROWS)
    chance = np.outer(busy / busy.mean(), popular / popular.mean()) * 30 / COLUMNS
    return np.asarray(stars * (rng.random((ROWS, COLUMNS)) < chance))


def _products(matrix: NDArray[np.float64], factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``matrix`` times each run's factor; shape (runs, rows, rank)."""
    runs, rows, rank = factors.shape
    together = np.ascontiguousarray(factors.transpose(1, 0, 2)).reshape(rows, runs * rank)
    return (matrix @ together).reshape(len(matrix), runs, rank).transpose(1, 0, 2)


def _gram(factors: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(factors.transpose(0, 2, 1) @ factors)


def _solve(products: NDArray[np.float64], factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least-squares factor: products · (factorsᵀ·factors)⁻¹ for each run."""
    return np.linalg.solve(_gram(factors), products.transpose(0, 2, 1)).transpose(0, 2, 1)
