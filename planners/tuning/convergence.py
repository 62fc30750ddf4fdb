"""When training will have converged: l(k) = 1/(β₀k + β₁) + β₂ fitted to the loss so far (Optimus, EuroSys 2018, 3.1).

Losses are divided by the largest one seen, so that thresholds mean the same for every job.
"""

from bisect import bisect_left
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.errors import OptionError

Losses = NDArray[np.float64]

GRID = 64
"""Values of β₂ tried before the best is refined."""

POINTS = 200
"""Points that a fit uses at most; longer histories are thinned evenly in log k."""


@dataclass(frozen=True, slots=True)
class LossModel:
    """A fitted curve; ``k`` is in steps or epochs, as the points were."""

    beta0: float  # 1/k
    beta1: float
    beta2: float  # normalized loss that is never passed
    scale: float = 1.0  # loss that 1 stands for
    r2: float = 1.0  # coefficient of determination on the points used

    def loss(self, k: float) -> float:
        """Return the normalized loss at ``k``."""
        return 1 / (self.beta0 * k + self.beta1) + self.beta2

    def decrease(self, k: float) -> float:
        """Return by how much the normalized loss falls from ``k`` to ``k`` + 1."""
        at = self.beta0 * k + self.beta1
        return self.beta0 / (at * (at + self.beta0)) if at > 0 else inf

    def converges_at(self, delta: float, patience: int = 3) -> int:
        """Return the last of the first ``patience`` ``k`` in a row from which the loss falls less than ``delta``.

        Raises ``OptionError``.
        """
        if delta <= 0 or patience < 1:
            raise OptionError(f"delta must be > 0 and patience >= 1; got {delta}, {patience}")
        high = 1
        while self.decrease(high) >= delta:
            high *= 2
        first = bisect_left(range(high + 1), -delta, key=lambda k: -self.decrease(k))
        while self.decrease(first) >= delta:
            first += 1
        return first + patience - 1

    def remaining(self, now: float, delta: float, patience: int = 3, most: float = inf) -> float:
        """Return the steps left at ``now``; ``most`` is where the job's owner stops it."""
        return max(0.0, min(float(self.converges_at(delta, patience)), most) - now)


class LossCurve:
    """The losses of one job so far."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._losses: list[float] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: float, loss: float) -> None:
        """Take one point; steps must grow.

        Raises:
            OptionError: a step that does not grow, or a loss that is not finite and positive.
        """
        if self._steps and step <= self._steps[-1]:
            raise OptionError(f"steps must grow; got {step} after {self._steps[-1]}")
        if not (isfinite(step) and step >= 0 and isfinite(loss) and loss > 0):
            raise OptionError(f"a step must be >= 0 and a loss > 0, both finite; got {step}, {loss}")
        self._steps.append(step)
        self._losses.append(loss)

    def restart(self) -> None:
        """Forget everything: the learning rate changed, and with it the curve."""
        self._steps.clear()
        self._losses.clear()

    def flat(self, delta: float, patience: int = 3) -> bool:
        """Return whether the last ``patience`` points each fell by less than ``delta`` of the largest loss."""
        if len(self._losses) <= patience:
            return False
        last = np.array(self._losses[-patience - 1 :]) / max(self._losses)
        return bool(np.all(np.abs(np.diff(last)) < delta))

    def fit(self, least: int = 5) -> LossModel | None:
        """Return the fitted curve; ``None`` while there are fewer than ``least`` points or the loss does not fall."""
        if len(self._steps) < max(least, 3):
            return None
        scale = max(self._losses)
        steps = np.array(self._steps)
        losses = smoothed(np.array(self._losses) / scale)
        chosen = _thinned(steps)
        steps, losses = steps[chosen], losses[chosen]
        thirds = np.arange(len(steps)) * 3 // len(steps)
        weights = np.array([1.0, 4.0, 16.0])[thirds]  # as in the authors' code
        beta2 = _best_floor(steps, losses, weights)
        beta0, beta1, error = _inner(steps, losses, weights, beta2)
        if not isfinite(error) or beta0 <= 0:
            return None
        residual = losses - (1 / (beta0 * steps + beta1) + beta2)
        spread = float(np.sum((losses - losses.mean()) ** 2))
        r2 = 1 - float(np.sum(residual**2)) / spread if spread > 0 else 0.0
        return LossModel(beta0, beta1, beta2, scale, r2)


def smoothed(losses: Losses) -> Losses:
    """Return ``losses`` with outliers replaced by the mean of their neighbors, two on each side.

    An outlier lies outside the neighbors' range by more than a tenth of it.
    """
    result = losses.copy()
    for at in range(2, len(losses) - 2):
        around = np.concatenate([losses[at - 2 : at], losses[at + 1 : at + 3]])
        low, high = float(around.min()), float(around.max())
        slack = 0.1 * (high - low)
        if not low - slack <= losses[at] <= high + slack:
            result[at] = around.mean()
    return result


def _thinned(steps: Losses) -> NDArray[np.intp]:
    if len(steps) <= POINTS:
        return np.arange(len(steps))
    spaced = np.geomspace(1, len(steps), POINTS)
    return np.unique(np.round(spaced).astype(np.intp) - 1)


def _inner(steps: Losses, losses: Losses, weights: Losses, beta2: float) -> tuple[float, float, float]:
    """Return β₀, β₁ ≥ 0 for one β₂, and the weighted squared error in the loss.

    1/(l - β₂) is linear in k; errors there are (l - β₂)⁻² times those in l.
    """
    from scipy.optimize import nnls

    above = losses - beta2
    rows = weights * above**2
    matrix = np.stack([steps * rows, rows], axis=1)
    (beta0, beta1), _ = nnls(matrix, rows / above)
    below = beta0 * steps + beta1
    if np.any(below <= 0):
        return float(beta0), float(beta1), inf
    error = float(np.sum((weights * (1 / below + beta2 - losses)) ** 2))
    return float(beta0), float(beta1), error


def _best_floor(steps: Losses, losses: Losses, weights: Losses) -> float:
    """Return the β₂ of least error below the smallest loss: the best of a grid, then golden section around it."""
    top = float(losses.min()) * (1 - 1e-6)
    grid = np.linspace(0, top, GRID)
    errors = [_inner(steps, losses, weights, float(beta2))[2] for beta2 in grid]
    best = int(np.argmin(errors))
    low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, GRID - 1)])
    golden = (5**0.5 - 1) / 2
    for _ in range(60):
        a, b = high - golden * (high - low), low + golden * (high - low)
        if _inner(steps, losses, weights, a)[2] <= _inner(steps, losses, weights, b)[2]:
            high = b
        else:
            low = a
    middle = (low + high) / 2
    at_middle = _inner(steps, losses, weights, middle)[2]
    return middle if at_middle <= errors[best] else float(grid[best])
