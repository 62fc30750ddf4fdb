"""Tensors that move, and running checkpoints of them."""

import copy
from typing import Any

import numpy as np
import torch

from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.infra.training.running.folder import RunningFolder
from ebbflow.infra.training.running.segments import Record


def tensors(seed: int = 0, rows: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(rows, 3, generator=generator), "b": torch.randn(rows, generator=generator)}


class Walk:
    """Tensors that move, some rows far and some not at all, and what they were."""

    def __init__(self, seed: int = 0, rows: int = 16) -> None:
        self.now = tensors(seed, rows)
        self._rng = np.random.default_rng(seed)
        self.past: list[dict[str, torch.Tensor]] = [copy.deepcopy(self.now)]

    def move(self) -> int:
        for tensor in self.now.values():
            scale = torch.tensor(self._rng.choice([0.0, 0.1, 1.0, 5.0], len(tensor)), dtype=torch.float32)
            noise = torch.tensor(self._rng.normal(size=tuple(tensor.shape)), dtype=torch.float32)
            tensor.add_(noise * scale.reshape(-1, *[1] * (tensor.dim() - 1)))
        self.past.append(copy.deepcopy(self.now))
        return len(self.past) - 1


def running(
    place: Any, model: Any, optimizer: Any = None, *, period: int = 8, fraction: float = 0.25, **options: Any
) -> RunningCheckpoint:
    made = RunningCheckpoint(
        StorageLocation(place),
        model,
        optimizer,
        period=period,
        fraction=fraction,
        **{"shard_rows": 2, **options},
    )
    made.initialize({"iteration": 0})
    return made


def durable(place: Any, blocks: int) -> dict[int, Record]:
    folder = RunningFolder(StorageLocation(place))
    start = folder.latest()
    assert start is not None
    return folder.newest(start, range(blocks))
