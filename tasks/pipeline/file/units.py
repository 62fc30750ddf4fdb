"""Durations, moments and sizes as people write them."""

import re
from datetime import datetime

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import MAX_SECONDS, UNSIGNED

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_PART = rf"({UNSIGNED})\s*(ms|s|min|m|h|d)"
_DURATION = re.compile(rf"(?:{_PART}\s*)+")
_PLAIN = re.compile(UNSIGNED)
_MOST_GIB = 1024e6
_GIB = {"": 1.0, "g": 1.0, "gib": 1.0, "gb": 1.0, "m": 1 / 1024, "mib": 1 / 1024, "mb": 1 / 1024}
_GIB |= {"t": 1024.0, "tib": 1024.0, "tb": 1024.0}


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
