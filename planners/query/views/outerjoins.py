"""Outer joins that are inner joins in truth: a later condition drops every row that they would add.

``a LEFT JOIN b ON ... WHERE b.x > 0`` drops the rows where ``b`` is missing, so LEFT means INNER there, and the join
may be reordered with others (Galindo-Legaria and Rosenthal, Outerjoin Simplification and Reordering for Query
Optimization, TODS 1997).
"""

from collections.abc import Sequence

from sqlglot import exp

from ebbflow.planners.query.sql.freezing import is_volatile
from ebbflow.planners.query.sql.predicates import aliases_of, conjuncts, has_subquery

_COMPARISONS = (exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.Like)
_STRICT = (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Neg, exp.Paren, exp.Cast, exp.Abs, exp.Lower, exp.Upper)


def simplify_outer_joins(query: exp.Query) -> exp.Query:
    """Turn outer joins of every SELECT in ``query`` into inner or one-sided ones where that changes nothing.

    Columns must be qualified. Changes ``query`` and returns it.
    """
    for select in query.find_all(exp.Select):
        joins = select.args.get("joins") or ()
        if any(j.side for j in joins):
            while any(_simplify(select, joins, i) for i in range(len(joins))):
                pass
    return query


def _simplify(select: exp.Select, joins: Sequence[exp.Join], position: int) -> bool:
    """Weaken one join, if it can be; tell whether it was."""
    join = joins[position]
    if join.side not in ("LEFT", "RIGHT", "FULL") or join.kind not in ("", "OUTER"):
        return False
    if join.method or join.args.get("using") or not isinstance(join.this, exp.Table | exp.Subquery):
        return False
    before = aliases_of([select.args["from_"].this, *(j.this for j in joins[:position])])
    own = frozenset({join.this.alias_or_name})
    conditions = _later_conditions(select, joins[position + 1 :])
    # each side's columns are NULL in the rows that the join adds for the other side
    keeps_left = join.side in ("LEFT", "FULL") and not any(_never_true(c, own) for c in conditions)
    keeps_right = join.side in ("RIGHT", "FULL") and not any(_never_true(c, before) for c in conditions)
    side = {(True, True): "FULL", (True, False): "LEFT", (False, True): "RIGHT"}.get(
        (keeps_left, keeps_right)
    )
    if side == join.side:
        return False
    join.set("side", side)
    join.set("kind", None if side is None else join.args.get("kind"))
    return True


def _later_conditions(select: exp.Select, later: Sequence[exp.Join]) -> list[exp.Expr]:
    """Return the conjuncts that every row of the result has passed after the join."""
    where = select.args.get("where")
    found = conjuncts(where.this) if where is not None else []
    for join in later:
        filters = join.kind == "SEMI" or (not join.side and join.kind in ("", "INNER", "CROSS"))
        if filters and join.args.get("on") is not None:
            found += conjuncts(join.args["on"])
    return [c for c in found if not has_subquery(c) and not is_volatile(c)]


def _never_true(node: exp.Expr, absent: frozenset[str]) -> bool:
    """Tell whether ``node`` is FALSE or NULL whenever all columns of the relations ``absent`` are NULL."""
    node = node.unnest()
    if isinstance(node, exp.And):
        return _never_true(node.this, absent) or _never_true(node.expression, absent)
    if isinstance(node, exp.Or):
        return _never_true(node.this, absent) and _never_true(node.expression, absent)
    if isinstance(node, exp.Not):
        return _never_false(node.this, absent)
    return _is_null(node, absent)


def _never_false(node: exp.Expr, absent: frozenset[str]) -> bool:
    """Tell whether ``node`` is TRUE or NULL whenever all columns of the relations ``absent`` are NULL."""
    node = node.unnest()
    if isinstance(node, exp.And):
        return _never_false(node.this, absent) and _never_false(node.expression, absent)
    if isinstance(node, exp.Or):
        return _never_false(node.this, absent) or _never_false(node.expression, absent)
    if isinstance(node, exp.Not):
        return _never_true(node.this, absent)
    if isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
        return _is_null(node.this, absent)
    return _is_null(node, absent)


def _is_null(node: exp.Expr, absent: frozenset[str]) -> bool:
    """Tell whether ``node`` is NULL whenever all columns of the relations ``absent`` are NULL."""
    node = node.unnest()
    if isinstance(node, exp.Column):
        return node.table in absent
    if isinstance(node, exp.Between) or (
        isinstance(node, exp.In) and not node.args.get("query") and not node.args.get("unnest")
    ):
        return _is_null(node.this, absent)
    if isinstance(node, (*_COMPARISONS, *_STRICT)):
        operands = [v for v in (node.this, node.args.get("expression")) if isinstance(v, exp.Expr)]
        return any(_is_null(v, absent) for v in operands) and not any(_quantified(v) for v in operands)
    return False


def _quantified(node: exp.Expr) -> bool:
    """Tell whether ``node`` is what ``= ANY`` or ``= ALL`` compare with: with an empty list NULL has an answer."""
    return isinstance(node, exp.Any | exp.All) or (
        isinstance(node, exp.Anonymous) and node.name.upper() in ("ANY", "ALL", "SOME")
    )
