"""What the experiments train: many runs of one model at once, their parameters in blocks."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.errors import OptionError

States = NDArray[Any]
"""Shape (runs, width): block b of a run is columns ``offsets[b]`` to ``offsets[b + 1]``.

What belongs to a block without counting for its distance (Adam's moments) lies in further planes: (runs, planes,
width). Columns after the last block are small state: saved with every save, left alone by a partial recovery.
"""


class Problem(Protocol):
    """A model in training. Iteration k works on the k-th piece of its data stream, whatever happened before."""

    name: str
    offsets: NDArray[np.int64]  # where blocks begin, and where the last one ends
    chunk: int  # runs that are fastest together
    look_every: int  # iterations between two looks at the loss while it is far from the criterion

    def start(self) -> States:
        """Return the state before iteration 0 of each stream."""
        ...

    def advance(self, states: States, iteration: int, streams: NDArray[np.int64]) -> States:
        """Return the states after one more iteration; row i draws its chances, if any, from ``streams[i]``."""
        ...

    def loss(self, states: States) -> NDArray[np.float64]:
        """Return the training loss of each run, in the unit of the criterion."""
        ...

    def distances(self, now: States, saved: States) -> NDArray[np.float64]:
        """Return how far each block is from its saved value; shape (runs, blocks)."""
        ...


def block_norms(problem: Problem, change: NDArray[Any]) -> NDArray[np.float64]:
    """Return the Euclidean norm of each block of (runs, width) differences."""
    ends = int(problem.offsets[-1])
    squares = np.add.reduceat(change[:, :ends].astype(np.float64) ** 2, problem.offsets[:-1], axis=1)
    return np.asarray(np.sqrt(squares))


def block_of(problem: Problem) -> NDArray[np.int64]:
    """Return the block of each column; small state has none and is left out."""
    return np.repeat(np.arange(len(problem.offsets) - 1), np.diff(problem.offsets))


def digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return scikit-learn's handwritten digits: 1,797 images of 8 × 8 with values 0 to 1, and their classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise OptionError(
            "the experiments train on scikit-learn's digits: pip install scikit-learn"
        ) from error
    images, classes = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), np.asarray(classes, np.int64)


def batches(rng: np.random.Generator, examples: int, batch: int, count: int) -> NDArray[np.int64]:
    """Return the examples of ``count`` mini-batches: epochs in new orders, what does not fill a batch left out."""
    per_epoch = examples // batch
    epochs = -(-count // per_epoch)
    order = [rng.permutation(examples)[: per_epoch * batch].reshape(per_epoch, batch) for _ in range(epochs)]
    return np.concatenate(order)[:count]
