"""From SQL text to one qualified query: parsing, checks, and freezing of what changes from run to run."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast

import sqlglot
from sqlglot import exp
from sqlglot.errors import OptimizeError, ParseError, TokenError
from sqlglot.optimizer.qualify import qualify

from ebbflow.planners.errors import SqlSyntaxError, UnknownColumnError, UnknownTableError, UnsupportedQueryError
from ebbflow.planners.model import Catalogue

# Functions whose value is fixed for a query: replaced by a literal once per run.
_CLOCKS = (exp.CurrentDate, exp.CurrentTimestamp, exp.CurrentDatetime, exp.Localtimestamp)
_CLOCK_NAMES = {"now", "localtimestamp", "current_timestamp", "curdate", "current_date"}
# Functions whose value differs from row to row and run to run: their stages are never reused.
_VOLATILE = (exp.Rand, exp.Randn, exp.Uuid)
_VOLATILE_NAMES = {
    "rand", "randn", "random", "uuid", "shuffle", "monotonically_increasing_id", "spark_partition_id",
    "input_file_name", "gen_random_uuid", "randstr", "uniform",
}  # fmt: skip


@dataclass(frozen=True)
class ParsedQuery:
    """One qualified query. Every column carries its table, every projection its name."""

    expression: exp.Query
    text: str
    notes: tuple[str, ...]  # what was frozen or is volatile, as sentences


def parse(text: str, dialect: str = "spark") -> exp.Query:
    """Return the single query in ``text``.

    Raises ``SqlSyntaxError`` with line, column and the offending piece, or ``UnsupportedQueryError`` when the
    text is empty, holds several statements, or is not a query.
    """
    try:
        statements = [s for s in sqlglot.parse(text, dialect=dialect) if s is not None]
    except ParseError as error:
        raise SqlSyntaxError(_describe(error)) from error
    except TokenError as error:
        raise SqlSyntaxError(f"SQL cannot be read: {error}") from error
    if len(statements) != 1:
        found = "none" if not statements else str(len(statements))
        raise UnsupportedQueryError(f"exactly one query is needed; found {found} in {_short(text)!r}")
    statement = statements[0]
    if isinstance(statement, exp.Subquery):
        statement = statement.unnest()
    if not isinstance(statement, exp.Query):
        raise UnsupportedQueryError(
            f"only queries (SELECT, WITH, UNION, VALUES) can be run; got {statement.key.upper()}: {_short(text)!r}"
        )
    return statement


def _describe(error: ParseError) -> str:
    if not error.errors:
        return f"SQL does not parse: {error}"
    first = error.errors[0]
    piece = first.get("highlight") or ""
    before = (first.get("start_context") or "")[-40:]
    after = (first.get("end_context") or "")[:20]
    return (
        f"SQL does not parse at line {first.get('line')}, column {first.get('col')}, near {piece!r}: "
        f"{first.get('description')}\n  …{before}>>>{piece}<<<{after}…"
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


def freeze(query: exp.Query, now: datetime) -> tuple[exp.Query, tuple[str, ...]]:
    """Replace clock functions by literals of ``now`` (UTC) and note volatile functions.

    Spark evaluates clock functions once per statement; a query that is split into statements must fix them
    once for all of them.
    """
    stamp = now.astimezone(UTC)
    notes: dict[str, None] = {}

    def literal(node: exp.Expression) -> exp.Expression:
        name = node.name.lower() if isinstance(node, exp.Anonymous) else node.key
        clock = isinstance(node, _CLOCKS) or (isinstance(node, exp.Anonymous) and name in _CLOCK_NAMES)
        if not clock:
            if is_volatile_function(node):
                notes[
                    f"{node.sql('spark')} is not deterministic: stages that contain it are never reused"
                ] = None
            return node
        if isinstance(node, exp.CurrentDate) or name in {"curdate", "current_date"}:
            kind, value = "DATE", stamp.date().isoformat()
        else:
            kind, value = "TIMESTAMP", stamp.strftime("%Y-%m-%d %H:%M:%S.%f")
        notes[f"{node.sql('spark')} frozen to {value} for this run"] = None
        return exp.cast(exp.Literal.string(value), kind)

    return cast("exp.Query", query.transform(literal)), tuple(notes)


def is_volatile_function(node: exp.Expression) -> bool:
    """Tell whether ``node`` itself is a call whose value differs from row to row or run to run."""
    return isinstance(node, _VOLATILE) or (
        isinstance(node, exp.Anonymous) and node.name.lower() in _VOLATILE_NAMES
    )


def is_volatile(node: exp.Expression) -> bool:
    """Tell whether ``node`` contains a volatile function."""
    return any(is_volatile_function(n) for n in node.find_all(*_VOLATILE, exp.Anonymous))


def check_tables(query: exp.Query, catalogue: Catalogue) -> None:
    """Raise ``UnknownTableError`` for the first table that is in neither the catalogue nor the query."""
    defined = {cte.alias_or_name.lower() for cte in query.find_all(exp.CTE)}
    for table in query.find_all(exp.Table):
        if not isinstance(table.this, exp.Identifier):
            continue  # a table function such as range(10)
        name = table.name.lower()
        if table.db:
            full = ".".join(p.name for p in table.parts)
            raise UnknownTableError(
                f"table {full!r}: qualified names are not supported; name the table {table.name!r} alone, "
                f"from --tables or the session's current database"
            )
        if name not in defined and catalogue.get(name) is None:
            raise UnknownTableError(f"unknown table {table.name!r}; {_nearest(name, catalogue.tables)}")


def parse_query(
    text: str, catalogue: Catalogue, *, now: datetime, dialect: str = "spark"
) -> ParsedQuery:
    """Parse, check, freeze and qualify ``text`` against ``catalogue``.

    Raises the errors of ``parse`` and ``check_tables``, and ``UnknownColumnError``.
    """
    query = parse(text, dialect)
    check_tables(query, catalogue)
    try:
        qualified = qualify(
            query.copy(), schema=catalogue.schema(), dialect="spark", quote_identifiers=False, identify=False
        )
    except OptimizeError as error:
        raise UnknownColumnError(_column_error(str(error), query, catalogue)) from error
    frozen, notes = freeze(cast("exp.Query", qualified), now)  # after qualify, which names the projections
    return ParsedQuery(frozen, text, notes)


def _column_error(message: str, query: exp.Query, catalogue: Catalogue) -> str:
    columns = {
        column
        for table in query.find_all(exp.Table)
        if (known := catalogue.get(table.name)) is not None
        for column, _ in known.columns
    }
    for column in query.find_all(exp.Column):
        if f"'{column.name}'" in message or f"{column.name}'" in message or f" {column.name}" in message:
            return f"unknown column {column.sql('spark')!r}; {_nearest(column.name, columns)} ({message})"
    return f"a column cannot be resolved: {message}"


def table_names(query: exp.Query) -> frozenset[str]:
    """Return the names in FROM and JOIN that the query does not define itself."""
    defined = {cte.alias_or_name.lower() for cte in query.find_all(exp.CTE)}
    tables = (t for t in query.find_all(exp.Table) if isinstance(t.this, exp.Identifier))
    return frozenset(t.name for t in tables if t.name.lower() not in defined or t.db)
