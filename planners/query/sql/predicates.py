"""Conjuncts: splitting, canonical text, factoring of disjunctions, and predicates implied by others."""

from collections.abc import Iterable, Iterator, Sequence

from sqlglot import ErrorLevel, exp

from ebbflow.planners.query.sql.dialect import duckdb_sql, spark_sql
from ebbflow.planners.query.sql.freezing import is_volatile
from ebbflow.planners.query.sql.joingraph import Column


def conjuncts(condition: exp.Expr | None) -> list[exp.Expr]:
    """Return the AND-ed parts of ``condition`` with common factors pulled out of disjunctions."""
    if condition is None:
        return []
    out: list[exp.Expr] = []
    stack = [condition]
    while stack:
        node = stack.pop().unnest()
        if isinstance(node, exp.And):
            stack += [node.expression, node.this]
        elif isinstance(node, exp.Or):
            out += _factored(node)
        else:
            out.append(node)
    return out


def disjuncts(node: exp.Expr) -> list[exp.Expr]:
    """Return the OR-ed parts of ``node``, in order."""
    node = node.unnest()
    if isinstance(node, exp.Or):
        return disjuncts(node.this) + disjuncts(node.expression)
    return [node]


def _factored(node: exp.Or) -> list[exp.Expr]:
    """Rewrite ``(a AND x) OR (a AND y)`` to ``a``, ``x OR y``; TPC-H Q19 hides its join this way."""
    if is_volatile(node):
        return [node]
    arms = [conjuncts(d) for d in disjuncts(node)]
    texts = [{canonical(c): c for c in arm} for arm in arms]
    common = [t for t in texts[0] if all(t in other for other in texts[1:])]
    if not common:
        return [node]
    factors = [texts[0][t] for t in common]
    rest = [[c for t, c in arm.items() if t not in common] for arm in texts]
    if any(not arm for arm in rest):
        return factors  # one arm is implied by the factors alone: the disjunction is true
    return [*factors, any_of(all_of(arm) for arm in rest)]


def all_of(parts: Iterable[exp.Expr]) -> exp.Expr:
    """Return the conjunction of copies of ``parts``."""
    return exp.and_(*(p.copy() for p in parts))


def any_of(parts: Iterable[exp.Expr]) -> exp.Expr:
    """Return the disjunction of copies of ``parts``, in parentheses."""
    return exp.paren(exp.or_(*(p.copy() for p in parts)))


def canonical(node: exp.Expr) -> str:
    """Return text that is equal for predicates that differ only in the order of operands.

    ``1 = a.x`` and ``a.x = 1`` agree; so do ``a < b`` and ``b > a``, IN lists, and operands of AND and OR.
    """
    node = node.unnest()
    if isinstance(node, exp.And):
        return " AND ".join(sorted({f"({canonical(c)})" for c in conjuncts(node)}))
    if isinstance(node, exp.Or):
        return " OR ".join(sorted({f"({canonical(d)})" for d in disjuncts(node)}))
    if isinstance(node, exp.Not):
        return f"NOT ({canonical(node.this)})"
    if isinstance(node, exp.EQ | exp.NEQ):
        left, right = sorted((_operand(node.this), _operand(node.expression)))
        return f"{left} {'=' if isinstance(node, exp.EQ) else '<>'} {right}"
    if isinstance(node, exp.GT | exp.GTE | exp.LT | exp.LTE):
        sign, left, right = _SIGN[type(node)], _operand(node.this), _operand(node.expression)
        return f"{left} {sign} {right}" if left <= right else f"{right} {_MIRROR[sign]} {left}"
    if isinstance(node, exp.In) and not node.args.get("query") and not node.args.get("unnest"):
        values = ", ".join(sorted(canonical(v) for v in node.expressions))
        return f"{_operand(node.this)} IN ({values})"
    return written(node)


def written(node: exp.Expr) -> str:
    """Return text that is equal for what every engine would be told in the same words.

    Spark's words alone do not do: DuckDB's ``regexp_replace`` with and without ``'g'`` are one of Spark's.
    """
    spark = spark_sql(node, normalize_functions="upper")
    if not any(True for _ in node.find_all(exp.Func)):
        return spark
    other = duckdb_sql(node, normalize_functions="upper", unsupported_level=ErrorLevel.IGNORE)
    return f"{spark} | {other}"


