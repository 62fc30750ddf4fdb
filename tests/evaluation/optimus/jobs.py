"""Jobs that train with parameter servers: how fast they truly are, how their loss falls, how their blocks lie."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from zlib import crc32

import numpy as np

from ebbflow.planners.tuning.convergence import LossModel
from tests.evaluation.optimus.optimus_tasks import Placed, Tasks
from tests.evaluation.optimus.ps_blocks import assign_blocks
from tests.evaluation.optimus.ps_blocks_mxnet import mxnet_blocks
from tests.evaluation.optimus.ps_speed import Mode

BANDWIDTH = 125e6  # bytes/s of a task: gigabit Ethernet
MODELS: Mapping[str, float] = {
    "resnext-110": 1.7, "resnet-50": 25.0, "inception-bn": 11.3, "kaggle-ndsb": 1.4, "cnn-rand": 6.0, "dssm": 1.5,
    "rnn-lstm": 4.7, "seq2seq": 9.1, "deepspeech2": 38.0,
}  # fmt: skip
"""Parameters, millions, of the nine job types of the evaluation."""

SPAN = 12_000.0  # s of arrivals
BATCHES = 8  # asynchronous mini-batches to a synchronous batch


@dataclass(frozen=True, slots=True)
class TrueJob:
    """All that the simulation knows of a job and schedulers must find out."""

    id: str
    model: str
    arrival: float  # s
    mode: Mode
    forward: float  # s of one worker for a whole synchronous batch
    backward: float  # s a step
    update: float  # s to apply one worker's gradients to the whole model
    overhead: float  # s a step for each server and each worker
    curve: LossModel  # loss by epoch
    delta: float  # of normalised loss an epoch, below which it has converged
    steps: int  # an epoch, in the job's own steps
    epochs: int  # it takes

    @property
    def bytes(self) -> float:
        """Return the model's size."""
        return 4e6 * MODELS[self.model]

    def speed(self, placed: Placed, balanced: bool) -> float:
        """Return true steps/s (Optimus, equation 2), with transfers by where tasks are and how blocks are dealt."""
        servers, workers = placed.tasks
        share = largest_share(self.model, servers, balanced)
        at_once = workers if self.mode == "synchronous" else max(1.0, workers / 2)
        batch = workers if self.mode == "synchronous" else BATCHES
        transfer = 2 * self.bytes / BANDWIDTH * _remote(placed, share) * at_once / workers
        time = (
            self.forward / batch
            + self.backward
            + transfer
            + self.update * at_once * share
            + self.overhead * (servers + workers)
        )
        return (1 if self.mode == "synchronous" else workers) / time


def _remote(placed: Placed, share: float) -> float:
    """Return the model sizes that the busiest task exchanges with other machines."""
    servers, workers = placed.tasks
    most = 0.0
    for tasks in placed.machines.values():
        if tasks.servers:
            most = max(most, share * (workers - tasks.workers))
        if tasks.workers:
            most = max(most, 1 - tasks.servers / servers)
    return most


def made(seed: int, count: int) -> list[TrueJob]:
    """Return ``count`` jobs that arrive over ``SPAN`` s, in order of arrival; types take turns at random."""
    rng = np.random.default_rng([seed, 41])
    types = {name: _type(name) for name in MODELS}
    names = rng.permutation([sorted(MODELS)[number % len(MODELS)] for number in range(count)])
    arrivals = np.sort(rng.random(count)) * SPAN
    jobs = []
    for number, (name, arrival) in enumerate(zip(names, arrivals, strict=True)):
        forward, backward, update, overhead, curve, steps = types[str(name)]
        mode: Mode = "synchronous" if rng.random() < 0.5 else "asynchronous"
        delta = float(rng.uniform(0.01, 0.05))
        epochs = curve.converges_at(delta, 3)
        scaled = steps if mode == "synchronous" else steps * BATCHES
        jobs.append(
            TrueJob(
                f"job-{number:02}", str(name), float(arrival), mode, forward, backward, update, overhead,
                curve, delta, scaled, epochs,
            )
        )  # fmt: skip
    return jobs


def _type(name: str) -> tuple[float, float, float, float, LossModel, int]:
    """Return what all jobs of a type have in common; the name is the seed.

    The coefficients have the sizes of those that the authors fitted: a second of compute a worker, a few of transfer.
    """
    rng = np.random.default_rng(crc32(name.encode()))
    forward = float(rng.uniform(6, 20))
    curve = LossModel(float(rng.uniform(0.1, 0.4)), 1.0, float(rng.uniform(0.02, 0.15)))
    return forward, forward / 40, float(rng.uniform(0.05, 0.3)), float(rng.uniform(0.005, 0.04)), curve, int(
        rng.integers(20, 80)
    )  # fmt: skip


@cache
def largest_share(model: str, servers: int, balanced: bool) -> float:
    """Return the share of a model's parameters that the fullest server holds."""
    sizes = blocks(model)
    if balanced:
        loads = assign_blocks(sizes, servers)
    else:
        loads = mxnet_blocks(sizes, servers, np.random.default_rng([crc32(model.encode()), servers]))
    return max(load.load for load in loads) / sum(sizes)


@cache
def blocks(model: str) -> tuple[float, ...]:
    """Return the sizes of a model's parameter blocks: ResNet-50's own, log-normal ones for the others."""
    if model == "resnet-50":
        return resnet50_blocks()
    rng = np.random.default_rng([crc32(model.encode()), 1])
    drawn = rng.lognormal(0.0, 2.0, 60)
    return tuple((drawn / drawn.sum() * MODELS[model] * 1e6).tolist())


@cache
def resnet50_blocks() -> tuple[float, ...]:
    """Return the parameters of each tensor of ResNet-50 (He et al., CVPR 2016): 25.6 million in all."""
    sizes: list[float] = [7 * 7 * 3 * 64, 64, 64]
    inside = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(depth):
            kernels = [(inside, width, 1), (width, width, 3), (width, 4 * width, 1)]
            if block == 0:
                kernels.append((inside, 4 * width, 1))
            for source, target, side in kernels:
                sizes += [float(source * target * side * side), target, target]
            inside = 4 * width
    return (*sizes, 2048 * 1000.0, 1000.0)


def packed(tasks: Tasks, per_machine: int = 5) -> Placed:
    """Return tasks dealt evenly to as few empty machines as hold them: where a pre-run would be."""
    count = -(-sum(tasks) // per_machine)
    machines = {
        f"m{at}": Tasks(*(total // count + (at < total % count) for total in tasks)) for at in range(count)
    }
    return Placed(tasks, {name: one for name, one in machines.items() if sum(one)})


def task_sizes(jobs: Sequence[TrueJob], server: float, worker: float) -> dict[str, tuple[float, float]]:
    """Return the units of (one server, one worker) of every job."""
    return {job.id: (server, worker) for job in jobs}
