"""Least squares with a ridge and bounds, for few unknowns."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

_TOLERANCE = 1e-12  # of a gradient, relative to what it is made of


def bounded_ridge(
    parts: Array, target: Array, pull: float, centre: float, bounds: tuple[float, float]
) -> Array:
    """Return the ``x`` that minimises ``|parts·x - target|² + pull²·|x - centre|²`` within bounds.

    A primal active-set method: on each face of the box the minimum is one linear system. It ends with the only
    minimum, since the ridge makes the problem strictly convex. (SciPy has one too, whose import takes a third of a
    second.)

    Args:
        parts: shape (measurements, unknowns).
        target: shape (measurements,).
        pull: weight of the ridge, > 0.
        centre: where the ridge draws every unknown to, within the bounds.
        bounds: the least and the most of every unknown.

    Source: J. Nocedal, S. Wright: Numerical Optimization, algorithm 16.3.
    """
    low, high = bounds
    kinds = parts.shape[1]
    matrix = parts.T @ parts + pull**2 * np.eye(kinds)
    vector = parts.T @ target + pull**2 * centre
    size = np.abs(matrix).sum(axis=1) * high + np.abs(vector)
    x = np.full(kinds, min(max(centre, low), high))
    free = (x > low) & (x < high)
    for _ in range(100 * kinds):  # far more than any takes
        step = np.zeros(kinds)
        if free.any():
            gradient = matrix @ x - vector
            step[free] = np.linalg.solve(matrix[np.ix_(free, free)], -gradient[free])
        room = np.full(kinds, np.inf)
        moving = step != 0.0
        room[moving] = (np.where(step > 0.0, high, low) - x)[moving] / step[moving]
        first = int(np.argmin(room))
        if room[first] < 1.0:
            x = np.clip(x + room[first] * step, low, high)
            x[first] = high if step[first] > 0.0 else low
            free[first] = False
            continue
        x = np.clip(x + step, low, high)
        slope = (matrix @ x - vector) / size
        gain = np.where(free, 0.0, np.where(x <= low, -slope, slope))  # of leaving its bound
        best = int(np.argmax(gain))
        if gain[best] <= _TOLERANCE:
            break
        free[best] = True
    return x
