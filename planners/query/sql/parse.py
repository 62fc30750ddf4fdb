"""From SQL text to one qualified query: parsing, checks, and names."""

import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import sqlglot
from sqlglot import exp
from sqlglot.errors import OptimizeError, ParseError, TokenError
from sqlglot.optimizer.qualify import qualify

from ebbflow.planners.errors import (
    SqlSyntaxError,
    UnknownColumnError,
    UnknownTableError,
    UnsupportedQueryError,
)
from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.sql.dialect import Spark4, kept, spark_sql
from ebbflow.planners.query.sql.forbidden import check_reach
from ebbflow.planners.query.sql.freezing import draws_again, freeze
from ebbflow.planners.query.sql.functions import (
    BARE,
)
from ebbflow.planners.query.sql.nesting import check_depth, check_length, within_bounds

_AFTER = ("with_", "distribute", "sort", "cluster", "order", "limit", "offset")  # what may follow a query


@dataclass(frozen=True)
class ParsedQuery:
    """One query. When ``qualified``, every column carries its table, every projection its name; output names
    are distinct and in the author's case."""

    expression: exp.Query
    text: str
    notes: tuple[str, ...]  # what was frozen, renamed or is volatile, as sentences
    qualified: bool = True


@within_bounds
def parse(text: str, dialect: str = "spark", allowed: Collection[str] = ()) -> exp.Query:
    """Return the single query in ``text``, which reads nothing but tables and what functions in ``allowed`` read.

    Raises ``SqlSyntaxError`` with line, column and the offending piece; ``UnsupportedQueryError`` when the text
    is empty, holds several statements, is not a query, or is too long or too deep; ``ForbiddenSqlError``.
    """
    check_length(text)
    statements = [kept(s, dialect) for s in _parsed(text, dialect) if not isinstance(s, exp.Semicolon)]
    if len(statements) != 1:
        found = "none" if not statements else str(len(statements))
        raise UnsupportedQueryError(f"exactly one query is needed; found {found} in {_short(text)!r}")
    check_depth(statements[0])
    statement = _outside_parentheses(statements[0])
    if isinstance(statement, exp.Subquery):
        statement = statement.unnest()
    if isinstance(statement, exp.Values):
        columns = [
            f"col{i}" for i in range(1, len(statement.expressions[0].expressions) + 1)
        ]  # Spark's names
        statement = exp.select("*").from_(exp.alias_(statement, "_values", table=columns))
    if not isinstance(statement, exp.Query):
        raise UnsupportedQueryError(
            f"only queries (SELECT, WITH, UNION, VALUES) can be run; "
            f"got {statement.key.upper()}: {_short(text)!r}"
        )
    check_reach(statement, allowed)
    for select in statement.find_all(exp.Select):
        if not select.expressions:
            raise SqlSyntaxError(
                f"a SELECT names no column: {_short(spark_sql(select))!r} in {_short(text)!r}"
            )
    return statement


