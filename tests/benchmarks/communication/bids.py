"""Bids by what placements are predicted to cost, against bids by a fixed factor, on Pollux' public workloads.

Run from the repository root: ``python -m tests.benchmarks.communication.bids``. Prints two tables: by what an
iteration takes longer on one GPU each of several nodes than on one node, measured and predicted; and mean and worst
finish-time fairness of policies that ask for bids, on nodes of 4 GPUs. What the simulator lets happen is what the
authors of AdaptDL measured; what bids are predicted from is what a training would record on two GPUs of one node:
compute, the sizes of gradients in DDP's buckets and when they are ready; and the rates of links.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np

from ebbflow.infra.simulation.jobs.profiles import Profile, Profiles
from ebbflow.infra.storage.files import write_text
from ebbflow.planners.communication.dag import CommOp, ComputeOp, Dependency, TrainingDag
from ebbflow.planners.communication.placement import profile_of
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.scheduling.catalogue import policy_entry
from ebbflow.planners.scheduling.locality import Level, Slowdown
from ebbflow.planners.scheduling.placement_cost import placement_cost
from ebbflow.tasks.simulation.inputs import Inputs
from ebbflow.tasks.simulation.request import SimulationRequest, links_of
from ebbflow.tasks.simulation.scenarios import run_world
from tests.benchmarks.policies import DATA

PARAMETERS: Mapping[str, float] = {
    "bert": 108.9e6,
    "cifar10": 11.17e6,
    "deepspeech2": 41.2e6,
    "imagenet": 25.56e6,
    "ncf": 1.60e6,
    "yolov3": 61.6e6,
}
"""Of BERT base with a head for questions, ResNet-18, five bidirectional GRU layers of 800, ResNet-50, NeuMF on
MovieLens 1M and YOLOv3 with 20 classes: the models of AdaptDL's benchmark."""
LINKS = "64gbit,10gbit"
"""Of an EC2 g4dn.12xlarge: PCIe 3.0 x8 of each GPU; what one flow gets between nodes of a placement group (EC2 user
guide, network bandwidth of instances)."""
FIRST, BUCKET = 1 << 20, 25 << 20  # bytes: DDP's first bucket, and the others
FORWARD = 1 / 3  # of the compute of an iteration


def local_batch(profile: Profile) -> int:
    """Return the examples of a GPU at the model's initial batch, as many of it as one takes."""
    return min(max(profile.first_batch, profile.local_min), profile.local_max)


def recorded(name: str, profile: Profile) -> RecordedTraining:
    """Return what a training records on two GPUs of a node.

    How much of the exchange an iteration had to wait for there, of what it sends at the rate of the node, says how
    many of its gradients are ready only as the backward pass ends; the others are ready evenly during it.
    """
    step, sync = profile.speed((2,), local_batch(profile))
    total = PARAMETERS[name] * 4
    sizes = [min(total, FIRST)]
    while (left := total - sum(sizes)) > 0:
        sizes.append(min(left, BUCKET))
    late = min(sync * links_of(LINKS).intra_node / total, 1.0) * total
    forward, backward = (step - sync) * FORWARD, (step - sync) * (1 - FORWARD)
    blocks, sent = [ComputeOp("forward", forward)], 0.0
    for k, size in enumerate(sizes):
        ready = min((sent + size) / (total - late), 1.0) if total > late else 1.0
        before = min(sent / (total - late), 1.0) if total > late else float(k > 0)
        blocks.append(ComputeOp(f"backward/{k}", backward * (ready - before)))
        sent += size
    comm = tuple(CommOp(f"bucket/{k}", "all-reduce", size, 2) for k, size in enumerate(sizes))
    after = [Dependency(f"backward/{k}", op.name) for k, op in enumerate(comm)]
    before_update = [Dependency(op.name, "update") for op in comm]
    dag = TrainingDag((*blocks, ComputeOp("update", 0.0)), comm, (*after, *before_update))
    return RecordedTraining(dag, 2, step, 10)


def slowdowns(profiles: Profiles, links: str) -> Iterator[tuple[str, int, float, float]]:
    """Yield model, nodes, and by what an iteration on one GPU of each takes longer than on one node.

    First as measured, then as predicted.
    """
    for name, profile in profiles.items():
        cost = placement_cost(profile_of(recorded(name, profile), 1, None), links_of(links))
        assert cost is not None
        local = local_batch(profile)
        for nodes in (2, 4):
            spread, near = profile.speed((1,) * nodes, local)[0], profile.speed((nodes,), local)[0]
            yield name, nodes, spread / near, cost.slowdown(nodes, Level.RACK)


def fairness(request: SimulationRequest, seeds: int) -> tuple[float, float, float]:
    """Return mean and worst finish-time fairness of all jobs, and the mean completion time, s; means over seeds."""
    inputs = Inputs(request)
    (source,), (entry,) = request.sources, request.policies
    found = []
    for seed in range(seeds):
        record = run_world(inputs, inputs.load(source, seed), policy_entry(entry.name), seed, None)
        rhos = [job["rho"] for job in record["jobs"]]
        found.append((float(np.mean(rhos)), float(np.max(rhos)), record["figures"]["avg_jct_s"]))
    return tuple(mean(column) for column in zip(*found, strict=True))  # type: ignore[return-value]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default="1,2,3,4")
    parser.add_argument("--policies", default="themis")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--links", default=LINKS)
    given = parser.parse_args()
    profiles = Profiles(DATA / "adaptdl" / "traces")
    errors: dict[str, list[float]] = {"predicted": [], "fixed": []}
    print("| model | nodes | measured | predicted |\n|---|---|---|---|")
    for name, nodes, measured, predicted in slowdowns(profiles, given.links):
        print(f"| {name} | {nodes} | {measured:.2f} | {predicted:.2f} |")
        errors["predicted"].append(abs(np.log(predicted / measured)))
        errors["fixed"].append(abs(np.log(Slowdown().rack / measured)))
    print({name: f"mean |log error| {mean(some):.2f}" for name, some in errors.items()})
    print(
        "\n| workload | policy | bids | mean rho | worst rho | mean completion, s |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, profile in profiles.items():
            write_text(Path(folder) / f"{name}.json", recorded(name, profile).to_json())
        for number in given.workloads.split(","):
            for policy in given.policies.split(","):
                fixed = SimulationRequest(workload=f"pollux-{number}", policy=policy)
                known = replace(fixed, communication=Path(folder), links=given.links)
                for bids, request in (("fixed factor", fixed), ("communication", known)):
                    average, worst, jct = fairness(request, given.seeds)
                    print(
                        f"| pollux-{number} | {policy} | {bids} | {average:.3f} | {worst:.2f} | {jct:,.0f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
