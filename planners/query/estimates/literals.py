"""Constants in predicates, folded onto the scale that column statistics use."""

import calendar
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Literal, NamedTuple

from sqlglot import exp

Kind = Literal["number", "date", "timestamp", "text"]

DAY = 86_400.0  # seconds
LAST_DAY = 3_000_000.0  # days since 1970; beyond year 9999, so a larger "date" is a timestamp in seconds
EPOCH = date(1970, 1, 1)

_MONTHS = {"YEAR": 12, "QUARTER": 3, "MONTH": 1}
_SECONDS = {"WEEK": 7 * DAY, "DAY": DAY, "HOUR": 3600.0, "MINUTE": 60.0, "SECOND": 1.0}
_TIMES = {
    exp.DType.TIMESTAMP,
    exp.DType.TIMESTAMPTZ,
    exp.DType.TIMESTAMPNTZ,
    exp.DType.TIMESTAMPLTZ,
    exp.DType.DATETIME,
}
_ARITHMETIC: dict[type[exp.Expr], Callable[[float, float], float]] = {
    exp.Add: lambda a, b: a + b,
    exp.Sub: lambda a, b: a - b,
    exp.Mul: lambda a, b: a * b,
    exp.Div: lambda a, b: a / b,
}


class Constant(NamedTuple):
    """A folded constant: dates in days since 1970, timestamps in seconds since 1970 (UTC)."""

    value: float | str
    kind: Kind


class _Span(NamedTuple):
    months: int
    seconds: float


def fold(expression: exp.Expr) -> Constant | None:
    """Return the value of a constant expression, or ``None`` if it is not one that we can compute.

    Folds literals, signs, arithmetic, casts and date arithmetic: ``DATE '1994-01-01' + INTERVAL '1' YEAR``
    gives the day 9131.
    """
    match expression:
        case exp.Paren():
            return fold(expression.this)
        case exp.Literal():
            return _literal(expression)
        case exp.Boolean():
            return Constant(float(bool(expression.this)), "number")
        case exp.Neg():
            inner = fold(expression.this)
            if inner is None or not isinstance(inner.value, float):
                return None
            return Constant(-inner.value, inner.kind)
        case exp.Cast() | exp.TryCast():
            return _cast(fold(expression.this), expression.to.this)
        case exp.TsOrDsToDate() | exp.Date():
            return _cast(fold(expression.this), exp.DType.DATE) if expression.this else None
        case exp.Add() | exp.Sub() | exp.Mul() | exp.Div():
            return _arithmetic(expression)
        case exp.TsOrDsAdd() | exp.DateAdd() | exp.DateSub() | exp.AddMonths():
            return _date_function(expression)
    return None


def onto_scale(constant: Constant, low: float | str | None) -> float | str | None:
    """Return the constant in the unit of a column whose smallest value is ``low``; ``None`` if it has none.

    A string compared with a number or date column is read as what the column holds, as Spark casts it.
    """
    value, kind = constant
    if low is None:
        return None
    if isinstance(low, str):
        return value if kind == "text" else None
    if kind == "text":
        read = _number(str(value)) or _read_time(str(value))
        if read is None:
            return None
        value, kind = read
    assert isinstance(value, float)
    in_seconds = abs(low) > LAST_DAY
    if kind == "date" and in_seconds:
        return value * DAY
    if kind == "timestamp" and not in_seconds:
        return value / DAY
    return value


def _literal(node: exp.Literal) -> Constant | None:
    if node.is_string:
        return Constant(str(node.this), "text")
    return _number(str(node.this))


def _number(text: str) -> Constant | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return Constant(value, "number") if math.isfinite(value) else None


def _read_time(text: str) -> Constant | None:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    if len(text.strip()) <= len("2000-01-01"):
        return Constant(float((moment.date() - EPOCH).days), "date")
    return Constant(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp(), "timestamp")


