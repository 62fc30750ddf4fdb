"""A training whose script does something by itself that a change of its processes might break.

Arguments: the folder in which it writes what it trained on, and what it does. Writes a line for each step that was
taken, as ``service_script`` does.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ebbflow import ElasticRun

SAMPLES, BATCH = 240, 24  # as in ``service_script``


def train(folder: Path, kind: str) -> None:
    x = torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(2))
    y = x.sum(1, keepdim=True).sin()
    with ElasticRun.start(directory=folder / "runs", seed=3) as run:
        if dist.get_rank() == 0:
            (folder / f"first-{os.getpid()}").touch()
        if kind == "before":
            dist.all_reduce(torch.ones(1))
        torch.manual_seed(1)
        model: Any = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        if kind == "compiled-before":
            model = torch.compile(model, backend="aot_eager")
        model, optimizer = run.prepare(model, lambda p: torch.optim.SGD(p, lr=0.05), batch_size=BATCH)
        if kind == "compiled-after":
            model = torch.compile(model, backend="aot_eager")
        if kind == "group":
            dist.new_group(list(range(dist.get_world_size())))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5) if kind == "scheduler" else None
        if kind == "first" and run.is_main:
            print("the first process writes for all")
        log = (folder / f"trained-{os.environ['RANK']}").open("a", buffering=1)
        for _ in run.epochs(100_000):
            for features, targets in run.batches((x, y)):
                run.backward(torch.nn.functional.mse_loss(model(features), targets))
                time.sleep(0.02)
                share, begun = run.share, run.progress.step
                try:
                    run.step()
                finally:
                    if (step := run.progress.step) > begun:
                        said = {"step": step, "pid": os.getpid(), "start": share.start, "stop": share.stop}
                        said |= {"generation": int(os.environ["EBBFLOW_GENERATION"]), "weight": share.weight}
                        log.write(json.dumps(said) + "\n")
                if kind == "between" and run.progress.step % 4 == 0:
                    dist.all_reduce(torch.ones(3))
            if schedule is not None:
                schedule.step()


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
