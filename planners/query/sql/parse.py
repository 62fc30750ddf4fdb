"""From SQL text to one qualified query: parsing, checks, and names."""

import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from ebbflow.planners.model.tables import distinct_names, renaming_notes
from ebbflow.planners.query.sql.aliases import expand_column_aliases, expanded_by_engine, orders_by_arms
from ebbflow.planners.query.sql.dialect import (
    QuantileDuckDB,
    Spark4,
    UsingInPlace,
    check_interpreted,
    divisor,
    kept,
    restored,
    spark_sql,
)
from ebbflow.planners.query.sql.forbidden import check_reach
from ebbflow.planners.query.sql.freezing import draws_again, freeze
from ebbflow.planners.query.sql.naming import (
    first_select,
    name_projections,
    named,
    named_whole,
    ordered_by_outputs,
)
from ebbflow.planners.query.sql.nesting import check_depth, check_length, within_bounds
from ebbflow.planners.query.sql.references import folded, outside_tables, whole_name
from ebbflow.planners.query.sql.translation.types import with_types
from ebbflow.planners.query.sql.translation.whole import alike
from ebbflow.planners.query.sql.using import remember_using, simplify_using
from ebbflow.planners.query.sql.valuefunctions import called, called_before_names

_FAILURES = (AssertionError, AttributeError, LookupError, TypeError, ValueError)  # sqlglot's own, on some SQL
_READ: dict[str, Any] = {"spark": Spark4, "duckdb": QuantileDuckDB}  # for sqlglot's own dialects
_AFTER = ("with_", "distribute", "sort", "cluster", "order", "limit", "offset")  # what may follow a query


@dataclass(frozen=True)
class ParsedQuery:
    """One query. When ``qualified``, every column carries its table, every projection its name; output names
    are distinct and in the author's case."""

    expression: exp.Query
    text: str
    notes: tuple[str, ...]  # what was frozen, renamed or is volatile, as sentences
    qualified: bool = True
    dialect: str = "spark"  # of ``text``
    unnamed: bool = False  # a column of the result has no name of its author's, nor one of the engine's
    as_written: bool = False  # for the engine of its dialect alone


@within_bounds
def parse(text: str, dialect: str = "spark", allowed: Collection[str] = ()) -> exp.Query:
    """Return the single query in ``text``, which reads nothing but tables and what functions in ``allowed`` read.

    Raises ``SqlSyntaxError`` with line, column and the offending piece; ``UnsupportedQueryError`` when the text
    is empty, holds several statements, is not a query, or is too long or too deep; ``ForbiddenSqlError``.
    """
    check_interpreted()
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
        start = 0 if dialect.lower() == "duckdb" else 1  # as the engines name them
        columns = [f"col{i}" for i in range(start, start + len(statement.expressions[0].expressions))]
        statement = exp.select("*").from_(exp.alias_(statement, "_values", table=columns))
    if isinstance(statement, exp.Pivot):  # DuckDB's PIVOT ... ON and UNPIVOT ... ON
        statement = exp.select("*").from_(exp.Subquery(this=statement))
    if not isinstance(statement, exp.Query):
        raise UnsupportedQueryError(
            f"only queries (SELECT, WITH, UNION, VALUES, PIVOT) can be run; "
            f"got {statement.key.upper()}: {_short(text)!r}"
        )
    check_reach(statement, allowed)
    _check_parts(statement, text)
    return statement


def _check_parts(statement: exp.Query, text: str) -> None:
    """Raise ``SqlSyntaxError`` for what sqlglot reads though every engine refuses it."""
    for select in statement.find_all(exp.Select):
        if not select.expressions:
            raise SqlSyntaxError(
                f"a SELECT names no column: {_short(spark_sql(select))!r} in {_short(text)!r}"
            )
    for with_ in statement.find_all(exp.With):
        seen: set[str] = set()
        for name in (folded(cte.alias) for cte in with_.expressions):
            if name in seen:
                raise SqlSyntaxError(f"WITH defines {_short(name)!r} twice: {_short(text)!r}")
            seen.add(name)


