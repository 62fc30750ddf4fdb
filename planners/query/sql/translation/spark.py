"""Spark's SQL for a query in DuckDB's: what is rewritten, and what Spark answers otherwise."""

from sqlglot import exp

from ebbflow.planners.query.sql.calls import TWO_VALUED, WHOLE_UNITS
from ebbflow.planners.query.sql.translation.rules import (
    BOTH,
    NAMES,
    Rewrites,
    Rules,
    always,
    escaped,
    odd_path,
    whole_number,
)

# --- calls that both have alike -------------------------------------------------------------------------------


def _log(node: exp.Log) -> exp.Expr | None:
    return (
        exp.Anonymous(this="LOG10", expressions=[node.this]) if node.args.get("expression") is None else None
    )


def _day_of_week(node: exp.DayOfWeek) -> exp.Expr:
    return _from_sunday(node.this)


def _from_sunday(day: exp.Expr) -> exp.Expr:
    return exp.paren(exp.Mod(this=exp.DayOfWeekIso(this=day), expression=exp.Literal.number(7)), copy=False)


def _part(node: exp.Extract) -> exp.Expr | None:
    return _part_of(node.name, node.expression)


def _called(node: exp.Anonymous) -> exp.Expr | None:
    name, given = node.name.lower(), node.expressions
    if name == "weekday" and len(given) == 1:
        return _from_sunday(given[0])
    if name in ("date_part", "datepart") and len(given) == 2 and given[0].is_string:
        return _part_of(given[0].name, given[1])
    return None


def _part_of(part: str, of: exp.Expr) -> exp.Expr | None:
    if part.lower() in ("dow", "dayofweek", "weekday"):
        return _from_sunday(of)
    if part.lower() in ("second", "seconds", "s", "sec"):
        return exp.Second(this=of)
    return None


def _day_name(node: exp.Dayname | exp.Monthname) -> exp.Expr:
    form = "%A" if isinstance(node, exp.Dayname) else "%B"
    return exp.TimeToStr(this=node.this, format=exp.Literal.string(form))


def _position(node: exp.ArrayPosition) -> exp.Expr:
    return exp.Nullif(this=node.copy(), expression=exp.Literal.number(0))


def _element(node: exp.Bracket) -> None:
    """A field by its name, and a part of a list, are no elements that may be missing."""
    places = node.expressions
    if len(places) == 1 and not isinstance(places[0], exp.Slice) and not places[0].is_string:
        node.set("safe", True)


def _contained(node: exp.ArrayContains) -> None:
    node.meta[TWO_VALUED] = True


def _like(node: exp.Like | exp.ILike) -> exp.Expr | None:
    """To DuckDB a backslash is one: have another character escape, which the pattern has not."""
    characters = map(chr, (*b"!|~^", *range(0x100, 0x1000)))
    return escaped(node, next(one for one in characters if one not in node.expression.name))


def _of_values(node: exp.ArgMax | exp.ArgMin) -> exp.Expr | None:
    """Leave rows out whose value is NULL."""
    if isinstance(node.this, exp.Distinct):  # of which no test can be made; Spark has no words for it either
        return None
    there = node.this.copy().is_(exp.null()).not_()
    above = node.parent
    if not isinstance(above, exp.Filter) or node.arg_key != "this":
        return exp.Filter(this=node.copy(), expression=exp.Where(this=there))
    above.expression.set("this", exp.and_(there, above.expression.this))
    return None


def _any_case(node: exp.RegexpLike | exp.RegexpReplace) -> None:
    """Tell within a pattern that case does not matter."""
    key = "flag" if isinstance(node, exp.RegexpLike) else "modifiers"
    flags, pattern = node.args.get(key), node.expression
    if flags is not None and flags.is_string and pattern.is_string and flags.name in ("i", "gi", "ig"):
        node.set("expression", exp.Literal.string(f"(?i){pattern.name}"))
        node.set(key, exp.Literal.string("g") if "g" in flags.name else None)


def _instant(node: exp.UnixToTime) -> None:
    if node.args.get("scale") is None:  # else Spark takes whole seconds
        node.set("scale", exp.UnixToTime.SECONDS)


# before: log(x), dayname(d), l[i]; after: LOG10(x), STRFTIME(d, '%A'), an element that may be missing
ALIKE: Rewrites = {
    exp.Log: _log,
    exp.DayOfWeek: _day_of_week,
    exp.Extract: _part,
    exp.Anonymous: _called,
    exp.Dayname: _day_name,
    exp.Monthname: _day_name,
    exp.ArrayPosition: _position,
    exp.Bracket: _element,
    exp.ArrayContains: _contained,
    exp.RegexpLike: _any_case,
    exp.RegexpReplace: _any_case,
    exp.Like: _like,
    exp.ILike: _like,
    exp.ArgMax: _of_values,
    exp.ArgMin: _of_values,
    exp.UnixToTime: _instant,
}

