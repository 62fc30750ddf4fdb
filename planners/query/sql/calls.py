"""Calls whose trees sqlglot would write as others: percentiles, first and last values of groups, which DuckDB has
under other names than those of windows, and what DuckDB has otherwise than Spark."""

from typing import Any, ClassVar
from typing import cast as as_type

from sqlglot import exp
from sqlglot.generator import Generator
from sqlglot.generators.duckdb import DuckDBGenerator
from sqlglot.generators.spark import SparkGenerator


class Percentile(exp.Expression, exp.AggFunc):
    """Spark's ``percentile(this, expression)``, which interpolates; sqlglot takes DuckDB's ``quantile`` for it,
    which does not."""

    arg_types: ClassVar = {"this": True, "expression": True}


class OrderedPercentile(exp.Expression, exp.AggFunc):
    """``percentile_cont(p) WITHIN GROUP (ORDER BY x)``: ``this`` and ``expression`` are those of the
    ``WithinGroup`` whose place it takes. sqlglot would write Spark's approximate percentile instead."""

    arg_types: ClassVar = {"this": True, "expression": True}


def ordered_for_spark(writer: Generator, call: OrderedPercentile) -> str:
    """Return Spark's SQL of ``call``."""
    name, fraction = call.this.sql_name(), writer.sql(call.this, "this")
    return f"{name}({fraction}) WITHIN GROUP ({writer.sql(call, 'expression').strip()})"


def ordered_for_duckdb(writer: Generator, call: OrderedPercentile) -> str:
    """Return DuckDB's SQL of ``call``."""
    name = "QUANTILE_CONT" if isinstance(call.this, exp.PercentileCont) else "QUANTILE_DISC"
    key = writer.sql(call.expression.expressions[0], "this")
    return f"{name}({key}, {writer.sql(call.this, 'this')}{writer.sql(call, 'expression')})"


_OF_GROUPS: dict[type[exp.Expr], type[exp.Func]] = {exp.FirstValue: exp.First, exp.LastValue: exp.Last}


def of_group(call: exp.Expr) -> Any:
    """Return ``call``; of ``first_value`` and ``last_value`` outside windows, where DuckDB has none, what they are of
    a group."""
    known = _OF_GROUPS.get(type(call))
    node = call
    while isinstance(node.parent, exp.IgnoreNulls | exp.RespectNulls | exp.Filter):
        node = node.parent
    if known is None or (isinstance(node.parent, exp.Window) and node.arg_key == "this"):
        return call
    return known(this=call.this.copy())


def value_of(call: exp.First | exp.Last) -> Any:
    """Return what ``call`` is one value of, without the order of its argument."""
    return call.this.this if isinstance(call.this, exp.Order) else call.this


# units of which DuckDB counts the bounds between two times, and Spark whole ones
WHOLE_UNITS = ("YEAR", "QUARTER", "MONTH", "WEEK", "DAY", "HOUR", "MINUTE", "SECOND")
ROUNDED = "rounded"  # marks a cast to whole numbers with Spark's function that rounds as DuckDB's cast does
CUT = "cut"  # marks a cast to whole numbers that cuts fractions off, as Spark's does
NULLS_TOO = "nulls_too"  # marks a value at an extreme that may be NULL, as Spark's
CUT_IF_ANY = "cut_if_any"  # as ``CUT``, of what may be no number
LOCAL = "local"  # marks a cast to a text of a time, which DuckDB writes with its zone, and Spark without
WHOLE = "whole"  # marks FLOOR and CEIL whose result is a whole number, as Spark's
DAYS = "days"  # marks a difference of two dates that is a number of days, as DuckDB's
KEY = "key"  # marks a look into a map
PLACE = "place"  # marks a look into a list at a place that is counted from 0, as Spark does
TWO_VALUED = "two_valued"  # marks a test of a list that is false where an element is NULL, as DuckDB's is
EXACT = "exact"  # marks an approximate percentile that is one of the values, as Spark's
DIGITS = "digits"  # marks a cast of a text to whole numbers, of which Spark takes no point and no exponent


