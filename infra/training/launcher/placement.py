"""Placements: how many slots (GPUs, or processor slots on this machine) of which nodes a run uses."""

import re
from collections.abc import Iterable, Mapping

from ebbflow.planners.errors import OptionError

_LOCAL = re.compile(r"local:([1-9][0-9]{0,3})(?:x([1-9][0-9]{0,2}))?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def parse(text: str) -> dict[str, int]:
    """Return the placement that ``text`` asks for; ``local:3x2`` is three nodes of this machine, two slots each.

    Raises ``OptionError``.

    Examples:
        >>> parse("local:2x1")
        {'node-1': 1, 'node-2': 1}
    """
    match = _LOCAL.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"nodes must be local:NODESxSLOTS, such as local:3x2; got {text!r}")
    return {f"node-{n}": int(match[2] or 1) for n in range(1, int(match[1]) + 1)}


def check(placement: Mapping[str, int]) -> dict[str, int]:
    """Return a copy of a placement that can be used. Raises ``OptionError``."""
    if not placement:
        raise OptionError("a placement must name a node at least")
    for name, slots in placement.items():
        if not _NAME.fullmatch(name):
            raise OptionError(f"a node's name holds letters, digits, dashes, dots, underscores; got {name!r}")
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise OptionError(f"node {name} must have 1 slot at least; got {slots!r}")
    return dict(placement)


def fresh(taken: Iterable[str]) -> str:
    """Return a name that no node in ``taken`` ever had."""
    numbers = [int(n.removeprefix("node-")) for n in taken if re.fullmatch(r"node-\d+", n)]
    return f"node-{max(numbers, default=0) + 1}"
