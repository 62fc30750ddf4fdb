"""A training over the aggregation service, for its tests.

Arguments: the folder in which it writes what it trained on, epochs, the optimizer, seconds that a batch takes, the
elements' type of the model, the width of its hidden layer, 300 unless given, and how the model is parallel, whole
unless given. Writes a line for each step that was taken: generation, step, rank, positions, and when; at the end the
parameters.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ebbflow import ElasticRun

SAMPLES, BATCH = 240, 24
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def make_model(width: int) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(10, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width // 4),
        torch.nn.ReLU(),
        torch.nn.Linear(width // 4, 1),
    )


def dataset() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(2))
    return x, (x[:, :3].sum(1, keepdim=True) * 0.5).sin()


def train(
    folder: Path, epochs: int, optimizer: str, pause: float, dtype: str, width: int, parallel: Any = None
) -> None:
    data = dataset()
    model = make_model(width)
    kind = getattr(torch, dtype)
    model = model.to(kind)
    data = tuple(part.to(kind) for part in data)  # type: ignore[assignment]
    exact = torch.promote_types(kind, torch.float32)
    with ElasticRun.start(directory=folder / "runs", seed=3) as run:
        model, _ = run.prepare(
            model,
            OPTIMIZERS[optimizer],
            batch_size=BATCH,
            clip_norm=5.0,
            learning_rate_rule="auto",
            parallel=parallel,
            wrap=[torch.nn.Linear] if parallel not in (None, "ddp") else None,
        )
        generation = int(os.environ.get("EBBFLOW_GENERATION", "0"))
        log = (folder / f"trained-{os.environ.get('RANK', '0')}").open("a", buffering=1)
        for _ in run.epochs(epochs):
            for x, y in run.batches(data):
                run.backward(torch.nn.functional.mse_loss(model(x).to(exact), y.to(exact)))
                time.sleep(pause)
                share, begun = run.share, run.progress.step
                try:
                    run.step()
                finally:  # a step after which it leaves counts, too
                    if (step := run.progress.step) > begun:
                        said = {"step": step, "pid": os.getpid(), "start": share.start, "stop": share.stop}
                        said |= {"generation": generation, "weight": share.weight, "at": time.time()}
                        log.write(json.dumps(said) + "\n")
        if run.is_main:
            found = {name: one.float().numpy() for name, one in model.state_dict().items()}
            np.savez(
                folder / "parameters", **{name.removeprefix("module."): one for name, one in found.items()}
            )


if __name__ == "__main__":
    wide = int(sys.argv[6]) if len(sys.argv) > 6 else 300
    how = sys.argv[7] if len(sys.argv) > 7 else None
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5], wide, how)
