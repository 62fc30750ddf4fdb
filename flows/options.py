"""Parsing of command-line values."""

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Share
from ebbflow.tasks.pipeline.units import parse_gib


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
    try:
        memory = parse_gib(values["memory"])
    except OptionError as error:
        raise OptionError(f"memory {error}") from error
    return Share.uniform(cores, memory, int(nodes), hazard=_number("hazard", values["hazard"]))


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
