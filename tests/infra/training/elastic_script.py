"""The user's script of the tests: a small network on made-up data, which does at some step what ``CASE`` says."""

import errno
import json
import os
import signal
import time

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ebbflow.infra.communication.control import PlanningSettings
from ebbflow.infra.training import ElasticRun
from ebbflow.infra.training.checkpoints import parts

CASE = json.loads(os.environ["CASE"])
RANK = int(os.environ.get("RANK", "0"))


class Counter:
    """Something that a script keeps besides the model: how many steps it has taken."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def main() -> None:
    if CASE.get("unwritable") == RANK:
        parts.write_part = no_space
    counter = Counter()
    generator = torch.Generator().manual_seed(5)
    samples = CASE.get("samples", 100) + RANK * CASE.get("samples_of_rank", 0)
    x = torch.randn(samples, 8, generator=generator)
    y = x @ torch.randn(8, 1, generator=generator) + 0.3 * torch.randn(len(x), 1, generator=generator)
    if "nan_at" in CASE:
        x[CASE["nan_at"]] = float("nan")
    with (
        open(CASE["log"] + f"-{RANK}", "a") as log,
        ElasticRun.start(
            seed=3 + RANK * CASE.get("seed_of_rank", 0), directory=CASE.get("folder"), run_id="t"
        ) as run,
    ):
        bare = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Dropout(CASE.get("dropout", 0.0)), nn.Linear(16, 1)
        )
        parallel, plan, tensor = CASE.get("parallel"), None, 1
        if CASE.get("tensor"):  # shape of the mesh: replicas, shards and tensor-parallel processes
            shape, tensor = CASE["tensor"], CASE["tensor"][-1]
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards", "tp")[-len(shape) :])
            plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
            if parallel in ("own", "spread"):
                parallelize_module(bare, mesh["tp"], plan)
                plan = None
            if parallel == "own":
                fully_shard(bare, mesh=mesh["shards"])
            else:
                parallel = mesh
        elif parallel == "own" and run.world.size > 1:
            fully_shard(bare, mesh=DeviceMesh("cpu", range(run.world.size)))
        if parallel == "mesh":
            parallel = DeviceMesh(
                "cpu", torch.arange(run.world.size).view(2, -1), mesh_dim_names=("replicas", "shards")
            )
        model, optimizer = run.prepare(
            bare,
            lambda p: torch.optim.AdamW(p, lr=0.02) if CASE.get("adam") else torch.optim.SGD(p, 0.05, 0.9),
            batch_size=CASE.get("batch", 24) + RANK * CASE.get("batch_of_rank", 0),
            max_batch_size=CASE.get("max_batch"),
            max_local=CASE.get("max_local"),
            scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.99),
            state={"counter": counter},
            communication=PlanningSettings(**CASE["planning"]) if CASE.get("planning") else None,
            ddp={"bucket_cap_mb": 0.0001} if CASE.get("planning") else None,
            clip_norm=CASE.get("clip_norm"),
            precision=CASE.get("precision", "fp32"),
            parallel=None if parallel == "own" else parallel,
            wrap=[nn.Linear] if parallel not in (None, "own") else None,
            tensor_parallel=plan,
        )
        restored = counter.steps
        for _ in run.epochs(CASE.get("epochs", 3)):
            for a, b, index in run.batches((x, y, torch.arange(len(x)))):
                step = run.progress.step
                misbehave(step, optimizer)
                planned = run._prepared.communication if run._prepared is not None else None
                if planned is not None and planned.switch.version == 0:
                    time.sleep(CASE.get("pause_unplanned", 0.0))
                if run.share.weight and RANK % tensor == 0:
                    seen = {"step": step, "turn": run.progress.cursor.turn, "seen": index.tolist()}
                    log.write(json.dumps(seen) + "\n")
                run.backward(nn.functional.mse_loss(model(a), b))
                counter.steps = step + 1
                try:
                    run.step()
                finally:
                    if run.progress.step > step:
                        log.write(json.dumps({"step": step, "loss": run.statistics.loss}) + "\n")
                    log.flush()
            run.report(loss=run.statistics.loss)
        inner = getattr(model, "module", model)
        weights = torch.cat([whole(p).flatten() for p in inner.parameters()]).tolist()
        if run.is_main:
            end = {"weights": weights, "lr": optimizer.param_groups[0]["lr"], "steps": run.progress.step}
            end |= {"skipped": run.progress.skipped, "gained": run.progress.gained, "extra": restored}
            log.write(json.dumps({"end": end}) + "\n")


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def whole(parameter: nn.Parameter) -> torch.Tensor:
    values = parameter.detach()
    return values.full_tensor() if isinstance(values, DTensor) else values


def misbehave(step: int, optimizer: torch.optim.Optimizer) -> None:
    time.sleep(CASE.get("pause", 0.0))
    if [step, RANK] == CASE.get("also_terminated"):
        os.kill(os.getpid(), signal.SIGTERM)
    for what, (at, rank) in CASE.get("at", {}).items():
        if (at, rank) == (step, RANK):
            if what == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            elif what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "hang":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            elif what == "rate":
                optimizer.param_groups[0]["lr"] = 0.01
            elif what == "error":
                raise ValueError("the user's own mistake")


main()
