"""Numbers, durations, timestamps and sizes as people type them. The one place that reads them."""

import re
from datetime import datetime
from math import inf, isfinite

from ebbflow.planners.errors import OptionError

UNSIGNED = r"[0-9]+(?:\.[0-9]+)?"
"""Pattern of a number without sign and exponent; ``\\d`` would take the digits of all scripts."""
MAX_NUMBER = 1e15
"""The largest magnitude that is read; products of a few such numbers stay finite."""
MAX_SECONDS = 3.2e9
"""A century."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = rf"({UNSIGNED})\s*(ms|s|min|m|h|d)"
_DURATION = re.compile(rf"(?:{_PART}\s*)+")
_PLAIN = re.compile(UNSIGNED)
_BIT_RATE = re.compile(rf"\s*({UNSIGNED})\s*(kbit|mbit|gbit)\s*", re.IGNORECASE)
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_MOST_GIB = 1024e6
_GIB = {"": 1.0, "g": 1.0, "gib": 1.0, "gb": 1.0, "m": 1 / 1024, "mib": 1 / 1024, "mb": 1 / 1024}
_GIB |= {"t": 1024.0, "tib": 1024.0, "tb": 1024.0}


def is_number(text: str) -> bool:
    """Tell whether ``text`` is a finite number."""
    return _NUMBER.fullmatch(text.strip()) is not None and isfinite(float(text))


def is_whole(text: str) -> bool:
    """Tell whether ``text`` is a whole number of 18 digits at most."""
    return _WHOLE.fullmatch(text.strip()) is not None


def parse_number(
    text: str, what: str, *, min: float = -MAX_NUMBER, max: float = MAX_NUMBER, above: float = -inf
) -> float:
    """Return the finite number that ``text`` is; ``what`` names it in errors.

    Args:
        text: such as ``2``, ``0.5`` or ``1e3``.
        what: the option, key or field.
        min: the smallest value.
        max: the largest value.
        above: a bound that the value must exceed.

    Raises ``OptionError`` that names value and rule.
    """
    if not is_number(text):
        raise OptionError(f"{what} must be a finite number; got {text!r:.60}")
    value = float(text)
    if not value > above:
        raise OptionError(f"{what} must be > {above:g}; got {text:.60}")
    if value < min:
        raise OptionError(f"{what} must be >= {min:g}; got {text:.60}")
    if value > max:
        raise OptionError(f"{what} must be at most {max:g}; got {text:.60}")
    return value


def parse_whole(text: str, what: str, *, min: int = 0, max: int = 10**9) -> int:
    """Return the whole number from ``min`` to ``max`` that ``text`` is. Raises ``OptionError``."""
    if not is_whole(text) or not min <= int(text) <= max:
        raise OptionError(f"{what} must be a whole number from {min:,} to {max:,}; got {text!r:.60}")
    return int(text)


def parse_duration(text: str) -> float:
    """Return the seconds of ``90s``, ``15m``, ``1h30m``, ``2d`` or a plain number. Raises ``OptionError``."""
    given = text.strip()
    if _PLAIN.fullmatch(given):
        seconds = float(given)
    elif _DURATION.fullmatch(given):
        seconds = sum(float(amount) * _SECONDS[unit] for amount, unit in re.findall(_PART, given))
    else:
        raise OptionError(f"must be a duration such as 500ms, 90s, 15m, 1h30m or 2d; got {text!r:.60}")
    if not seconds <= MAX_SECONDS:
        raise OptionError(f"must be a duration of a century at most; got {text!r:.60}")
    return seconds


def duration_of(value: object, where: str) -> float:
    """Return the seconds of a number >= 0, or of a text such as ``90s``; ``where`` names it in errors.

    Raises ``OptionError``.
    """
    if isinstance(value, str):
        try:
            return parse_duration(value)
        except OptionError as error:
            raise OptionError(f"{where} {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        raise OptionError(f"{where} must be a duration such as 90s, 5m or 1h30m, or seconds; got {value!r}")
    return float(value)


def show_duration(seconds: float) -> str:
    """Return ``seconds`` as ``parse_duration`` reads them: ``2h``, ``90s``, ``0.5s``."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{seconds:.15g}s"


def parse_bit_rate(text: object, what: str) -> float:
    """Return the bit/s of a text such as ``200mbit``; ``what`` names it in errors.

    >>> parse_bit_rate("200mbit", "rate")
    200000000.0

    Raises ``OptionError``.
    """
    found = _BIT_RATE.fullmatch(text) if isinstance(text, str) else None
    rate = float(found.group(1)) * _BITS[found.group(2).lower()] if found else 0.0
    if not 0 < rate <= MAX_NUMBER:
        raise OptionError(f"{what} must be a rate such as 200mbit or 25gbit; got {text!r:.60}")
    return rate


def parse_moment(text: str) -> float:
    """Return the seconds since the Unix epoch of ``2026-11-22T18:00Z``. Raises ``OptionError``.

    The offset is asked for: a deadline must not depend on the machine that reads it.
    """
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise OptionError(
            f"must be a moment with its offset, such as 2026-11-22T18:00Z or 2026-11-22T18:00+02:00; got {text!r:.60}"
        )
    try:
        seconds = moment.timestamp()
    except (OverflowError, ValueError, OSError) as error:
        raise OptionError(f"must be a moment between the years 1 and 9999; got {text!r:.60}") from error
    return seconds


def parse_gib(text: str) -> float:
    """Return GiB of ``6GiB``, ``6g``, ``512m`` or ``6``. Raises ``OptionError``."""
    found = re.fullmatch(rf"\s*({UNSIGNED})\s*([a-zA-Z]*)\s*", text)
    gib = float(found[1]) * _GIB.get(found[2].lower(), 0.0) if found else 0.0
    if not gib > 0:
        raise OptionError(f"must be a positive size such as 6GiB or 512m; got {text!r:.60}")
    if not gib <= _MOST_GIB:
        raise OptionError(f"must be a size of 1,000,000 TiB at most; got {text!r:.60}")
    return gib
