"""DuckDB's SQL for a query in Spark's: what is rewritten, and what DuckDB answers otherwise."""

from sqlglot import exp

from ebbflow.planners.query.sql.calls import (
    EXACT,
    KEY,
    NULLS_TOO,
    PLACE,
    WHOLE_UNITS,
    OrderedPercentile,
    Percentile,
)
from ebbflow.planners.query.sql.translation.rules import (
    BOTH,
    NAMES,
    Rewrites,
    Rules,
    always,
    escaped,
    odd_format,
    odd_reading,
    whole_number,
)

# --- calls that both have alike -------------------------------------------------------------------------------


def _from_sunday(day: exp.Expr) -> exp.Expr:
    rest = exp.Mod(this=exp.DayOfWeekIso(this=day), expression=exp.Literal.number(7))
    return exp.paren(exp.Add(this=rest, expression=exp.Literal.number(1)), copy=False)


def _day_of_week(node: exp.DayOfWeek) -> exp.Expr:
    return _from_sunday(node.this)


def _part(node: exp.Extract) -> exp.Expr | None:
    found = _part_of(node.name, node.expression)
    return None if isinstance(found, exp.Extract) else found


def _called(node: exp.Anonymous) -> exp.Expr | None:
    name, given = node.name.lower(), node.expressions
    if name == "weekday" and len(given) == 1:
        return exp.paren(
            exp.Sub(this=exp.DayOfWeekIso(this=given[0]), expression=exp.Literal.number(1)), copy=False
        )
    if name in ("date_part", "datepart") and len(given) == 2 and given[0].is_string:
        return _part_of(given[0].name, given[1])
    if name in ("isnull", "isnotnull") and len(given) == 1:
        there = given[0].is_(exp.null())
        return exp.paren(there if name == "isnull" else there.not_(), copy=False)
    if name == "log10" and len(given) == 1:
        node.set("expressions", [_positive(given[0])])
    return None


def _part_of(part: str, of: exp.Expr) -> exp.Expr:
    if part.lower() in ("dow", "dayofweek"):
        return _from_sunday(of)
    if part.lower() in ("dow_iso", "dayofweek_iso", "dayofweekiso"):
        return exp.DayOfWeekIso(this=of)
    return exp.Extract(this=exp.var(part.upper()), expression=of)


def _day_name(node: exp.Dayname | exp.Monthname) -> exp.Expr:
    form = "%a" if isinstance(node, exp.Dayname) else "%b"
    return exp.TimeToStr(this=node.this, format=exp.Literal.string(form))


def _collected(node: exp.ArrayAgg | exp.ArrayUniqueAgg) -> exp.Expr | None:
    """A list of no values is empty on Spark."""
    outer: exp.Expr = node
    while isinstance(outer.parent, exp.Filter | exp.Window | exp.WithinGroup) and outer.arg_key == "this":
        outer = outer.parent
    if outer is node:
        return exp.Coalesce(this=node.copy(), expressions=[exp.Array()])
    known = exp.Coalesce(expressions=[exp.Array()])
    outer.replace(known)
    known.set("this", outer)  # not a copy: parts of it may still be rewritten
    return None


def _of_nulls_too(node: exp.ArgMax | exp.ArgMin) -> None:
    node.meta[NULLS_TOO] = True


def _truncated(node: exp.DateTrunc | exp.TimestampTrunc) -> exp.Expr | None:
    unit = _UNITS.get(node.text("unit").upper())
    if unit is not None:
        node.args["unit"].set("this", unit)
    return _date(node) if isinstance(node, exp.DateTrunc) else None


def _date(node: exp.Expr) -> exp.Expr | None:
    """A date moved by whole days is a date on Spark, a timestamp on DuckDB."""
    above = node.parent
    if isinstance(above, exp.Cast) and above.to.this == exp.DType.DATE:
        return None
    return exp.cast(node.copy(), exp.DType.DATE)


