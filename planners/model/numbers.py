"""Numbers as people type them: finite, of ASCII digits, within bounds. The one place that reads them."""

import re
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


def parse_seconds(text: str, what: str) -> float:
    """Return the seconds of ``20s`` or ``2.5``, a century at most. Raises ``OptionError``."""
    found = re.fullmatch(rf"({UNSIGNED})s?", text)
    if found is None or not float(found[1]) <= MAX_SECONDS:
        raise OptionError(f"{what} must be seconds such as 20s or 2.5, a century at most; got {text!r:.60}")
    return float(found[1])
