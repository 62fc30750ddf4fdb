"""What fraction of rows a predicate keeps, from column statistics.

The formulas are System R's (Selinger et al. 1979, table 1): ``1/ndv`` for an equality, ``k/ndv`` for a list,
the covered part of [low, high] for a range, inclusion-exclusion for OR. Conjuncts are combined with
*exponential back-off* (the i-th most selective counts with exponent 2^-i), because predicates on one table
are more often correlated than not, and an intermediate result underestimated is broadcast when it must not
be.
The constants below stand in where statistics say nothing.

What fraction of groups a HAVING keeps.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from sqlglot import exp

from ebbflow.planners.model import ColumnStatistics
from ebbflow.planners.query.estimates.intervals import Interval, covered, intersect
from ebbflow.planners.query.estimates.literals import DAY, LAST_DAY, fold, onto_scale
from ebbflow.planners.query.sql.joingraph import Column
from ebbflow.planners.query.sql.predicates import conjuncts

Lookup = Callable[[Column], ColumnStatistics | None]

RANGE = 1 / 3  # one-sided comparison with something unknown (System R)
BETWEEN = 1 / 4  # two-sided (System R)
UNKNOWN = 1 / 3  # any other boolean expression
EXPRESSION_DISTINCT = 200.0  # distinct values that a function of a column is taken to have at most
LIKE_PREFIX = 0.05  # 'abc%'
LIKE_CONTAINS = 0.1  # '%abc%'; each further piece between wildcards halves it
EXISTS = 0.5  # EXISTS and IN (subquery), negated or not
SCALAR_SUBQUERY = 0.1  # a column compared with a scalar subquery
DAYS_PER_YEAR = 365.25


def selectivity(expression: exp.Expr, lookup: Lookup) -> float:
    """Return the estimated fraction of rows for which ``expression`` is true, in [0, 1].

    ``lookup`` gives the statistics of a qualified column, ``None`` if there are none. Rows for which the
    expression is NULL are not counted.
    """
    return min(max(_selectivity(expression, lookup), 0.0), 1.0)


def conjunction(expressions: Iterable[exp.Expr], lookup: Lookup) -> float:
    """Return the fraction of rows for which all of ``expressions`` are true.

    Comparisons of one column with constants are first merged into one interval. Back-off is between conjuncts
    over one relation; those over different relations multiply.
    """
    by_relation: dict[str, list[float]] = {}
    for alias, fraction in _parts(expressions, lookup):
        by_relation.setdefault(alias, []).append(fraction)
    return math.prod(back_off(fractions) for fractions in by_relation.values())


def back_off(fractions: Iterable[float]) -> float:
    """Combine selectivities of conjuncts: ``s1 · s2^(1/2) · s3^(1/4) ...``, the most selective first."""
    result, exponent = 1.0, 1.0
    for fraction in sorted(fractions):
        result *= max(fraction, 0.0) ** exponent
        exponent /= 2
    return result


def column_of(node: exp.Expr) -> Column | None:
    """Return the column that ``node`` is, looking through parentheses and casts that keep the order."""
    while isinstance(node, exp.Paren | exp.TsOrDsToDate) or (
        isinstance(node, exp.Cast | exp.TryCast) and node.to.this not in exp.DataType.TEXT_TYPES
    ):
        node = node.this
    return (node.table, node.name) if isinstance(node, exp.Column) else None


def single_column(expression: exp.Expr) -> Column | None:
    """Return the only column that ``expression`` uses, or ``None``."""
    found = {(c.table, c.name) for c in expression.find_all(exp.Column)}
    return found.pop() if len(found) == 1 else None


def _selectivity(node: exp.Expr, lookup: Lookup) -> float:
    match node:
        case exp.Paren():
            return selectivity(node.this, lookup)
        case exp.Boolean():
            return float(bool(node.this))
        case exp.Null():
            return 0.0
        case exp.And():
            return conjunction(node.flatten(), lookup)
        case exp.Or():
            return _disjunction([_unwrap(part) for part in node.flatten()], lookup)
        case exp.Not():
            return _negation(_unwrap(node.this), lookup)
        case exp.Exists():
            return EXISTS
        case exp.In():
            return _membership(node, lookup)
        case exp.Is():
            return _null_test(node, lookup)
        case exp.Between():
            bounded = as_interval(node, lookup)
            return BETWEEN if bounded is None else _covered(bounded, lookup)
        case exp.Like() | exp.ILike() | exp.SimilarTo() | exp.RegexpLike() | exp.StartsWith():
            return _pattern(node, lookup)
        case exp.EQ() | exp.NullSafeEQ():
            return _equality(node.this, node.expression, lookup)
        case exp.NEQ():
            equal = _equality(node.this, node.expression, lookup)
            return equal if _has_subquery(node) else _rest(equal, node, lookup)
        case exp.LT() | exp.LTE() | exp.GT() | exp.GTE():
            return _comparison(node, lookup)
        case exp.Column():
            return 0.5
    return UNKNOWN


def _unwrap(node: exp.Expr) -> exp.Expr:
    return node.unnest() if isinstance(node, exp.Paren) else node


def _negation(inner: exp.Expr, lookup: Lookup) -> float:
    if isinstance(inner, exp.Is):
        return 1.0 - selectivity(inner, lookup)
    if isinstance(inner, exp.Exists) or (isinstance(inner, exp.In) and inner.args.get("query")):
        return EXISTS
    return _rest(selectivity(inner, lookup), inner, lookup)


def _rest(kept: float, node: exp.Expr, lookup: Lookup) -> float:
    """Return the fraction for which ``node`` is false: neither true nor NULL."""
    column = single_column(node)
    statistics = lookup(column) if column else None
    return max(1.0 - kept - (statistics.nulls if statistics else 0.0), 0.0)


def _disjunction(parts: Sequence[exp.Expr], lookup: Lookup) -> float:
    # Alternatives over one column are usually disjoint values or ranges, so they add up.
    by_column: dict[Column | int, float] = {}
    for position, part in enumerate(parts):
        key = single_column(part) or position
        by_column[key] = min(by_column.get(key, 0.0) + selectivity(part, lookup), 1.0)
    miss = 1.0
    for fraction in by_column.values():
        miss *= 1.0 - fraction
    return 1.0 - miss


def independent_parts(expressions: Iterable[exp.Expr], lookup: Lookup) -> list[float]:
    """Return the selectivities of conjuncts, with the comparisons of each column merged into one."""
    return [fraction for _, fraction in _parts(expressions, lookup)]


def _parts(expressions: Iterable[exp.Expr], lookup: Lookup) -> list[tuple[str, float]]:
    """Return (relation, selectivity) pairs; the relation is empty for a conjunct over none or several."""
    parts: list[tuple[str, float]] = []
    intervals: dict[Column, Interval] = {}
    for expression in map(_unwrap, expressions):
        bounded = as_interval(expression, lookup)
        if bounded is None:
            aliases = {c.table for c in expression.find_all(exp.Column)}
            parts.append((aliases.pop() if len(aliases) == 1 else "", selectivity(expression, lookup)))
        else:
            column, interval = bounded
            intervals[column] = intersect(intervals.get(column, Interval()), interval)
    parts += [(column[0], _covered((column, found), lookup)) for column, found in intervals.items()]
    return parts


def _covered(bounded: tuple[Column, Interval], lookup: Lookup) -> float:
    statistics = lookup(bounded[0])
    assert statistics is not None
    return covered(bounded[1], statistics)


def as_interval(node: exp.Expr, lookup: Lookup) -> tuple[Column, Interval] | None:
    """Read a range predicate of one column against constants as an interval on its statistics' scale."""
    if isinstance(node, exp.Between):
        low = _bounded(node.this, node.args["low"], lookup)
        high = _bounded(node.this, node.args["high"], lookup)
        return None if low is None or high is None else (low[0], Interval(low[1], high[1]))
    if not isinstance(node, exp.LT | exp.LTE | exp.GT | exp.GTE):
        return None
    below, strict = isinstance(node, exp.LT | exp.LTE), isinstance(node, exp.LT | exp.GT)
    bound = _bounded(node.this, node.expression, lookup)
    if bound is None:
        bound, below = _bounded(node.expression, node.this, lookup), not below
    if bound is None:
        return None
    column, value = bound
    interval = Interval(high=value, open_high=strict) if below else Interval(low=value, open_low=strict)
    return column, interval