def date_diff_for_spark(writer: Generator, call: exp.DateDiff) -> str:
    """Return Spark's SQL of ``call``, which counts bounds where they are meant: between the beginnings of units,
    whole units are as many."""
    unit = call.text("unit").upper()
    if not call.args.get("date_part_boundary") or unit not in WHOLE_UNITS:
        return SparkGenerator.datediff_sql(as_type("SparkGenerator", writer), call)
    start, end = (
        writer.func("DATE_TRUNC", exp.Literal.string(unit), one) for one in (call.expression, call.this)
    )
    return f"DATEDIFF({unit}, {start}, {end})"


def sub_for_spark(writer: Generator, node: exp.Sub) -> str:
    """Return Spark's SQL of ``node``, whose difference of two dates is an interval."""
    if not node.meta_get(DAYS):
        return writer.binary(node, "-")
    start, end = node.expression.copy(), node.this.copy()
    unit = exp.var("DAY")
    return date_diff_for_spark(
        writer, exp.DateDiff(this=end, expression=start, unit=unit, date_part_boundary=True)
    )


def contains_for_spark(writer: Generator, call: exp.ArrayContains) -> str:
    """Return Spark's SQL of ``call``."""
    if call.meta_get(TWO_VALUED):
        return f"({writer.func('ARRAY_POSITION', call.this, call.expression)} > 0)"
    return writer.func("ARRAY_CONTAINS", call.this, call.expression)


def rounded_for_spark(cast: exp.Cast) -> exp.Cast:
    """Return ``cast`` with the function that it is marked with: without one, Spark cuts fractions off."""
    name = cast.meta_get(ROUNDED)
    if not name:
        return cast
    rounded = cast.copy()
    rounded.set("this", exp.Anonymous(this=name, expressions=[rounded.this]))
    return rounded


def cut_for_duckdb(cast: exp.Cast) -> exp.Cast:
    """Return ``cast`` such that it cuts fractions off where it is marked so: else DuckDB rounds. A text of a time has
    no zone, and a text of a number that is not whole is none, where it is marked so."""
    if cast.meta_get(LOCAL):
        local = cast.copy()
        local.set("this", exp.cast(local.this, exp.DType.TIMESTAMP))
        return local
    if cast.meta_get(CUT):
        cut = cast.copy()
        cut.set("this", exp.Anonymous(this="TRUNC", expressions=[cut.this]))
        return cut
    if cast.meta_get(DIGITS):
        digits = cast.copy()
        parts = [digits.this, exp.Literal.string("._eExXbB"), exp.Literal.string("?" * 8)]
        digits.set("this", exp.Anonymous(this="TRANSLATE", expressions=parts))
        return digits
    return cast


def cut_if_any_for_duckdb(writer: Generator, cast: exp.Cast, prefix: str) -> str:
    """Return DuckDB's SQL of ``cast`` that cuts off the fractions of what has some: only DuckDB knows its type."""
    value, to, word = writer.sql(cast, "this"), writer.sql(cast, "to"), f"{prefix}CAST"
    nested = any(one.meta_get(CUT_IF_ANY) for one in cast.this.walk())
    one = "_cut" if nested else value  # written several times, within another one it would be so at each
    found = (
        f"CASE WHEN TYPEOF({one}) IN ('DOUBLE', 'FLOAT') THEN {word}(TRUNC({word}({one} AS DOUBLE)) AS {to}) "
        f"WHEN STARTS_WITH(TYPEOF({one}), 'DECIMAL') "
        f"THEN {word}(SPLIT_PART(CAST({one} AS TEXT), '.', 1) AS {to}) ELSE {word}({one} AS {to}) END"
    )
    return f"LIST_TRANSFORM([{value}], LAMBDA {one} : {found})[1]" if nested else found


