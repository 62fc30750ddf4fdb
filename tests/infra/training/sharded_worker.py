"""The ranks of the tests of sharded checkpoints."""

import sys
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ebbflow.infra.training.checkpoints import CheckpointFolder
from ebbflow.planners.errors import OptionError
from tests.infra.training.worlds import fork_world

VALUES = torch.arange(48.0).reshape(12, 4)


def state(size: int, values: torch.Tensor, step: int, name: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,))
    return {"model": {"w": distribute_tensor(values, mesh, [Shard(0)])}, "run": {"step": step, "name": name}}


def save(place: str, size: int) -> None:
    kept = state(size, VALUES, 3, "x")
    folder = CheckpointFolder(place)
    assert folder.save_sharded(kept, 3).bytes > 48 * 4
    with pytest.raises(OptionError, match=r"model\.w is sharded over processes; save it with save_sharded"):
        folder.save(kept, 3)


def load(place: str, size: int, rank: int) -> None:
    kept = state(size, torch.zeros(12, 4), 0, "")
    folder = CheckpointFolder(place)
    found = folder.latest()
    assert found is not None
    folder.load_sharded(found, kept)
    rows = 12 // size
    assert torch.equal(kept["model"]["w"].to_local(), VALUES[rank * rows : (rank + 1) * rows])
    assert kept["run"] == {"step": 3, "name": "x"}


if __name__ == "__main__":
    place = sys.argv[1]
    fork_world(lambda rank: save(place, 3), 3)
    fork_world(lambda rank: load(place, 2, rank), 2)
