"""The training of chaotic runs: a line through points, and an account of which samples went into which step.

python fit.py --data FOLDER --x COLUMN --y COLUMN --log FOLDER --epochs 12 --pause 0.2

Each process writes a file of its own into ``--log``, a line for what it is about to use and one for each step that is
done (``samples`` reads them). The data are sorted and cut, so that they are the same however a query wrote them.
"""

import argparse
import json
import os
import time
from pathlib import Path

import pyarrow.dataset
import torch
from torch import nn

from ebbflow.infra.training import ElasticRun

SAMPLES, BATCH, SEED = 256, 32, 5


def read(folder: str, x: str, y: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``SAMPLES`` points, standardised."""
    table = pyarrow.dataset.dataset(folder, format="parquet").to_table(columns=[x, y])
    columns = [[float(value) for value in table[name].to_pylist()] for name in (x, y)]
    rows = sorted(zip(*columns, strict=True))[:SAMPLES]
    points = torch.tensor(rows, dtype=torch.float64)
    points = (points - points.mean(0)) / points.std(0).clamp_min(1e-9)
    return points[:, :1].float(), points[:, 1:].float()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--data", "--x", "--y", "--log"):
        parser.add_argument(name, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, help="s that a step takes")
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()

    torch.set_num_threads(1)
    x, y = read(options.data, options.x, options.y)
    rank, run_id = os.environ.get("RANK", "0"), os.environ.get("EBBFLOW_RUN_ID", "alone")
    folder = Path(options.log) / run_id
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / f"{time.monotonic_ns()}-{os.getpid()}-{rank}.jsonl").open("a") as log,
        ElasticRun.start(seed=SEED) as run,
    ):
        torch.manual_seed(SEED)
        model, _ = run.prepare(
            nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)),
            lambda parameters: torch.optim.SGD(parameters, lr=options.lr, momentum=0.9),
            batch_size=BATCH,
        )

        def say(**line: object) -> None:
            log.write(json.dumps({"at": time.monotonic(), **line}) + "\n")
            log.flush()

        say(
            begins=run.progress.step,
            launch=os.environ.get("EBBFLOW_CHANNEL", ""),
            generation=int(os.environ.get("EBBFLOW_GENERATION", "0")),
        )
        for _ in run.epochs(options.epochs, unit="pass"):
            for inputs, wanted, index in run.batches((x, y, torch.arange(len(x)))):
                step = run.progress.step
                time.sleep(options.pause)
                if run.share.weight:
                    say(step=step, turn=run.progress.cursor.turn, seen=index.tolist())
                run.backward(nn.functional.mse_loss(model(inputs), wanted))
                try:
                    run.step()
                finally:
                    if run.progress.step > step:
                        say(done=step)
            model.eval()
            with torch.no_grad():
                error = float(nn.functional.mse_loss(model(x.to(run.device)), y.to(run.device)))
            model.train()
            run.report(r2=1.0 - error)
        if run.is_main:
            inner = getattr(model, "module", model)
            weights = torch.cat([p.detach().flatten() for p in inner.parameters()])
            say(end=run.progress.step, weights=weights.numpy().tobytes().hex())


if __name__ == "__main__":
    main()
