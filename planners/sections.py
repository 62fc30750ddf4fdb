"""Sections of configuration files that people write: tables whose keys and values are checked one by one."""

from collections.abc import Mapping
from difflib import get_close_matches
from math import isfinite
from typing import Any

from ebbflow.planners.errors import OptionError


def table(value: object, where: str) -> Mapping[str, Any]:
    """Return ``value`` as a table; ``where`` says in errors where it stands. Raises ``OptionError``."""
    if not isinstance(value, Mapping):
        raise OptionError(f"{where} must be a table; got {value!r}")
    return value


def only(content: Mapping[str, Any], where: str, keys: tuple[str, ...]) -> None:
    """Refuse keys other than ``keys``. Raises ``OptionError`` with the nearest known one."""
    for key in content:
        if key not in keys:
            close = get_close_matches(str(key).removesuffix("_s"), keys, 1, 0.4)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise OptionError(f"{where}: {key} is not known; known are {', '.join(keys)}{hint}")


def number(value: object, where: str) -> float:
    """Return a finite number. Raises ``OptionError``."""
    # bool is an int for Python, not for us
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise OptionError(f"{where} must be a number; got {value!r}")
    return value
