"""What the wrapper adds to a step: plain DDP and ``ElasticRun`` on models of 10 million parameters, in turns."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ebbflow.infra.training import ElasticRun
from ebbflow.infra.training.gradients import DENSE, EVERY

# Steps of one side before the other has its turn: noise is measured in two of each.
BLOCK = 2 * EVERY
# Blocks before: all of the first 128 steps are measured, and Adam's factors are renewed often in the first thousand,
# which only the smaller steps feel.
WARM_UP = {"transformer": 1 + DENSE // BLOCK, "perceptron": 1024 // BLOCK}
TOKENS = 64

CASES = ("transformer, AdamW", "transformer, SGD", "perceptron, AdamW", "perceptron, SGD")


class Transformer(nn.Module):
    """A causal language model over bytes, 10.8 million parameters."""

    def __init__(self, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(TOKENS, width))
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TOKENS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.body(self.embed(x) + self.place, mask=self.mask, is_causal=True))
        return found


def perceptron() -> nn.Module:
    """Return a multi-layer perceptron of 10.0 million parameters."""
    widths = (784, 2048, 2048, 2048)
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


def overhead(world: int, device: str, case: str, rounds: int, local: int) -> dict[str, Any]:
    """Return milliseconds of a step of both, and the median of their ratios over ``rounds`` pairs of blocks.

    ``local`` examples a process; those of the transformer are of 64 tokens.
    """
    kind, optimizer = case.split(", ")
    warm_up = WARM_UP[kind]

    def make(parameters: Any) -> torch.optim.Optimizer:
        if optimizer == "SGD":
            return torch.optim.SGD(parameters, 1e-3, momentum=0.9)
        return torch.optim.AdamW(parameters, 1e-4)

    run = ElasticRun.start()
    model_of: Callable[[], nn.Module] = Transformer if kind == "transformer" else perceptron
    batch, steps = local * world, (warm_up + rounds) * BLOCK
    data, loss = _task(kind, batch * (steps + 2), device)
    plain = model_of().to(device)
    size = sum(p.numel() for p in plain.parameters())
    called = DistributedDataParallel(plain, gradient_as_bucket_view=True) if world > 1 else plain
    plain_optimizer = make(called.parameters())
    # the batch may grow by less than a process' share: everything adaptive is at work, and yet nothing changes
    model, _ = run.prepare(model_of(), make, batch_size=batch, max_batch_size=batch + 1)
    order = iter(torch.randperm(len(data[0])).split(local))
    epochs = run.epochs(1)
    next(epochs)
    batches = run.batches(data)

    def plain_step() -> None:
        rows = next(order)
        loss(called, [column[rows].to(device, non_blocking=True) for column in data]).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def elastic_step() -> None:
        run.backward(loss(model, next(batches)))
        run.step()

    def timed(step: Callable[[], None]) -> tuple[float, float]:
        _meet(world, device)
        begun, used = time.perf_counter(), time.process_time()
        for _ in range(BLOCK):
            step()
        used = time.process_time() - used
        _meet(world, device)
        return (time.perf_counter() - begun) / BLOCK, used / BLOCK

    with run:
        for _ in range(warm_up):
            plain_step()
            for _ in range(BLOCK):
                elastic_step()
        pairs = [(timed(plain_step), timed(elastic_step)) for _ in range(rounds)]
        ratios = sorted(elastic[0] / alone[0] for alone, elastic in pairs)
        used = [statistics.median(side[1] for side in sides) for sides in zip(*pairs, strict=True)]
        found = {
            "case": case,
            "parameters": size,
            "local_batch": local,
            "processes": world,
            "rounds": rounds,
            "block": BLOCK,
            "plain_ms": 1e3 * statistics.median(alone[0] for alone, _ in pairs),
            "elastic_ms": 1e3 * statistics.median(elastic[0] for _, elastic in pairs),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
            "plain_cpu_ms": 1e3 * used[0],
            "elastic_cpu_ms": 1e3 * used[1],
            "noise_scale": run.statistics.noise_scale,
        }
        assert run.statistics.batch == batch
        batches.close()
    return found


def _task(kind: str, examples: int, device: str) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
    """Return data that are drawn at random and a loss; what is learnt does not matter to the time it takes."""
    torch.manual_seed(0)
    if kind == "transformer":
        text = torch.randint(256, (examples, TOKENS))

        def next_byte(model: nn.Module, batch: Any) -> Tensor:
            x = batch[0]
            return nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())

        return (text,), next_byte
    images = torch.randn(min(examples, 4096), 784)
    images = images[torch.arange(examples) % len(images)]
    labels = torch.randint(10, (len(images),))
    return (images, labels), lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])


def _meet(world: int, device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    if world > 1:
        dist.barrier()
