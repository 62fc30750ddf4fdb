"""The ranks of the tests of sharded gradients and saves: norms, memory, what cannot be sharded, last moments."""

import copy
import itertools
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder, SavedCheckpoint
from ebbflow.infra.training.checkpoints.shards import is_sharded, local, split
from ebbflow.infra.training.gradients.noise import GradientMeter
from ebbflow.infra.training.gradients.preconditioner import AdamPreconditioner
from ebbflow.infra.training.gradients.shard_samples import ShardSamples
from ebbflow.infra.training.gradients.squares import SquareSums
from ebbflow.infra.training.prepared import Options
from ebbflow.infra.training.process.generation import Generation
from ebbflow.infra.training.process.link import Link
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.infra.training.saver import RESCUE
from ebbflow.infra.training.sharded.parallel import Sharding, check_parallel, shard
from ebbflow.infra.training.sharded.saver import ShardedSaver
from ebbflow.infra.training.sharded.tensor import clip
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.worlds import fork_world

SIZE = 4
SHARES = ((3, 2), (1, 4), (5, 0), (2, 3))  # examples of each rank in each pass


class Block(nn.Module):
    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def made(hidden: int = 7) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), Block(hidden), Block(hidden), nn.Linear(6, 3))


def even() -> nn.Sequential:
    """Return a model whose blocks two tensor-parallel processes share evenly, which torch's styles require."""
    return made(10)


def batch(rank: int, number: int) -> torch.Tensor:
    count = max(1, SHARES[rank][number])
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(10 * rank + number))


def weight(rank: int, number: int, size: int) -> float:
    return SHARES[rank][number] * size / sum(map(sum, SHARES[:size]))


PLAN = {"1.first": ColwiseParallel(), "1.second": RowwiseParallel(), "2.first": ColwiseParallel()}
PLAN["2.second"] = RowwiseParallel(use_local_output=True)


def norms(
    rank: int, parallel: Any, adam: bool, local_size: str = str(SIZE), shape: tuple[int, ...] = ()
) -> None:
    """The meter's norms against those of whole gradients, of which each rank computes a share.

    ``shape``: of a mesh whose last dimension is tensor parallel, which the first and the last layer are not.
    """
    model, whole = (even(), even()) if shape else (made(), made())
    tensor = shape[-1] if shape else 1
    if shape:
        names = ("replicas", "shards", "tp")[-len(shape) :]
        parallel = init_device_mesh("cpu", shape, mesh_dim_names=names)
    more = {"plan": PLAN if shape else None}
    sharding = shard(World(rank, SIZE), model, None, parallel, None, {"LOCAL_WORLD_SIZE": local_size}, **more)
    assert sharding is not None
    assert sharding.tensor == tensor
    size, rank = SIZE // tensor, rank // tensor
    count = sum(map(sum, SHARES[:size]))
    assert [type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)] == [
        "FSDPSequential",
        "FSDPBlock",
        "FSDPBlock",
    ]
    optimizers = [
        torch.optim.Adam(m.parameters(), 0.01) if adam else torch.optim.SGD(m.parameters(), 0.1)
        for m in (model, whole)
    ]
    meter = GradientMeter(
        model,
        optimizers[0],
        20,
        every=1,
        samples=lambda s, p: ShardSamples(model, sharding.division, s, p, tensor),
    )
    conditioner = AdamPreconditioner(optimizers[1]) if adam else None
    for step in range(6 if adam else 2):  # gradients are pre-conditioned after five steps
        if conditioner is not None:
            conditioner.begin()
        sums = torch.zeros(1, dtype=torch.float64)
        for parameter in whole.parameters():
            parameter.grad = torch.zeros_like(parameter)
        passes = list(itertools.product(range(size), range(2)))
        for other, number in passes[dist.get_rank() :: SIZE]:
            alone = copy.deepcopy(whole)
            alone.zero_grad()
            (alone(batch(other, number)).square().mean() * weight(other, number, size)).backward()
            for parameter, its in zip(whole.parameters(), alone.parameters(), strict=True):
                parameter.grad += its.grad / size
            if weight(other, number, size):
                gradients = [p.grad for p in alone.parameters()]
                sums += squared(whole, gradients, conditioner) / weight(other, number, size)
        for one in (sums, *(parameter.grad for parameter in whole.parameters())):
            dist.all_reduce(one)
        expected = sums.item()
        mean = squared(whole, [p.grad for p in whole.parameters()], conditioner)
        for number in range(2):
            loss = model(batch(rank, number)).square().mean()
            now = weight(rank, number, size)
            with meter.micro_pass(last=number == 1, weight=now, loss_scale=8.0):
                (loss * now * meter.loss_factor * 8.0).backward()
        found = torch.tensor(meter.local(count), dtype=torch.float64)
        dist.all_reduce(found)
        if shape and shape[-2] == 1:  # nothing is scattered, and no sample seen
            expected, passes = 0.0, []
        assert found[0].item() == pytest.approx(expected, rel=1e-4), (shape, parallel, adam, step)
        assert found[1].item() == pytest.approx(sum(weight(*one, size) > 0 for one in passes))
        assert found[2].item() == pytest.approx(mean, rel=1e-4), (parallel, adam, step)
        meter.finish(found.tolist(), size, count)
        for parameter, its in zip(whole.parameters(), model.parameters(), strict=True):
            its.grad = its.grad / 8.0
            torch.testing.assert_close(its.grad.full_tensor(), parameter.grad)
        if shape:
            clipped(model, whole, sharding, 0.1 * mean**0.5 if step % 2 else 1e9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert (conditioner is not None) == adam
    assert conditioner is None or conditioner.on


def clipped(model: nn.Module, whole: nn.Module, sharding: Sharding, most: float) -> None:
    """Gradients in two device meshes are clipped as whole ones are."""
    world = World(dist.get_rank(), SIZE)
    found = clip(
        model.parameters(), most, sharding.tensor, sharding.division.replicas, lambda one: world.sum([one])[0]
    )
    assert found == pytest.approx(float(nn.utils.clip_grad_norm_(whole.parameters(), most)), rel=1e-5)
    for parameter, its in zip(whole.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(its.grad.full_tensor(), parameter.grad)


def pieces_of_groups(rank: int) -> None:
    """Each element is saved by one process, wherever tensor parallelism and shards cut, unevenly as well."""
    model = even()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "tp"))
    assert shard(World(rank, SIZE), model, None, mesh, plan=PLAN) is not None
    rest, pieces, found = split({"model": model.state_dict()})
    assert (found.part, found.parts, found.replicas) == (rank, SIZE, 1)
    filled = {name: torch.zeros(value.shape) for name, value in even().state_dict().items()}
    values = {name: torch.zeros(value.shape) for name, value in filled.items()}
    for piece, part in pieces:
        region = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.size, strict=True))
        filled[str(piece.path[1])][region] += 1
        values[str(piece.path[1])][region] = part
    for name, expected in even().state_dict().items():
        dist.all_reduce(filled[name])
        dist.all_reduce(values[name])
        assert torch.equal(filled[name], torch.ones_like(expected)), name
        assert torch.equal(values[name], expected), name
    assert rest == {"model": {}}


