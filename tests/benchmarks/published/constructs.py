"""Which constructs of SQL a statement has, by the names that the generated statements' page uses."""

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

_NODES: tuple[tuple[str, tuple[type[exp.Expr], ...]], ...] = (
    ("aggregate", (exp.AggFunc,)),
    ("cte", (exp.CTE,)),
    ("set operation", (exp.SetOperation,)),
    ("window", (exp.Window,)),
    ("grouping", (exp.Group,)),
    ("having", (exp.Having,)),
    ("qualify", (exp.Qualify,)),
    ("distinct", (exp.Distinct,)),
    ("order", (exp.Order,)),
    ("limit", (exp.Limit, exp.Offset, exp.Fetch)),
    ("where", (exp.Where,)),
    ("star", (exp.Star,)),
    ("columns", (exp.Columns,)),
    ("pivot", (exp.Pivot,)),
    ("values", (exp.Values,)),
    ("lateral", (exp.Lateral,)),
    ("unnest", (exp.Unnest, exp.Explode)),
    ("sample", (exp.TableSample,)),
    ("lambda", (exp.Lambda,)),
    ("case", (exp.Case,)),
    ("cast", (exp.Cast,)),
    ("interval", (exp.Interval,)),
    ("nested type", (exp.Struct, exp.Array, exp.Map, exp.Bracket, exp.Dot)),
)


def constructs(sql: str) -> frozenset[str]:
    """Return the names of the constructs of a statement in DuckDB's dialect."""
    try:
        tree = sqlglot.parse_one(sql, dialect="duckdb")
    except (SqlglotError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return frozenset({"not read by sqlglot"})
    found = {name for name, kinds in _NODES if tree.find(*kinds)}
    for join in tree.find_all(exp.Join):
        found.add(_join(join))
    if any(with_.recursive for with_ in tree.find_all(exp.With)):
        found.add("recursive cte")
    if any(
        group.args.get(key)
        for group in tree.find_all(exp.Group)
        for key in ("rollup", "cube", "grouping_sets")
    ):
        found.add("grouping sets")
    if any(isinstance(table.this, exp.Func) for table in tree.find_all(exp.Table)):
        found.add("table function")
    for subquery in tree.find_all(exp.Subquery, exp.Exists, exp.In):
        if isinstance(subquery, exp.Subquery) and isinstance(subquery.parent, exp.From | exp.Join):
            found.add("derived table")
        elif not isinstance(subquery, exp.In) or subquery.args.get("query"):
            found.add("subquery")
    return frozenset(found or {"expressions alone"})


def _join(join: exp.Join) -> str:
    if join.method:
        return f"{join.method.lower()} join"
    if join.args.get("using"):
        return "using"
    return f"{(join.side or join.kind or '').lower()} join".strip()
