"""Spark's resolved expressions as DuckDB's, those of which generated tests have proven that the values are equal.

What DuckDB computes is what Spark computes, or an error: then Spark SQL runs the stage and has the last word. So a
statement may fail that Spark would answer, and must never answer what Spark would refuse.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ebbflow.infra.spark.native import types
from ebbflow.infra.spark.native.catalyst import Node, NotNativeError
from ebbflow.infra.spark.native.types import Decimal, decimal, duckdb_type

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_DAY = 86_400_000_000  # microseconds
_EXACT_DOUBLE = 15  # digits of a decimal whose division by a power of ten is one rounding


class Typed(NamedTuple):
    """An expression in DuckDB's SQL, and the Spark type that its values have."""

    sql: str
    type: str


Subquery = Callable[[Node], tuple[str, tuple[str, ...]]]  # a subquery's plan: its SQL and its columns' types


@dataclass(frozen=True)
class Translator:
    """Writes expressions.

    Args:
        subquery: writes the plan of one.
        replaced: what was computed below, by the text that it stands for.
        calls: writes aggregate calls, where there may be any.
        escapes: the statement may name an escape character, which Spark's plan does not show.
        common: what a reference to a common expression means.
    """

    subquery: Subquery
    replaced: Mapping[str, Typed]
    calls: Callable[[Node], Typed] | None = None
    escapes: bool = False
    common: Typed | None = None

    def of(self, node: Node) -> Typed:
        """Return ``node`` in DuckDB's SQL. Raises ``NotNativeError``."""
        if node.kind == "AggregateExpression":
            if self.calls is None:
                raise NotNativeError("an aggregate stands where none can be computed")
            return self.calls(node)
        rule = _RULES.get(node.kind)
        if self.replaced and rule is not None and node.kind not in ("Literal", "Alias"):
            whole = self.replaced.get(self._without().of(node).sql) if _free_of_calls(node) else None
            if whole is not None:
                return whole
        if rule is None:
            raise NotNativeError(f"{node.kind} is not proven to be equal")
        return rule(self, node)

    def _without(self) -> "Translator":
        return replace(self, replaced={}, calls=None)

    def all(self, node: Node) -> list[Typed]:
        """Return the children of ``node``."""
        return [self.of(child) for child in node.children]


def _free_of_calls(node: Node) -> bool:
    return all(n.kind != "AggregateExpression" for n in node.walk())


def quoted(text: str) -> str:
    """Return ``text`` as a literal. Raises ``NotNativeError``."""
    if "\0" in text:
        raise NotNativeError("a text holds a zero byte")
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """Return ``name`` as an identifier."""
    return '"' + name.replace('"', '""') + '"'


def cast(sql: str, kind: str) -> str:
    """Return a cast to one of Spark's types."""
    return f"CAST({sql} AS {duckdb_type(kind)})"


def failing(test: str, value: str) -> str:
    """Return ``value``, or an error where ``test`` holds."""
    return f"(CASE WHEN {test} THEN error('Spark decides') ELSE {value} END)"


def unscaled(sql: str, kind: Decimal) -> str:
    """Return a decimal's digits as a whole number of 128 bits."""
    if not kind.scale:
        return f"CAST({sql} AS HUGEINT)"
    ten = f"CAST('1{'0' * kind.scale}' AS DECIMAL({kind.scale + 1},0))"
    return f"CAST(CAST({sql} AS DECIMAL({types.MOST},{kind.scale})) * {ten} AS HUGEINT)"


def quotient(above: str, below: str, result: Decimal, shift: int) -> str:
    """Return ``above``·10^``shift``/``below``, whole numbers of 128 bits, as a decimal, rounded half up."""
    if not 0 <= shift <= types.MOST - 1:
        raise NotNativeError("a quotient has more digits than are proven to be equal")
    ten = f"CAST('1{'0' * shift}' AS HUGEINT)"
    # from inside out: numerator and denominator are computed once each
    whole = (
        "(CASE WHEN d = 0 THEN error('Spark decides') ELSE "
        "(CASE WHEN (n < 0) = (d < 0) THEN CAST(1 AS HUGEINT) ELSE CAST(-1 AS HUGEINT) END)"
        " * ((2 * abs(n) + abs(d)) // (2 * abs(d))) END)"
    )
    digits = whole.replace("abs(n)", f"abs({above} * {ten})").replace("(n < 0)", f"({above} < 0)")
    digits = digits.replace("abs(d)", f"abs({below})").replace("(d < 0)", f"({below} < 0)")
    digits = digits.replace("WHEN d = 0", f"WHEN {below} = 0")
    return scaled(digits, result)