def squared(model: nn.Module, gradients: list, conditioner: AdamPreconditioner | None) -> float:
    factors = None
    if conditioner is not None and conditioner.on:
        factors = conditioner.of(list(model.parameters()))
    return float(SquareSums().of(gradients, factors))


def memory(rank: int) -> None:
    """Parameters, gradients and optimizer state take what plain FSDP2 takes."""
    sizes = []
    for ours in (True, False):
        model = made()
        if ours:
            assert shard(World(rank, SIZE), model, None, "fsdp") is not None
        else:
            for block in (model[1], model[2], model):
                fully_shard(block, mesh=DeviceMesh("cpu", range(SIZE)))
        optimizer = torch.optim.Adam(model.parameters())
        model(batch(rank, 0)).square().mean().backward()
        optimizer.step()
        kept = [*model.parameters(), *(p.grad for p in model.parameters())]
        kept += [value for state in optimizer.state.values() for value in state.values()]
        assert sum(map(is_sharded, kept)) == 4 * 12
        sizes.append(sum(local(value).numel() for value in kept))
    assert sizes[0] == sizes[1]


def asked(world: World, model: nn.Module, options: Options) -> None:
    check_parallel(options, model, world, planned=False)
    shard(world, model, None, options.parallel, options.wrap, plan=options.tensor_parallel)


