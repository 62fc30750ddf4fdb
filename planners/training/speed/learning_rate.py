"""How a learning rate follows the batch size: the factor on the rate that was made for the initial batch.

``scale`` is the batch over the initial batch, >= 1. Progress counts in iterations at the initial batch, whatever
rule is used; schedules of the learning rate must be indexed by it.
"""

from math import sqrt

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.goodput import GradientStatistics, gain


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
