"""What follows from types for a query that another engine than the one it was written for may run."""

from sqlglot import exp

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.sql.calls import (
    CUT,
    CUT_IF_ANY,
    DAYS,
    DIGITS,
    KEY,
    LOCAL,
    PLACE,
    ROUNDED,
    WHOLE,
)
from ebbflow.planners.query.sql.translation.kinds import annotated, element_of, is_parameter, kind_of
from ebbflow.planners.query.sql.translation.rules import SAID, UNLIKE

_ROUNDING = {exp.DType.FLOAT: "RINT", exp.DType.DOUBLE: "RINT", exp.DType.DECIMAL: "ROUND"}
# that hold what an engine writes in its own way
_OTHER_TEXTS = (
    exp.DType.FLOAT, exp.DType.DOUBLE, exp.DType.ARRAY, exp.DType.LIST, exp.DType.STRUCT, exp.DType.MAP,
    exp.DType.BINARY, exp.DType.VARBINARY, exp.DType.INTERVAL,
)  # fmt: skip
_NO_LISTS = (exp.DType.FLOAT, exp.DType.DOUBLE, exp.DType.STRUCT, exp.DType.MAP, exp.DType.INTERVAL)
_ZONED = (exp.DType.TIMESTAMPTZ, exp.DType.TIMESTAMPLTZ)
_TIMES = (exp.DType.TIMESTAMP, *_ZONED)
_NOT_KNOWN = "the type of what is cast is not known"
_JOINED = (exp.DPipe, exp.Concat, exp.ConcatWs, exp.GroupConcat)
_WHOLE = (exp.Floor, exp.Ceil)
_KINDS = (exp.Cast, exp.Sub, exp.Add, exp.Bracket, *_JOINED, *_WHOLE)
_SORTED = (exp.ArrayMax, exp.ArrayMin, exp.ArraySort)
_BY_OTHERS = (exp.ArgMax, exp.ArgMin)
_RANKED = (exp.Greatest, exp.Least, exp.Max, exp.Min, exp.Ordered, *_BY_OTHERS, *_SORTED)
_NESTED = (exp.DType.ARRAY, exp.DType.LIST, exp.DType.STRUCT)
_COMPARED = (
    exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.Between, exp.In, exp.NullSafeEQ, exp.NullSafeNEQ,
)  # fmt: skip
_OF_ONE_TYPE = (
    exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.Coalesce, exp.Greatest, exp.Least, *_COMPARED,
)  # fmt: skip
_DAYS = ("DAY", "DAYS", "WEEK", "WEEKS", "MONTH", "MONTHS", "QUARTER", "QUARTERS", "YEAR", "YEARS")


def with_types(query: exp.Query, catalogue: Catalogue, dialect: str) -> exp.Query:
    """Have either engine cast fractions to whole numbers, and reckon with dates, as that of ``dialect`` does, and
    mark casts to texts that the other writes otherwise. Changes ``query``, which need not be qualified."""
    of_spark = dialect.lower() == "spark"
    floats = of_spark and _has_floats(query, catalogue)
    kinds = (*_KINDS, *_RANKED) if _has_nested(query, catalogue) else _KINDS
    kinds = (*kinds, *_OF_ONE_TYPE) if floats else kinds
    if dialect.lower() not in ("spark", "duckdb") or not any(isinstance(n, kinds) for n in query.walk()):
        return query
    known = query.copy()
    pairs = [pair for pair in zip(query.walk(), known.walk(), strict=True) if isinstance(pair[0], kinds)]
    if not annotated(known, catalogue, dialect):
        return query
    for node, typed in reversed(pairs):  # inner ones first
        if floats and isinstance(node, _OF_ONE_TYPE):
            _widened(node, typed)
        if isinstance(node, exp.Cast):
            _cast(node, typed.this, of_spark=of_spark)
        elif isinstance(node, exp.Add | exp.Sub):
            _reckoned(node, typed, of_spark=of_spark)
        elif isinstance(node, _JOINED):
            _joined(node, typed, of_spark=of_spark)
        elif isinstance(node, _WHOLE):
            if of_spark and not node.args.get("decimals") and kind_of(typed.this) != exp.DType.DECIMAL:
                node.meta[WHOLE] = True
        elif isinstance(node, _RANKED):
            _ranked(node, typed)
        elif isinstance(node, exp.Bracket):
            _looked_up(node, typed, of_spark=of_spark)
    return query


def _has_nested(query: exp.Query, catalogue: Catalogue) -> bool:
    """Tell whether the query may have lists or rows among its values."""
    columns = (kind for table in catalogue.tables.values() for _, kind in table.columns)
    return query.find(exp.Array, exp.Struct) is not None or any("<" in kind for kind in columns)


def _has_floats(query: exp.Query, catalogue: Catalogue) -> bool:
    columns = (kind for table in catalogue.tables.values() for _, kind in table.columns)
    return "float" in columns or any(one.this == exp.DType.FLOAT for one in query.find_all(exp.DataType))