def scaled(digits: str, result: Decimal) -> str:
    """Return a whole number of 128 bits as the digits of a decimal."""
    value = f"CAST({digits} AS DECIMAL({types.MOST},0))"
    if result.scale:
        value = f"({value} * CAST('0.{'0' * (result.scale - 1)}1' AS DECIMAL({result.scale},{result.scale})))"
    return cast(value, result.name)


# --- leaves ---------------------------------------------------------------------------------------------------


def _attribute(_: Translator, node: Node) -> Typed:
    found = node.attribute
    if found.type != "void":  # which only a cast may make something of
        duckdb_type(found.type)
    return Typed(found.column, found.type)


def _outer(writer: Translator, node: Node) -> Typed:
    return _attribute(writer, node.expression("e"))


def _alias(writer: Translator, node: Node) -> Typed:
    return writer.of(node.children[0])


def _literal(_: Translator, node: Node) -> Typed:
    kind, value = str(node.fields["dataType"]), node.fields["value"]
    if value is None:
        if kind == "void":
            return Typed("NULL", kind)
        return Typed(cast("NULL", kind), kind)
    text = str(value)
    if kind == "string":
        return Typed(quoted(text), kind)
    if kind == "date":
        return Typed(f"DATE {quoted(_plain_date(text))}", kind)
    if kind == "boolean":
        return Typed(text.lower(), kind)
    if kind in types.INTEGERS or kind == "double" or decimal(kind) is not None:
        if kind == "double" and not re.fullmatch(r"-?[0-9.]+(E-?[0-9]+)?", text):
            raise NotNativeError(f"the number {text} is not proven to be equal")
        return Typed(cast(quoted(text), kind), kind)
    raise NotNativeError(f"a literal of type {kind} is not proven to be equal")


def _plain_date(text: str) -> str:
    if not _DATE.fullmatch(text):
        raise NotNativeError(f"the date {text!r} is not proven to be equal")
    return text


# --- arithmetic -----------------------------------------------------------------------------------------------


def _arithmetic(sign: str) -> Callable[[Translator, Node], Typed]:
    def write(writer: Translator, node: Node) -> Typed:
        (a, left), (b, right) = writer.all(node)
        if left == right and (left in types.INTEGERS or left == "double"):
            return Typed(f"({a} {sign} {b})", left)
        one, other = decimal(left), decimal(right)
        if one is None or other is None:
            raise NotNativeError(f"{left} {sign} {right} is not proven to be equal")
        result = types.multiplied(one, other) if sign == "*" else types.added(one, other)
        scale = one.scale + other.scale if sign == "*" else max(one.scale, other.scale)
        if scale > types.MOST:
            raise NotNativeError("a product has more digits than are proven to be equal")
        if sign == "*":
            return Typed(cast(f"({a} * {b})", result.name), result.name)
        whole = max(one.precision - one.scale, other.precision - other.scale) + 1
        wide = f"DECIMAL({min(types.MOST, whole + scale)},{scale})"
        return Typed(cast(f"(CAST({a} AS {wide}) {sign} CAST({b} AS {wide}))", result.name), result.name)

    return write


def _divide(writer: Translator, node: Node) -> Typed:
    (a, left), (b, right) = writer.all(node)
    if left == right == "double":
        return Typed(failing(f"{b} = 0", f"({a} / {b})"), left)
    one, other = decimal(left), decimal(right)
    if one is None or other is None:
        raise NotNativeError(f"{left} / {right} is not proven to be equal")
    result = types.divided(one, other)
    if types.MOST + 1 - result.scale <= min(other.precision, 30):  # Spark rounds twice, the first time there
        raise NotNativeError("a quotient has more digits than are proven to be equal")
    shift = result.scale + other.scale - one.scale
    return Typed(quotient(unscaled(a, one), unscaled(b, other), result, shift), result.name)


def _remainder(writer: Translator, node: Node) -> Typed:
    (a, left), (b, right) = writer.all(node)
    if left != right or left not in types.INTEGERS:
        raise NotNativeError(f"{left} % {right} is not proven to be equal")
    return Typed(failing(f"{b} = 0", f"({a} % {b})"), left)


def _of_number(pattern: str) -> Callable[[Translator, Node], Typed]:
    def write(writer: Translator, node: Node) -> Typed:
        (a, kind), *_ = writer.all(node)
        if kind not in types.INTEGERS and decimal(kind) is None:
            raise NotNativeError(f"{node.kind} of {kind} is not proven to be equal")
        value = pattern.format(a)
        return Typed(cast(value, kind) if decimal(kind) else value, kind)

    return write


# --- comparing ------------------------------------------------------------------------------------------------