def _position(node: exp.ArrayPosition) -> exp.Expr | None:
    known = exp.and_(*(one.copy().is_(exp.null()).not_() for one in (node.this, node.expression)))
    found = exp.Coalesce(this=node.copy(), expressions=[exp.Literal.number(0)])
    return exp.Case().when(known, found)


def _between_times(node: exp.DateDiff) -> exp.Expr | None:
    """Count whole units between two times, not between their dates."""
    if node.text("unit").upper() not in _EXACT:
        return None
    start, end = (
        exp.cast(one.this if isinstance(one, exp.TsOrDsToDate) else one, exp.DType.TIMESTAMP)
        for one in (node.expression, node.this)
    )
    return exp.TimestampDiff(this=end, expression=start, unit=node.args["unit"])


def _from_start(node: exp.Substring) -> None:
    """To Spark, place 0 is the first too."""
    if whole_number(node.args.get("start")) == 0:
        node.set("start", exp.Literal.number(1))


def _like(node: exp.Like | exp.ILike) -> exp.Expr | None:
    return escaped(node, "\\")


def _as_double(node: exp.Expr) -> None:
    """To Spark percentiles are doubles, to DuckDB those of decimals have their scale."""
    of = node.expression.expressions[0] if isinstance(node, OrderedPercentile) else node
    among = isinstance(node, OrderedPercentile) and not isinstance(node.this, exp.PercentileCont)
    if not among and not (isinstance(of.this, exp.Cast) and of.this.to.this == exp.DType.DOUBLE):
        of.set("this", exp.cast(of.this, exp.DType.DOUBLE))


def _positive(value: exp.Expr) -> exp.Expr:
    """Return ``value`` where it is above 0, else NULL."""
    zero = exp.Literal.number(0)
    kept = exp.Greatest(this=exp.cast(value, exp.DType.DOUBLE), expressions=[zero], ignore_nulls=True)
    return exp.Nullif(this=kept, expression=zero.copy())


def _logarithm(node: exp.Ln | exp.Log) -> None:
    """To Spark there is none of 0 and below."""
    key = "expression" if isinstance(node, exp.Log) else "this"
    node.set(key, _positive(node.args[key]))


def _with_all(node: exp.Group) -> None:
    """Before: ``GROUP BY a, b WITH ROLLUP``; after: ``GROUP BY ROLLUP (a, b)``."""
    for key in ("rollup", "cube"):
        (*_, whole) = node.args.get(key) or [None]
        if whole is not None and not whole.expressions:
            whole.set("expressions", node.expressions)
            node.set("expressions", [whole])
            node.set(key, None)


def _one_of_them(node: exp.ApproxQuantile) -> None:
    """To DuckDB an approximate percentile is between values."""
    node.meta[EXACT] = True


_EXACT = ("WEEK", "DAY", "HOUR", "MINUTE", "SECOND")  # units that always take as long
_UNITS = {"MM": "MONTH", "MON": "MONTH", "YYYY": "YEAR", "YY": "YEAR", "DD": "DAY"}

ALIKE: Rewrites = {
    exp.ApproxQuantile: _one_of_them,
    exp.Group: _with_all,
    exp.Ln: _logarithm,
    exp.Log: _logarithm,
    exp.Median: _as_double,
    Percentile: _as_double,
    OrderedPercentile: _as_double,
    exp.DayOfWeek: _day_of_week,
    exp.Extract: _part,
    exp.Anonymous: _called,
    exp.Dayname: _day_name,
    exp.Monthname: _day_name,
    exp.ArrayAgg: _collected,
    exp.ArrayUniqueAgg: _collected,
    exp.ArgMax: _of_nulls_too,
    exp.ArgMin: _of_nulls_too,
    exp.TsOrDsAdd: _date,
    exp.AddMonths: _date,
    exp.DateTrunc: _truncated,
    exp.TimestampTrunc: _truncated,
    exp.DateFromUnixDate: _date,
    exp.ArrayPosition: _position,
    exp.DateDiff: _between_times,
    exp.Like: _like,
    exp.ILike: _like,
    exp.Substring: _from_start,
}

