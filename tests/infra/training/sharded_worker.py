"""The ranks of the tests of sharded checkpoints, full and running."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.planners.errors import OptionError
from tests.infra.training.worlds import fork_world

VALUES = torch.arange(48.0).reshape(12, 4)


def state(size: int, values: torch.Tensor, step: int, name: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,))
    return {"model": {"w": distribute_tensor(values, mesh, [Shard(0)])}, "run": {"step": step, "name": name}}


def save(place: str, size: int, rank: int) -> None:
    kept = state(size, VALUES, 3, "x")
    folder = CheckpointFolder(StorageLocation(place))
    assert folder.save_sharded(kept, 3, world=World(rank, size)).bytes > 48 * 4
    with pytest.raises(OptionError, match=r"model\.w is sharded over processes; save it with save_sharded"):
        folder.save(kept, 3)


def load(place: str, size: int, rank: int) -> None:
    folder = CheckpointFolder(StorageLocation(place))
    found = folder.latest()
    assert found is not None
    rows = 12 // size
    kept = folder.load(found, cut=lambda path, shape: (slice(rank * rows, (rank + 1) * rows), slice(0, 4)))
    assert torch.equal(kept["model"]["w"], VALUES[rank * rows : (rank + 1) * rows])
    assert kept["run"] == {"step": 3, "name": "x"}


def running(place: str, size: int, rank: int) -> None:
    """Train with real FSDP; lose a shard and get it back; leave a running checkpoint of everything behind."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    model[0].tied = torch.nn.Linear(6, 9, bias=False)
    model[0].tied.weight = model[0].weight
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    made = RunningCheckpoint(
        StorageLocation(f"{place}/partial"),
        model,
        optimizer,
        period=4,
        fraction=0.5,
        shard_rows=1,
        group=dist.group.WORLD,
    )
    assert sorted(set(made.placement)) == list(range(size))
    assert len(made.blocks) == 2 * (9 + 3)
    made.initialize()
    past = [shards(model, optimizer)]
    for iteration in range(1, 8):
        train(model, optimizer, iteration)
        past.append(shards(model, optimizer))
        saved = made.step(iteration)
        made.wait()
        gathered: list[list[int]] = [[] for _ in range(size)]
        dist.all_gather_object(gathered, saved)
        assert (sum(map(len, gathered)) > 0) == (iteration % 2 == 0)
        assert all(made.placement[block] == rank for block in saved)
    own = [block for block, owner in enumerate(made.placement) if owner == rank]
    with pytest.raises(OptionError, match="shards that this process does not have"):
        made.recover(range(len(made.blocks)))
    if rank == 1:
        for parameter in model.parameters():
            parameter.detach().to_local().zero_()
        made.recover(own)
    after = shards(model, optimizer)
    for block in own:
        spec, at = made.blocks[block], made.durable[block] if rank == 1 else 7
        for key in ("", ".exp_avg", ".exp_avg_sq"):
            name = spec.tensor.partition("@")[0] + key
            then = past[at].get(name, torch.zeros_like(after[name]))  # no moments before the first step
            assert torch.equal(after[name][spec.start : spec.stop], then[spec.start : spec.stop]), name
    last = RunningCheckpoint(
        StorageLocation(f"{place}/full"),
        model,
        optimizer,
        period=1,
        fraction=1.0,
        shard_rows=2,
        group=dist.group.WORLD,
    )
    last.initialize()
    train(model, optimizer, 9)
    last.step(9, {"iteration": 9})
    last.wait()
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    whole |= {
        f"{index}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for index, kept in optimizer.state_dict()["state"].items()
        for key, value in kept.items()
    }
    if rank == 0:
        torch.save(whole, f"{place}/expected.pt")
    before = shards(model, optimizer)
    train(model, optimizer, 10)
    assert last.recover_all().state == {"iteration": 9}
    assert all(torch.equal(value, before[name]) for name, value in shards(model, optimizer).items())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()


def shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of what this process has."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().to_local().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            if key != "step":
                found[f"{name}.{key}"] = value.to_local().clone()
    return found


if __name__ == "__main__":
    places = sys.argv[1:]
    fork_world(lambda rank: [save(place, 3, rank) for place in places], 3)
    fork_world(lambda rank: [load(place, 2, rank) for place in places] + [running(places[0], 2, rank)], 2)
