"""Subqueries of conditions, made into derived tables as far as they do not depend on the outer query.

What is uncorrelated becomes a view, whose joins can be planned and whose result can be shared; what is correlated
stays where it stands.
"""

import itertools
from collections.abc import Iterator

from sqlglot import exp

from ebbflow.planners.query.sql.freezing import is_volatile
from ebbflow.planners.query.sql.predicates import conjuncts, free_columns, sources

KEPT = "KEPT"  # any ``kind`` of a SELECT is a reason for sqlglot not to merge it


def separate_conditions(query: exp.Query) -> exp.Query:
    """Turn subqueries of conditions into derived tables where that is worth planning: a join or an aggregate.

    A whole subquery, when it is uncorrelated. Before: ``o_orderkey IN (SELECT l_orderkey FROM lineitem GROUP BY
    l_orderkey)``; after: ``o_orderkey IN (SELECT _q1.l_orderkey FROM (SELECT ...) AS _q1)``.

    Its FROM and uncorrelated conditions, when it is correlated and joins. Before: ``(SELECT min(b.y) FROM b, c WHERE
    b.j = c.j AND b.k = a.k)``; after: ``(SELECT min(_q1.b__y) FROM (SELECT b.k AS b__k, b.y AS b__y FROM b, c WHERE
    b.j = c.j) AS _q1 WHERE _q1.b__k = a.k)``.

    Columns must be qualified. Changes ``query`` and returns it.
    """
    names = _unused(query)
    for inner in reversed(list(query.find_all(exp.Select, exp.SetOperation))):  # inner ones first
        if not _in_condition(inner):
            continue
        correlated = any(True for _ in free_columns(inner))
        if isinstance(inner.parent, exp.Exists) or correlated:
            for select in _arms(inner):
                _separate_from(select, names)
        else:
            _separate_whole(inner, names)
    return query


def _unused(query: exp.Query) -> Iterator[str]:
    """Yield aliases that nothing in ``query`` has: one for all would hide an outer relation of that name."""
    taken = {i.name.lower() for i in query.find_all(exp.Identifier)}
    return (name for n in itertools.count(1) if (name := f"_q{n}") not in taken)


def _in_condition(query: exp.Query) -> bool:
    """Tell whether ``query`` is a subquery of an expression, not one in FROM, in WITH or an arm of a union."""
    parent = query.parent
    if not isinstance(parent, exp.Subquery):
        return isinstance(parent, exp.In | exp.Exists)
    outside = (exp.From, exp.Join, exp.SetOperation, exp.Subquery, exp.CTE, exp.Lateral)
    return parent.parent is not None and not isinstance(parent.parent, outside)


def _arms(query: exp.Expr) -> list[exp.Select]:
    node = query.unnest()
    if isinstance(node, exp.SetOperation):
        return _arms(node.this) + _arms(node.expression)
    return [node] if isinstance(node, exp.Select) else []


def _separate_whole(query: exp.Query, names: Iterator[str]) -> None:
    arms = _arms(query)
    if query.args.get("with_") or not any(s.args.get("joins") or s.args.get("group") for s in arms):
        return
    columns = query.named_selects
    if not columns or "*" in columns:
        return
    alias = next(names)
    inner = query.copy()
    if isinstance(inner, exp.Select):
        inner.set("kind", inner.args.get("kind") or KEPT)
    query.replace(
        exp.select(*(exp.alias_(exp.column(n, table=alias), n) for n in columns)).from_(
            _derived(inner, alias)
        )
    )


def _separate_from(select: exp.Select, names: Iterator[str]) -> None:
    """Move the joins of ``select`` with the conditions on them alone into a derived table."""
    start, joins = select.args.get("from_"), [j.copy() for j in select.args.get("joins") or ()]
    if start is None or not joins or select.args.get("with_") or select.args.get("hint"):
        return
    if any(select.args.get(key) for key in ("laterals", "pivots", "sample", "match", "windows", "kind")):
        return
    own = sources(select)
    where = select.args.get("where")
    parts = conjuncts(where.this) if where is not None else []
    if not any(
        j.side in ("RIGHT", "FULL") for j in joins
    ):  # an inner join's condition may stand in WHERE as well
        for join in joins:
            parts += _without_correlation(join, own)
    outside = [c for node in (start, *joins) for c in free_columns(node) if c.table not in own]
    if outside or any(is_volatile(node) for node in (start, *joins)):
        return
    if any(
        n.parent_select is select for n in select.find_all(exp.Star) if not isinstance(n.parent, exp.Count)
    ):
        return
    if isinstance(select.parent, exp.Exists) and _any_row_will_do(select):
        select.set("expressions", [exp.alias_(exp.Literal.number(1), "_one")])
    moved: list[exp.Expr] = []
    stay: list[exp.Expr] = []
    for part in parts:
        free = all(c.table in own for c in free_columns(part)) and not is_volatile(part)
        (moved if free else stay).append(part.copy())
    alias = next(names)
    above = exp.Where(this=exp.and_(*stay)) if stay else None
    select.set("where", above)
    rest = [v for key, value in select.args.items() if key not in ("from_", "joins") for v in _nodes(value)]
    used = [c for node in rest for c in free_columns(node) if c.table in own]
    columns = sorted({(c.table, c.name) for c in used})
    output = {c: f"{c[0]}__{c[1]}" for c in columns}
    if len(set(output.values())) < len(columns):
        output = {c: f"{c[0]}__{c[1]}__{i}" for i, c in enumerate(columns)}
    items = [exp.alias_(exp.column(name, table=table), output[table, name]) for table, name in columns]
    inner = exp.select(*(items or [exp.alias_(exp.Literal.number(1), "_one")]))
    inner.set("from_", start.copy())
    inner.set("joins", joins)
    if moved:
        inner.set("where", exp.Where(this=exp.and_(*moved)))
    inner.set("kind", KEPT)
    for column in used:
        column.replace(exp.column(output[column.table, column.name], table=alias))
    select.set("from_", exp.From(this=_derived(inner, alias)))
    select.set("joins", None)


def _without_correlation(join: exp.Join, own: frozenset[str]) -> list[exp.Expr]:
    """Take the correlated conjuncts out of an inner join's ON and return them."""
    on = join.args.get("on")
    if on is None or join.side or join.kind not in ("", "INNER", "CROSS") or join.method:
        return []
    parts = conjuncts(on)
    out = [p for p in parts if any(c.table not in own for c in free_columns(p))]
    if out:
        rest = [p.copy() for p in parts if not any(p is o for o in out)]
        join.set("on", exp.and_(*rest) if rest else None)
        join.set("kind", join.args.get("kind") if rest else "CROSS")
    return out


def _any_row_will_do(select: exp.Select) -> bool:
    """Tell whether EXISTS over ``select`` asks for rows of its FROM alone, whatever it selects of them."""
    whole = any(
        select.args.get(k) for k in ("group", "having", "distinct", "limit", "offset", "qualify", "order")
    )
    return not whole and not any(
        item.find(exp.AggFunc, exp.Anonymous, exp.Window, exp.UDTF) for item in select.expressions
    )


def _derived(query: exp.Query, alias: str) -> exp.Subquery:
    return exp.Subquery(this=query, alias=exp.TableAlias(this=exp.to_identifier(alias)))


def _nodes(value: object) -> list[exp.Expr]:
    return [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, exp.Expr)]
