"""Texts, dates and times."""

from collections.abc import Mapping

from ebbflow.infra.spark.native import types
from ebbflow.infra.spark.native.arithmetic import DAY
from ebbflow.infra.spark.native.catalyst import Node, NotNativeError
from ebbflow.infra.spark.native.expressions import (
    Rule,
    Translator,
    Typed,
    clock_time,
    failing,
    of_clock,
    quoted,
)

_MONTHS = ("interval month", "interval year", "interval year to month")  # all are counted in months

# --- texts ----------------------------------------------------------------------------------------------------


def _text(writer: Translator, node: Node) -> str:
    sql, kind = writer.of(node)
    if kind != "string":
        raise NotNativeError(f"a text of type {kind} is not proven to be equal")
    return sql


def _constant(node: Node, kind: str) -> str:
    if node.kind != "Literal" or node.fields["dataType"] != kind or node.fields["value"] is None:
        raise NotNativeError(f"this argument must be a constant {kind}")
    return str(node.fields["value"])


def _like(writer: Translator, node: Node) -> Typed:
    value, pattern = node.children
    text = _constant(pattern, "string")
    if "\\" in text or writer.escapes:
        raise NotNativeError("LIKE with an escape character is not proven to be equal")
    return Typed(f"({_text(writer, value)} LIKE {quoted(text)})", "boolean")