def _parsed(text: str, dialect: str) -> list[exp.Expr]:
    try:
        return [
            s
            for s in sqlglot.parse(text, dialect=Spark4 if dialect.lower() == "spark" else dialect)
            if s is not None
        ]
    except ParseError as error:
        raise SqlSyntaxError(_describe(error)) from error
    except TokenError as error:
        raise SqlSyntaxError(f"SQL cannot be read: {_short(str(error))}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # sqlglot's own, on some wrong SQL
        raise SqlSyntaxError(
            f"SQL cannot be read ({type(error).__name__}: {_short(str(error))}): {_short(text)!r}"
        ) from error


def _outside_parentheses(tree: exp.Expr) -> exp.Expr:
    """Give what follows a query in parentheses a SELECT of its own: whoever takes them off would lose it.

    Before: ``(SELECT x FROM a) LIMIT 2``; after: ``SELECT * FROM (SELECT x FROM a) AS _s1 LIMIT 2``.
    """
    taken = {i.name.lower() for i in tree.find_all(exp.Identifier)}
    names = (name for n in itertools.count(1) if (name := f"_s{n}") not in taken)
    for node in reversed(list(tree.find_all(exp.Subquery))):  # inner ones first
        after = {key: node.args[key] for key in _AFTER if node.args.get(key)}
        if not after or node.alias:
            continue
        for key in after:
            node.set(key, None)
        select = exp.select("*").from_(exp.Subquery(this=node.this.copy(), alias=exp.TableAlias()))
        select.args["from_"].this.args["alias"].set("this", exp.to_identifier(next(names)))
        for key, value in after.items():
            select.set(key, value)
        node.set("this", select)
    return tree


def _describe(error: ParseError) -> str:
    if not error.errors:
        return f"SQL does not parse: {error}"
    first = error.errors[0]
    piece = first.get("highlight") or ""
    before = (first.get("start_context") or "")[-40:]
    after = (first.get("end_context") or "")[:20]
    wrong = re.sub(
        r".* missing for <class '[\w.]*?(\w+)'>", r"\1 is incomplete", first.get("description") or ""
    )
    return (
        f"SQL does not parse at line {first.get('line')}, column {first.get('col')}, near {piece!r}: "
        f"{wrong}\n  …{before}>>>{piece}<<<{after}…"
    )


def _short(text: str, limit: int = 80) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"known: {shown}" if names else "none is known"


def outside_tables(node: exp.Expr, bound: frozenset[str] = frozenset()) -> Iterator[exp.Table]:
    """Yield the tables under ``node`` that no WITH in scope defines; table functions are none.

    Before: ``WITH t AS (SELECT * FROM t) SELECT * FROM t, u``; yields the inner ``t`` and ``u``.
    """
    named = isinstance(node, exp.Table) and isinstance(node.this, exp.Identifier)
    if isinstance(node, exp.Table) and named and (node.db or _folded(node.name) not in bound):
        yield node
    with_ = node.args.get("with_")
    if with_ is not None:
        for cte in with_.expressions:
            name = frozenset({_folded(cte.alias)})
            yield from outside_tables(cte.this, bound | name if with_.recursive else bound)
            bound |= name
    for child in node.iter_expressions():
        if child is not with_:
            yield from outside_tables(child, bound)


def _folded(name: str) -> str:
    """Return a name as DuckDB compares it, in lower case as far as it is ASCII: to Python, the sign of Kelvin is a k,
    and a WITH of that name would hide a file's."""
    return name.encode().lower().decode()


def table_names(query: exp.Expr) -> frozenset[str]:
    """Return the names in FROM and JOIN that the query does not define itself."""
    return frozenset(t.name for t in outside_tables(query))


def check_tables(query: exp.Query, catalogue: Catalogue) -> None:
    """Raise ``UnknownTableError`` for the first table that is in neither the catalogue nor the query."""
    for table in outside_tables(query):
        if table.db:
            full = ".".join(p.name for p in table.parts)
            raise UnknownTableError(
                f"table {full!r}: qualified names are not supported; name the table {table.name!r} alone, "
                f"from --tables or the session's current database"
            )
        if catalogue.get(table.name) is None:
            nearest = _nearest(table.name.lower(), catalogue.tables)
            raise UnknownTableError(f"unknown table {_short(table.name)!r}; {nearest}")


@within_bounds
def parse_query(
    text: str, catalogue: Catalogue, *, now: datetime, dialect: str = "spark", allowed: Collection[str] = ()
) -> ParsedQuery:
    """Parse, check, freeze and qualify ``text`` against ``catalogue``.

    Raises the errors of ``parse`` and ``check_tables``, and ``UnknownColumnError``.
    """
    query = _divided(parse(text, dialect, allowed), dialect)
    check_tables(query, catalogue)
    if draws_again(query):
        frozen, notes = freeze(_called(query, catalogue), now)
        reason = "the query runs whole: an alias of what is not deterministic is used again in its SELECT"
        return ParsedQuery(frozen, text, (*notes, reason), qualified=False)
    try:
        qualified = qualified_copy(query, catalogue)
    except OptimizeError as error:
        if not _defines_columns(query):
            raise UnknownColumnError(_column_error(str(error), query, catalogue)) from error
        frozen, notes = freeze(_called(query, catalogue), now)
        return ParsedQuery(frozen, text, (*notes, f"the query runs whole: {error}"), qualified=False)
    named, renamed = _named(_ordered_by_outputs(qualified), query, catalogue)
    frozen, notes = freeze(named, now)  # after qualify, which names the projections
    return ParsedQuery(frozen, text, (*notes, *renamed))


def _called(query: exp.Query, catalogue: Catalogue) -> exp.Query:
    """Write words such as ``localtimestamp``, which engines call as functions where no column is called so, as calls:
    in a query that was not qualified they look like columns."""
    tables = (catalogue.get(t.name) for t in outside_tables(query))
    named = {name.lower() for table in tables if table is not None for name, _ in table.columns}
    named |= {node.alias.lower() for node in query.find_all(exp.Alias)}
    named |= {column.name.lower() for node in query.find_all(exp.TableAlias) for column in node.columns}
    for column in list(query.find_all(exp.Column)):
        word = column.name.lower()
        if word in BARE - named and not column.table and not column.this.quoted:
            column.replace(exp.Anonymous(this=word))
    return query


def _divided(query: exp.Query, dialect: str) -> exp.Query:
    """Make ``/`` mean what it does in the query's dialect: DuckDB divides decimals as doubles, Spark as decimals of
    six or so digits, whose rounding adds up."""
    if dialect.lower() == "duckdb":
        for node in reversed(list(query.find_all(exp.Div))):  # inner ones first
            left = node.this
            if not (isinstance(left, exp.Cast) and left.to.this == exp.DType.DOUBLE):
                node.set("this", exp.cast(left, exp.DType.DOUBLE))
    return query


def qualified_copy(query: exp.Query, catalogue: Catalogue) -> exp.Query:
    """Return ``query`` with every column under its table and every projection named.

    Raises sqlglot's ``OptimizeError`` for a column that cannot be resolved.
    """
    schema = cast("dict[str, Any]", catalogue.schema())
    return qualify(query.copy(), schema=schema, dialect="spark", quote_identifiers=False, identify=False)


def _ordered_by_outputs(query: exp.Query) -> exp.Query:
    """Point the ORDER BY of a SELECT DISTINCT at its outputs: above DISTINCT Spark knows no other names.

    Before: ``SELECT DISTINCT t.a AS a FROM t ORDER BY t.a``; after: ``... ORDER BY a``.
    """
    for select in query.find_all(exp.Select):
        order = select.args.get("order")
        if order is None or not select.args.get("distinct"):
            continue
        outputs = {
            item.unalias().unnest(): item.alias for item in select.selects if isinstance(item, exp.Alias)
        }
        for key in order.expressions:
            found = outputs.get(key.this.unnest()) if isinstance(key, exp.Ordered) else None
            if found is not None:
                key.set("this", exp.column(found))
    return query


def _defines_columns(query: exp.Query) -> bool:
    """Tell whether the query has relations whose columns only an engine knows."""
    return query.find(exp.Lateral, exp.UDTF, exp.Pivot) is not None or any(
        not isinstance(t.this, exp.Identifier) for t in query.find_all(exp.Table)
    )


def _named(
    qualified: exp.Query, written: exp.Query, catalogue: Catalogue
) -> tuple[exp.Query, tuple[str, ...]]:
    """Give the result's columns distinct names, in the author's case or, for ``*``, the table's.

    Qualifying turns names to lower case, and a Parquet file cannot hold two columns of one name.
    """
    first, original = _first_select(qualified), _first_select(written)
    stars = any(item.is_star for item in original.selects)
    cased = _stored_names(first, catalogue) if stars else [item.output_name for item in original.selects]
    seen: set[str] = set()
    taken = {name.lower() for name in first.named_selects}  # ORDER BY may mean them
    notes: list[str] = []
    for item, wanted in zip(first.selects, cased, strict=False):
        if not isinstance(item, exp.Alias):
            continue
        name = wanted if wanted.lower() == item.alias.lower() else item.alias
        fresh, number = name, 0
        while fresh.lower() in seen or (number and fresh.lower() in taken):
            number += 1
            fresh = f"{name}_{number}"
        seen.add(fresh.lower())
        if fresh != name:
            notes.append(f"a second output column {name} is named {fresh}: Parquet needs distinct names")
        if fresh != item.alias:
            item.set("alias", exp.to_identifier(fresh))
    return qualified, tuple(notes)


def _stored_names(select: exp.Query, catalogue: Catalogue) -> list[str]:
    """Return the names of columns taken straight from tables as the tables have them, of others nothing."""
    tables = {t.alias_or_name: catalogue.get(t.name) for t in select.find_all(exp.Table)}
    out = []
    for item in select.selects:
        column = item.unalias()
        table = tables.get(column.table) if isinstance(column, exp.Column) else None
        names = [n for n, _ in table.columns if n.lower() == column.name.lower()] if table is not None else []
        out.append(names[0] if names else "")
    return out


def _first_select(query: exp.Query) -> exp.Query:
    """Return the SELECT that names the output of ``query``."""
    node = query.unnest()
    while isinstance(node, exp.SetOperation):
        node = node.this.unnest()
    return cast("exp.Query", node)


def _column_error(message: str, query: exp.Query, catalogue: Catalogue) -> str:
    owners: dict[str, list[str]] = {}
    for table in outside_tables(query):
        known = catalogue.get(table.name)
        for column, _ in known.columns if known is not None else ():
            owners.setdefault(column.lower(), []).append(table.alias_or_name)
    for found in query.find_all(exp.Column):
        if not re.search(rf"(?<!\w){re.escape(found.name)}(?!\w)", message, re.IGNORECASE):
            continue
        several = owners.get(found.name.lower(), [])
        if not found.table and len(several) > 1:
            return f"column {_short(found.name)!r} is ambiguous: qualify it with one of {', '.join(several)}"
        nearest = _nearest(found.name, owners)
        return f"unknown column {_short(spark_sql(found))!r}; {nearest} ({_short(message, 300)})"
    return f"a column cannot be resolved: {_short(message, 300)}"
