"""Rounds of gradients over the aggregation service against all-reduce, where nothing computes, and where time goes.

::

    python -m tests.benchmarks.aggregation_rounds --megabytes 50 --workers 4 --pairs 3

Each worker is a process with the tensors of a model of that size: it pushes all gradients, commits and pulls the
parameters, or all-reduces them with gloo and updates them itself (momentum, both). Prints, as JSON for each pair: the
median seconds of a round either way, their ratio, and the processor seconds of aggregators and of one worker.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from ebbflow.infra.aggregation.agent import AggregationAgent
from ebbflow.infra.aggregation.frames import AggregatorAddress
from ebbflow.infra.aggregation.process import AggregatorProcess
from ebbflow.infra.aggregation.rules import Sgd, rule_values
from ebbflow.infra.machine.encrypted_router import CurveKeys

TENSORS = 24
ROUNDS, WARM_UP = 12, 3


def over_service(given: dict[str, Any]) -> list[float]:
    """Return the seconds of each round."""
    keys = CurveKeys(given["public"], given["secret"])
    where = {name: AggregatorAddress(*one) for name, one in given["aggregators"].items()}
    names = [f"t{i}" for i in range(TENSORS)]
    hosts = sorted(where)
    table = {name: [hosts[i % len(hosts)]] for i, name in enumerate(names)}
    agent = AggregationAgent(keys, where, table, timeout_s=120, share_memory=not given["wire"])
    data = {name: np.ones(given["elements"], np.float32) for name in names}
    options = {"rule": rule_values(Sgd(lr=1e-3, momentum=0.9)), "step": 0, "moments": []}
    agent.init({name: one.data.cast("B") for name, one in data.items()}, dict.fromkeys(names, options))
    agent.pull(names, 0)
    agent.parameters(names)
    found = []
    for number in range(ROUNDS):
        begun = time.perf_counter()
        for name in names:
            agent.push(name, data[name].data.cast("B"), number, 1, given["rank"], given["world"])
        agent.norms(names)
        agent.commit({name: {} for name in names}, number, 1)
        for name, frame in agent.parameters(names).items():
            np.copyto(data[name], np.frombuffer(frame.payload, np.float32))
        found.append(time.perf_counter() - begun)
    agent.close()
    return found


def over_allreduce(given: dict[str, Any]) -> list[float]:
    """Return the seconds of each round."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(given["port"])}
    dist.init_process_group("gloo", rank=given["rank"], world_size=given["world"])
    data = [torch.nn.Parameter(torch.ones(given["elements"])) for _ in range(TENSORS)]
    optimizer = torch.optim.SGD(data, lr=1e-3, momentum=0.9)
    found = []
    for _ in range(ROUNDS):
        for one in data:
            one.grad = torch.ones_like(one)
        begun = time.perf_counter()
        works = [dist.all_reduce(one.grad, async_op=True) for one in data]
        for work in works:
            work.wait()
        optimizer.step()
        found.append(time.perf_counter() - begun)
    dist.destroy_process_group()
    return found


def worker(given: dict[str, Any]) -> None:
    """Be a worker, and print what it took."""
    found = over_service(given) if "aggregators" in given else over_allreduce(given)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"rounds": found[WARM_UP:], "cpu": (used.ru_utime + used.ru_stime) / ROUNDS}))


def _run(orders: list[dict[str, Any]]) -> tuple[float, float]:
    command = [sys.executable, "-m", "tests.benchmarks.aggregation_rounds", "--worker"]
    processes = [subprocess.Popen([*command, json.dumps(one)], stdout=subprocess.PIPE) for one in orders]
    said = [json.loads(process.communicate(timeout=600)[0]) for process in processes]
    rounds = [max(one) for one in zip(*(each["rounds"] for each in said), strict=True)]
    return statistics.median(rounds), said[0]["cpu"]


def _cpu(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pair(
    megabytes: float, workers: int, aggregators: int, threads: int, port: int, *, wire: bool
) -> dict[str, Any]:
    """Return a round's seconds either way, one after the other; ``wire``: also on one machine all is sent."""
    base = {"elements": int(megabytes * 1e6 / 4 / TENSORS), "world": workers, "wire": wire}
    made = {f"a{i}": AggregatorProcess(f"a{i}", threads=threads) for i in range(aggregators)}
    try:
        pairs = [CurveKeys.make() for _ in range(workers)]
        for one in made.values():
            one.command(do="admit", job="job", workers={f"w{i}": keys.public for i, keys in enumerate(pairs)})
        where = {name: (one.where.address, one.where.public) for name, one in made.items()}
        orders = [
            {**base, "rank": i, "aggregators": where, "public": keys.public, "secret": keys.secret}
            for i, keys in enumerate(pairs)
        ]
        service, service_cpu = _run(orders)
        servers = sum(_cpu(one.pid) for one in made.values()) / ROUNDS
    finally:
        for one in made.values():
            one.close()
    reduced, reduced_cpu = _run([{**base, "rank": i, "port": port} for i in range(workers)])
    return {
        "service_s": round(service, 4), "allreduce_s": round(reduced, 4), "ratio": round(reduced / service, 3),
        "aggregators_cpu_s": round(servers, 3), "worker_cpu_s": round(service_cpu, 3),
        "allreduce_worker_cpu_s": round(reduced_cpu, 3), "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=50.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--aggregators", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--wire", action="store_true", help="send all, as between two machines")
    parser.add_argument("--worker")
    given = parser.parse_args()
    if given.worker:
        worker(json.loads(given.worker))
        return
    for number in range(given.pairs):
        port = given.port + number
        found = pair(given.megabytes, given.workers, given.aggregators, given.threads, port, wire=given.wire)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