def _parsed(text: str, dialect: str) -> list[exp.Expr]:
    try:
        return [s for s in sqlglot.parse(text, dialect=_READ.get(dialect.lower(), dialect)) if s is not None]
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


def _unqualified(query: exp.Query, catalogue: Catalogue) -> exp.Query:
    """Give tables of other databases that ``catalogue`` has under their whole names these as names of one part.

    Columns that name a database are found by the alias that its table gets: its own name, or one of the whole name
    where another source of the query is called so.
    """
    sources = [node.alias_or_name.lower() for node in query.find_all(exp.Table)]
    sources += [node.alias.lower() for node in query.find_all(exp.Subquery, exp.CTE)]
    aliases: dict[tuple[str, ...], str] = {}  # of tables, by the parts of their names
    for table in list(outside_tables(query)):
        whole = whole_name(table)
        if not table.db or catalogue.get(whole) is None:
            continue
        if not table.alias:
            alias = table.name
            if sources.count(alias.lower()) > 1:
                alias = re.sub(r"\W", "_", whole)
                while alias.lower() in sources:
                    alias += "_"
            aliases[tuple(part.name.lower() for part in table.parts)] = alias
            table.set("alias", exp.TableAlias(this=exp.to_identifier(alias)))
        table.set("this", exp.to_identifier(whole, quoted=True))
        table.set("db", None)
        table.set("catalog", None)
    if aliases:
        for column in [column for column in query.find_all(exp.Column) if column.db]:
            _under_alias(column, aliases)
    return query


def _under_alias(column: exp.Column, aliases: Mapping[tuple[str, ...], str]) -> None:
    """Write a column after the alias of the table that it names with its database; what follows are its fields."""
    names = tuple(part.name.lower() for part in column.parts)
    for count in range(len(names) - 1, 1, -1):
        for table, alias in aliases.items():
            if table[-count:] == names[:count]:
                first, *fields = [part.copy() for part in column.parts[count:]]
                found = exp.Column(this=first, table=exp.to_identifier(alias))
                column.replace(exp.Dot.build([found, *fields]) if fields else found)
                return


def check_tables(query: exp.Query, catalogue: Catalogue) -> None:
    """Raise ``UnknownTableError`` for the first table that is in neither the catalogue nor the query."""
    for table in outside_tables(query):
        if table.db:
            raise UnknownTableError(
                f"unknown table {_short(whole_name(table))!r}; a table of --tables is named alone, as {table.name!r}"
            )
        if catalogue.get(table.name) is None:
            nearest = _nearest(table.name.lower(), catalogue.tables)
            raise UnknownTableError(f"unknown table {_short(table.name)!r}; {nearest}")


