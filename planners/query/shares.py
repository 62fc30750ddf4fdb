"""How capacity is divided among queries that run at once: weighted max-min fair shares (QOOP, 2.3.1 and 2.4)."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, inf, isfinite

from ebbflow.planners.errors import OptionError

_SLACK = 1e-9  # rounding never makes or takes a core


def entitlements(
    weights: Mapping[str, float], total: float, limits: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return what each query may count on of ``total``, in its unit: ``total`` · w/Σw, and what others leave.

    ``weights`` are positive, by query. ``limits`` say how much a query can use at most; a query not named has
    no limit. What a limited query leaves goes to the others by weight, so that nothing lies idle that someone
    can use. The result sums to min(``total``, sum of limits), it is zero only where the limit or ``total`` is,
    and nobody could get more without taking it from a query with less per weight: progressive filling
    (Bertsekas and Gallager, Data Networks, section 6.5.2). O(n log n).

    Raises ``OptionError`` for a weight that is not positive and finite, a negative or infinite total, or a
    negative limit.

    >>> entitlements({"a": 1, "b": 1, "c": 2}, 13, {"a": 1})
    {'a': 1.0, 'b': 4.0, 'c': 8.0}
    """
    limits = limits or {}
    for query, weight in weights.items():
        if not (0 < weight < inf):
            raise OptionError(f"the weight of {query} must be > 0 and finite; got {weight}")
        if not limits.get(query, 0.0) >= 0:
            raise OptionError(f"the limit of {query} must be >= 0; got {limits[query]}")
    if not (total >= 0 and isfinite(total)):
        raise OptionError(f"total must be >= 0 and finite; got {total}")
    given: dict[str, float] = dict.fromkeys(weights, 0.0)
    by_level = sorted(weights, key=lambda q: limits.get(q, inf) / weights[q])
    left, weight_left = float(total), float(sum(weights.values()))
    for n, query in enumerate(by_level):
        fair = left * weights[query] / weight_left
        if n + 1 == len(by_level):
            fair = left
        given[query] = min(fair, float(limits.get(query, inf)))
        left = max(left - given[query], 0.0)
        weight_left -= weights[query]
    return given


def whole_cores(shares: Mapping[str, float], total_cores: int) -> dict[str, int]:
    """Return ``shares``, in cores, as whole cores: the largest remainders are rounded up (Hamilton's method).

    The result sums to ``total_cores``, or to the sum of the shares (rounded up) where queries can use no
    more. Every query with a positive share gets a core if there is one for each; what that takes comes from
    the queries with the most cores beyond their share. With fewer cores than such queries the first ones in
    the order of ``shares`` get one each: it is for the caller to rotate that order. Ties go by that order too,
    so that equal inputs give equal results. Shares that sum to more than ``total_cores`` are scaled down.

    Raises ``OptionError`` for a share or a total that is negative or not finite.

    >>> whole_cores({"a": 2.5, "b": 2.5, "c": 0.2}, 5)
    {'a': 2, 'b': 2, 'c': 1}
    """
    if total_cores < 0:
        raise OptionError(f"total_cores must be >= 0; got {total_cores}")
    for query, share in shares.items():
        if not (0 <= share < inf):
            raise OptionError(f"the share of {query} must be >= 0 cores and finite; got {share}")
    served = [query for query, share in shares.items() if share > 0]
    given = dict.fromkeys(shares, 0)
    if total_cores <= len(served):
        given.update(dict.fromkeys(served[:total_cores], 1))
        return given
    asked = sum(shares.values())
    scale = min(1.0, total_cores / asked) if asked > 0 else 1.0
    quota = {query: shares[query] * scale for query in served}
    target = min(total_cores, max(ceil(asked - _SLACK), len(served)))
    for query in served:
        given[query] = max(floor(quota[query] + _SLACK), 1)
    order = {query: n for n, query in enumerate(served)}
    while sum(given.values()) < target:
        query = max(served, key=lambda q: (quota[q] - given[q], -order[q]))
        given[query] += 1
    while sum(given.values()) > target:
        query = max((q for q in served if given[q] > 1), key=lambda q: (given[q] - quota[q], order[q]))
        given[query] -= 1
    return given


def jain(shares: Sequence[float]) -> float:
    """Return Jain's fairness index (Σx)²/(n·Σx²): 1 when all x are equal, 1/n when one has everything.

    Nobody having anything is fair: 1. Raises ``OptionError`` for no shares or a negative one (Jain, Chiu and
    Hawe, DEC-TR-301, 1984).
    """
    if not shares or min(shares) < 0:
        raise OptionError(f"Jain's index is over one or more shares >= 0; got {list(shares)}")
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares > 0 else 1.0