def _comparison(sign: str) -> Callable[[Translator, Node], Typed]:
    def write(writer: Translator, node: Node) -> Typed:
        (a, left), (b, right) = writer.all(node)
        _comparable(left, right)
        if "double" in (left, right) and sign in ("=", "IS NOT DISTINCT FROM"):
            raise NotNativeError("equality of doubles is not proven to be equal")  # of zeros, in joins
        return Typed(f"({a} {sign} {b})", "boolean")

    return write


def _comparable(left: str, right: str) -> None:
    if left == right or "void" in (left, right):
        return
    if decimal(left) is None or decimal(right) is None:
        raise NotNativeError(f"comparing {left} with {right} is not proven to be equal")


def _connective(word: str) -> Callable[[Translator, Node], Typed]:
    def write(writer: Translator, node: Node) -> Typed:
        a, b = writer.all(node)
        return Typed(f"({a.sql} {word} {b.sql})", "boolean")

    return write


def _test(pattern: str) -> Callable[[Translator, Node], Typed]:
    def write(writer: Translator, node: Node) -> Typed:
        return Typed(pattern.format(writer.of(node.children[0]).sql), "boolean")

    return write


def _in(writer: Translator, node: Node) -> Typed:
    value, *listed = writer.all(node)
    for _, kind in listed:
        _comparable(value.type, kind)
    return Typed(f"({value.sql} IN ({', '.join(sql for sql, _ in listed)}))", "boolean")


def _in_subquery(writer: Translator, node: Node) -> Typed:
    *values, query = node.children
    sql, kinds = writer.subquery(query)
    if len(values) != 1 or len(kinds) != 1:
        raise NotNativeError("IN with several columns is not proven to be equal")
    value = writer.of(values[0])
    _comparable(value.type, kinds[0])
    return Typed(f"({value.sql} IN ({sql}))", "boolean")


def _exists(writer: Translator, node: Node) -> Typed:
    sql, _ = writer.subquery(node)
    return Typed(f"EXISTS ({sql})", "boolean")


def _scalar(writer: Translator, node: Node) -> Typed:
    sql, kinds = writer.subquery(node)
    return Typed(f"({sql})", kinds[0])


# --- choosing -------------------------------------------------------------------------------------------------


def _common(values: list[Typed]) -> str:
    kinds = {kind for _, kind in values} - {"void"}
    if len(kinds) > 1:
        raise NotNativeError(f"values of {' and '.join(sorted(kinds))} are not proven to mix equally")
    return kinds.pop() if kinds else "void"


