"""Parameter blocks over parameter servers as MXNet deals them, which Optimus is compared with (EuroSys 2018, 5.3)."""

from collections.abc import Sequence

import numpy as np

from ebbflow.planners.errors import OptionError
from tests.evaluation.optimus.ps_blocks import ServerLoad

SLICED = 1_000_000
"""Parameters from which on a block is cut into a slice for every server."""


def mxnet_blocks(
    sizes: Sequence[float], servers: int, rng: np.random.Generator, sliced: float = SLICED
) -> list[ServerLoad]:
    """Return who holds what: large blocks in equal slices on all servers, each other one on a random server.

    ``sizes`` in parameters. Raises ``OptionError`` for fewer than one server.
    """
    if servers < 1:
        raise OptionError(f"servers must be >= 1; got {servers}")
    loads = [ServerLoad() for _ in range(servers)]
    for block, size in enumerate(sizes):
        if size < sliced:
            loads[int(rng.integers(servers))].add(block, size)
        else:
            for load in loads:
                load.add(block, size / servers)
    return loads