def _operand(node: exp.Expr) -> str:
    """Return canonical text that cannot run into its surroundings: ``(a < b) = c`` is not ``a < (b = c)``."""
    text, bare = canonical(node), node.unnest()
    simple = isinstance(bare, exp.Column | exp.Literal | exp.Dot | exp.Func)
    compound = isinstance(bare, exp.Binary) and not isinstance(bare, exp.Dot)
    return text if simple and not compound else f"({text})"


_SIGN: dict[type[exp.Expr], str] = {exp.GT: ">", exp.GTE: ">=", exp.LT: "<", exp.LTE: "<="}
_MIRROR = {">": "<", ">=": "<=", "<": ">", "<=": ">="}


def free_columns(node: exp.Expr) -> Iterator[exp.Column]:
    """Yield the column nodes under ``node`` that are not bound by a subquery inside it.

    Columns must be qualified. Yielded nodes belong to the tree: changing them changes it.
    """
    yield from _free(node, frozenset())


def _free(node: exp.Expr, bound: frozenset[str]) -> Iterator[exp.Column]:
    if isinstance(node, exp.Column):
        if node.table and node.table not in bound:
            yield node
        return
    if isinstance(node, exp.Select):
        bound = bound | sources(node)
    for child in node.iter_expressions():
        yield from _free(child, bound)


def sources(select: exp.Select) -> frozenset[str]:
    """Return the aliases that ``select`` defines in FROM, JOIN and LATERAL."""
    start = select.args.get("from_")
    items = [start.this] if start is not None else []
    items += [j.this for j in select.args.get("joins") or ()]
    items += select.args.get("laterals") or ()
    return aliases_of(items)


def aliases_of(items: Iterable[exp.Expr]) -> frozenset[str]:
    """Return the aliases that items of a FROM clause define, those of joins in parentheses too."""
    found: set[str] = set()
    stack = [*items]
    while stack:
        item = stack.pop()
        found.add(item.alias_or_name)
        stack += [j.this for j in item.args.get("joins") or ()]
        if isinstance(item, (exp.Paren, exp.Subquery)) and isinstance(item.this, exp.Table):
            stack.append(item.this)
    return frozenset(found)


def columns_of(node: exp.Expr) -> frozenset[Column]:
    """Return ``(alias, column)`` of every free column under ``node``."""
    return frozenset((c.table, c.name) for c in free_columns(node))


def has_subquery(node: exp.Expr) -> bool:
    """Tell whether ``node`` contains a query."""
    return node.find(exp.Query) is not None


def is_correlated(node: exp.Expr) -> bool:
    """Tell whether a subquery in ``node`` refers to columns outside it."""
    outermost = (q for q in node.find_all(exp.Query) if q.find_ancestor(exp.Query) is None)
    return any(True for query in outermost for _ in free_columns(query))


def implied_by_disjunction(node: exp.Expr, aliases: Sequence[str]) -> list[exp.Expr]:
    """Return, per alias, the single-relation predicate that an OR over several relations implies.

    ``(n1.x = 1 AND n2.x = 2) OR (n1.x = 2 AND n2.x = 1)`` implies ``n1.x = 1 OR n1.x = 2``.
    """
    if not isinstance(node.unnest(), exp.Or):
        return []
    arms = [conjuncts(d) for d in disjuncts(node)]
    out = []
    for alias in aliases:
        parts = []
        for arm in arms:
            own = [c for c in arm if {a for a, _ in columns_of(c)} == {alias} and not has_subquery(c)]
            if not own:
                break
            parts.append(all_of(own))
        else:
            out.append(any_of(parts))
    return out


def implied_by_equality(node: exp.Expr, column: Column, others: Iterable[Column]) -> list[exp.Expr]:
    """Return ``node`` restated for columns equal to ``column``, its only column, when it compares that column
    with literals."""
    if not isinstance(node, exp.EQ | exp.GT | exp.GTE | exp.LT | exp.LTE | exp.Between | exp.In):
        return []
    if has_subquery(node) or not isinstance(node.this, exp.Column):
        return []
    out: list[exp.Expr] = []
    for alias, name in others:
        if (alias, name) == column:
            continue
        copy = node.copy()
        for found in list(copy.find_all(exp.Column)):
            found.replace(exp.column(name, table=alias))
        out.append(copy)
    return out
