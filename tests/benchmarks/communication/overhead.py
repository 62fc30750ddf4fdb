"""What the enforcer costs where there is nothing to gain: a small model on loopback, against plain DDP, interleaved.

``python -m tests.benchmarks.communication.overhead [RANKS] [ROUNDS]`` prints one JSON object. Both ways send the same
buckets whole, on one channel, in the order of their submission, so that only the enforcer itself differs; blocks of
iterations take turns in the same processes, and the median ratio of neighboring blocks counts: of wall time, and of
the processor time of the first process, which says more on a machine that others use too.
"""

import json
import sys
import time
from statistics import median

import torch
import torch.distributed as dist

from ebbflow.infra.communication.channels import Channels
from ebbflow.infra.communication.ddp_hook import PlannedReduction, register
from ebbflow.infra.communication.enforcer import Enforcer
from ebbflow.infra.communication.payloads import Payload, Summed
from ebbflow.infra.communication.plain import PlainCollectives
from ebbflow.planners.communication.costs import Choice
from ebbflow.planners.communication.order import LaunchOrder
from ebbflow.planners.communication.plan import CommunicationPlan, PlannedCollective
from tests.infra.training.worlds import fork_world

BLOCK = 10  # iterations of one way before the other's turn
BATCH, WIDTH, DEPTH = 128, 512, 4


def measure(rank: int, rounds: int) -> None:
    """Time both ways on this rank; the first prints the result."""
    torch.set_num_threads(1)
    ranks, channels, plain = dist.get_world_size(), Channels(1), PlainCollectives()
    torch.manual_seed(0)
    layers = [part for _ in range(DEPTH) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1.1)  # type: ignore[no-untyped-call]
    sizes: dict[str, float] = {}

    def noted(op: str, payload: Payload) -> "torch.futures.Future[Payload]":
        assert isinstance(payload, Summed)
        sizes[op] = float(payload.tensor.nbytes)
        return plain.submit(op, payload)

    reduction = PlannedReduction(noted, ranks)
    register(model, reduction)
    x = torch.randn(BATCH, WIDTH)

    def block() -> tuple[float, float]:
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(BLOCK):
            model(x).square().mean().backward()
            model.zero_grad()
        return (time.perf_counter() - began) / BLOCK, (time.process_time() - busy) / BLOCK

    block()
    collectives = {op: PlannedCollective("all-reduce", size, Choice()) for op, size in sorted(sizes.items())}
    order = LaunchOrder.in_order((op, 0, 0) for op in collectives)
    enforcer = Enforcer(CommunicationPlan(1, ranks, collectives, order, 1.0, 1.0), channels)
    found: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for k in range(rounds + 1):
        pair = {}
        for way in (0, 1) if k % 2 else (1, 0):
            reduction.submit = enforcer.submit if way else plain.submit
            pair[way] = block()
        if k:
            found.append((pair[0], pair[1]))
    enforcer.close()
    if rank == 0:
        said: dict[str, object] = {"ranks": ranks, "buckets": len(sizes), "rounds": rounds}
        for k, what in enumerate(("wall", "processor")):
            ratios = sorted(planned[k] / before[k] for before, planned in found)
            said[what] = {
                "plain_ms": 1e3 * median(before[k] for before, _ in found),
                "enforcer_ms": 1e3 * median(planned[k] for _, planned in found),
                "median_ratio": median(ratios),
                "quartiles": [ratios[rounds // 4], ratios[3 * rounds // 4]],
            }
        print(json.dumps(said))


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    fork_world(lambda rank: measure(rank, given[1] if len(given) > 1 else 60), given[0] if given else 2)
