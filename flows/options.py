"""Parsing of command-line values."""

import re

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Share

_UNITS = {"": 1.0, "g": 1.0, "gib": 1.0, "gb": 1.0, "m": 1 / 1024, "mib": 1 / 1024, "mb": 1 / 1024}


def parse_gib(text: str) -> float:
    """Return GiB of ``6GiB``, ``6g``, ``512m`` or ``6``. Raises ``OptionError``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS or float(found[1]) <= 0:
        raise OptionError(f"memory must be a positive size such as 6GiB or 512m; got {text!r}")
    return float(found[1]) * _UNITS[found[2].lower()]


def parse_capacity(text: str) -> Share:
    """Return the share that ``cores=3,memory=6GiB[,nodes=3][,hazard=2]`` describes. Raises ``OptionError``."""
    values = {"cores": "3", "memory": "6GiB", "nodes": "", "hazard": "0.05"}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or name.strip() not in values:
            raise OptionError(f"capacity must look like cores=3,memory=6GiB,nodes=3,hazard=2; got {part!r}")
        values[name.strip()] = value.strip()
    cores = _positive("cores", values["cores"])
    nodes = _positive("nodes", values["nodes"] or str(int(max(cores, 1))))
    if nodes != int(nodes):
        raise OptionError(f"nodes must be a whole number; got {values['nodes']}")
    return Share.uniform(
        cores, parse_gib(values["memory"]), int(nodes), hazard=_number("hazard", values["hazard"])
    )


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """Return ``{"key": "value"}`` of ``key=value`` texts. Raises ``OptionError``."""
    out = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise OptionError(f"a Spark setting must look like spark.some.key=value; got {pair!r}")
        out[key.strip()] = value.strip()
    return out


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise OptionError(f"{name} must be a number; got {text!r}") from None
    if value < 0:
        raise OptionError(f"{name} must be >= 0; got {text}")
    return value


def _positive(name: str, text: str) -> float:
    value = _number(name, text)
    if value <= 0:
        raise OptionError(f"{name} must be > 0; got {text}")
    return value