def _cast(inner: Constant | None, to: object) -> Constant | None:
    if inner is None:
        return None
    value, kind = inner
    if to in exp.DataType.NUMERIC_TYPES:
        return _number(str(value)) if kind == "text" else inner
    if to in exp.DataType.TEXT_TYPES:
        return inner if kind == "text" else None
    if to in (exp.DType.DATE, exp.DType.DATE32):
        moment = _read_time(str(value)) if kind == "text" else inner
        if moment is None or moment.kind == "number":
            return None
        days = float(moment.value) if moment.kind == "date" else float(moment.value) // DAY
        return Constant(days, "date")
    if to in _TIMES:
        moment = _read_time(str(value)) if kind == "text" else inner
        if moment is None or moment.kind == "number":
            return None
        seconds = float(moment.value) * (DAY if moment.kind == "date" else 1.0)
        return Constant(seconds, "timestamp")
    return None


def _arithmetic(node: exp.Expr) -> Constant | None:
    left, right = node.this, node.expression
    if isinstance(node, exp.Add) and isinstance(left, exp.Interval):
        left, right = right, left
    if isinstance(right, exp.Interval):
        span = _span(right)
        base = fold(left)
        sign = 1 if isinstance(node, exp.Add) else -1 if isinstance(node, exp.Sub) else None
        return None if span is None or sign is None else _shift(base, span, sign)
    a, b = fold(left), fold(right)
    if a is None or b is None or not isinstance(a.value, float) or not isinstance(b.value, float):
        return None
    if isinstance(node, exp.Div) and b.value == 0.0:
        return None
    kind: Kind = "number" if a.kind == b.kind else "date" if "date" in (a.kind, b.kind) else "timestamp"
    return Constant(_ARITHMETIC[type(node)](a.value, b.value), kind)


def _date_function(node: exp.Expr) -> Constant | None:
    base = fold(node.this)
    amount = fold(node.expression) if node.expression else None
    if isinstance(node.expression, exp.Interval):
        span = _span(node.expression)
    elif amount is not None and isinstance(amount.value, float):
        unit = "MONTH" if isinstance(node, exp.AddMonths) else str(node.args.get("unit") or "DAY")
        span = _as_span(amount.value, unit)
    else:
        span = None
    if span is None:
        return None
    return _shift(_cast(base, exp.DType.DATE), span, -1 if isinstance(node, exp.DateSub) else 1)


def _span(interval: exp.Interval) -> _Span | None:
    amount = fold(interval.this) if interval.this else None
    if amount is None:
        return None
    number = amount if isinstance(amount.value, float) else _number(str(amount.value))
    unit = interval.args.get("unit")
    return None if number is None or unit is None else _as_span(float(number.value), str(unit))


def _as_span(amount: float, unit: str) -> _Span | None:
    unit = unit.upper().rstrip("S")
    if unit in _MONTHS:
        return _Span(int(amount * _MONTHS[unit]), 0.0)
    return _Span(0, amount * _SECONDS[unit]) if unit in _SECONDS else None


def _shift(base: Constant | None, span: _Span, sign: int) -> Constant | None:
    if base is not None and base.kind == "text":
        base = _read_time(str(base.value))
    if base is None or base.kind not in ("date", "timestamp"):
        return None
    seconds = float(base.value) * (DAY if base.kind == "date" else 1.0)
    try:
        moment = datetime(1970, 1, 1) + timedelta(seconds=seconds)
        moment = _add_months(moment, sign * span.months) + timedelta(seconds=sign * span.seconds)
    except (OverflowError, ValueError):
        return None
    shifted = (moment - datetime(1970, 1, 1)).total_seconds()
    whole_days = base.kind == "date" and shifted % DAY == 0.0
    return Constant(shifted / DAY, "date") if whole_days else Constant(shifted, "timestamp")


def _add_months(moment: datetime, months: int) -> datetime:
    index = moment.year * 12 + moment.month - 1 + months
    year, month = divmod(index, 12)
    day = min(moment.day, calendar.monthrange(year, month + 1)[1])
    return moment.replace(year=year, month=month + 1, day=day)
