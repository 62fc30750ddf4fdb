"""Arithmetic and casts, with the results' types and the errors of Spark under ANSI."""

import re
from collections.abc import Callable, Mapping

from ebbflow.infra.spark.native import types
from ebbflow.infra.spark.native.catalyst import Node, NotNativeError
from ebbflow.infra.spark.native.expressions import (
    Rule,
    Translator,
    Typed,
    cast,
    clock_time,
    failing,
    of_clock,
    quoted,
    quotient,
    unscaled,
)
from ebbflow.infra.spark.native.types import Decimal, decimal, duckdb_type

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}( ([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?)?")
DAY = 86_400_000_000  # microseconds
_EXACT_DOUBLE = 15  # digits of a decimal whose division by a power of ten is one rounding


def constant_only(node: Node) -> bool:
    """Tell whether an expression is of constants."""
    return all(n.children or n.kind == "Literal" for n in node.walk())


def _check_constants(node: Node, kind: str) -> None:
    """Raise ``NotNativeError`` for arithmetic of constants that may fail: Spark may compute it where no row asks."""
    if kind in types.INTEGERS and constant_only(node) and _whole(node) is None:
        raise NotNativeError("arithmetic of constants is not proven to be equal")


def _number(node: Node) -> bool:
    """Tell whether an expression is a number that is written, other than zero."""
    while node.kind == "Cast":
        (node,) = node.children
    digits = str(node.fields.get("value")).lstrip("-").replace(".", "", 1)
    return node.kind == "Literal" and digits.isdecimal() and digits.strip("0") != ""


def _whole(node: Node) -> int | None:
    """Return the value of constants, all of it small enough for any type; ``None`` if it is not."""
    if node.kind == "Literal":
        text = str(node.fields["value"])
        value = int(text) if text.lstrip("-").isdigit() else None
        value = value // DAY if value is not None and node.fields["dataType"] == "interval day" else value
    else:
        parts = [_whole(child) for child in node.children]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or node.kind not in _CONSTANTS:
            return None
        value = _CONSTANTS[node.kind](known)
    return value if value is not None and abs(value) < 2**31 else None


_CONSTANTS: Mapping[str, Callable[[list[int]], int]] = {
    "Add": lambda v: v[0] + v[1],
    "Subtract": lambda v: v[0] - v[1],
    "Multiply": lambda v: v[0] * v[1],
    "UnaryMinus": lambda v: -v[0],
    "UnaryPositive": lambda v: v[0],
    "Abs": lambda v: abs(v[0]),
    "ExtractANSIIntervalDays": lambda v: v[0],
    "Cast": lambda v: v[0],
}


def _arithmetic(sign: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        (a, left), (b, right) = writer.all(node)
        _check_constants(node, left)
        if left == right and (left in types.INTEGERS or left == "double" or (left == "byte" and sign == "+")):
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
    if constant_only(node) and not all(map(_number, node.children)):
        raise NotNativeError("a quotient of constants is not proven to be equal")
    if left == right == "double":
        return Typed(failing(f"{b} = 0", f"({a} / {b})"), left)
    one, other = decimal(left), decimal(right)
    if one is None or other is None:
        raise NotNativeError(f"{left} / {right} is not proven to be equal")
    result = types.divided(one, other)
    shift = result.scale + other.scale - one.scale
    above, below = unscaled(a, one), unscaled(b, other)
    value = quotient(above, below, result, shift)
    # Spark rounds twice, first to as many digits: of a less wide divisor no other quotient is as near to a tie
    digits = types.MOST + 1 - result.scale
    if other.precision > digits:
        value = failing(f"abs({below}) >= CAST('1{'0' * digits}' AS HUGEINT)", value)
    return Typed(value, result.name)


def _remainder(writer: Translator, node: Node) -> Typed:
    (a, left), (b, right) = writer.all(node)
    _check_constants(node, left)
    if left != right or left not in types.INTEGERS:
        raise NotNativeError(f"{left} % {right} is not proven to be equal")
    return Typed(failing(f"{b} = 0", f"({a} % {b})"), left)


def _round(writer: Translator, node: Node) -> Typed:
    value, places = node.children
    (sql, kind), digits = writer.of(value), _whole(places)
    known = decimal(kind)
    if digits is None or not 0 <= digits < types.MOST or constant_only(node):
        raise NotNativeError("rounding before the point, or a constant, is not proven to be equal")
    if known is not None:
        scale = min(known.scale, digits)
        result = Decimal(min(known.precision - known.scale + 1 + scale, types.MOST), scale).name
        return Typed(cast(sql, result), result)
    if kind != "double":
        raise NotNativeError(f"rounding {kind} is not proven to be equal")
    rounded = cast(f"CAST({sql} AS VARCHAR)", Decimal(types.MOST, digits).name)  # what it is written as
    return Typed(f"CAST(CAST({rounded} AS VARCHAR) AS DOUBLE)", kind)


def _of_number(pattern: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        (a, kind), *_ = writer.all(node)
        if kind not in (*types.INTEGERS, "double") and decimal(kind) is None:
            raise NotNativeError(f"{node.kind} of {kind} is not proven to be equal")
        _check_constants(node, kind)
        value = pattern.format(a)
        return Typed(cast(value, kind) if decimal(kind) else value, kind)

    return write


def _cast(writer: Translator, node: Node) -> Typed:
    target = str(node.fields["dataType"])
    child = node.children[0]
    duckdb_type(target)
    if child.kind == "Literal" and child.fields["dataType"] == "string" and target == "date":
        return Typed(f"DATE {quoted(plain_date(str(child.fields['value'])))}", target)
    if child.kind == "Literal" and child.fields["dataType"] == "string" and target in types.TIMES:
        return plain_time(str(child.fields["value"]), target)
    sql, kind = writer.of(child)
    if child.kind == "Literal" and child.fields["value"] is not None and not _fits(child, kind, target):
        raise NotNativeError("a cast of a constant that may not fit is not proven to be equal")
    if kind in (target, "void"):
        return Typed(sql if kind == target else cast("NULL", target), target)
    if {kind, target} <= {"date", *types.TIMES}:
        value = f"CAST({clock_time(sql, kind)} AS {'DATE' if target == 'date' else 'TIMESTAMP'})"
        return Typed(of_clock(value, target), target)
    a, b = decimal(kind), decimal(target)
    if (kind in types.INTEGERS or a is not None) and b is not None:
        return Typed(cast(sql, target), target)
    if (kind, target) == ("long", "integer"):
        _check_constants(child, kind)
    if kind in (*types.INTEGERS, *types.SHORT) and target in types.INTEGERS:
        return Typed(cast(sql, target), target)
    if (kind, target) == ("float", "double"):
        return Typed(cast(sql, target), target)
    if child.kind == "BitwiseAnd" and target == "byte":
        return Typed(cast(sql, target), target)
    if kind in (*types.INTEGERS, *types.SHORT) and target in ("double", "string"):
        return Typed(cast(sql, target), target)
    if a is not None and not a.scale and target in types.INTEGERS and not constant_only(child):
        return Typed(cast(sql, target), target)
    if a is not None and target == "double":  # DuckDB rounds twice where one division is not exact
        return Typed(cast(sql if a.precision <= _EXACT_DOUBLE else f"CAST({sql} AS VARCHAR)", target), target)
    raise NotNativeError(f"a cast from {kind} to {target} is not proven to be equal")


def _grouping(writer: Translator, node: Node) -> Typed:
    """Write whether a set of groups leaves out a key: the bit of it in the set's number."""
    shifted, one = node.children
    if shifted.kind != "ShiftRight" or shifted.children[0].kind != "AttributeReference" or _whole(one) != 1:
        raise NotNativeError("arithmetic of bits is not proven to be equal")
    sets, place = shifted.children
    if sets.attribute.name != "spark_grouping_id":
        raise NotNativeError("arithmetic of bits is not proven to be equal")
    sql, kind = writer.of(sets)
    return Typed(f"(({sql} >> {_whole(place)}) & 1)", kind)


def _fits(literal: Node, kind: str, target: str) -> bool:
    """Tell whether the cast of a literal cannot fail."""
    known = decimal(target)
    if kind in types.INTEGERS and target == "integer":
        return -(2**31) <= int(str(literal.fields["value"])) < 2**31
    if kind in types.INTEGERS and known is not None:
        return len(str(abs(int(str(literal.fields["value"]))))) <= known.precision - known.scale
    source = decimal(kind)
    if source is not None and known is not None:
        return (
            source.precision - source.scale < known.precision - known.scale
            or source == known
            or (
                source.precision - source.scale == known.precision - known.scale
                and source.scale <= known.scale
            )
        )
    return True


def plain_date(text: str) -> str:
    """Return a date as it is written everywhere. Raises ``NotNativeError`` for another."""
    if not _DATE.fullmatch(text):
        raise NotNativeError(f"the date {text!r} is not proven to be equal")
    return text


def plain_time(text: str, kind: str) -> Typed:
    """Return a time as it is written everywhere, in UTC. Raises ``NotNativeError`` for another."""
    if not _TIME.fullmatch(text):
        raise NotNativeError(f"the time {text!r} is not proven to be equal")
    shown = text if " " in text else f"{text} 00:00:00"
    return Typed(f"TIMESTAMPTZ '{shown}+00'" if kind == "timestamp" else f"TIMESTAMP '{shown}'", kind)


def _whole_of(function: str) -> Rule:
    def write(writer: Translator, node: Node) -> Typed:
        (sql, kind), *more = writer.all(node)
        if kind != "double" or more:
            raise NotNativeError(f"{node.kind} of {kind} is not proven to be equal")
        return Typed(cast(f"{function}({sql})", "long"), "long")  # beyond which Spark has the last one

    return write


def _root(writer: Translator, node: Node) -> Typed:
    ((sql, kind),) = writer.all(node)
    if kind != "double":
        raise NotNativeError(f"a root of {kind} is not proven to be equal")
    return Typed(f"sqrt({sql})", kind)


def _no_number(writer: Translator, node: Node) -> Typed:
    ((sql, kind),) = writer.all(node)
    if kind != "double":
        raise NotNativeError(f"{node.kind} of {kind} is not proven to be equal")
    return Typed(f"coalesce(isnan({sql}), false)", "boolean")


RULES: Mapping[str, Rule] = {
    "Add": _arithmetic("+"),
    "Subtract": _arithmetic("-"),
    "Multiply": _arithmetic("*"),
    "Divide": _divide,
    "Remainder": _remainder,
    "Round": _round,
    "UnaryMinus": _of_number("(-{})"),
    "UnaryPositive": _of_number("{}"),
    "Abs": _of_number("abs({})"),
    "Floor": _whole_of("floor"),
    "Ceil": _whole_of("ceil"),
    "Sqrt": _root,
    "IsNaN": _no_number,
    "BitwiseAnd": _grouping,
    "Cast": _cast,
}
