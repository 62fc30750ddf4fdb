"""A training as it is written for torchrun: nothing in it knows of Ebbflow.

Arguments: folder for checkpoints ("-": none, it starts from scratch each time), steps, seconds a step, what it does
at SIGTERM (save: leaves with 143; zero: saves and leaves with 0; ignore; die: as Python does without a handler).
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, steps, seconds, manner = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
asked = []


def leave(number, _frame):
    asked.append(number)


if manner != "die":
    signal.signal(signal.SIGTERM, leave if manner != "ignore" else signal.SIG_IGN)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
start, saved = 0, folder / "checkpoint.pt"
if saved.exists():
    state = torch.load(saved, weights_only=True)
    model.module.load_state_dict(state["model"])
    start = state["step"]


def save(step):
    if rank == 0 and folder != Path("-"):
        torch.save({"model": model.module.state_dict(), "step": step}, f"{saved}.new")
        os.replace(f"{saved}.new", saved)


for step in range(start, steps):
    examples = torch.full((2, 4), 1.0 / (step + 1))  # the same on all ranks: the world's size changes nothing
    loss = model(examples).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step + 1}/{steps} loss {loss.item():.4f}", flush=True)
    stop = torch.tensor(float(bool(asked)))
    dist.all_reduce(stop)
    if stop:
        save(step + 1)
        sys.exit(0 if manner == "zero" else 143)
    if step % 10 == 9:
        save(step + 1)
    time.sleep(seconds)
save(steps)
if rank == 0:
    where = folder if folder != Path("-") else Path(os.environ["EBBFLOW_RUN_FOLDER"])
    torch.save([parameter.detach() for parameter in model.parameters()], where / "weights.pt")
    (where / "seen").write_text(
        f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['TORCHELASTIC_RUN_ID']} {world}"
    )
