"""Texts and dates."""

from collections.abc import Mapping

from ebbflow.infra.spark.native.arithmetic import DAY
from ebbflow.infra.spark.native.catalyst import Node, NotNativeError
from ebbflow.infra.spark.native.expressions import Rule, Translator, Typed, failing, quoted

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


# --- dates ----------------------------------------------------------------------------------------------------


def _date(writer: Translator, node: Node) -> str:
    sql, kind = writer.of(node)
    if kind != "date":
        raise NotNativeError(f"a date of type {kind} is not proven to be equal")
    return sql


def _part(name: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        return Typed(f"CAST({name}({_date(writer, node.children[0])}) AS INTEGER)", "integer")

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
    sign = 1
    if interval.kind == "UnaryMinus":
        sign, (interval,) = -1, interval.children
    if interval.kind != "Literal" or interval.fields["dataType"] not in _MONTHS:
        raise NotNativeError("an interval that is computed is not proven to be equal")
    months = sign * int(str(interval.fields["value"]))
    return Typed(f"CAST(({_date(writer, day)} + INTERVAL ({months}) MONTH) AS DATE)", "date")


def _interval_days(_: Translator, node: Node) -> Typed:
    interval = node.children[0]
    if interval.kind != "Literal" or int(str(interval.fields["value"])) % DAY:
        raise NotNativeError("an interval that is no constant of whole days is not proven to be equal")
    return Typed(f"CAST({int(str(interval.fields['value'])) // DAY} AS INTEGER)", "integer")


def _between_days(writer: Translator, node: Node) -> Typed:
    later, sooner = (_date(writer, child) for child in node.children)
    return Typed(f"CAST(({later} - {sooner}) AS INTEGER)", "integer")


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
    "ExtractANSIIntervalDays": _interval_days,
}
