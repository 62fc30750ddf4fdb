"""Columns that USING and NATURAL joins share: after an inner or a left join, the left one alone.

Qualifying makes each a COALESCE of all of them. Engines refuse that for columns of two types, and it hides from the
planner that the join is on plain columns.
"""

from sqlglot import exp

_USING = "using"  # in a join's meta: the names that it shares; empty: those that both sides have


def remember_using(query: exp.Query) -> None:
    """Write down at the joins of a query, before it is qualified, which columns they share."""
    for join in query.find_all(exp.Join):
        shared = [one.name.lower() for one in join.args.get("using") or ()]
        if shared or str(join.args.get("method") or "").upper() == "NATURAL":
            join.meta[_USING] = shared


def simplify_using(query: exp.Query) -> exp.Query:
    """Return a qualified query whose shared columns of inner and left joins are those of the left side."""
    for select in query.find_all(exp.Select):
        joins = [join for join in select.args.get("joins") or () if _USING in join.meta]
        if not joins:
            continue
        one_sided = {
            join.this.alias_or_name: join.meta[_USING]
            for join in joins
            if (join.side or "").upper() in ("", "LEFT")
        }
        for node in list(select.find_all(exp.Coalesce)):
            if node.find_ancestor(exp.Select) is not select:
                continue  # its names may be others'
            first, *others = node.this, *node.expressions
            columns = [one for one in (first, *others) if isinstance(one, exp.Column) and one.table]
            if len(columns) < 2 or len(columns) != 1 + len(others):
                continue
            name = first.name.lower()
            if any(one.name.lower() != name for one in columns):
                continue
            shared = [one_sided.get(one.table) for one in others]
            if all(names is not None and (not names or name in names) for names in shared):
                node.replace(first.copy())
    return query
