"""What ``training_recovery`` trains: a perceptron of a million parameters that notes when it begins and each step.

Arguments: the folder for the notes. A line is a word, a number and seconds since the Unix epoch.
"""

import os
import sys
import time
from pathlib import Path

START = time.time()

import torch  # noqa: E402 - the time before it is measured

from ebbflow.infra.training import ElasticRun  # noqa: E402


def main() -> None:
    path = Path(sys.argv[1]) / f"{os.environ['EBBFLOW_GENERATION']}-{os.environ['RANK']}"
    with path.open("w", buffering=1) as notes:
        notes.write(f"script 0 {START}\n")
        with ElasticRun.start() as run:
            notes.write(f"joined 0 {time.time()}\n")
            model = torch.nn.Sequential(
                torch.nn.Linear(64, 960), torch.nn.ReLU(), torch.nn.Linear(960, 960), torch.nn.ReLU(),
                torch.nn.Linear(960, 10),
            )  # fmt: skip
            data = torch.randn(100_000, 64)
            labels = (data[:, :10]).argmax(1)
            model, _ = run.prepare(
                model, lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9), batch_size=256
            )
            notes.write(f"loaded {run.progress.step} {time.time()}\n")
            for _ in run.epochs(1_000_000):
                for x, y in run.batches((data, labels)):
                    run.backward(torch.nn.functional.cross_entropy(model(x), y))
                    run.step()
                    notes.write(f"step {run.progress.step} {time.time()}\n")


if __name__ == "__main__":
    main()