def _case(writer: Translator, node: Node) -> Typed:
    parts = writer.all(node)
    pairs = [(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
    rest = parts[-1] if len(parts) % 2 else None
    kind = _common([value for _, value in pairs] + ([rest] if rest else []))
    whens = " ".join(f"WHEN {test.sql} THEN {value.sql}" for test, value in pairs)
    return Typed(f"(CASE {whens} ELSE {rest.sql if rest else 'NULL'} END)", kind)


def _if(writer: Translator, node: Node) -> Typed:
    test, yes, no = writer.all(node)
    kind = _common([yes, no])
    return Typed(f"(CASE WHEN {test.sql} THEN {yes.sql} ELSE {no.sql} END)", kind)


def _coalesce(writer: Translator, node: Node) -> Typed:
    values = writer.all(node)
    return Typed(f"coalesce({', '.join(v.sql for v in values)})", _common(values))


def _replaced(writer: Translator, node: Node) -> Typed:
    return writer.of(node.children[0])


def _with(writer: Translator, node: Node) -> Typed:
    below, *definitions = node.children
    if len(definitions) != 1 or any(n.kind == "With" for n in below.walk()):
        raise NotNativeError("common expressions within each other are not proven to be equal")
    return replace(writer, common=writer.of(definitions[0].children[0])).of(below)


def _common_expression(writer: Translator, node: Node) -> Typed:
    if writer.common is None or writer.common.type != node.fields["dataType"]:
        raise NotNativeError("a common expression that is defined elsewhere is not proven to be equal")
    return writer.common


def _null_if(writer: Translator, node: Node) -> Typed:
    test, value = writer.all(node)
    return Typed(f"(CASE WHEN {test.sql} THEN NULL ELSE {value.sql} END)", value.type)


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


def _search(name: str) -> Callable[[Translator, Node], Typed]:
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


def _length(writer: Translator, node: Node) -> Typed:
    return Typed(f"CAST(length({_text(writer, node.children[0])}) AS INTEGER)", "integer")


# --- dates ----------------------------------------------------------------------------------------------------


def _date(writer: Translator, node: Node) -> str:
    sql, kind = writer.of(node)
    if kind != "date":
        raise NotNativeError(f"a date of type {kind} is not proven to be equal")
    return sql


def _part(name: str) -> Callable[[Translator, Node], Typed]:
    def write(writer: Translator, node: Node) -> Typed:
        return Typed(f"CAST({name}({_date(writer, node.children[0])}) AS INTEGER)", "integer")

    return write


def _days(sign: str) -> Callable[[Translator, Node], Typed]:
    def write(writer: Translator, node: Node) -> Typed:
        day, count = node.children
        sql, kind = writer.of(count)
        if kind != "integer":
            raise NotNativeError(f"a date and {kind} are not proven to add up equally")
        return Typed(f"({_date(writer, day)} {sign} {sql})", "date")

    return write


def _months(writer: Translator, node: Node) -> Typed:
    day, interval = node.children
    if interval.kind != "Literal" or not str(interval.fields["dataType"]).startswith("interval"):
        raise NotNativeError("an interval that is computed is not proven to be equal")
    months = int(str(interval.fields["value"]))
    return Typed(f"CAST(({_date(writer, day)} + INTERVAL ({months}) MONTH) AS DATE)", "date")


def _interval_days(_: Translator, node: Node) -> Typed:
    interval = node.children[0]
    if interval.kind != "Literal" or int(str(interval.fields["value"])) % _DAY:
        raise NotNativeError("an interval that is no constant of whole days is not proven to be equal")
    return Typed(f"CAST({int(str(interval.fields['value'])) // _DAY} AS INTEGER)", "integer")


def _between_days(writer: Translator, node: Node) -> Typed:
    later, sooner = (_date(writer, child) for child in node.children)
    return Typed(f"CAST(({later} - {sooner}) AS INTEGER)", "integer")


# --- casts ----------------------------------------------------------------------------------------------------


def _cast(writer: Translator, node: Node) -> Typed:
    target = str(node.fields["dataType"])
    child = node.children[0]
    duckdb_type(target)
    if child.kind == "Literal" and child.fields["dataType"] == "string" and target == "date":
        return Typed(f"DATE {quoted(_plain_date(str(child.fields['value'])))}", target)
    sql, kind = writer.of(child)
    if kind in (target, "void"):
        return Typed(sql if kind == target else cast("NULL", target), target)
    a, b = decimal(kind), decimal(target)
    if (kind in types.INTEGERS or a is not None) and b is not None:
        return Typed(cast(sql, target), target)
    if kind in types.INTEGERS and target in (*types.INTEGERS, "double", "string"):
        return Typed(cast(sql, target), target)
    if a is not None and target == "double" and a.precision <= _EXACT_DOUBLE:
        return Typed(cast(sql, target), target)
    raise NotNativeError(f"a cast from {kind} to {target} is not proven to be equal")


_RULES: Mapping[str, Callable[[Translator, Node], Typed]] = {
    "AttributeReference": _attribute,
    "OuterReference": _outer,
    "Alias": _alias,
    "Literal": _literal,
    "Add": _arithmetic("+"),
    "Subtract": _arithmetic("-"),
    "Multiply": _arithmetic("*"),
    "Divide": _divide,
    "Remainder": _remainder,
    "UnaryMinus": _of_number("(-{})"),
    "UnaryPositive": _of_number("{}"),
    "Abs": _of_number("abs({})"),
    "EqualTo": _comparison("="),
    "EqualNullSafe": _comparison("IS NOT DISTINCT FROM"),
    "LessThan": _comparison("<"),
    "LessThanOrEqual": _comparison("<="),
    "GreaterThan": _comparison(">"),
    "GreaterThanOrEqual": _comparison(">="),
    "And": _connective("AND"),
    "Or": _connective("OR"),
    "Not": _test("(NOT {})"),
    "IsNull": _test("({} IS NULL)"),
    "IsNotNull": _test("({} IS NOT NULL)"),
    "In": _in,
    "InSubquery": _in_subquery,
    "Exists": _exists,
    "ScalarSubquery": _scalar,
    "CaseWhen": _case,
    "If": _if,
    "Coalesce": _coalesce,
    "With": _with,
    "CommonExpressionRef": _common_expression,
    "NullIfResult": _null_if,
    "NullIf": _replaced,
    "Nvl": _replaced,
    "Between": _replaced,
    "Extract": _replaced,
    "DatePart": _replaced,
    "Like": _like,
    "StartsWith": _search("starts_with"),
    "EndsWith": _search("ends_with"),
    "Contains": _search("contains"),
    "Substring": _substring,
    "Left": _left,
    "Concat": _concat,
    "Length": _length,
    "Year": _part("year"),
    "Month": _part("month"),
    "DayOfMonth": _part("day"),
    "Quarter": _part("quarter"),
    "DateAdd": _days("+"),
    "DateSub": _days("-"),
    "DateDiff": _between_days,
    "DateAddYMInterval": _months,
    "ExtractANSIIntervalDays": _interval_days,
    "Cast": _cast,
}
SCALARS = frozenset(_RULES)
