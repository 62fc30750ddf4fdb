"""Multinomial logistic regression by gradient descent, with bounded staleness (Litz, section 4.2)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbflow.infra.elastic.application import Application, Driver, Executor, Key, TaskContext, Value
from ebbflow.infra.elastic.apps.arrays import opened
from ebbflow.infra.elastic.apps.iterative import IterativeDriver

Floats = NDArray[np.float64]
_FIXED = 2.0**32  # units of a weight in fixed point


class Mlr(Application):
    """Minimises the mean cross-entropy plus ``decay``/2 times the squared weights.

    ``data`` is the URI of an ``.npz`` file that all workers can read, with ``x`` (n × d floats) and ``y`` (n
    integers from 0). An iteration takes one ``batch``-th of every partition in turn (1: all of it). With
    ``exact`` weights are fixed-point integers and reads are isolated: at staleness 0 any number of workers gives the
    same bits. Parameters are the rows of the weights, one a class, the last column being the bias.
    """

    tolerant = True

    def __init__(
        self,
        data: str,
        classes: int,
        executors: int = 16,
        iterations: int = 100,
        staleness: int | None = 0,
        rate: float = 0.5,
        decay: float = 1e-4,
        batch: int = 1,
        exact: bool = False,
        shards: int = 8,
    ) -> None:
        self.data = data
        self.classes = classes
        self.executors = executors
        self.iterations = iterations
        self.staleness = staleness
        self.rate = rate
        self.decay = decay
        self.batch = batch
        self.isolated = self.exact = exact
        self.shards = shards
        with opened(data) as arrays:
            self.features = int(arrays["x"].shape[1])

    def driver(self) -> Driver:
        return IterativeDriver(self.executors, self.iterations, self.staleness)

    def executor(self, index: int) -> Executor:
        return MlrExecutor(self, index)

    def parameters(self) -> Mapping[Key, Value]:
        kind = np.int64 if self.exact else np.float64
        return {("w", row): np.zeros(self.features + 1, kind) for row in range(self.classes)}

    def weights(self, parameters: Mapping[Key, Value]) -> Floats:
        """Return the weights, classes × (d + 1), from the values of the parameters."""
        rows = np.stack([parameters["w", row] for row in range(self.classes)])
        return rows / _FIXED if self.exact else rows

    def objective(self, parameters: Mapping[Key, Value]) -> float:
        """Return the objective on all data."""
        with opened(self.data) as arrays:
            x, y = _with_bias(arrays["x"]), arrays["y"]
        weights = self.weights(parameters)
        loss, _ = loss_and_gradient(weights, x, y)
        return float(loss / len(y) + self.decay / 2 * np.sum(weights**2))


class MlrExecutor(Executor):
    """Every ``executors``-th sample; stateless."""

    def __init__(self, app: Mlr, index: int) -> None:
        self._app = app
        self._index = index
        self._x: Floats
        self._y: NDArray[np.int64]
        self._samples = 0

    def load_input(self) -> None:
        with opened(self._app.data) as arrays:
            x, y = arrays["x"], arrays["y"]
        mine = slice(self._index, None, self._app.executors)
        self._samples, self._x, self._y = len(y), _with_bias(x[mine]), y[mine].astype(np.int64)

    def input_state(self) -> Any:
        return self._samples, self._x, self._y

    def set_input(self, data: Any) -> None:
        self._samples, self._x, self._y = data

    async def run(self, context: TaskContext, args: int) -> float:
        """Do iteration ``args``; return the part of the objective that its samples add, times ``batch``."""
        app = self._app
        keys = [("w", row) for row in range(app.classes)]
        weights = app.weights(dict(zip(keys, await context.get(*keys), strict=True)))
        taken = slice(args % app.batch, None, app.batch)
        loss, gradient = loss_and_gradient(weights, self._x[taken], self._y[taken])
        scale = app.batch / self._samples
        gradient = gradient * scale + app.decay * weights / app.executors
        step = -app.rate * gradient
        if app.exact:
            step = np.rint(step * _FIXED).astype(np.int64)
        for row, key in enumerate(keys):
            context.update(key, step[row])
        return float(loss * scale + app.decay / 2 * np.sum(weights**2) / app.executors)


def loss_and_gradient(weights: Floats, x: Floats, y: NDArray[np.int64]) -> tuple[float, Floats]:
    """Return the summed cross-entropy and its gradient, classes × features."""
    scores = x @ weights.T
    scores -= scores.max(axis=1, keepdims=True)
    chances = np.exp(scores)
    total = chances.sum(axis=1, keepdims=True)
    chances /= total
    rows = np.arange(len(y))
    loss = float(np.sum(np.log(total[:, 0]) - scores[rows, y]))
    chances[rows, y] -= 1.0
    return loss, chances.T @ x


def _with_bias(x: Floats) -> Floats:
    return np.hstack([x, np.ones((len(x), 1))])
