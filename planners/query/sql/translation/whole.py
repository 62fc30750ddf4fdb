"""One engine's SQL for a query in the other's, if it says all that the query does."""

import re
from typing import TypeVar, cast

from sqlglot import Dialect, ErrorLevel, exp

from ebbflow.planners.errors import PlanningError, SqlSyntaxError, UnsupportedQueryError
from ebbflow.planners.query.sql.dialect import QuantileDuckDB, Spark4, duckdb_sql, spark_sql
from ebbflow.planners.query.sql.nesting import within_bounds
from ebbflow.planners.query.sql.translation import duckdb, spark
from ebbflow.planners.query.sql.translation.rules import SAID, rewritten, unlike

_Tree = TypeVar("_Tree", bound=exp.Expr)

# what sqlglot remarks on though nothing of the result is another: what is so anyway, and what only Snowflake has
_HARMLESS = re.compile(r"RESPECT NULLS is not|Hints are not|timezone handling differences")


def alike(tree: _Tree, dialect: str) -> _Tree:
    """Return ``tree``, as parsed from ``dialect``, with calls that the other engine has otherwise as such that both
    have alike. Changes ``tree``."""
    known = {"duckdb": spark.ALIKE, "spark": duckdb.ALIKE}.get(dialect.lower())
    return tree if known is None else cast("_Tree", rewritten(tree, known))


def whole_duckdb_sql(tree: exp.Expr, dialect: str) -> str:
    """Return ``tree``, as parsed from ``dialect``, as DuckDB's SQL.

    Raises ``UnsupportedQueryError`` for an argument or a clause that DuckDB has no words for: left out, as sqlglot
    does, it would be another query. Before: ``array_sort(a, f)``; it would be ``list_sort(a)``. Also for calls of
    Spark's that DuckDB answers otherwise. The error says what to do.
    """
    check_said(tree, dialect, "duckdb")
    return duckdb_sql(tree)


def check_said(tree: exp.Expr, dialect: str, engine: str) -> None:
    """Raise ``UnsupportedQueryError`` for what ``engine`` is not told of ``tree``, as parsed from ``dialect``: it
    says what to do."""
    lacks = {"duckdb": duckdb_lacks, "spark": spark_lacks}.get(engine)
    if lacks is not None and (reason := lacks(tree, dialect)):
        raise _advised(reason, engine)


def _advised(reason: str, engine: str) -> UnsupportedQueryError:
    """Return the error of a query in another dialect that ``engine`` does not run, with what to do."""
    other, needs, name = (
        ("spark", " (needs Java)", "DuckDB") if engine == "duckdb" else ("duckdb", "", "Spark")
    )
    ways = [f"run it with --engine {other}{needs}", f"write it in {name}'s SQL with --dialect {engine}"]
    if reason.endswith(SAID):
        ways.append("cast to DECIMAL first")
    return UnsupportedQueryError(f"{reason}; {', '.join(ways[:-1])}, or {ways[-1]}")


def refused(reason: str, dialect: str) -> PlanningError:
    """Return the error of a query in ``dialect`` that DuckDB itself refuses for ``reason``, the first line of its own
    error."""
    if dialect.lower() != "duckdb":
        return _advised(f"DuckDB refuses the query: {reason}", "duckdb")
    if reason.startswith("Parser Error"):
        return SqlSyntaxError(f"DuckDB cannot read the query: {reason}")
    return UnsupportedQueryError(f"DuckDB refuses the query: {reason}")


@within_bounds
def duckdb_lacks(tree: exp.Expr, dialect: str) -> str:
    """Return what DuckDB has no words for in ``tree``, as parsed from ``dialect``, or which call of Spark's it
    answers otherwise, such as ``hash(x)``; empty where it is told the whole query."""
    return (
        ""
        if dialect.lower() == "duckdb"
        else _lacking(tree, dialect.lower() == "spark", QuantileDuckDB(), "DuckDB")
    )


@within_bounds
def spark_lacks(tree: exp.Expr, dialect: str) -> str:
    """Return what Spark has no words for in ``tree``, as parsed from ``dialect``, or which call of DuckDB's it
    answers otherwise, such as ``list(x)``, which has nulls; empty where it is told the whole query."""
    return (
        "" if dialect.lower() == "spark" else _lacking(tree, dialect.lower() == "duckdb", Spark4(), "Spark")
    )


def _lacking(tree: exp.Expr, of_other: bool, words: Dialect, engine: str) -> str:
    writer = words.generator(comments=False, unsupported_level=ErrorLevel.IGNORE)
    writer.generate(tree)
    for message in writer.unsupported_messages:
        if not _HARMLESS.search(message):
            return f"{engine} has no words for all of the query: {message}"
    if not of_other:
        return ""
    known, written = (spark, duckdb_sql) if engine == "Spark" else (duckdb, spark_sql)
    found = unlike(tree, known.UNLIKE_CALLS, known.UNLIKE_NAMES)
    return f"{engine} answers {written(found[0])[:80]!r} otherwise: {found[1]}" if found else ""
