"""The gradient noise scale from norms of gradients (McCandlish et al. 2018, appendix A; Pollux, OSDI 2021, 3.1).

Only squared norms come in, so a training process keeps its tensors where they are. With a pre-conditioner, norms are
those of the pre-conditioned gradients.
"""

from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.goodput import GradientStatistics

SMOOTHING = 0.999  # factor of the averages per iteration at the initial batch
LEAST_VARIANCE = 1e-6


class NormEstimate(NamedTuple):
    """Unbiased estimates from one iteration."""

    sqr: float  # squared norm of the true gradient; can be negative near convergence
    trace: float  # of the covariance of one example's gradient


def from_samples(local_sqr: float, total_sqr: float, samples: int, batch: float) -> NormEstimate:
    """Return estimates from ``samples`` gradients, each the mean over ``batch`` examples.

    ``local_sqr`` is the mean of their squared norms, ``total_sqr`` the squared norm of their mean.

    >>> from_samples(10.0, 8.0, 2, 4)
    NormEstimate(sqr=6.0, trace=16.0)

    Raises ``OptionError``.
    """
    if samples < 2 or not batch > 0:
        raise OptionError(f"noise needs two samples or more of a batch > 0; got {samples} of {batch}")
    sqr = (samples * total_sqr - local_sqr) / (samples - 1)
    return NormEstimate(sqr, (local_sqr - total_sqr) * samples * batch / (samples - 1))


def from_difference(previous: ArrayLike, present: ArrayLike, batch: float) -> NormEstimate:
    """Return estimates from the gradients of two iterations in a row, each the mean over ``batch`` examples.

    Right as long as the true gradient hardly moves between them.

    Raises ``OptionError``.
    """
    first, second = np.asarray(previous, float).ravel(), np.asarray(present, float).ravel()
    if first.shape != second.shape:
        raise OptionError(f"gradients must have equal shapes; got {first.shape} and {second.shape}")
    mean = 0.5 * (first + second)
    local = 0.5 * float(first @ first + second @ second)
    return from_samples(local, float(mean @ mean), 2, batch)


@dataclass(frozen=True, slots=True)
class Average:
    """An exponential average whose early values are not drawn towards zero."""

    biased: float = 0.0
    weight: float = 0.0

    def add(self, value: float, factor: float) -> "Average":
        """Return the average with ``value`` in it; ``factor`` is what the past keeps."""
        keep = 1.0 - factor
        return Average(factor * self.biased + keep * value, factor * self.weight + keep)

    @property
    def value(self) -> float:
        """Return the average; 0 before the first value."""
        return self.biased / self.weight if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Running averages of the two statistics of one job. They are smoothed apart: the mean of ratios is biased."""

    initial: int  # batch size, examples
    sqr: Average = Average()
    var: Average = Average()
    differenced: bool = False  # whether the averages come from iterations in a row

    def update(
        self, estimate: NormEstimate, total: float, differenced: bool = False, smoothing: float = SMOOTHING
    ) -> "GradientNoise":
        """Return the averages after an iteration over ``total`` examples (both iterations' of a difference).

        The larger the batch, the more the new estimate weighs. The first estimate from several samples replaces
        everything that came from differences. An estimate that is not finite changes nothing.

        Raises ``OptionError`` for a batch or a smoothing outside its range.
        """
        if not total > 0 or not 0 <= smoothing < 1:
            raise OptionError(f"update needs total > 0 and 0 <= smoothing < 1; got {total}, {smoothing}")
        if not (isfinite(estimate.sqr) and isfinite(estimate.trace)):
            return self
        fresh = self.differenced and not differenced
        sqr, var = (Average(), Average()) if fresh else (self.sqr, self.var)
        factor = smoothing ** (total / self.initial)
        return GradientNoise(
            self.initial,
            sqr.add(estimate.sqr, factor),
            var.add(estimate.trace / self.initial, factor),
            differenced,
        )

    @property
    def statistics(self) -> GradientStatistics:
        """Return what goodput needs; before the first update, a gradient without noise."""
        if not self.sqr.weight:
            return GradientStatistics(1.0, 0.0)
        return GradientStatistics(max(self.sqr.value, 0.0), max(self.var.value, LEAST_VARIANCE))