# --- what DuckDB answers otherwise ----------------------------------------------------------------------------


def _odd_unit(node: exp.DateDiff | exp.TimestampDiff) -> bool:
    return bool(node.text("unit")) and node.text("unit").upper() not in _EXACT


def _of_fractions(node: exp.Extract) -> bool:
    return node.name.lower() in ("second", "seconds", "s", "sec", "secs")


def _odd_replacing(node: exp.RegexpReplace) -> bool:
    by = node.args["replacement"]
    return not by.is_string or bool(set(by.name) & set("\\$"))


def _odd_series(node: exp.GenerateSeries) -> bool:
    first, last = whole_number(node.args["start"]), whole_number(node.args["end"])
    step = node.args.get("step")
    if step is not None:
        return whole_number(step) is None
    return first is None or last is None or first > last


def _odd_trunc(node: exp.TimestampTrunc) -> bool:
    return node.text("unit").upper() not in WHOLE_UNITS


def _odd_date_trunc(node: exp.DateTrunc) -> bool:
    return node.text("unit").upper() not in ("YEAR", "QUARTER", "MONTH", "WEEK")


def _to_bytes(node: exp.Cast) -> bool:
    return node.to.this in (exp.DType.BINARY, exp.DType.VARBINARY)


def _odd_place(node: exp.Bracket) -> bool:
    if "offset" in node.args or len(node.expressions) != 1:
        return False
    place = node.expressions[0]
    if node.meta_get(KEY) or node.meta_get(PLACE):
        return False
    return whole_number(place) is None and not place.is_string


def _counting(node: exp.Pivot) -> bool:
    return not node.unpivot and any(one.find(exp.Count, exp.CountIf) for one in node.expressions)


UNLIKE_CALLS: Rules = {
    **BOTH,
    exp.Pivot: (_counting, "DuckDB counts 0 where Spark has NULL"),
    exp.DateDiff: (_odd_unit, "DuckDB counts whole months in another way"),
    exp.TimestampDiff: (_odd_unit, "DuckDB counts whole months in another way"),
    exp.Extract: (_of_fractions, "Spark has fractions of seconds"),
    exp.MonthsBetween: (always, "Spark counts times of the day, and rounds"),
    exp.GenerateSeries: (_odd_series, "Spark counts down where the end is before the start"),
    exp.RegexpReplace: (_odd_replacing, "DuckDB has other words for groups"),
    exp.Bracket: (_odd_place, "DuckDB counts places from 1"),
    exp.TsOrDsToDate: (odd_reading, "it has other formats"),
    exp.UnixToStr: (odd_format, "it has other formats"),
    exp.StrToUnix: (odd_reading, "it has other formats"),
    exp.JSONFormat: (always, "Spark leaves out fields that are NULL"),
    exp.DateTrunc: (_odd_date_trunc, "Spark does not know the unit"),
    exp.TimestampTrunc: (_odd_trunc, "Spark does not know the unit"),
    exp.Cast: (_to_bytes, "bytes have other texts"),
    exp.TryCast: (_to_bytes, "bytes have other texts"),
    exp.ArrayExcept: (always, "DuckDB leaves a NULL and the order out"),
    exp.ArrayInsert: (always, "Spark fills a list with NULL"),
    exp.ArraysZip: (always, "fields have other names"),
    exp.Format: (always, "Spark writes NULL as null, and has other formats"),
    exp.ArrayIntersect: (always, "DuckDB leaves a NULL and the order out"),
    exp.BitwiseCount: (always, "Spark counts in 64 bits"),
    exp.ArrayRemove: (always, "it would leave nulls out"),
}
UNLIKE_NAMES = NAMES
