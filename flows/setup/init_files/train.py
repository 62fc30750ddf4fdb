"""Trains a small network that predicts how much a store sells: ebbflow run pipeline.yaml."""

import argparse

import pyarrow.parquet as pq
import torch
from torch import nn

from ebbflow import ElasticRun


def read(directory: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scaled inputs (visitors, price) and the scaled target (sold) of all rows."""
    table = pq.read_table(directory)
    columns = [
        torch.tensor(table[name].to_pylist(), dtype=torch.float32) for name in ("visitors", "price", "sold")
    ]
    scaled = [(column - column.mean()) / column.std() for column in columns]
    return torch.stack(scaled[:2], dim=1), scaled[2].unsqueeze(1)


def main() -> None:
    """Train a network on the tables of ``--data``, and report its loss after each pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="directory of Parquet files")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()
    inputs, target = read(options.data)
    with ElasticRun.start(seed=1) as run:
        model, _ = run.prepare(
            nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)),
            lambda parameters: torch.optim.SGD(parameters, lr=options.lr),
            batch_size=32,
        )
        for _ in run.epochs(options.epochs):
            for x, y in run.batches((inputs, target)):
                run.backward(nn.functional.mse_loss(model(x), y))
                run.step()
            with torch.no_grad():
                error = (model(inputs.to(run.device)).cpu() - target).square().mean()
            run.report(r2=1.0 - float(error / target.square().mean()))


if __name__ == "__main__":
    main()