def refused(rank: int) -> None:
    world = World(rank, SIZE)
    tied, scalar, partly, meta, own = made(), made(), made(), made(), made()
    tied[1].first.weight = tied[2].first.weight
    scalar.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    fully_shard(partly[1], mesh=DeviceMesh("cpu", range(SIZE)))
    meta[0].to("meta")
    own.to("meta")
    fully_shard(own, mesh=DeviceMesh("cpu", range(SIZE)))
    cases: list[tuple[nn.Module, object, object, str]] = [
        (made(), "zero", None, "parallel must be ddp, fsdp, hsdp or a DeviceMesh; got 'zero'"),
        (made(), "ddp", [Block], "wrap says which modules are sharded as one; it needs parallel="),
        (made(), "fsdp", [nn.Conv2d], "wrap chooses none of the 9 modules"),
        (made(), "fsdp", ["Block"], "wrap must be classes of modules or a function"),
        (made(), DeviceMesh("cpu", [0, 1]), None, "each process of the run once; got 2 for 4 processes"),
        (made(), DeviceMesh("cpu", torch.arange(4).view(4, 1)), None, "one shard a replica is data parallel"),
        (made(), DeviceMesh("cpu", torch.arange(4).view(2, 2, 1)), None, "one dimension .* or two .*; got 3"),
        (
            made(),
            named_mesh((2, 2), "shards", "tp"),
            None,
            "'tp', but no parameter of the model is tensor para",
        ),
        (partly, "fsdp", None, "the model is sharded already; leave parallel and wrap out"),
        (partly, None, None, "must be sharded as a whole: call fully_shard"),
        (
            tied,
            "fsdp",
            None,
            "2.first.weight and 1.first.weight are one parameter in modules that are sharded apart",
        ),
        (scalar, "fsdp", None, "the model cannot be sharded: .*scalar"),
        (meta, "fsdp", None, r"0.weight has no values \(device meta\)"),
        (own, None, None, r"0.weight has no values \(device meta\)"),
        (nn.Tanh(), "fsdp", None, "the model has no parameter to train"),
    ]
    for model, parallel, wrap, message in cases:
        with pytest.raises(OptionError, match=message):
            asked(world, model, Options(8, parallel=parallel, wrap=wrap))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="communication='planned' orders DDP's buckets"):
        check_parallel(Options(8, parallel="fsdp"), made(), world, planned=True)
    with pytest.raises(OptionError, match="ddp are options of DistributedDataParallel; got 'hsdp' beside"):
        check_parallel(Options(8, parallel="hsdp", ddp={"x": 1}), made(), world, planned=False)
    model = made()
    optimizer = torch.optim.Adam(model.parameters())
    model(batch(rank, 0)).mean().backward()
    optimizer.step()
    with pytest.raises(OptionError, match="the optimizer has a state of whole parameters"):
        shard(world, model, optimizer, "fsdp")


