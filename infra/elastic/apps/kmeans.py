"""Mini-batch k-means (Sculley, "Web-scale k-means clustering", WWW 2010) in exact arithmetic."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbflow.infra.elastic.application import Application, Driver, Executor, Key, TaskContext, Value
from ebbflow.infra.elastic.apps.arrays import opened
from ebbflow.infra.elastic.apps.iterative import IterativeDriver

Floats = NDArray[np.float64]
_FIXED = 2.0**20  # units of a coordinate in fixed point


class KMeans(Application):
    """Finds ``clusters`` centres; each is the mean of all points that any mini-batch has assigned to it.

    That mean is what a learning rate of 1 over a centre's count gives. Parameters are the sums and counts, integers
    in fixed point, so that at staleness 0 any number of workers gives the same bits. ``data`` is the URI of an
    ``.npz`` file that all workers can read, with ``x`` (n × d floats) and ``start`` (the first centres).
    """

    isolated = True
    tolerant = True

    def __init__(
        self,
        data: str,
        clusters: int,
        executors: int = 16,
        iterations: int = 50,
        sample: int = 64,
        seed: int = 0,
        staleness: int | None = 0,
        shards: int = 8,
    ) -> None:
        self.data = data
        self.clusters = clusters
        self.executors = executors
        self.iterations = iterations
        self.sample = sample  # points of each executor in an iteration
        self.seed = seed
        self.staleness = staleness
        self.shards = shards

    def driver(self) -> Driver:
        return IterativeDriver(self.executors, self.iterations, self.staleness)

    def executor(self, index: int) -> Executor:
        return KMeansExecutor(self, index)

    def parameters(self) -> Mapping[Key, Value]:
        with opened(self.data) as arrays:
            start = np.rint(arrays["start"] * _FIXED).astype(np.int64)
        # a row: the sums of the coordinates, then the count
        return {c: np.append(start[c], 1) for c in range(self.clusters)}

    def centres(self, parameters: Mapping[Key, Value]) -> Floats:
        """Return the centres, clusters × d, from the values of the parameters."""
        rows = np.stack([parameters[c] for c in range(self.clusters)])
        centres: Floats = rows[:, :-1] / _FIXED / rows[:, -1:]
        return centres

    def objective(self, parameters: Mapping[Key, Value]) -> float:
        """Return the mean squared distance of all points to their centres."""
        with opened(self.data) as arrays:
            return float(_distances(arrays["x"], self.centres(parameters)).min(axis=1).mean())


class KMeansExecutor(Executor):
    """Every ``executors``-th point; its state is how many mini-batches it has drawn."""

    def __init__(self, app: KMeans, index: int) -> None:
        self._app = app
        self._index = index
        self._x: Floats
        self._drawn = 0

    def load_input(self) -> None:
        with opened(self._app.data) as arrays:
            self._x = arrays["x"][self._index :: self._app.executors]

    def input_state(self) -> Any:
        return self._x

    def set_input(self, data: Any) -> None:
        self._x = data

    def state_dict(self) -> Any:
        return self._drawn

    def load_state_dict(self, state: Any) -> None:
        self._drawn = state

    async def run(self, context: TaskContext, args: int) -> float:
        """Do one mini-batch; return the sum of squared distances over the executors' points."""
        app = self._app
        rng = np.random.default_rng((app.seed, self._index, self._drawn))
        self._drawn += 1
        points = self._x[rng.integers(len(self._x), size=app.sample)]
        keys = range(app.clusters)
        centres = app.centres(dict(zip(keys, await context.get(*keys), strict=True)))
        distances = _distances(points, centres)
        nearest = distances.argmin(axis=1)
        fixed = np.rint(points * _FIXED).astype(np.int64)
        for cluster in np.unique(nearest):
            mine = fixed[nearest == cluster]
            context.update(int(cluster), np.append(mine.sum(axis=0), len(mine)))
        return float(distances.min(axis=1).mean() / app.executors)


def _distances(x: Floats, centres: Floats) -> Floats:
    found: Floats = (x**2).sum(axis=1)[:, None] - 2 * x @ centres.T + (centres**2).sum(axis=1)
    return np.maximum(found, 0.0)
