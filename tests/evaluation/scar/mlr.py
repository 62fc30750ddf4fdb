"""Multinomial logistic regression by mini-batch SGD; blocks are the rows of the (features × classes) matrix."""

import numpy as np
from numpy.typing import NDArray

from tests.evaluation.scar.problems import States, batches, block_norms, digits

CLASSES = 10


class Regression:
    """On the digits with a bias: 65 blocks of 10 weights. The loss is the sum of nats over all examples."""

    chunk = 64
    look_every = 1

    def __init__(self, *, rate: float = 0.5, batch: int = 300, seed: int = 0, iterations: int = 600) -> None:
        images, self.classes = digits()
        self.name = "MLR"
        self.features = np.concatenate([images, np.ones((len(images), 1), np.float32)], axis=1)
        self.offsets = np.arange(0, self.features.shape[1] * CLASSES + 1, CLASSES)
        self.rate = rate
        self.order = batches(np.random.default_rng([seed, 1]), len(images), batch, iterations)

    def start(self) -> States:
        return np.zeros((1, int(self.offsets[-1])), np.float32)

    def advance(self, states: States, iteration: int, streams: NDArray[np.int64]) -> States:
        chosen = self.order[iteration]
        features = self.features[chosen]
        shares = self._scores(states, features)
        shares -= shares.max(axis=1, keepdims=True)
        np.exp(shares, out=shares)
        shares /= shares.sum(axis=1, keepdims=True)
        shares[np.arange(len(chosen)), self.classes[chosen]] -= 1
        slope = features.T @ shares.reshape(len(chosen), -1)
        slope = slope.reshape(-1, len(states)).T
        return np.asarray(states - np.float32(self.rate / len(chosen)) * slope)

    def loss(self, states: States) -> NDArray[np.float64]:
        scores = self._scores(states, self.features)
        scores -= scores.max(axis=1, keepdims=True)
        right = scores[np.arange(len(scores)), self.classes].sum(axis=0, dtype=np.float64)
        np.exp(scores, out=scores)
        return np.asarray(np.log(scores.sum(axis=1)).sum(axis=0, dtype=np.float64) - right)

    def distances(self, now: States, saved: States) -> NDArray[np.float64]:
        return block_norms(self, now - saved)

    def _scores(self, states: States, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return shape (examples, classes, runs): runs innermost, so that sums over classes run along memory."""
        weights = np.ascontiguousarray(states.T).reshape(features.shape[1], -1)
        return (features @ weights).reshape(len(features), CLASSES, len(states))
