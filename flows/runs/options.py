"""Parsing of command-line values."""

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Share
from ebbflow.planners.model.numbers import parse_number, parse_whole
from ebbflow.tasks.pipeline.file.units import parse_gib

_MAX_CORES = 10**6


def parse_capacity(text: str) -> Share:
    """Return the share that ``cores=3,memory=6GiB[,nodes=3][,hazard=2]`` describes. Raises ``OptionError``."""
    values = {"cores": "3", "memory": "6GiB", "nodes": "", "hazard": "0.05"}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or name.strip() not in values:
            raise OptionError(f"capacity must look like cores=3,memory=6GiB,nodes=3,hazard=2; got {part!r}")
        values[name.strip()] = value.strip()
    cores = parse_number(values["cores"], "cores", above=0, max=_MAX_CORES)
    nodes = parse_whole(values["nodes"] or str(int(max(cores, 1))), "nodes", min=1, max=_MAX_CORES)
    try:
        memory = parse_gib(values["memory"])
    except OptionError as error:
        raise OptionError(f"memory {error}") from error
    return Share.uniform(
        cores, memory, nodes, hazard=parse_number(values["hazard"], "hazard", min=0, max=1e9)
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