def _search(name: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        value, part = (_text(writer, child) for child in node.children)
        return Typed(f"{name}({value}, {part})", "boolean")

    return write


def _substring(writer: Translator, node: Node) -> Typed:
    value, at, length = node.children
    start, count = int(_constant(at, "integer")), int(_constant(length, "integer"))
    if start < 1 or count < 0:
        raise NotNativeError("substring from before the start is not proven to be equal")
    return Typed(f"substring({_text(writer, value)}, {start}, {count})", "string")


def _left(writer: Translator, node: Node) -> Typed:
    value, length = node.children
    count = max(int(_constant(length, "integer")), 0)
    return Typed(f"substring({_text(writer, value)}, 1, {count})", "string")


def _concat(writer: Translator, node: Node) -> Typed:
    return Typed("(" + " || ".join(_text(writer, child) for child in node.children) + ")", "string")


def _cased(function: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        text = _text(writer, node.children[0])
        # of letters beyond ASCII some become several, and which do is a matter of each engine's tables
        return Typed(failing(f"strlen({text}) > length({text})", f"{function}({text})"), "string")

    return write


def _length(writer: Translator, node: Node) -> Typed:
    return Typed(f"CAST(length({_text(writer, node.children[0])}) AS INTEGER)", "integer")


def _trimmed(function: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        if len(node.children) != 1:
            raise NotNativeError("trimming other characters than blanks is not proven to be equal")
        return Typed(f"{function}({_text(writer, node.children[0])}, ' ')", "string")

    return write


def _instead(writer: Translator, node: Node) -> Typed:
    text, old, new = (_text(writer, child) for child in node.children)
    return Typed(f"replace({text}, {old}, {new})", "string")


def _place(writer: Translator, node: Node) -> Typed:
    text, part = (_text(writer, child) for child in node.children)
    return Typed(f"CAST(instr({text}, {part}) AS INTEGER)", "integer")


# --- dates ----------------------------------------------------------------------------------------------------


def _date(writer: Translator, node: Node) -> str:
    sql, kind = writer.of(node)
    if kind != "date":
        raise NotNativeError(f"a date of type {kind} is not proven to be equal")
    return sql


def _part(name: str, more: int = 0) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        value = f"{name}({_date(writer, node.children[0])})"
        return Typed(f"CAST({f'({value} + {more})' if more else value} AS INTEGER)", "integer")

    return write


def _days(sign: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        day, count = node.children
        sql, kind = writer.of(count)
        if kind != "integer":
            raise NotNativeError(f"a date and {kind} are not proven to add up equally")
        return Typed(f"({_date(writer, day)} {sign} {sql})", "date")

    return write


def _months(writer: Translator, node: Node) -> Typed:
    day, interval = node.children
    months = _amount(interval, _MONTHS)
    return Typed(f"CAST(({_date(writer, day)} + INTERVAL ({months}) MONTH) AS DATE)", "date")


def _interval_days(_: Translator, node: Node) -> Typed:
    interval = node.children[0]
    if interval.kind != "Literal" or int(str(interval.fields["value"])) % DAY:
        raise NotNativeError("an interval that is no constant of whole days is not proven to be equal")
    return Typed(f"CAST({int(str(interval.fields['value'])) // DAY} AS INTEGER)", "integer")


def _between_days(writer: Translator, node: Node) -> Typed:
    later, sooner = (_date(writer, child) for child in node.children)
    return Typed(f"CAST(({later} - {sooner}) AS INTEGER)", "integer")


def _last_day(writer: Translator, node: Node) -> Typed:
    return Typed(f"last_day({_date(writer, node.children[0])})", "date")


def _date_cut(writer: Translator, node: Node) -> Typed:
    day, unit = node.children
    cut = _unit(unit, _DAYS_OR_MORE)
    return Typed(f"CAST(date_trunc('{cut}', {_date(writer, day)}) AS DATE)", "date")


def _day_of(writer: Translator, node: Node) -> Typed:
    if len(node.children) != 1:
        raise NotNativeError("reading a date in a format is not proven to be equal")
    sql, kind = writer.of(node.children[0])
    if kind == "date":
        return Typed(sql, kind)
    return Typed(f"CAST({_clock(sql, kind, node)} AS DATE)", "date")


# --- times ----------------------------------------------------------------------------------------------------

_DAYS_OR_MORE = {
    "year": "year", "yyyy": "year", "yy": "year", "quarter": "quarter", "month": "month", "mm": "month",
    "mon": "month", "week": "week",
}  # fmt: skip
_UNITS = {
    **_DAYS_OR_MORE, "day": "day", "dd": "day", "hour": "hour", "minute": "minute", "second": "second",
    "millisecond": "millisecond", "microsecond": "microsecond",
}  # fmt: skip


def _unit(node: Node, known: Mapping[str, str]) -> str:
    text = _constant(node, "string").lower()
    if text not in known:
        raise NotNativeError(f"the unit {text!r} is not proven to be equal")
    return known[text]


def _clock(sql: str, kind: str, node: Node) -> str:
    """Return what clocks show in UTC at a time that ``node`` is of."""
    if kind not in types.TIMES:
        raise NotNativeError(f"{node.kind} of {kind} is not proven to be equal")
    return clock_time(sql, kind)


def _time_part(name: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        sql, kind = writer.of(node.children[0])
        return Typed(f"CAST({name}({_clock(sql, kind, node)}) AS INTEGER)", "integer")

    return write


def _time_cut(writer: Translator, node: Node) -> Typed:
    unit, time = node.children
    sql, kind = writer.of(time)
    cut = f"date_trunc('{_unit(unit, _UNITS)}', {_clock(sql, kind, node)})"
    return Typed(of_clock(cut, kind), kind)


def _later(writer: Translator, node: Node) -> Typed:
    time, interval = node.children
    sql, kind = writer.of(time)
    amount = _amount(interval, ("interval day", "interval hour", "interval minute", "interval second"))
    shown = f"make_timestamp(epoch_us({_clock(sql, kind, node)}) + CAST({amount} AS BIGINT))"
    return Typed(of_clock(shown, kind), kind)


def _months_later(writer: Translator, node: Node) -> Typed:
    time, interval = node.children
    sql, kind = writer.of(time)
    shown = f"({_clock(sql, kind, node)} + INTERVAL ({_amount(interval, _MONTHS)}) MONTH)"
    return Typed(of_clock(shown, kind), kind)


def _amount(interval: Node, kinds: tuple[str, ...]) -> int:
    """Return a constant interval's months or microseconds."""
    sign = 1
    if interval.kind == "UnaryMinus":
        sign, (interval,) = -1, interval.children
    if interval.kind != "Literal" or not str(interval.fields["dataType"]).startswith(kinds):
        raise NotNativeError("an interval that is computed is not proven to be equal")
    return sign * int(str(interval.fields["value"]))


RULES: Mapping[str, Rule] = {
    "Like": _like,
    "StartsWith": _search("starts_with"),
    "EndsWith": _search("ends_with"),
    "Contains": _search("contains"),
    "Substring": _substring,
    "Left": _left,
    "Concat": _concat,
    "Length": _length,
    "Upper": _cased("upper"),
    "Lower": _cased("lower"),
    "Year": _part("year"),
    "Month": _part("month"),
    "DayOfMonth": _part("day"),
    "Quarter": _part("quarter"),
    "DateAdd": _days("+"),
    "DateSub": _days("-"),
    "DateDiff": _between_days,
    "DateAddYMInterval": _months,
    "DayOfYear": _part("dayofyear"),
    "DayOfWeek": _part("dayofweek", 1),
    "WeekDay": _part("isodow", -1),
    "WeekOfYear": _part("weekofyear"),
    "LastDay": _last_day,
    "TruncDate": _date_cut,
    "ParseToDate": _day_of,
    "Hour": _time_part("hour"),
    "Minute": _time_part("minute"),
    "Second": _time_part("second"),
    "TruncTimestamp": _time_cut,
    "TimestampAddInterval": _later,
    "TimestampAddYMInterval": _months_later,
    "StringTrim": _trimmed("trim"),
    "StringTrimLeft": _trimmed("ltrim"),
    "StringTrimRight": _trimmed("rtrim"),
    "StringReplace": _instead,
    "StringInstr": _place,
    "ExtractANSIIntervalDays": _interval_days,
}