def whole_for_duckdb(writer: Generator, call: exp.Floor | exp.Ceil) -> str:
    """Return DuckDB's SQL of ``call``, which is a double there also of a whole number."""
    found = writer.ceil_floor(call)
    return f"CAST({found} AS BIGINT)" if call.meta_get(WHOLE) else found


def place_for_duckdb(writer: Generator, node: exp.Bracket) -> str:
    """Return DuckDB's SQL of ``node``; of one marked so a look into a list at a place from 0, or into a map."""
    places = node.expressions
    computed = len(places) == 1 and not isinstance(places[0], exp.Literal | exp.Slice)
    if len(places) != 1 or not (node.meta_get(KEY) or (computed and node.meta_get(PLACE))):
        return DuckDBGenerator.bracket_sql(as_type("DuckDBGenerator", writer), node)
    items, place = writer.sql(node, "this"), writer.sql(places[0])
    if node.meta_get(KEY):
        return f"{items}[{place}]"
    return f"{items}[GREATEST({place}, -1) + 1]"  # of place 0 there is nothing


def contains_for_duckdb(writer: Generator, call: exp.ArrayContains) -> str:
    """Return DuckDB's SQL of ``call``; on Spark a list with a NULL may or may not hold what is not found in it."""
    items = writer.sql(call, "this")
    found = writer.func("LIST_CONTAINS", call.this, call.expression)
    if call.meta_get(TWO_VALUED):
        return found
    return f"CASE WHEN {found} OR LIST_COUNT({items}) = LENGTH({items}) THEN {found} END"


def whole_units_for_duckdb(writer: Generator, call: exp.TimestampDiff) -> str:
    """Return DuckDB's SQL of ``call``, which counts whole units and not their bounds."""
    unit = exp.Literal.string(call.text("unit").upper())
    return writer.func("DATE_SUB", unit, call.expression, call.this)


def extreme_for_duckdb(writer: Generator, call: exp.ArgMax | exp.ArgMin) -> str:
    """Return DuckDB's SQL of ``call``."""
    name = "ARG_MAX" if isinstance(call, exp.ArgMax) else "ARG_MIN"
    return writer.func(
        f"{name}_NULL" if call.meta_get(NULLS_TOO) else name,
        call.this,
        call.expression,
        call.args.get("count"),
    )


def unix_for_duckdb(writer: Generator, call: exp.StrToUnix) -> str:
    """Return DuckDB's SQL of ``call``, a whole number; without a format its argument may be a time or a date."""
    text, form = writer.sql(call, "this") or "NOW()", writer.format_time(call)
    if form not in (None, "'%Y-%m-%d %H:%M:%S'"):
        text = f"STRPTIME({text}, {form})"
    return f"CAST(FLOOR(EPOCH(CAST({text} AS TIMESTAMPTZ))) AS BIGINT)"


def percentile_for_duckdb(writer: Generator, call: exp.ApproxQuantile) -> str:
    """Return DuckDB's SQL of ``call``; of one marked so the exact one, which Spark's is of some thousand values."""
    if call.meta_get(EXACT):
        return writer.func("QUANTILE_DISC", call.this, call.args["quantile"])
    return DuckDBGenerator.approxquantile_sql(as_type("DuckDBGenerator", writer), call)


FOR_SPARK: dict[type[exp.Expr], Any] = {
    OrderedPercentile: ordered_for_spark,
    exp.Sub: sub_for_spark,
    exp.ArrayContains: contains_for_spark,
    exp.DateDiff: date_diff_for_spark,
}
FOR_DUCKDB: dict[type[exp.Expr], Any] = {
    OrderedPercentile: ordered_for_duckdb,
    exp.ApproxQuantile: percentile_for_duckdb,
    exp.ArgMax: extreme_for_duckdb,
    exp.ArgMin: extreme_for_duckdb,
    exp.ArrayContains: contains_for_duckdb,
    exp.Bracket: place_for_duckdb,
    exp.Ceil: whole_for_duckdb,
    exp.StrToUnix: unix_for_duckdb,
    exp.Floor: whole_for_duckdb,
}
