"""What ``training_pauses`` trains: a perceptron, by ``ElasticRun``, by plain torchrun, or by torchft.

Arguments: how, the folder for notes, the width of its hidden layers. Each process notes its steps in a file of its
own: a line is the step's number and seconds since the Unix epoch.
"""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SAMPLES, BATCH = 4096, 32
SAVE_EVERY = 5.0  # seconds between the checkpoints of plain torchrun
COLLECTIVE = timedelta(seconds=30)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Note = Callable[[int], None]


def make_model(width: int) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )  # fmt: skip


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def dataset() -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(2))
    return data, data[:, :10].argmax(1)


def elastic(note: Note, width: int) -> None:
    """Train until told to stop."""
    from ebbflow.infra.training import ElasticRun

    with ElasticRun.start() as run:
        model, _ = run.prepare(make_model(width), make_optimizer, batch_size=BATCH)
        for _ in run.epochs(1_000_000):
            for x, y in run.batches(dataset()):
                run.backward(torch.nn.functional.cross_entropy(model(x), y))
                run.step()
                note(run.progress.step)


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a process's share of a step's samples."""
    x, y = dataset()
    begin = step * BATCH % SAMPLES
    rows = slice(begin + rank, begin + BATCH, world)
    return x[rows].to(DEVICE), y[rows].to(DEVICE)


def plain(note: Note, width: int, folder: Path) -> None:
    """Train as a script for torchrun does, which saves now and then and loads when it starts."""
    dist.init_process_group("gloo", timeout=COLLECTIVE)
    rank, world = dist.get_rank(), dist.get_world_size()
    model, step, path = make_model(width).to(DEVICE), 0, folder / "checkpoint.pt"
    optimizer = make_optimizer(model.parameters())
    if path.exists():
        found = torch.load(path, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = found["step"]
    parallel, saved = torch.nn.parallel.DistributedDataParallel(model), time.monotonic()
    while True:
        x, y = batch(step, rank, world)
        torch.nn.functional.cross_entropy(parallel(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note(step)
        if rank == 0 and time.monotonic() - saved > SAVE_EVERY:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
            saved = time.monotonic()


def replicated(note: Note, width: int) -> None:
    """Train as a replica of torchft."""
    import torchft

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = make_model(width).to(DEVICE)
    optimizer = make_optimizer(model.parameters())

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=COLLECTIVE),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"replica-{os.getpid()}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        timeout=COLLECTIVE,
    )
    wrapped = torchft.Optimizer(manager, optimizer)
    while True:
        step = manager.current_step()
        wrapped.zero_grad()  # which begins a quorum
        x, y = batch(step, 0, 1)
        half = BATCH // 2
        torch.nn.functional.cross_entropy(model(x[:half]), y[:half]).backward()
        # by hand: its DistributedDataParallel ends with an AssertionError at a loss under torch 2.13
        works = [manager.allreduce(parameter.grad) for parameter in model.parameters()]
        for work in works:
            work.wait()
        wrapped.step()
        if manager.current_step() > step:
            note(manager.current_step())


def main() -> None:
    how, folder, width = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    with (folder / str(os.getpid())).open("w", buffering=1) as notes:

        def note(step: int) -> None:
            notes.write(f"{step} {time.time()}\n")

        if how == "elastic":
            elastic(note, width)
        elif how == "torchrun":
            plain(note, width, folder.parent)
        else:
            replicated(note, width)


if __name__ == "__main__":
    main()
