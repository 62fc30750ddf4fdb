"""One of two gloo processes that measure gradients; writes what it found as JSON. Run by ``test_gradient_ranks``."""

import gc
import json
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.gradients.noise import GradientMeter

SIZES = ((40, 30), (30,), (30, 20), (20,))
EXAMPLES = 24


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 20))


def data() -> torch.Tensor:
    torch.manual_seed(6)
    return torch.randn(EXAMPLES, 40)


def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean(dim=1).mean()


def summed(values) -> list[float]:
    found = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(found)
    return found.tolist()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.detach().double().reshape(-1) for p in model.parameters()])


def passes_of(rank: int, shares: list[list[int]]) -> list[torch.Tensor]:
    """Return this rank's examples, a tensor a pass; ``shares`` are counts by rank and pass, in order."""
    flat_shares = [n for counts in shares for n in counts]
    pieces = data()[: sum(flat_shares)].split(flat_shares)
    begin = sum(len(counts) for counts in shares[:rank])
    return list(pieces[begin : begin + len(shares[rank])])


def measure(model, meter, rank, shares, scale=1.0):
    whole = sum(map(sum, shares))
    passes = passes_of(rank, shares)
    for n, x in enumerate(passes):
        last = n == len(passes) - 1
        weight = 2 * len(x) / whole
        with nullcontext() if last else model.no_sync():
            value = loss(model, x) * weight * scale * meter.loss_factor if len(x) else model(x).sum()
            with meter.micro_pass(last=last, weight=weight, loss_scale=scale):
                value.backward()
    norms = meter.local(whole)
    return norms, whole


def meters(rank: int, **ddp) -> tuple[torch.nn.Module, GradientMeter]:
    model = DistributedDataParallel(network(), **ddp)
    return model, GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), EXAMPLES)


def against_plain(rank: int) -> dict:
    """Gradients through the hook beside those of DDP without one, with many buckets."""
    gaps, parts = [], []
    for view in (False, True):
        settings = {"bucket_cap_mb": 0.002, "gradient_as_bucket_view": view}
        model, meter = meters(rank, **settings)
        plain = DistributedDataParallel(network(), **settings)
        for _ in range(3):  # buckets are made anew after the first
            model.zero_grad()
            plain.zero_grad()
            norms, whole = measure(model, meter, rank, [[12], [12]])
            loss(plain, data()[12 * rank :][:12]).backward()
            gaps.append(float((flat(model) - flat(plain)).abs().max()))
            parts.append([*summed(norms), float(flat(plain) @ flat(plain))])
            meter.finish(summed(norms), 2, whole)
    return {"gaps": gaps, "parts": parts}


def shares(rank: int, counts: list[list[int]], scale: float = 1.0) -> dict:
    model, meter = meters(rank)
    norms, whole = measure(model, meter, rank, counts, scale)
    total = summed(norms)
    statistics = meter.finish(total, 2, whole)
    return {"summed": total, "statistics": list(statistics), "gradient": (flat(model) / scale).tolist()}


def adam(rank: int) -> dict:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.002)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    meter = GradientMeter(model, optimizer, EXAMPLES)
    found = []
    for n in range(9):
        optimizer.zero_grad()
        norms, whole = measure(model, meter, rank, [[12], [12]])
        factors = torch.ones_like(flat(model))
        if n >= 5:
            moments = [optimizer.state[p]["exp_avg_sq"].double().reshape(-1) for p in model.parameters()]
            factors = 1 / ((torch.cat(moments) / (1 - 0.999**n)).sqrt() + 1e-8)
        alone = network()
        alone.load_state_dict(model.module.state_dict())
        loss(alone, data()[12 * rank :][:12]).backward()
        mine, mean = factors * flat(alone), factors * flat(model)
        found.append([*norms, float(mine @ mine), float(mean @ mean), *summed(norms)])
        meter.finish(summed(norms), 2, whole)
        optimizer.step()
    return {"steps": found}


def broken(rank: int) -> dict:
    model, meter = meters(rank)
    norms, whole = measure(model, meter, rank, [[12], [12]])
    meter.finish(summed(norms), 2, whole)
    before = meter.state_dict()
    with meter.micro_pass(last=True):
        (loss(model, data()[:12]) * meter.loss_factor * (float("nan") if rank == 1 else 1.0)).backward()
    meter.finish(summed(meter.local(24)), 2, 24)
    return {"finite": meter.finite, "same": meter.state_dict() == before}


def late(rank: int) -> dict:
    model, meter = meters(rank)
    found = []
    for _ in range(2):
        model.zero_grad()
        value = loss(model, data()[:12])
        dist.barrier()
        if rank == 1:
            time.sleep(0.4)
        with meter.micro_pass(last=True):
            value.backward()
        norms = meter.local(24)
        meter.finish(summed(norms), 2, 24)
        found.append([norms.sync, meter.sync_seconds])
    return {"steps": found}


def unsynchronised(rank: int) -> dict:
    model, meter = meters(rank)
    with model.no_sync():
        value = loss(model, data()[:4])
    with meter.micro_pass(last=True):
        value.backward()
    try:
        meter.local(8)
    except TrainingError as error:
        return {"error": str(error)}
    return {"error": ""}


def noise(rank: int) -> dict:
    """Gradients of a normal distribution on two ranks, against what it is."""
    torch.manual_seed(11 + rank)
    deviation, gradient = torch.linspace(0.2, 2.0, 300), torch.linspace(-0.1, 0.2, 300)
    model = DistributedDataParallel(torch.nn.Linear(300, 1, bias=False))
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), 16, every=1)
    for _ in range(800):
        model.zero_grad()
        drawn = gradient + deviation * torch.randn(300) / 8**0.5
        with meter.micro_pass(last=True):
            (model(drawn).sum() * meter.loss_factor).backward()
        meter.finish(summed(meter.local(16)), 2, 16)
    return {"found": meter.noise_scale, "true": float(deviation @ deviation / (gradient @ gradient))}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    found = {
        "plain": against_plain(rank),
        "even": shares(rank, [[12], [12]]),
        "accumulated": shares(rank, [[6, 6], [6, 6]]),
        "uneven": shares(rank, [[4, 2], [10, 8]]),
        "scaled": shares(rank, [[12], [12]], scale=1024.0),
        "idle": shares(rank, [[24], [0]]),
        "adam": adam(rank),
        "broken": broken(rank),
        "late": late(rank),
        "unsynchronised": unsynchronised(rank),
        "noise": noise(rank),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    gc.collect()  # models left in cycles hold the group, and its threads must not outlive the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
