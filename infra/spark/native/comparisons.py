"""Columns, literals, comparisons, choices between values, and subqueries."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ebbflow.infra.spark.native import types
from ebbflow.infra.spark.native.arithmetic import constant_only, plain_date, plain_time
from ebbflow.infra.spark.native.catalyst import Node, NotNativeError
from ebbflow.infra.spark.native.expressions import Rule, Translator, Typed, cast, quoted
from ebbflow.infra.spark.native.types import decimal, duckdb_type

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
        return Typed(f"DATE {quoted(plain_date(text))}", kind)
    if kind == "timestamp":
        return plain_time(text, kind)
    if kind == "timestamp_ntz":
        return Typed(f"make_timestamp(CAST({int(text)} AS BIGINT))", kind)
    if kind == "boolean":
        return Typed(text.lower(), kind)
    if kind in types.INTEGERS or kind == "double" or decimal(kind) is not None:
        if kind == "double" and not re.fullmatch(r"-?[0-9.]+(E-?[0-9]+)?", text):
            raise NotNativeError(f"the number {text} is not proven to be equal")
        return Typed(cast(quoted(text), kind), kind)
    raise NotNativeError(f"a literal of type {kind} is not proven to be equal")


# --- comparing ------------------------------------------------------------------------------------------------


def _comparison(sign: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        (a, left), (b, right) = writer.all(node)
        _comparable(left, right)
        if "double" in (left, right) and sign in ("=", "IS NOT DISTINCT FROM"):
            _check_constant(node.children)
        return Typed(f"({a} {sign} {b})", "boolean")

    return write


def _comparable(left: str, right: str) -> None:
    if left == right or "void" in (left, right):
        return
    if decimal(left) is None or decimal(right) is None:
        raise NotNativeError(f"comparing {left} with {right} is not proven to be equal")


def _check_constant(sides: Sequence[Node]) -> None:
    """Raise ``NotNativeError`` unless one of doubles that are to be equal is constant: two sums of the same rows, in
    orders of their own, need not be."""
    if not any(constant_only(side) for side in sides):
        raise NotNativeError("equality of doubles is not proven to be equal")


def _connective(word: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        a, b = writer.all(node)
        return Typed(f"({a.sql} {word} {b.sql})", "boolean")

    return write


def _test(pattern: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        return Typed(pattern.format(writer.of(node.children[0]).sql), "boolean")

    return write


def _in(writer: Translator, node: Node) -> Typed:
    value, *listed = writer.all(node)
    for (_, kind), other in zip(listed, node.children[1:], strict=True):
        _comparable(value.type, kind)
        if kind == "double":
            _check_constant([other])
    return Typed(f"({value.sql} IN ({', '.join(sql for sql, _ in listed)}))", "boolean")


def _in_subquery(writer: Translator, node: Node) -> Typed:
    *values, query = node.children
    sql, kinds = writer.subquery(query)
    if len(values) != 1 or len(kinds) != 1:
        raise NotNativeError("IN with several columns is not proven to be equal")
    value = writer.of(values[0])
    _comparable(value.type, kinds[0])
    if value.type == "double":
        raise NotNativeError("equality of doubles is not proven to be equal")
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


def _extreme(function: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        values = writer.all(node)
        kind = _common(values)
        if not types.compared(kind):
            raise NotNativeError(f"the {function} of {kind} is not proven to be equal")
        return Typed(f"{function}({', '.join(v.sql for v in values)})", kind)

    return write


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


RULES: Mapping[str, Rule] = {
    "AttributeReference": _attribute,
    "OuterReference": _outer,
    "Alias": _alias,
    "Literal": _literal,
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
    "Nvl2": _replaced,
    "Greatest": _extreme("greatest"),
    "Least": _extreme("least"),
    "Nvl": _replaced,
    "Between": _replaced,
    "Extract": _replaced,
    "DatePart": _replaced,
    "DatetimeSub": _replaced,
}
