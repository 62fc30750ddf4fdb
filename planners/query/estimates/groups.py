"""What fraction of groups a HAVING keeps."""

from collections.abc import Iterable

from sqlglot import exp

from ebbflow.planners.query.estimates.literals import fold
from ebbflow.planners.query.estimates.selectivity import UNKNOWN, Lookup, back_off, column_of
from ebbflow.planners.query.sql.predicates import conjuncts

_MIRROR: dict[type[exp.Expr], type[exp.Expr]] = {
    exp.GT: exp.LT,
    exp.GTE: exp.LTE,
    exp.LT: exp.GT,
    exp.LTE: exp.GTE,
}


def having_fraction(condition: exp.Expr, group_rows: float, lookup: Lookup) -> float:
    """Return the fraction of groups for which ``condition`` is true; ``group_rows`` are the rows of a group on
    average.

    A SUM or COUNT compared with a constant beyond its mean keeps at most ``1/(1 + z²)`` of the groups, z standard
    deviations away (Cantelli's inequality, which holds for any distribution); that bound is the estimate, since too
    small a guess is broadcast when it must not be. The mean and the deviation are those of a random number of
    values, uniform within the column's range. Anything else is ``UNKNOWN``.
    """
    return back_off(_fractions(conjuncts(condition.copy()), group_rows, lookup))


def _fractions(parts: Iterable[exp.Expr], group_rows: float, lookup: Lookup) -> Iterable[float]:
    for part in parts:
        found = _tail(part, group_rows, lookup)
        yield UNKNOWN if found is None else min(found, 1.0 - UNKNOWN)


def _tail(node: exp.Expr, group_rows: float, lookup: Lookup) -> float | None:
    kind = type(node)
    if kind not in _MIRROR:
        return None
    moments, limit = _moments(node.this, group_rows, lookup), fold(node.expression)
    if moments is None:
        kind = _MIRROR[kind]
        moments, limit = _moments(node.expression, group_rows, lookup), fold(node.this)
    if moments is None or limit is None or not isinstance(limit.value, int | float):
        return None
    mean, variance = moments
    beyond = float(limit.value) - mean if kind in (exp.GT, exp.GTE) else mean - float(limit.value)
    tail = variance / (variance + beyond * beyond) if variance > 0.0 or beyond else 0.5
    return tail if beyond > 0.0 else 1.0 - tail


def _moments(node: exp.Expr, group_rows: float, lookup: Lookup) -> tuple[float, float] | None:
    """Return mean and variance of an aggregate over groups whose number of rows varies as a Poisson variable."""
    if isinstance(node, exp.Count) and not isinstance(node.this, exp.Distinct):
        return group_rows, group_rows
    column = column_of(node.this) if isinstance(node, exp.Sum) else None
    known = lookup(column) if column is not None else None
    if known is None or not isinstance(known.low, int | float) or not isinstance(known.high, int | float):
        return None
    mean, spread = (known.low + known.high) / 2.0, (known.high - known.low) ** 2 / 12.0
    return group_rows * mean, group_rows * (spread + mean * mean)
