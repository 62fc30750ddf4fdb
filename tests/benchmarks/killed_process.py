"""Four gloo processes hold the rows of a logistic regression between them; one is killed with SIGKILL after epoch 7.

The large-scale experiment of SCAR (thesis, section 5.5.5) on scikit-learn's digits: each process owns random rows of
the weights, which the others get for a minibatch and do not keep. SCAR saves 1/8 of the rows each epoch, those that
moved most, and after the loss reads back the lost rows alone; the traditional way saves all rows each 8 epochs and
reads all of them back. Rework is how many epochs later, interpolated between epochs, the loss is down at what the
undisturbed run reaches after ``BASE`` epochs. ``python -m tests.benchmarks.killed_process SEEDS`` prints one JSON
line for each seed.
"""

import json
import os
import signal
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.planners.training.saving.partial import assign_lost_blocks

PROCESSES = 4
KILLED_AFTER = 7  # epochs
EVERY = 8  # epochs, C
BASE = 30  # epochs
MOST = BASE + 15  # epochs
BATCH = 300
RATE = 0.5
TIMEOUT = timedelta(seconds=60)
WAYS = ("none", "scar", "traditional")


def data() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    scaled = torch.tensor(images / 16.0, dtype=torch.float32)
    return torch.cat([scaled, torch.ones(len(scaled), 1)], 1), torch.tensor(labels)


class Worker:
    """One process: an owner of rows and a worker on part of each minibatch."""

    def __init__(self, rank: int, way: str, seed: int, place: str, meeting: str) -> None:
        self.rank, self.way, self.seed, self.place, self.meeting = rank, way, seed, place, meeting
        self.inputs, self.labels = data()
        self.weights = torch.zeros(self.inputs.shape[1], 10)
        self.size = PROCESSES

    def run(self) -> dict[str, Any]:
        self._join("first", self.rank, PROCESSES)
        fraction = 1.0 if self.way == "traditional" else 1 / EVERY
        self.running = RunningCheckpoint(
            StorageLocation(self.place), {"w": self.weights}, period=EVERY, fraction=fraction, shard_rows=1,
            group=dist.group.WORLD, seed=self.seed,
        )  # fmt: skip
        self.running.initialize()
        losses, recovery = [self.loss()], None
        for epoch in range(1, MOST + 1):
            try:
                self.epoch(epoch)
                self.running.step(epoch)
                self.running.wait()
                if self.way != "none" and epoch == KILLED_AFTER and self.rank == PROCESSES - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                losses.append(self.loss())
            except RuntimeError:  # a peer is gone
                if recovery is not None or epoch not in (KILLED_AFTER, KILLED_AFTER + 1):
                    raise
                recovery = self.recover()
                if epoch == KILLED_AFTER:
                    losses.append(self.loss())
                else:
                    losses[-1] = self.loss()
                    self.epoch(epoch)
                    losses.append(self.loss())
        dist.barrier()
        return {"losses": losses, "recovery_s": recovery.seconds if recovery else 0.0}

    def epoch(self, number: int) -> None:
        order = torch.randperm(
            len(self.labels), generator=torch.Generator().manual_seed(1000 * self.seed + number)
        )
        mine = [block for block, owner in enumerate(self.running.placement) if owner == self.running.owner]
        for start in range(0, len(order) - BATCH + 1, BATCH):
            weights = self.pulled()
            own = order[start : start + BATCH].chunk(self.size)[self.rank]
            picked = self.inputs[own]
            error = torch.softmax(picked @ weights, 1)
            error[torch.arange(len(own)), self.labels[own]] -= 1
            gradient = picked.T @ error / BATCH
            dist.all_reduce(gradient)
            self.weights[mine] -= RATE * gradient[mine]

    def pulled(self) -> torch.Tensor:
        """Return all rows, each from its owner."""
        shared = torch.zeros_like(self.weights)
        mine = [block for block, owner in enumerate(self.running.placement) if owner == self.running.owner]
        shared[mine] = self.weights[mine]
        dist.all_reduce(shared)
        return shared

    def loss(self) -> float:
        """Return the summed cross-entropy over all data, nats."""
        outputs = self.inputs @ self.pulled()
        return float(torch.nn.functional.cross_entropy(outputs, self.labels, reduction="sum"))

    def recover(self) -> Any:
        dist.destroy_process_group()
        self.size = PROCESSES - 1
        self._join("second", self.rank, self.size)
        gone = PROCESSES - 1
        placement = self.running.placement
        lost = [block for block, owner in enumerate(placement) if owner == gone]
        loads = {rank: float(placement.count(rank)) for rank in range(self.size)}
        adopted = assign_lost_blocks(dict.fromkeys(lost, 1.0), loads)
        self.running.regroup(dist.group.WORLD, [adopted.get(b, owner) for b, owner in enumerate(placement)])
        everything = range(len(placement))
        self.weights[lost] = float("nan")  # nobody has them any more
        return self.running.recover(lost if self.way == "scar" else everything)

    def _join(self, name: str, rank: int, size: int) -> None:
        dist.init_process_group(
            "gloo", f"file://{self.meeting}/{name}", rank=rank, world_size=size, timeout=TIMEOUT
        )


def world(way: str, seed: int) -> dict[str, Any]:
    """Run four processes and return what the first one says."""
    with tempfile.TemporaryDirectory() as meeting:
        children = []
        for rank in range(PROCESSES):
            child = os.fork()
            if not child:
                status = 1
                try:
                    result = Worker(rank, way, seed, f"{meeting}/running", meeting).run()
                    if rank == 0:
                        with open(f"{meeting}/result", "w") as out:
                            json.dump(result, out)
                    status = 0
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    os._exit(status)
            children.append(child)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        expected = 0 if way == "none" else -signal.SIGKILL
        if ends != [0] * (PROCESSES - 1) + [expected]:
            raise RuntimeError(f"processes ended with {ends}")
        with open(f"{meeting}/result") as file:
            found: dict[str, Any] = json.load(file)
        return found


def reached(losses: list[float], criterion: float) -> float:
    """Return the epoch, interpolated, from which the loss is at the criterion."""
    for epoch in range(1, len(losses)):
        if losses[epoch] <= criterion:
            before, after = losses[epoch - 1], losses[epoch]
            return epoch - 1 + (before - criterion) / (before - after) if before > criterion else float(epoch)
    raise RuntimeError(f"a loss of {criterion} was not reached within {len(losses) - 1} epochs")


def main() -> None:
    torch.set_num_threads(1)
    data()
    for seed in range(int(sys.argv[1])):
        found = {way: world(way, seed) for way in WAYS}
        criterion = found["none"]["losses"][BASE]
        line: dict[str, Any] = {"seed": seed, "criterion": criterion}
        for way in ("scar", "traditional"):
            line[way] = reached(found[way]["losses"], criterion) - BASE
            line[f"{way}_recovery_s"] = found[way]["recovery_s"]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
