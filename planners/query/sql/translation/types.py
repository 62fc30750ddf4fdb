"""What follows from types for a query that another engine than the one it was written for may run."""

from typing import Any

from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.annotate_types import annotate_types

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.sql.calls import CUT, ROUNDED
from ebbflow.planners.query.sql.translation.rules import UNLIKE

_FAILURES = (AssertionError, AttributeError, LookupError, TypeError, ValueError)  # sqlglot's own, on some SQL
_ROUNDING = {exp.DType.FLOAT: "RINT", exp.DType.DOUBLE: "RINT", exp.DType.DECIMAL: "ROUND"}
# that hold what an engine writes in its own way
_OTHER_TEXTS = (
    exp.DType.FLOAT, exp.DType.DOUBLE, exp.DType.ARRAY, exp.DType.LIST, exp.DType.STRUCT, exp.DType.MAP,
    exp.DType.BINARY, exp.DType.VARBINARY, exp.DType.INTERVAL,
)  # fmt: skip
_NO_LISTS = (exp.DType.FLOAT, exp.DType.DOUBLE, exp.DType.STRUCT, exp.DType.MAP, exp.DType.INTERVAL)
_SAID = "texts of such values are others"
_JOINED = (exp.DPipe, exp.Concat, exp.ConcatWs)
_DAYS = ("DAY", "DAYS", "WEEK", "WEEKS", "MONTH", "MONTHS", "QUARTER", "QUARTERS", "YEAR", "YEARS")


def with_types(query: exp.Query, catalogue: Catalogue, dialect: str) -> exp.Query:
    """Have either engine cast fractions to whole numbers, and reckon with dates, as that of ``dialect`` does, and
    mark casts to texts that the other writes otherwise. ``query`` is qualified. Changes it."""
    kinds = (exp.Cast, exp.Sub, exp.Add, exp.Bracket, *_JOINED)
    if dialect.lower() not in ("spark", "duckdb") or not any(isinstance(n, kinds) for n in query.walk()):
        return query
    schema: Any = catalogue.schema()
    known = query.copy()
    pairs = [pair for pair in zip(query.walk(), known.walk(), strict=True) if isinstance(pair[0], kinds)]
    for literal in list(known.find_all(exp.Literal)):
        if literal.is_number and "." in literal.name and "e" not in literal.name.lower():
            literal.replace(exp.cast(literal.copy(), exp.DType.DECIMAL))  # to sqlglot it is a double
    try:
        annotate_types(known, schema=schema, dialect="spark")
    except (SqlglotError, *_FAILURES):
        return query
    for node, typed in reversed(pairs):  # inner ones first
        if isinstance(node, exp.Cast):
            _cast(node, typed.this, dialect)
        elif isinstance(node, exp.Add | exp.Sub):
            _reckoned(node, typed, dialect)
        elif isinstance(node, _JOINED):
            if any(_kind(part) in _NO_LISTS for part in typed.iter_expressions()):
                node.meta[UNLIKE] = _SAID
        elif typed.this.is_type("map") and any(key.is_number for key in node.expressions):
            node.meta[UNLIKE] = "a number may be a place or a key"
    return query


def _kind(value: exp.Expr) -> exp.DType | None:
    return value.type.this if value.type is not None else None


def _cast(node: exp.Cast, value: exp.Expr, dialect: str) -> None:
    kind = _kind(value)
    if node.to.this in exp.DataType.TEXT_TYPES and kind in _OTHER_TEXTS:
        node.meta[UNLIKE] = _SAID
    elif node.to.this in exp.DataType.TEMPORAL_TYPES and kind in exp.DataType.NUMERIC_TYPES:
        node.meta[UNLIKE] = "to DuckDB a number is no time"
    elif node.to.this in exp.DataType.INTEGER_TYPES and kind in _ROUNDING:
        if dialect.lower() == "duckdb":
            node.meta[ROUNDED] = _ROUNDING[kind]
        else:
            node.meta[CUT] = True


def _reckoned(node: exp.Add | exp.Sub, typed: exp.Expr, dialect: str) -> None:
    if not typed.this.is_type("date"):
        return
    by = node.expression
    if typed.expression.is_type("date") and dialect.lower() == "duckdb":
        days = exp.DateDiff(this=node.this, expression=by, unit=exp.var("DAY"), date_part_boundary=True)
        node.replace(days)
    elif typed.expression.is_type("date"):
        node.meta[UNLIKE] = "Spark has an interval, DuckDB a number"
    elif (
        isinstance(by, exp.Interval)
        and by.text("unit").upper() in _DAYS
        and isinstance(node.parent, exp.Alias)
    ):
        kind = exp.DType.DATE if dialect.lower() == "spark" else exp.DType.TIMESTAMPNTZ
        node.replace(exp.cast(node.copy(), kind))
