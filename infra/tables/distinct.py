"""How many distinct values a column has, judged by a random sample of it.

The hybrid of Haas, Naughton, Seshadri and Stokes, "Sampling-Based Estimation of the Number of Distinct Values
of an Attribute" (VLDB 1995): a chi-squared test tells whether the sample's frequencies are skewed, and then
Shlosser's estimator is used, else a jackknife.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Frequencies = npt.NDArray[np.int64]  # how often each distinct value was sampled, all >= 1
_NORMAL_QUANTILE = 1.96  # of 0.975


def frequencies(column: Any) -> Frequencies | None:
    """Return how often each value of a ``pyarrow.ChunkedArray`` occurs; ``None`` for nested types."""
    import pyarrow as pa

    if pa.types.is_nested(column.type) or pa.types.is_null(column.type):
        return None
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    encoded = encoded.unify_dictionaries()
    codes = encoded.combine_chunks() if encoded.num_chunks != 1 else encoded.chunk(0)
    indices = codes.indices.drop_null().to_numpy(zero_copy_only=False)
    counts = np.bincount(indices).astype(np.int64) if len(indices) else np.zeros(0, np.int64)
    return counts[counts > 0]


def estimate(counts: Frequencies, population: float) -> float:
    """Return the estimated distinct values among ``population`` values; ``counts`` is of a random sample.

    Not less than ``len(counts)`` nor more than ``population``.
    """
    if len(counts) == 0:
        return 0.0
    population = max(population, float(counts.sum()))
    raw = shlosser(counts, population) if skewed(counts) else jackknife(counts, population)
    return min(population, max(float(len(counts)), raw))


def skewed(counts: Frequencies) -> bool:
    """Tell whether the frequencies are unlikely to come from equally frequent values.

    Compares ``sum((c - mean)^2 / mean)`` with the 0.975 quantile of chi-squared with ``d - 1`` degrees of
    freedom (by Wilson and Hilferty's approximation).
    """
    freedom = len(counts) - 1
    if freedom < 1:
        return False
    mean = counts.mean()
    spread = float(((counts - mean) ** 2 / mean).sum())
    step = 2.0 / (9.0 * freedom)
    return spread > freedom * (1.0 - step + _NORMAL_QUANTILE * math.sqrt(step)) ** 3


def jackknife(counts: Frequencies, population: float) -> float:
    """Estimate for values of about equal frequency: ``n d / (n - f1 + f1 n / N)``.

    With n sampled values, d distinct, f1 of them seen once, N values in all: the first-order unsmoothed
    jackknife D_uj1 of Haas and Stokes, "Estimating the Number of Classes in a Finite Population", JASA
    93(444), 1998. Exact for keys.
    """
    n, once = float(counts.sum()), float((counts == 1).sum())
    return n * len(counts) / (n - once + once * n / population)


def shlosser(counts: Frequencies, population: float) -> float:
    """Estimate for skewed frequencies: ``d + f1 sum_i (1-q)^i f_i / sum_i i q (1-q)^(i-1) f_i``.

    With f_i the number of values seen i times and q = n / N: A. Shlosser, "On estimation of the size of the
    dictionary of a long text on the basis of a sample", Engineering Cybernetics 19, 1981.
    """
    q = min(1.0, float(counts.sum()) / population)
    times, seen = np.unique(counts, return_counts=True)
    once = float(seen[0]) if times[0] == 1 else 0.0
    if once == 0.0 or q >= 1.0:
        return float(len(counts))
    missed = float(((1.0 - q) ** times * seen).sum())
    kept = float((times * q * (1.0 - q) ** (times - 1.0) * seen).sum())
    return len(counts) + once * missed / kept