def _bounded(operand: exp.Expr, limit: exp.Expr, lookup: Lookup) -> tuple[Column, float | str] | None:
    """Return the column that ``operand`` is and the constant ``limit`` on its scale."""
    column, constant = column_of(operand), fold(limit)
    statistics = lookup(column) if column else None
    if column is None or constant is None or statistics is None or statistics.high is None:
        return None
    value = onto_scale(constant, statistics.low)
    return None if value is None else (column, value)


def _has_subquery(node: exp.Expr) -> bool:
    return node.find(exp.Query) is not None


def _comparison(node: exp.Expr, lookup: Lookup) -> float:
    bounded = as_interval(node, lookup)
    if bounded is not None:
        return _covered(bounded, lookup)
    return SCALAR_SUBQUERY if _has_subquery(node) else RANGE


def _equality(left: exp.Expr, right: exp.Expr, lookup: Lookup) -> float:
    if _has_subquery(left) or _has_subquery(right):
        return SCALAR_SUBQUERY
    constant, other = fold(right), left
    if constant is None:
        constant, other = fold(left), right
    if constant is None:
        return 1.0 / max(distinct_of(left, lookup), distinct_of(right, lookup), 1.0)
    column = column_of(other)
    statistics = lookup(column) if column else None
    if column is None or statistics is None:
        return 1.0 / max(distinct_of(other, lookup), 1.0)
    value = onto_scale(constant, statistics.low)
    if value is not None and _outside(value, statistics):
        return 0.0
    return (1.0 - statistics.nulls) / max(statistics.distinct or EXPRESSION_DISTINCT, 1.0)


