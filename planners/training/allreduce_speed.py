"""Speed of data-parallel training without parameter servers, fitted to what a job measured while it ran.

Optimus (EuroSys 2018, section 3.2) with its parameter-server terms replaced by those of a ring all-reduce:
T = θ₀M/w + θ₁ + θ₂(w - 1)/w + θ₃w + θ₄[more than one node], M the total batch, w the GPUs.
"""

from collections.abc import Callable, Iterable

import numpy as np
from scipy.optimize import nnls

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App

SplitOf = Callable[[int, int], tuple[int, int]]
"""Examples per GPU and pass, and accumulation passes, on (nodes, GPUs)."""


class AllReduceSpeed:
    """Seconds per iteration by GPUs and nodes. What was measured overrides what was fitted."""

    def __init__(self, batch: float, per_node: int = 8) -> None:
        if batch <= 0 or per_node < 1:
            raise OptionError(f"batch must be > 0 and per_node >= 1; got {batch}, {per_node}")
        self._batch, self._per_node = batch, per_node
        self._times: dict[tuple[int, int], tuple[float, int]] = {}
        self._theta: tuple[float, ...] | None = None

    def add(self, nodes: int, gpus: int, seconds: float) -> None:
        """Take one measured iteration; repeated ones count by their mean.

        Raises:
            OptionError: a time that is not positive, or fewer GPUs than nodes.
        """
        if not 0 < seconds < float("inf") or not 1 <= nodes <= gpus:
            raise OptionError(f"an iteration of {seconds} s on {gpus} GPUs of {nodes} nodes cannot be")
        mean, times = self._times.get((nodes, gpus), (0.0, 0))
        self._times[nodes, gpus] = (mean + (seconds - mean) / (times + 1), times + 1)
        self._theta = None

    @property
    def samples(self) -> int:
        """Return how many configurations were measured."""
        return len(self._times)

    @property
    def theta(self) -> tuple[float, ...]:
        """Return θ₀ … θ₄ >= 0 of least relative error."""
        if self._theta is None:
            if not self._times:
                raise OptionError("no iteration was measured yet")
            pairs = sorted(self._times)
            rows = np.array([self._row(nodes, gpus) for nodes, gpus in pairs])
            times = np.array([self._times[pair][0] for pair in pairs])
            theta, _ = nnls(rows / times[:, None], np.ones(len(pairs)))
            self._theta = tuple(float(value) for value in theta)
        return self._theta

    def _row(self, nodes: int, gpus: int) -> list[float]:
        return [self._batch / gpus, 1.0, (gpus - 1) / gpus, float(gpus), float(nodes > 1)]

    def iteration_time(self, gpus: int) -> float:
        """Return seconds per iteration on ``gpus`` GPUs of as few nodes as possible."""
        nodes = -(-gpus // self._per_node)
        known = self._times.get((nodes, gpus))
        if known is not None:
            return known[0]
        return float(np.dot(self._row(nodes, gpus), self.theta))


class SpeedAgent:
    """Keeps its job's total batch and learns its speed. Implements ``planners.model.scheduling.Agent``.

    ``trials`` are (nodes, GPUs, s per iteration) of short runs before the job starts (the paper's pre-run): five or
    more that vary both. Afterwards every new configuration is learnt as it runs.
    """

    adaptive = False

    def __init__(
        self,
        split: SplitOf,
        batch: float,
        trials: Iterable[tuple[int, int, float]],
        *,
        most_gpus: int,
        per_node: int = 8,
    ) -> None:
        self._split = split
        self._most_gpus = most_gpus
        self.speed = AllReduceSpeed(batch, per_node)
        for nodes, gpus, seconds in trials:
            self.speed.add(nodes, gpus, seconds)
        if not self.speed.samples:
            raise OptionError(
                "an agent needs at least one trial: a policy asks for speed before the job runs"
            )
        self._last: tuple[int, int, float] | None = None

    def split(self, nodes: int, gpus: int) -> tuple[int, int]:
        """Return the split of the job's batch."""
        return self._split(nodes, gpus)

    def observe(
        self, nodes: int, gpus: int, local: int, passes: int, step: float, sync: float, sqr: float, var: float
    ) -> None:
        """Learn the time of an iteration; the same one again in a row teaches nothing."""
        seen = (nodes, gpus, step + passes * (step - sync))
        if seen != self._last:
            self._last = seen
            self.speed.add(*seen)

    def report(self, app: App) -> None:
        """Set the fitted speed and the most GPUs."""
        app.speed = self.speed
        app.min_gpus = 1
        app.max_gpus = self._most_gpus
