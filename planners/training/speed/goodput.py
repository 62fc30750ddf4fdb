"""Goodput: examples per second, weighed by what an example is worth in a batch of that size.

Pollux, OSDI 2021, section 3 (equations 3.1 to 3.3 of the thesis). The noise of the gradient says how much larger a
batch must be to make the same progress in fewer iterations.

How a learning rate follows the batch size: the factor on the rate that was made for the initial batch.

``scale`` is the batch over the initial batch, >= 1. Progress counts in iterations at the initial batch, whatever
rule is used; schedules of the learning rate must be indexed by it.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit, candidates, within
from ebbflow.planners.training.speed.throughput import ThroughputParameters, throughput

MOST_NOISE = 1e9  # examples: what a vanishing gradient's noise scale is taken for

Array = NDArray[np.float64]


class GradientStatistics(NamedTuple):
    """Squared norm of the gradient and its variance, both for one iteration at the initial batch size."""

    sqr: float
    var: float

    def noise_scale(self, initial: int) -> float:
        """Return the gradient noise scale φ = initial * var / sqr in examples, within [0, 1e9]."""
        if self.sqr <= 0:
            return MOST_NOISE if self.var > 0 else 0.0
        return min(max(initial * self.var / self.sqr, 0.0), MOST_NOISE)


def gain(statistics: GradientStatistics, scale: ArrayLike) -> Array:
    """Return the progress of one iteration at ``scale`` times the initial batch, in iterations at the initial one.

    (var + sqr) / (var / scale + sqr): between 1 and ``scale`` for ``scale`` >= 1.
    """
    sqr, var = statistics
    return np.asarray((var + sqr) / (var / np.asarray(scale, float) + sqr))


def efficiency(statistics: GradientStatistics, scale: ArrayLike) -> Array:
    """Return the progress per example at ``scale`` times the initial batch, 1 at the initial one.

    (φ + M0) / (φ + M) with M = scale * M0 (equation 3.3), in terms of the statistics.
    """
    sqr, var = statistics
    return np.asarray((var + sqr) / (var + sqr * np.asarray(scale, float)))


def efficiency_at(noise_scale: float, initial: int, total: ArrayLike) -> Array:
    """Return (φ + M0) / (φ + M) for a noise scale and batches in examples."""
    return np.asarray((noise_scale + initial) / (noise_scale + np.asarray(total, float)))


@dataclass(frozen=True, slots=True)
class GoodputModel:
    """What a job believes about its goodput. Implements ``planners.model.scheduling.Goodput``.

    ``adaptive`` false is for a job whose batch means nothing to its progress: every example counts alike.
    """

    speed: ThroughputParameters
    statistics: GradientStatistics
    limits: BatchLimits
    adaptive: bool = True

    def __post_init__(self) -> None:
        sqr, var = self.statistics
        if not (sqr >= 0 and var >= 0 and sqr + var > 0 and np.isfinite(sqr + var)):
            raise OptionError(
                f"gradient statistics must be finite, >= 0 and not both 0; got {self.statistics}"
            )

    def best(self, nodes: NDArray[Any], gpus: NDArray[Any]) -> Array:
        """Return the best goodput over batches, examples per second, for each pair of node and GPU counts.

        The arrays have equal shapes. No GPUs, and more GPUs than the largest batch can keep busy, give 0.

        Raises ``OptionError``.
        """
        nodes, gpus = np.asarray(nodes), np.asarray(gpus)
        if not gpus.size:
            return np.zeros(gpus.shape)
        if gpus.min() < 0:
            raise OptionError(f"a job holds no less than 0 GPUs; got {int(gpus.min())}")
        most = int(gpus.max())
        found = np.zeros((2, most + 1))  # on one node, on several; by GPUs
        if most:
            for several in (0, 1):
                if np.any((nodes > 1) == several):
                    found[several, 1:] = self._grid(bool(several), most).max(axis=1)
        return np.asarray(found[(nodes > 1).astype(int), gpus])

    def best_split(self, nodes: int, gpus: int) -> tuple[float, BatchSplit]:
        """Return the best goodput on ``gpus`` GPUs of ``nodes`` nodes, and the batch that gives it.

        Of equally good batches the smallest total. Raises ``OptionError`` where no batch is feasible.
        """
        if gpus < 1:
            raise OptionError(f"a batch is split over at least one GPU; got {gpus}")
        tried = candidates(self.limits, _rounded(gpus))
        row = self._row(nodes > 1, gpus)
        at = int(row.argmax())
        if not row[at] > 0:
            raise OptionError(f"no batch within {self.limits} keeps {gpus} GPUs busy")
        chosen = tried.batch[gpus - 1, at], tried.accumulation[gpus - 1, at]
        return float(row[at]), within(self.limits, gpus, int(chosen[0]), int(chosen[1]))

    def at(self, nodes: int, gpus: int, split: BatchSplit) -> float:
        """Return the goodput of a given batch, examples per second; whether the limits allow it is not asked."""
        speed = float(throughput(self.speed, nodes, gpus, split.batch, split.accumulation))
        worth = efficiency(self.statistics, split.total(gpus) / self.limits.initial) if self.adaptive else 1.0
        return speed * float(worth)

    def _grid(self, several: bool, most: int) -> Array:
        """Return goodput by GPUs (1 to ``most``) and candidate total."""
        rows = _rounded(most)
        grid = _throughputs(self.speed, self.limits, several, rows)[:most]
        if self.adaptive:
            sqr, var = self.statistics
            scales = candidates(self.limits, rows).total[:most] * (sqr / self.limits.initial)
            grid = grid * ((var + sqr) / (var + scales))
        return grid

    def _row(self, several: bool, gpus: int) -> Array:
        """Return goodput by candidate total on ``gpus`` GPUs."""
        tried = candidates(self.limits, _rounded(gpus))
        at = gpus - 1
        total = tried.total[at]
        speed = throughput(self.speed, 1 + several, gpus, tried.batch[at], tried.accumulation[at])
        worth = efficiency(self.statistics, total / self.limits.initial) if self.adaptive else 1.0
        return np.where(tried.allowed[at], speed * worth, 0.0)


def _rounded(gpus: int) -> int:
    """Return the next power of two: few sizes of tables to keep."""
    return 1 << (gpus - 1).bit_length()


@lru_cache(maxsize=512)
def _throughputs(speed: ThroughputParameters, limits: BatchLimits, several: bool, gpus: int) -> Array:
    """Return examples per second by GPUs (1 to ``gpus``) and candidate total, 0 where the split is not allowed."""
    tried = candidates(limits, gpus)
    found = throughput(speed, 1 + several, tried.gpus, tried.batch, tried.accumulation)
    return np.where(tried.allowed, found, 0.0)


def adascale(scale: float, statistics: GradientStatistics) -> float:
    """Return the gain of one iteration (AdaScale, ICML 2020): between 1 and ``scale``. For SGD with momentum."""
    return float(gain(statistics, _checked(scale)))


def square_root(scale: float) -> float:
    """Return the square root of ``scale``: for Adam and AdamW."""
    return sqrt(_checked(scale))


def linear(scale: float) -> float:
    """Return ``scale`` itself: for plain SGD while the noise of the gradient dominates."""
    return _checked(scale)


def legw(scale: float, progress: float, warmup: float) -> float:
    """Return the square root of ``scale`` after a linear warm-up ``scale`` times as long (LEGW: You et al., SC 2019).

    ``progress`` at the end of the step and ``warmup``, the length at the initial batch, are in iterations.
    """
    whole = _checked(scale) * warmup
    return sqrt(scale) * (min(1.0, progress / whole) if whole > 0 else 1.0)


def _checked(scale: float) -> float:
    if not scale > 0:
        raise OptionError(f"scale must be > 0; got {scale}")
    return float(scale)
