"""What the wrapper adds to a step: plain DDP or FSDP2 and ``ElasticRun`` on 10 million parameters, in turns."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ebbflow.infra.training import ElasticRun
from ebbflow.infra.training.gradients.noise import DENSE, EVERY
from tests.benchmarks.ranks import together

BLOCK = 2 * EVERY  # steps that are compared: noise is measured in two of them
TURN = 4  # steps of one side before the other has its turn: machines change their speed within seconds
WARM_UP = 1 + DENSE // BLOCK  # blocks before: all of the first 128 steps are measured
AGED = 1024  # steps that Adam believes to have made then: in the first thousand its factors are renewed often
LAUNCHES = {"transformer": 4, "perceptron": 8, "large transformer": 2}
TOKENS = 64

SIDES = ("plain", "elastic")
CASES = (
    "transformer, AdamW",
    "transformer, SGD",
    "perceptron, AdamW",
    "perceptron, SGD",
    "transformer, AdamW, sharded",
    "transformer, SGD, sharded",
)
CUDA_CASES = (*CASES, "large transformer, AdamW", "large transformer, AdamW, sharded")
LARGE = 1024, 24, 16  # width, layers and heads: 302 million parameters, that compute in bf16


class Transformer(nn.Module):
    """A causal language model over bytes; 10.8 million parameters unless it is told otherwise."""

    def __init__(self, width: int = 384, layers: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(TOKENS, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
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


class Turns(NamedTuple):
    """Seconds of a step in each block, by the clock and of the processor, of both sides in turns in one process."""

    plain: list[tuple[float, float]]
    elastic: list[tuple[float, float]]
    parameters: int
    noise_scale: float


def overhead(device: str, case: str, rounds: int, world: int, local: int) -> dict[str, Any]:
    """Return milliseconds of a step of both, and the median of their ratios over ``rounds`` pairs of blocks.

    ``local`` examples a process; those of the transformer are of 64 tokens. Where a model lies in memory decides over
    as much as what is measured here, so the pairs are of several launches, half of which make the other side first.
    """
    launches = LAUNCHES[case.split(", ", maxsplit=1)[0]]
    each = -(-rounds // launches)
    found = [
        Turns(*together(in_turns, world, device, case, each, local, SIDES[n % 2])) for n in range(launches)
    ]
    plain, elastic = ([pair for launch in found for pair in getattr(launch, side)] for side in SIDES)
    ratios = [after[0] / alone[0] for alone, after in zip(plain, elastic, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    milliseconds = [
        [1e3 * statistics.median(part) for part in zip(*side, strict=True)] for side in (plain, elastic)
    ]
    return {
        "case": case,
        "parameters": found[0].parameters,
        "local_batch": local,
        "processes": world,
        "rounds": len(ratios),
        "block": BLOCK,
        "plain_ms": milliseconds[0][0],
        "elastic_ms": milliseconds[1][0],
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "ratio_by_launch": [
            statistics.median(e[0] / p[0] for p, e in zip(launch.plain, launch.elastic, strict=True))
            for launch in found
        ],
        "plain_cpu_ms": milliseconds[0][1],
        "elastic_cpu_ms": milliseconds[1][1],
        "noise_scale": found[0].noise_scale,
    }


def in_turns(world: int, device: str, case: str, rounds: int, local: int, first: str) -> Turns:
    """Train both sides in this process and its peers; ``first`` of the two is made first."""
    kind, rule, *sharded = case.split(", ")

    def make(parameters: Any) -> torch.optim.Optimizer:
        if rule == "SGD":
            return torch.optim.SGD(parameters, 1e-3, momentum=0.9)
        return torch.optim.AdamW(parameters, 1e-4)

    run = ElasticRun.start()
    large = kind.startswith("large")
    model_of: Callable[[], nn.Module] = perceptron if kind == "perceptron" else Transformer
    if large:
        model_of = partial(Transformer, *LARGE)
    batch, steps = local * world, (WARM_UP + 1 + rounds) * BLOCK
    data, loss = _task(kind, batch * (steps + 2), device)

    def shard(inner: nn.Module) -> nn.Module:
        mesh = DeviceMesh(device, range(world), mesh_dim_names=("shards",))  # equal to the run's own
        for block in (*inner.get_submodule("body.layers").children(), inner):
            fully_shard(block, mesh=mesh)
        return inner

    def make_plain() -> tuple[nn.Module, torch.optim.Optimizer]:
        inner = model_of().to(device)
        if sharded:
            shard(inner)
            return inner, make(inner.parameters())
        called = DistributedDataParallel(inner, gradient_as_bucket_view=True) if world > 1 else inner
        return called, make(called.parameters())

    def make_elastic() -> tuple[nn.Module, torch.optim.Optimizer]:
        # the batch may grow by less than a process' share: everything adaptive is at work, and yet nothing changes
        alone = bool(sharded) and world == 1  # a run shards over others only
        parallel: Any = "fsdp" if sharded and not alone else None
        return run.prepare(
            shard(model_of().to(device)) if alone else model_of(), make, batch_size=batch,
            max_batch_size=batch + 1, parallel=parallel, precision="bf16" if large else "fp32",
        )  # fmt: skip

    if first == "plain":
        (called, plain_optimizer), (model, optimizer) = make_plain(), make_elastic()
    else:
        (model, optimizer), (called, plain_optimizer) = make_elastic(), make_plain()
    order = iter(torch.randperm(len(data[0])).split(local))
    epochs = run.epochs(1)
    next(epochs)
    batches = run.batches(data)

    def plain_step() -> None:
        rows = next(order)
        with torch.autocast(device, torch.bfloat16, enabled=large):
            found = loss(called, [column[rows].to(device, non_blocking=True) for column in data])
        found.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def elastic_step() -> None:
        run.backward(loss(model, next(batches)))
        run.step()

    def timed(step: Callable[[], None]) -> tuple[float, float]:
        _meet(world, device)
        begun, used = time.perf_counter(), time.process_time()
        for _ in range(TURN):
            step()
        used = time.process_time() - used
        _meet(world, device)
        return time.perf_counter() - begun, used

    def pair() -> dict[str, tuple[float, float]]:
        """Return seconds of a step of each side, by the clock and of the processor, over a block of both."""
        spent: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for turn in range(BLOCK // TURN):
            for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                spent[side].append(timed(plain_step if side == "plain" else elastic_step))
        return {
            side: (sum(wall for wall, _ in of) / BLOCK, sum(used for _, used in of) / BLOCK)
            for side, of in spent.items()
        }

    with run:
        for _ in range(WARM_UP):
            plain_step()
            for _ in range(BLOCK):
                elastic_step()
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] += AGED
        called.load_state_dict(model.state_dict())  # what is in the numbers decides over their speed, too
        plain_optimizer.load_state_dict(optimizer.state_dict())
        pair()
        pairs = [pair() for _ in range(rounds)]
        assert run.statistics.batch == batch
        noise_scale = run.statistics.noise_scale
        batches.close()
    size = sum(p.numel() for p in called.parameters())
    return Turns([one["plain"] for one in pairs], [one["elastic"] for one in pairs], size, noise_scale)


def _task(kind: str, examples: int, device: str) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
    """Return data that are drawn at random and a loss; what is learnt does not matter to the time it takes."""
    torch.manual_seed(0)
    if kind != "perceptron":
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