def _outside(value: float | str, statistics: ColumnStatistics) -> bool:
    low, high = statistics.low, statistics.high
    if low is None or high is None:
        return False
    # Footers may truncate strings, so a string just above a truncated maximum still counts as inside.
    if isinstance(value, str) and isinstance(high, str):
        return value < str(low) or value[: len(high)] > high
    if isinstance(value, str) or isinstance(low, str) or isinstance(high, str):
        return False
    return value < low or value > high


def distinct_of(node: exp.Expr, lookup: Lookup) -> float:
    """Return the number of distinct values of an expression, as far as can be told."""
    column = column_of(node)
    if column is not None:
        statistics = lookup(column)
        return (statistics.distinct if statistics else None) or EXPRESSION_DISTINCT
    used = {(c.table, c.name) for c in node.find_all(exp.Column)}
    if not used:
        return 1.0
    product = 1.0
    for one in sorted(used):
        statistics = lookup(one)
        product *= (statistics.distinct if statistics else None) or EXPRESSION_DISTINCT
    years = _years(node, lookup)
    return min(product, EXPRESSION_DISTINCT if years is None else years)


def _years(node: exp.Expr, lookup: Lookup) -> float | None:
    """Return how many years YEAR(column) can give."""
    is_year = isinstance(node, exp.Year) or (isinstance(node, exp.Extract) and node.name.upper() == "YEAR")
    column = single_column(node) if is_year else None
    statistics = lookup(column) if column else None
    if statistics is None or not isinstance(statistics.low, int | float):
        return None
    if not isinstance(statistics.high, int | float):
        return None
    unit = DAY if abs(statistics.high) > LAST_DAY else 1.0
    return float(int((statistics.high - statistics.low) / unit / DAYS_PER_YEAR) + 1)


def _membership(node: exp.In, lookup: Lookup) -> float:
    if node.args.get("query") is not None or not node.expressions:
        return EXISTS
    each = [_equality(node.this, item, lookup) for item in node.expressions]
    column = column_of(node.this)
    statistics = lookup(column) if column else None
    return min(sum(each), 1.0 - (statistics.nulls if statistics else 0.0))


def _null_test(node: exp.Is, lookup: Lookup) -> float:
    column = column_of(node.this)
    statistics = lookup(column) if column else None
    if not isinstance(node.expression, exp.Null):
        return 0.5
    return statistics.nulls if statistics else 0.1


def _pattern(node: exp.Expr, lookup: Lookup) -> float:
    constant = fold(node.expression)
    column = column_of(node.this)
    statistics = lookup(column) if column else None
    present = 1.0 - (statistics.nulls if statistics else 0.0)
    if constant is None or isinstance(node, exp.RegexpLike | exp.SimilarTo):
        return LIKE_CONTAINS * present
    text = str(constant.value)
    if isinstance(node, exp.StartsWith):
        return LIKE_PREFIX * present
    if "%" not in text and "_" not in text:
        return _equality(node.this, node.expression, lookup)
    pieces = [piece for piece in text.replace("_", "%").split("%") if piece]
    if not pieces:
        return present
    first = LIKE_CONTAINS if text[0] in "%_" else LIKE_PREFIX
    return present * first * math.pow(0.5, len(pieces) - 1)


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