def named_mesh(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def refused_groups(rank: int) -> None:
    """What tensor parallelism cannot be had with."""
    world, mesh = World(rank, SIZE), named_mesh((2, 2), "shards", "tp")
    spread = parallelize_module(made(), mesh["tp"], PLAN)
    cases: list[tuple[nn.Module, dict, str]] = [
        (made(), {"parallel": "fsdp", "tensor_parallel": PLAN}, "needs a DeviceMesh whose last dimension"),
        (spread, {"parallel": mesh, "tensor_parallel": PLAN}, "the model is tensor parallel already"),
        (made(), {"parallel": mesh, "tensor_parallel": PLAN, "precision": "fp16"}, "precision='fp16' is not"),
        (spread, {}, "must be sharded as a whole: call fully_shard"),
    ]
    for model, options, message in cases:
        with pytest.raises(OptionError, match=message):
            asked(world, model, Options(8, **options))
    saving = RunSettings(partial_checkpoint_interval=4)
    with pytest.raises(OptionError, match="partial checkpoints are of shards in one dimension"):
        check_parallel(Options(8, parallel=mesh), spread, world, planned=False, settings=saving)
    with pytest.raises(OptionError, match="tensor_parallel names none of the model's modules"):
        shard(world, made(), None, mesh, plan={"nothing": ColwiseParallel()})


def optimizers_follow(rank: int) -> None:
    model = made()
    with torch.no_grad():
        model[0].weight.add_(rank)  # of the first process counts
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert shard(World(rank, SIZE), model, optimizer, "fsdp") is not None
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert torch.equal(model[0].weight.full_tensor(), made()[0].weight)
    assert (
        shard(World(rank, SIZE), made(), None, "hsdp", None, {"LOCAL_WORLD_SIZE": str(1 + 2 * (rank == 0))})
        is None
    )


def own_replicas(rank: int) -> None:
    """Replicas that a script has made are equal, whatever each was made of; so is what is not sharded."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    model.register_buffer("drawn", torch.randn(2))
    mesh = DeviceMesh("cpu", torch.arange(SIZE).view(2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model, mesh=mesh)
    assert shard(World(rank, SIZE), model, None, None) is not None
    states = World(rank, SIZE).from_all(
        {name: local(value).flatten().tolist() for name, value in model.state_dict().items()}
    )
    assert states[0] == states[2]
    assert states[1] == states[3]
    assert states[0]["0.weight"] != states[1]["0.weight"]
    assert states[0]["drawn"] == states[1]["drawn"]


def empty_shards(rank: int) -> None:
    """A running checkpoint of fewer rows than processes: some own nothing of it."""
    world = World(rank, SIZE)
    with tempfile.TemporaryDirectory() as mine:
        place = StorageLocation(str(world.from_first(mine)))
        model = nn.Linear(5, 2)
        fully_shard(model, mesh=DeviceMesh("cpu", range(SIZE)))
        running = RunningCheckpoint(place, model, period=1, fraction=1.0, group=dist.group.WORLD)
        assert set(running.placement) == {0, 1}
        running.initialize({"iteration": 0})
        before = local(model.weight).clone()
        assert len(before) == (rank < 2)
        local(model.weight.detach()).add_(1.0)
        assert running.recover_all().state == {"iteration": 0}
        assert torch.equal(local(model.weight), before)
        world.from_all(None)  # have read, before the directory goes


class Claims(Link):
    """Lets the first process that asks have what it asks for, as a launcher does."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(None, rank, 1.0)
        self._folder = folder

    def claim(self, name: str) -> bool:
        try:
            (self._folder / name).mkdir()
        except FileExistsError:
            return False
        return True


class Gated(CheckpointFolder):
    """Writes its manifests once it may."""

    gate = threading.Event()

    def committed(self, *given: Any) -> SavedCheckpoint:
        assert self.gate.wait(150)
        return super().committed(*given)


def saving(rank: int) -> None:
    """Parts that are written one by one at the last moment are a checkpoint; a slow manifest confuses nobody."""
    world = World(rank, SIZE)
    with tempfile.TemporaryDirectory() as mine:
        root = Path(str(world.from_first(mine)))
        folder = Gated(StorageLocation(root / "checkpoints"), timeout=60.0)
        model = made()
        sharding = shard(world, model, None, "fsdp")
        assert sharding is not None
        generation = Generation(world, Claims(root, rank), RunSettings(checkpoint_interval=0.0))
        saver = ShardedSaver(folder, generation, sharding)

        def state() -> dict[str, Any]:
            return {"model": model.state_dict()}

        def until_written() -> None:
            while world.sum(saver.counts())[1] < SIZE:
                time.sleep(0.01)

        saver.maybe(state, 1, (1.0, 0.0))
        until_written()
        saver.maybe(state, 2, (0.0, SIZE))
        assert saver.costs.write > 0, "known to all"
        with pytest.raises(StorageError, match="the manifest of a checkpoint is still writing"):
            saver.now(state, 3, "stop", 30.0)
        saver.maybe(state, 4, (1.0, 0.0))
        until_written()
        saver.maybe(state, 4, (0.0, SIZE))
        assert saver.saved_step == -1
        Gated.gate.set()
        saver.last(state, 5, "finished")
        assert saver.saved_step == 5
        found = folder.latest()
        assert found is not None
        assert (found.step, found.passed_over) == (5, ())
        world.from_all(None)  # have looked

        while len(list(root.glob("checkpoints/step-000000000006-*/part-*.json"))) < rank:
            time.sleep(0.01)
        done = saver.rescue(state, 6, "deadline", 60.0)
        assert len(list(root.glob("checkpoints/step-000000000006-*/part-*.json"))) == SIZE, (
            "ended before the others"
        )
        assert sorted(world.from_all(done)) == [False] * (SIZE - 1) + [True]
        found = folder.latest()
        assert found is not None
        assert found.step == 6
        assert not saver.rescue(state, 7, RESCUE, 60.0), "a shard is lost with its process"
        world.from_all(None)  # have looked, before the directory goes


def state_beside(rank: int) -> None:
    """What another thread saves is what the model says of itself, and leaves gathered parameters alone."""
    model = made()
    model.append(nn.BatchNorm1d(3))
    model.register_buffer("passing", torch.ones(1), persistent=False)
    model[4].weight = model[3].bias  # tied within a unit
    sharding = shard(World(rank, SIZE), model, None, "fsdp")
    assert sharding is not None
    model(torch.randn(4, 5))
    assert not is_sharded(model[0].weight), "gathered until backward"
    found = sharding.state_of(model)
    assert not is_sharded(model[0].weight)
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(local(found[name]), local(value)) for name, value in expected.items())


def main(rank: int) -> None:
    state_beside(rank)
    refused(rank)
    refused_groups(rank)
    pieces_of_groups(rank)
    optimizers_follow(rank)
    own_replicas(rank)
    empty_shards(rank)
    saving(rank)
    memory(rank)
    norms(rank, "fsdp", False, "4")
    for parallel, local_size in (("fsdp", "4"), ("hsdp", "2")):
        norms(rank, parallel, True, local_size)
    norms(rank, None, True, shape=(2, 2))
    norms(rank, None, False, shape=(2, 1, 2))


if __name__ == "__main__":
    fork_world(main, SIZE)