# --- what Spark answers otherwise -----------------------------------------------------------------------------

_JSON_NUMBERS = (*exp.DataType.NUMERIC_TYPES, exp.DType.BOOLEAN)


def _odd_json(node: exp.JSONExtract) -> bool:
    above = node.parent
    while isinstance(above, exp.Paren):
        above = above.parent
    inner = isinstance(above, exp.JSONExtract | exp.JSONExtractScalar) and node.arg_key == "this"
    number = isinstance(above, exp.Cast) and above.to.this in _JSON_NUMBERS
    return odd_path(node) or not (inner or number)


def _odd_cast(node: exp.Cast) -> bool:
    return node.to.this in (exp.DType.JSON, exp.DType.BIT, exp.DType.VARBINARY)


def _odd_split(node: exp.Split) -> bool:
    return not node.expression.is_string or not node.expression.name or "\\E" in node.expression.name


def _odd_split_part(node: exp.SplitPart) -> bool:
    delimiter = node.args["delimiter"]
    return (delimiter.is_string and not delimiter.name) or whole_number(node.args["part_index"]) == 0


def _odd_replacing(node: exp.RegexpReplace) -> bool:
    flags, by = node.args.get("modifiers"), node.args["replacement"]
    return flags is None or flags.name != "g" or not by.is_string or bool(set(by.name) & set("\\$"))


def _odd_group(node: exp.RegexpExtract | exp.RegexpExtractAll) -> bool:
    return whole_number(node.args.get("group")) is None


def _odd_unit(node: exp.DateDiff | exp.TimestampTrunc | exp.DateTrunc) -> bool:
    return node.text("unit").upper() not in WHOLE_UNITS


def _odd_series(node: exp.GenerateSeries) -> bool:
    if node.args.get("is_end_exclusive"):  # sqlglot sees to that, but for steps
        return node.args.get("step") is not None
    start, end, step = (node.args.get(key) for key in ("start", "end", "step"))
    first, last = whole_number(start), whole_number(end)
    return (
        first is None or last is None or first > last or (step is not None and (whole_number(step) or 0) < 1)
    )


def _odd_join(node: exp.Join) -> bool:
    return node.method in ("ASOF", "POSITIONAL")


UNLIKE_CALLS: Rules = {
    **BOTH,
    exp.JSONExtract: (
        _odd_json,
        "Spark gives text, not JSON, and has paths of keys and places from the start only",
    ),
    exp.ParseJSON: (always, "Spark keeps a text of JSON as it is"),
    exp.Cast: (_odd_cast, "JSON, bits and bytes have other texts"),
    exp.TryCast: (_odd_cast, "JSON, bits and bytes have other texts"),
    exp.Split: (_odd_split, "Spark splits by a pattern"),
    exp.SplitPart: (_odd_split_part, "Spark has no part 0, and no empty separator"),
    exp.RegexpLike: (lambda node: node.args.get("flag") is not None, "Spark has no such options"),
    exp.RegexpReplace: (_odd_replacing, "Spark replaces all matches, and has other words for groups"),
    exp.RegexpExtract: (_odd_group, "Spark takes one group, by its number"),
    exp.RegexpExtractAll: (_odd_group, "Spark takes one group, by its number"),
    exp.Unicode: (always, "of an empty text, Spark has 0"),
    exp.DateDiff: (_odd_unit, "Spark does not know the unit"),
    exp.TimestampTrunc: (_odd_unit, "Spark does not know the unit"),
    exp.DateTrunc: (_odd_unit, "Spark does not know the unit"),
    exp.TimeToUnix: (always, "Spark has whole seconds"),
    exp.GenerateSeries: (_odd_series, "Spark counts down where the end is before the start"),
    exp.ArrayConcat: (always, "Spark has NULL where a list is NULL"),
    exp.ArrayAgg: (always, "Spark leaves nulls and the order out"),
    exp.Quantile: (always, "Spark interpolates"),
    exp.ApproxQuantile: (always, "Spark has one of the values"),
    exp.ToBinary: (always, "it is another function"),
    exp.Any: (lambda node: not isinstance(node.this, exp.Query), "Spark has NULL where a list is NULL"),
    exp.Join: (_odd_join, "Spark takes the word for an alias"),
}
UNLIKE_NAMES = {
    **NAMES,
    "bit_count": "Spark counts in 64 bits",
    "element_at": "it is a list on DuckDB",
    **dict.fromkeys(("regexp_extract", "regexp_extract_all", "regexp_replace"), "Spark has no such options"),
    **dict.fromkeys(("row", "struct_pack"), "Spark calls fields otherwise"),
}
