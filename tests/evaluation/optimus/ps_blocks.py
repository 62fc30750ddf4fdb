"""Parameter blocks over parameter servers: equal bytes, few and equal requests (Optimus, EuroSys 2018, 5.3)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

from ebbflow.planners.errors import OptionError

SMALL = 0.01
"""A block below this share of the mean load is placed by requests, not by size."""


@dataclass(slots=True)
class ServerLoad:
    """What one parameter server holds: (block, size) of each piece, sizes in the caller's unit."""

    pieces: list[tuple[int, float]] = field(default_factory=list)
    load: float = 0.0

    @property
    def requests(self) -> int:
        """Return the update requests of one step: one a piece."""
        return len(self.pieces)

    def add(self, block: int, size: float) -> None:
        """Take one piece."""
        self.pieces.append((block, size))
        self.load += size


def assign_blocks(sizes: Sequence[float], servers: int) -> list[ServerLoad]:
    """Return who holds what, blocks in falling order of size.

    Blocks above the mean load are cut into pieces of that size for the least loaded servers; what remains, and every
    other block, goes to the server with least room up to the mean load that still holds it, or else to the least
    loaded; the smallest go where requests are fewest.

    Raises:
        OptionError: fewer than one server, or a size that is not finite and positive.
    """
    if servers < 1:
        raise OptionError(f"servers must be >= 1; got {servers}")
    if not all(isfinite(size) and size > 0 for size in sizes):
        raise OptionError("sizes of blocks must be finite and > 0")
    mean = sum(sizes) / servers
    loads = [ServerLoad() for _ in range(servers)]
    for block in sorted(range(len(sizes)), key=lambda block: (-sizes[block], block)):
        size = sizes[block]
        if size < SMALL * mean:
            min(loads, key=lambda server: (server.requests, server.load)).add(block, size)
            continue
        while size > mean * (1 + 1e-9):
            min(loads, key=lambda server: server.load).add(block, mean)
            size -= mean
        _best_fit(loads, mean, size).add(block, size)
    return loads


def _best_fit(loads: Sequence[ServerLoad], mean: float, size: float) -> ServerLoad:
    holding = [server for server in loads if mean - server.load >= size - 1e-9 * mean]
    if holding:
        return max(holding, key=lambda server: server.load)
    return min(loads, key=lambda server: server.load)


def round_robin(sizes: Sequence[float], servers: int) -> list[ServerLoad]:
    """Return blocks dealt in turn, as TensorFlow does."""
    loads = [ServerLoad() for _ in range(servers)]
    for block, size in enumerate(sizes):
        loads[block % servers].add(block, size)
    return loads
