"""Smoothed activity of slabs and smoothed use of memory (Infiniswap)."""

from math import floor, log

from ebbflow.planners.errors import OptionError


class ExponentialMovingAverage:
    """An exponentially weighted moving average of measurements at equal intervals.

    Args:
        alpha: weight of the newest measurement, above 0 and at most 1.
        initial: value before the first measurement; ``None``: the first measurement becomes the value.

    Raises ``OptionError`` for a weight outside its range.
    """

    __slots__ = ("_alpha", "_value")

    def __init__(self, alpha: float, initial: float | None = None) -> None:
        self._alpha = _weight(alpha)
        self._value = initial

    @property
    def value(self) -> float:
        """Return the average; 0 before the first measurement where there is no initial value."""
        return 0.0 if self._value is None else self._value

    def update(self, x: float) -> float:
        """Add a measurement and return the new average."""
        self._value = x if self._value is None else self._alpha * x + (1 - self._alpha) * self._value
        return self._value


def seconds_to_cross(rate: float, threshold: float, alpha: float) -> int | None:
    """Return after how many measurements of a constant rate the average, which starts at 0, exceeds a threshold.

    Args:
        rate: of each measurement.
        threshold: that must be exceeded; equal is not enough.
        alpha: weight of the newest measurement, above 0 and at most 1.

    Returns ``None`` where the average never exceeds it. Raises ``OptionError`` for a weight outside its range.
    """
    _weight(alpha)
    if threshold < 0:
        return 0
    if rate <= threshold:
        return None
    if alpha == 1:
        return 1
    # the average after k measurements is rate * (1 - (1 - alpha) ** k)
    return floor(log(1 - threshold / rate) / log(1 - alpha) + 1e-9) + 1


def _weight(alpha: float) -> float:
    if not 0 < alpha <= 1:
        raise OptionError(f"alpha must be above 0 and at most 1, not {alpha}")
    return alpha
