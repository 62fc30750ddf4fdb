"""A training script for the launcher's tests: plain DDP that speaks the channel's protocol, and saves and rescues.

Arguments: the number of steps, the seconds that each takes, and the folder in which to save.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ebbflow.infra.training.channel import Channel, Report


def save(folder: Path, step: int) -> None:
    beside = folder / f".step.{os.getpid()}"
    beside.write_text(json.dumps(step))
    beside.replace(folder / "step")


def main() -> None:
    steps, pause, folder = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    channel = Channel.connect()
    assert channel is not None
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    step = json.loads((folder / "step").read_text()) if (folder / "step").exists() else 0

    def say(kind: str, **content: object) -> None:
        channel.post(Report(kind, rank, time.time(), step, content))

    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    if rank == 0:
        say("started", world=world)
    lost = False
    try:
        while step < steps:
            stop = torch.tensor(float(channel.stop_request() is not None))
            dist.all_reduce(stop)
            if stop.item():
                break
            model(torch.ones(2, 4)).sum().backward()
            time.sleep(pause)
            step += 1
            if rank == 0:
                say("step", world=world)
    except RuntimeError as error:
        if "clos" not in str(error) and "reset" not in str(error):
            raise
        lost = True
    if lost:
        if channel.claim("rescue"):
            save(folder, step)
            say("checkpoint", saved_step=step, reason="rescue")
        return
    if rank == 0:
        save(folder, step)
        say("finished" if step >= steps else "stopped", saved_step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