def _widened(node: exp.Expr, typed: exp.Expr) -> None:
    """To Spark a FLOAT beside what is none is a DOUBLE, and so is each in a quotient."""
    parts = list(zip(list(node.iter_expressions()), list(typed.iter_expressions()), strict=True))
    known = {kind_of(one) for _, one in parts} - {exp.DType.UNKNOWN, exp.DType.NULL}
    for part, one in parts if len(known) > 1 or isinstance(node, exp.Div) else ():
        if part.arg_key != "query" and kind_of(one) == exp.DType.FLOAT:  # a cast of IN's query has one value
            part.replace(exp.cast(part.copy(), exp.DType.DOUBLE))


def _ranked(node: exp.Expr, typed: exp.Expr) -> None:
    """Mark what puts lists or rows in order."""
    value = typed.expression if isinstance(node, _BY_OTHERS) else typed.this
    if isinstance(node, exp.Ordered) and isinstance(node.this, exp.Column) and not node.this.table:
        select = typed.find_ancestor(exp.Select)
        outputs = select.selects if select is not None else []
        value = next((one.this for one in outputs if one.alias == node.this.name), value)
    kind = element_of(value) if isinstance(node, _SORTED) else kind_of(value)
    if kind in _NESTED:
        node.meta[UNLIKE] = "to DuckDB a NULL within a list or a row is the greatest, to Spark the least"


def _cast(node: exp.Cast, value: exp.Expr, *, of_spark: bool) -> None:
    kind, to = kind_of(value), node.to.this
    simple = isinstance(value.unnest(), exp.Column) and not is_parameter(value.unnest())
    unknown = kind == exp.DType.UNKNOWN and not isinstance(value.unnest(), exp.JSONExtract)
    if to in exp.DataType.TEXT_TYPES:
        if kind in _OTHER_TEXTS or (kind in _ZONED and not of_spark):
            node.meta[UNLIKE] = SAID
        elif kind in _TIMES and of_spark:
            node.meta[LOCAL] = True
        elif unknown and not simple:
            node.meta[UNLIKE] = _NOT_KNOWN
    elif to in exp.DataType.TEMPORAL_TYPES and kind in exp.DataType.NUMERIC_TYPES:
        node.meta[UNLIKE] = "to DuckDB a number is no time"
    elif to in exp.DataType.REAL_TYPES and kind in _ZONED:
        node.meta[UNLIKE] = "to DuckDB a time is no number"
    elif to in exp.DataType.INTEGER_TYPES:
        if kind in _ROUNDING and not of_spark:
            node.meta[ROUNDED] = _ROUNDING[kind]
        elif kind in _ROUNDING:
            node.meta[CUT] = True
        elif kind in exp.DataType.TEXT_TYPES and of_spark:
            node.meta[DIGITS] = True
        elif kind in _ZONED and of_spark:
            node.set("this", exp.UnixSeconds(this=node.this))
        elif unknown and of_spark:
            node.meta[CUT_IF_ANY] = True
        elif unknown and not simple:
            node.meta[UNLIKE] = _NOT_KNOWN


def _joined(node: exp.Expr, typed: exp.Expr, *, of_spark: bool) -> None:
    parts = zip(list(node.iter_expressions()), list(typed.iter_expressions()), strict=True)
    for part, kind in [(part, kind_of(one)) for part, one in parts]:
        if kind in _NO_LISTS or (kind in _ZONED and not of_spark):
            node.meta[UNLIKE] = SAID
        elif kind in _TIMES and of_spark:
            value = part.expressions[0] if isinstance(part, exp.Distinct) else part
            text = exp.cast(value.copy(), exp.DType.TEXT)
            text.meta[LOCAL] = True
            value.replace(text)


def _looked_up(node: exp.Bracket, typed: exp.Expr, *, of_spark: bool) -> None:
    if typed.this.is_type("map"):
        node.meta[KEY] = True
    elif of_spark and typed.this.is_type("array") and not node.args.get("offset"):
        node.meta[PLACE] = kind_of(typed.expressions[0]) in exp.DataType.INTEGER_TYPES


def _reckoned(node: exp.Add | exp.Sub, typed: exp.Expr, *, of_spark: bool) -> None:
    if kind_of(typed.this) != exp.DType.DATE:
        return
    if kind_of(typed.expression) == exp.DType.DATE:
        if of_spark:
            node.meta[UNLIKE] = "Spark has an interval, DuckDB a number"
        else:
            node.meta[DAYS] = True
    elif _whole_days(node.expression) and isinstance(_around(node), exp.Alias | exp.Func | exp.DPipe):
        node.replace(exp.cast(node.copy(), exp.DType.DATE if of_spark else exp.DType.TIMESTAMPNTZ))


def _whole_days(by: exp.Expr) -> bool:
    return isinstance(by, exp.Interval) and by.text("unit").upper() in _DAYS


def _around(node: exp.Expr) -> exp.Expr | None:
    """Return what uses the value of ``node``; compared, a date and a time are the same."""
    while isinstance(node.parent, exp.Paren):
        node = node.parent
    return node.parent
