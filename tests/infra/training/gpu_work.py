"""What ``test_gpus`` runs: each function is one process on a GPU, and returns what it saw."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ebbflow.infra.training import ElasticRun
from ebbflow.infra.training.gradients.comm_hook import RankSamples
from ebbflow.infra.training.gradients.squares import SquareSums
from ebbflow.infra.training.process import nccl
from ebbflow.planners.model.trainings import RunSettings

WIDTH, BATCH, STEPS = 256, 64, 24


def network(depth: int = 4, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, 8))


def samples(steps: int = STEPS, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH * steps, width, generator=torch.Generator().manual_seed(2))
    return x, x[:, :8].sin()


def train(run: ElasticRun, model: nn.Module, **options: Any) -> dict[str, Any]:
    """Train one epoch; return the losses, and the model as the run gave it back."""
    called, optimizer = run.prepare(
        model, lambda p: torch.optim.AdamW(p, 1e-3), batch_size=BATCH, clip_norm=1.0, **options
    )
    losses = []
    for _ in run.epochs(1):
        for x, y in run.batches(samples()):
            loss = nn.functional.mse_loss(called(x), y)
            run.backward(loss)
            run.step()
            losses.append(loss.item())
    return {"losses": losses, "model": called, "optimizer": optimizer}


def plain(world: int, device: str) -> list[float]:
    """Return the losses of a loop without a wrapper, over the samples in the run's order."""
    from ebbflow.planners.training.saving.data_order import DataOrder

    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = (part.to(device) for part in samples())
    order, losses = DataOrder(len(x), 3), []
    for step in range(STEPS):
        rows = torch.tensor(order.indices(0, step * BATCH, (step + 1) * BATCH), device=device)
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def elastic(world: int, device: str, graphs: bool = False) -> list[float]:
    """Return the losses of an elastic run; ``graphs``: of a model whose passes are replayed as CUDA graphs."""
    with ElasticRun.start(seed=3) as run:
        model = network()
        if graphs:
            model.compile(mode="reduce-overhead")
        found: list[float] = train(run, model)["losses"]
    return found


def sharded(world: int, device: str) -> dict[str, Any]:
    """Shard over NCCL, save, and load what was saved; return losses and where states lie."""
    with tempfile.TemporaryDirectory() as folder:
        with ElasticRun.start(seed=3, directory=folder, run_id="one") as run:
            model = network().to(device)
            mesh = DeviceMesh(device, range(world), mesh_dim_names=("shards",))
            for block in (*model.children(), model):
                fully_shard(block, mesh=mesh)
            done = train(run, model)
            backend = dist.get_backend_config(mesh.get_group())
        kept = {name: value.full_tensor().cpu() for name, value in done["model"].state_dict().items()}
        with ElasticRun.start(seed=3, directory=folder, run_id="one") as again:
            model, _ = again.prepare(network(), lambda p: torch.optim.AdamW(p, 1e-3), batch_size=BATCH)
            step = again.progress.step
            same = all(torch.equal(value.cpu(), kept[name]) for name, value in model.state_dict().items())
    return {"losses": done["losses"], "backend": backend, "step": step, "same": same}


def hooked(world: int, device: str) -> dict[str, Any]:
    """Reduce gradients by the run's hook over NCCL; return what it does with them and how long it says it took."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    inner = network().to(device)
    module = DistributedDataParallel(inner, device_ids=[0], gradient_as_bucket_view=True)
    hook = RankSamples(module, SquareSums(), None)
    x, y = (part[:BATCH].to(device) for part in samples())
    hook.begin(True)
    nn.functional.mse_loss(module(x), y).backward()
    hook.after_pass(1.0, True)
    norms = hook.norms(BATCH, 1.0)
    square = sum(float(p.grad.square().sum()) for p in inner.parameters())
    dist.destroy_process_group()
    return {
        "averages": hook.loss_factor == 1.0,
        "square": square,
        "total": norms.total,
        "seconds": norms.sync,
    }


def remade(world: int, device: str, times: int = 20) -> dict[str, Any]:
    """Make NCCL's group anew again and again under one model; return memory, and seconds of a change."""
    nccl.prepare()
    inner = network().to(device)
    x, y = (part[:BATCH].to(device) for part in samples())
    memory, seconds, losses = [], [], []
    for _ in range(times):
        begun = time.perf_counter()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        module = DistributedDataParallel(inner, device_ids=[0], gradient_as_bucket_view=True)
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        losses.append(loss.item())
        inner.zero_grad()
        del module, loss
        nccl.finish(torch.device(device))
        nccl.abort()  # as where processes come and go
        dist.destroy_process_group()
        nccl.begun()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        free, total = torch.cuda.mem_get_info()
        memory.append(total - free)
    return {
        "memory": memory,
        "seconds": statistics.median(seconds[1:]),
        "first": seconds[0],
        "same": len(set(losses)) == 1,
    }


def saved(world: int, device: str, width: int = 4096, depth: int = 16, saves: int = 3) -> dict[str, Any]:
    """Save a model of a gigabyte again and again while it trains, until so many saves are whole.

    Return how many steps were done while each was written, how long steps were held up, and whether the model came
    back.
    """
    times: list[float] = []
    beside: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        x, y = samples(64, width)
        always = RunSettings(checkpoint_interval=0.0)
        with ElasticRun.start(seed=3, directory=folder, run_id="one", settings=always) as run:
            model, _ = run.prepare(
                network(depth, width), lambda p: torch.optim.AdamW(p, 1e-4), batch_size=BATCH
            )
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            for _ in run.epochs(100):
                for a, b in run.batches((x, y)):
                    begun = time.perf_counter()
                    run.backward(nn.functional.mse_loss(model(a), b))
                    run.step()
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - begun)
                    for whole in Path(folder).glob("**/manifest.json"):
                        step = int(whole.parent.name.split("-")[1])
                        beside.setdefault(whole.parent.name, run.progress.step - step)
                if len(beside) >= saves:
                    break
            kept = {name: value.cpu() for name, value in model.state_dict().items()}
        del model
        with ElasticRun.start(seed=3, directory=folder, run_id="one") as again:
            model, _ = again.prepare(
                network(depth, width), lambda p: torch.optim.AdamW(p, 1e-4), batch_size=BATCH
            )
            same = all(torch.equal(value.cpu(), kept[name]) for name, value in model.state_dict().items())
    return {
        "bytes": size,
        "saves": len(beside),
        "beside": statistics.median(beside.values()),
        "usual": statistics.median(times),
        "longest": max(times[4:]),
        "same": same,
    }
