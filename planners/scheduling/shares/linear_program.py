"""Linear programmes over shares, solved by HiGHS.

Every share x satisfies x >= 0, at most 1 in sum for each app, and no more GPUs of a type than there are.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, hstack, kron, vstack

from ebbflow.planners.scheduling.shares.rules import Array, Demand

_TOLERANCE = 1e-9


class Programme:
    """The shares that a demand allows."""

    def __init__(self, demand: Demand) -> None:
        self.shape = demand.throughput.shape
        apps, types = self.shape
        self._rows = kron(csr_array(np.eye(apps)), np.ones((1, types)), format="csr")
        room = kron(demand.gang[None, :], csr_array(np.eye(types)), format="csr")
        self._within = vstack([self._rows, room], format="csr")
        self._limits = np.concatenate([np.ones(apps), demand.gpus])

    def _weights(self, coefficients: Array) -> csr_array:
        """Return the matrix that maps shares to each app's sum of coefficient times share."""
        return csr_array(self._rows.multiply(coefficients.ravel()[None, :]))

    def _shares(self, found: Array) -> Array:
        """Return the solver's vector as shares, its tolerance cut off."""
        return np.clip(np.asarray(found).reshape(self.shape), 0.0, 1.0)

    def maximise(self, value: Array) -> Array:
        """Return shares that maximise Σ value·x."""
        found = linprog(
            -value.ravel(), A_ub=self._within, b_ub=self._limits, bounds=(0, 1), method="highs-ds"
        )
        return self._shares(found.x) if found.status == 0 else np.zeros(self.shape)

    def stretch(
        self, rates: Array, floors: Array, fixed: NDArray[np.bool_] | None = None
    ) -> tuple[float, Array, Array]:
        """Return the largest t with Σ_τ rates·x >= t·floors for each app, such shares, and the apps' duals.

        With ``fixed`` (of apps), those rows ask for ``floors`` once instead of t times. Apps whose floor is 0 or
        less never bind.
        """
        grows = np.where(floors > 0, floors, 0.0)
        asked = np.zeros(len(floors))
        if fixed is not None:
            grows = np.where(fixed, 0.0, grows)
            asked = np.where(fixed, floors, 0.0)
        apps, types = self.shape
        need = hstack([-self._weights(rates), csr_array(grows[:, None])], format="csr")
        within = hstack([self._within, csr_array((apps + types, 1))], format="csr")
        objective = np.zeros(apps * types + 1)
        objective[-1] = -1.0
        bounds = [(0.0, 1.0)] * (apps * types) + [(0.0, 1e12)]
        found = linprog(
            objective,
            A_ub=vstack([within, need], format="csr"),
            b_ub=np.concatenate([self._limits, -asked]),
            bounds=bounds,
            method="highs-ds",
        )
        if found.status != 0:
            return 0.0, np.zeros(self.shape), np.zeros(apps)
        duals = -np.asarray(found.ineqlin.marginals)[apps + types :]
        return float(found.x[-1]), self._shares(found.x[:-1]), duals

    def fairest(self, rates: Array, floors: Array) -> Array:
        """Return shares that maximise the least Σ_τ rates·x / floor, then the next least, and so on.

        The rates are then unique, and on one GPU type the shares too.
        """
        fixed, level = ~(floors > 0), np.where(floors > 0, floors, 0.0)
        shares = np.zeros(self.shape)
        while not fixed.all():
            t, found, duals = self.stretch(rates, level, fixed)
            if t <= 0 or not (duals[~fixed] > _TOLERANCE).any():
                return found if t > 0 else shares
            shares = found
            bound = ~fixed & (duals > _TOLERANCE)
            # A hair less than the optimum keeps the next programme feasible in floating point.
            level = np.where(bound, level * t * (1 - _TOLERANCE), level)
            fixed = fixed | bound
        return shares


def root(function: Callable[[float], float], low: float, high: float, relative: float = 1e-9) -> float:
    """Return the least x in [low, high], to ``relative``, at which the growing ``function`` is not negative.

    ``function(high)`` must not be negative. Regula falsi (Illinois) on the bracket.
    """
    f_low, f_high = function(low), function(high)
    if f_low >= 0:
        return low
    side = 0
    for _ in range(200):
        if high - low <= relative * high:
            break
        x = (low * f_high - high * f_low) / (f_high - f_low) if f_high > 0 else (low + high) / 2
        if not low < x < high:
            x = (low + high) / 2
        f = function(x)
        if f >= 0:
            high, f_high = x, f
            f_low, side = (f_low / 2, 1) if side == 1 else (f_low, 1)
        else:
            low, f_low = x, f
            f_high, side = (f_high / 2, -1) if side == -1 else (f_high, -1)
    return high
