"""Nodes as a training names them: ``local:3x2``, ``aws:POOL:3x2``."""

import re

from ebbflow.planners.errors import OptionError

NODES = re.compile(
    r"(?:local|aws:(?P<pool>[a-z](?:-?[a-z0-9])+(?:/[a-z0-9](?:-?[a-z0-9])*)?))"  # a gang is pool/gang
    r":(?P<nodes>[1-9][0-9]{0,3})(?:x(?P<slots>[1-9][0-9]{0,2}))?"
)


AUTO = "auto"


def node_of(processes: str, gpus: int, cores: int) -> str:
    """Return one node of this machine with ``processes`` slots: a number, or ``auto``, as torchrun means it.

    That is one for each GPU, or where there is none for each core. Raises ``OptionError``.
    """
    if processes != AUTO and not re.fullmatch(r"[1-9][0-9]{0,2}", processes):
        raise OptionError(f"nproc must be a whole number from 1 to 999, or auto; got {processes!r:.60}")
    count = min(gpus or cores, 999) if processes == AUTO else int(processes)
    return f"local:1x{count}"


def slots_of(nodes: str, fleet: bool = False) -> dict[str, int]:
    """Return the slots of each node that ``local:3x2``, or with ``fleet`` ``aws:POOL:3x2`` too, names.

    Raises ``OptionError``.
    """
    found = NODES.fullmatch(nodes.strip())
    if found is None or (found["pool"] and not fleet):
        also = ", or aws:POOL:NODESxSLOTS" if fleet else ""
        raise OptionError(f"nodes must be local:NODESxSLOTS, such as local:3x2{also}; got {nodes!r}")
    return {f"node-{n}": int(found["slots"] or 1) for n in range(1, int(found["nodes"]) + 1)}
