"""Values of the client: how blocks are laid out, what has happened to them, and the store behind them."""

from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Protocol

from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory import protocol
from ebbflow.planners.memory.slab_table import BlockRange


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """How blocks are laid out, and what is waited for.

    Args:
        slabs: number of slabs of the address space.
        slab_bytes: size of a slab, a multiple of ``block_bytes``; that of the daemons.
        block_bytes: size of a block.
        request_blocks: most blocks that move at once.
        entries: writes that may be under way; further ones wait.
        hot: blocks/s above which a slab is mapped.
        choices: hosts that are compared for a slab.
        probe_timeout: seconds for an answer about free slabs.
        request_timeout: seconds for a read, a write or a slab; then the host counts as lost.
        store_timeout: seconds for the store behind.
    """

    slabs: int = 8192
    slab_bytes: int = 16 << 20
    block_bytes: int = 256 << 10
    request_blocks: int = 4
    entries: int = 64
    hot: float = 20.0
    choices: int = 2
    probe_timeout: float = 1.0
    request_timeout: float = 10.0
    store_timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.slab_bytes < 1 or self.slab_bytes % self.block_bytes:
            raise MemoryTierError(
                f"a slab must have a whole number of blocks; {self.slab_bytes} / {self.block_bytes} is none"
            )
        if not 1 <= self.request_blocks * self.block_bytes <= protocol.MAX_BLOCK:
            raise MemoryTierError(
                f"a request must have 1 to {protocol.MAX_BLOCK} bytes, not "
                f"{self.request_blocks} blocks of {self.block_bytes}"
            )
        if self.entries < 1 or self.slabs < 1:
            raise MemoryTierError(
                f"there must be at least 1 slab and 1 entry, not {self.slabs} and {self.entries}"
            )

    @property
    def blocks_per_slab(self) -> int:
        """Return the blocks of a slab."""
        return self.slab_bytes // self.block_bytes


@dataclass(slots=True)
class TierMetrics:
    """What has happened to blocks since the client began."""

    remote_hits: int = 0  # reads that a peer answered
    store_hits: int = 0  # reads that the store behind answered
    fallbacks: int = 0  # reads that a peer should have answered and did not
    remote_writes: int = 0
    store_writes: int = 0
    stalls: int = 0  # writes that waited for an entry
    stall_seconds: float = 0.0
    maps: int = 0
    remaps: int = 0  # of slabs that were mapped before
    unplaced: int = 0  # searches that found no host
    evictions: int = 0
    lost_hosts: int = 0

    def as_dict(self) -> dict[str, float]:
        """Return the values by name."""
        return asdict(self)


class BehindStore(Protocol):
    """The store behind the blocks. Calls of one lane come one at a time and in their order."""

    def lane(self, blocks: BlockRange) -> Hashable:
        """Return the queue that a request belongs to; all requests for one block have one."""
        ...

    def write(self, blocks: BlockRange, data: bytes) -> None:
        """Keep ``data`` from the first block's start on. Raises ``InfraError`` or ``OSError``."""
        ...

    def read(self, blocks: BlockRange, offset: int, size: int) -> bytes:
        """Return ``size`` bytes, ``offset`` bytes after the first block's start. Raises as ``write`` does."""
        ...
