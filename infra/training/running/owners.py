"""Which blocks a training is cut into, and which of its processes owns each."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ebbflow.infra.errors import StorageError
from ebbflow.infra.training.checkpoints.states import Signature, signature
from ebbflow.infra.training.process import agreeing
from ebbflow.infra.training.running.blocks import (
    BlockSpec,
    partition_by_layer,
    partition_by_shard,
    place_blocks,
)
from ebbflow.infra.training.running.live_state import LiveState
from ebbflow.planners.errors import OptionError

Partition = Literal["shard", "layer"]


class Owners:
    """The processes that hold the blocks of a training together, as one of them sees it.

    Args:
        group: the processes; this one alone where it is ``None``.
        owner: this process' number among the owners; its rank unless given.

    Raises ``OptionError`` for a number that two of them have.
    """

    def __init__(self, group: Any, owner: int | None) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group) if group is not None else 0
        size = dist.get_world_size(group) if group is not None else 1
        self.owner = self.rank if owner is None else owner
        self.all = self.all_gather(self.owner)
        if len(set(self.all)) != size:
            raise OptionError(f"owners must differ between processes; got {self.all}")

    @property
    def first(self) -> bool:
        """Return whether this process does what is done once for all."""
        return self.group is None or dist.get_rank(self.group) == 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return what each process of the group gives, by rank."""
        if self.group is None:
            return [value]
        return agreeing.from_all(value, self.group)

    def summed(self, values: NDArray[np.float64], device: torch.device) -> NDArray[np.float64]:
        """Return the sum of all processes' values, exchanged from ``device``: exact where all but one are 0."""
        shared = torch.from_numpy(values).to(device)
        dist.all_reduce(shared, group=self.group)
        return np.asarray(shared.cpu().numpy())

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Do the work and return the results of all processes, by rank; raise what any of them raised."""
        result, error = None, None
        try:
            result = work()
        except StorageError as exc:
            error = exc
        gathered = self.all_gather((result, error))
        for _, failed in gathered:
            if failed is not None:
                raise failed
        return [value for value, _ in gathered]


class OwnedBlocks:
    """The blocks of all processes, by number, and the owner of each.

    Args:
        owners: the processes; where tensors are sharded this is collective.
        live: what this process holds.
        partition, shard_rows, seed: see ``RunningCheckpoint``.

    Raises ``OptionError``.
    """

    def __init__(
        self, owners: Owners, live: LiveState, partition: Partition, shard_rows: int | None, seed: int
    ) -> None:
        tensors = live.tensors
        cut = partition_by_layer(tensors) if partition == "layer" else partition_by_shard(tensors, shard_rows)
        self.tensors: Signature = signature(tensors)  # of all processes
        self.placement = place_blocks(len(cut), owners.all, seed)
        self.local = range(len(cut))  # those of tensors that this process has
        if live.sharded:
            gathered = owners.all_gather((cut, self.tensors))
            before = sum(len(blocks) for blocks, _ in gathered[: owners.rank])
            self.local = range(before, before + len(cut))
            cut = tuple(block for blocks, _ in gathered for block in blocks)
            self.tensors = {name: kind for _, signed in gathered for name, kind in signed.items()}
            counts = [len(blocks) for blocks, _ in gathered]
            self.placement = tuple(
                o for o, count in zip(owners.all, counts, strict=True) for _ in range(count)
            )
        if not cut:  # of no process; one alone may have empty shards only
            raise OptionError("there is no parameter to cut into blocks")
        self.specs: tuple[BlockSpec, ...] = cut
        self.sizes: NDArray[np.float64] = np.array([block.nbytes for block in cut], float)
        self._owner = owners.owner

    def __len__(self) -> int:
        return len(self.specs)

    def mine(self, numbers: Sequence[int]) -> list[int]:
        """Return those of the blocks that this process owns."""
        return [block for block in numbers if self.placement[block] == self._owner]

    def place(self, placement: Sequence[int]) -> None:
        """Let others own the blocks: ``placement`` has the owner of each. Raises ``OptionError``."""
        if len(placement) != len(self):
            raise OptionError(f"placement must name an owner for {len(self)} blocks; got {len(placement)}")
        self.placement = tuple(placement)