@within_bounds
def parse_query(
    text: str,
    catalogue: Catalogue,
    *,
    now: datetime,
    dialect: str = "spark",
    allowed: Collection[str] = (),
    outputs: Sequence[str] | None = None,
    engine: str = "",
    tree: exp.Query | None = None,
) -> ParsedQuery:
    """Parse, check, freeze and qualify ``text``, or ``tree``, which ``parse`` made of it, against ``catalogue``.

    ``outputs`` are the names that the engine gives to the result's columns: those that the query does not name take
    them, and what cannot be planned though the engine understands it runs whole. The ``engine`` of its own dialect is
    told of a query that runs whole as its author wrote it: parts of it may be called as they are written.

    Raises the errors of ``parse`` and ``check_tables``, and ``UnknownColumnError``.
    """
    query = parse(text, dialect, allowed) if tree is None else tree.copy()
    query = _unqualified(_divided(query, dialect), catalogue)
    check_tables(query, catalogue)
    if dialect.lower() == "duckdb":
        query = called_before_names(query, catalogue, known=not _defines_columns(query))
    again = "an alias of what is not deterministic is used again in its SELECT"
    reason = again if draws_again(query) else expanded_by_engine(query)
    if not reason:
        try:
            qualified = qualified_copy(query, catalogue, dialect)
        except OptimizeError as error:
            if outputs is None and not _defines_columns(query):
                raise UnknownColumnError(_column_error(str(error), query, catalogue)) from error
            reason = str(error)
        except _FAILURES as error:
            reason = f"its names cannot be resolved ({type(error).__name__}: {_short(str(error))})"
        else:
            reason = _misnumbered(first_select(qualified), outputs) or orders_by_arms(qualified, dialect)
    if reason:
        own = engine.lower() == dialect.lower()
        if not own:
            query = with_types(alike(query, dialect), catalogue, dialect)
        whole, unnamed = named_whole(called(query, catalogue, dialect), outputs)
        frozen, notes = freeze(whole, now, dialect)
        found = outputs or ()
        notes = (*notes, f"the query runs whole: {reason}", *renaming_notes(found, distinct_names(found)))
        return ParsedQuery(frozen, text, notes, False, dialect, unnamed, as_written=own)
    ordered = ordered_by_outputs(alike(qualified, dialect), catalogue, dialect)
    final, renamed, unnamed = named(with_types(ordered, catalogue, dialect), query, catalogue, outputs)
    frozen, notes = freeze(final, now, dialect)  # after qualify, which names the projections
    _forget_places(frozen)
    return ParsedQuery(frozen, text, (*notes, *renamed), dialect=dialect, unnamed=unnamed)


def _forget_places(tree: exp.Expr) -> None:
    """Drop where in the text names stand, which no error tells any more: much of what a copy takes."""
    for name in tree.find_all(exp.Identifier):
        for key in ("line", "col", "start", "end"):
            name.meta.pop(key, None)


def _misnumbered(first: exp.Query, outputs: Sequence[str] | None) -> str:
    """Return that the engine makes other columns of the SELECT ``first`` than it seems to have, if it does."""
    if outputs is None:
        return ""
    if first.is_star:
        return "only the engine knows the columns of *"
    if len(outputs) == len(first.selects):
        return ""
    return f"the engine gives it {len(outputs)} columns where {len(first.selects)} are written"


def _divided(query: exp.Query, dialect: str) -> exp.Query:
    """Make ``/`` mean what it does in the query's dialect: DuckDB divides decimals as doubles, Spark as decimals of
    six or so digits, whose rounding adds up. DuckDB itself is told what was written; it has quotients of FLOATs."""
    if dialect.lower() == "duckdb":
        for node in reversed(list(query.find_all(exp.Div))):  # inner ones first
            right = node.expression  # not the left: that may be an interval
            if not (isinstance(right, exp.Cast) and right.to.this == exp.DType.DOUBLE):
                node.set("expression", divisor(right))
    return query


def qualified_copy(query: exp.Query, catalogue: Catalogue, dialect: str = "spark") -> exp.Query:
    """Return ``query`` with every column under its table and every projection named.

    In SQL of DuckDB's ``dialect`` the columns of USING and NATURAL stay at their places in ``*``. Raises sqlglot's
    ``OptimizeError`` for a column that cannot be resolved.
    """
    schema = cast("dict[str, Any]", catalogue.schema())
    rules = UsingInPlace if dialect.lower() == "duckdb" else "spark"
    query, duckdb = query.copy(), dialect.lower() == "duckdb"
    name_projections(query, duckdb=duckdb)
    for join in query.find_all(exp.Join):
        if isinstance(condition := join.args.get("on"), exp.Subquery):
            join.set("on", exp.paren(condition, copy=False))
    remember_using(query)
    qualified = qualify(query, schema=schema, dialect=rules, quote_identifiers=False, identify=False)
    found = restored(qualified, catalogue, one_spelling=not duckdb)
    return simplify_using(expand_column_aliases(found, catalogue, fewer=duckdb))


def _defines_columns(query: exp.Query) -> bool:
    """Tell whether the query has relations whose columns only an engine knows."""
    return query.find(exp.Lateral, exp.UDTF, exp.Pivot) is not None or any(
        not isinstance(t.this, exp.Identifier) for t in query.find_all(exp.Table)
    )


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
