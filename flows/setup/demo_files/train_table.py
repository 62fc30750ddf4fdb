"""Trains a small network to predict one column of a Parquet directory from the others, on nodes that come and go.

python train_table.py --data results/baskets --target total
"""

import argparse

import pyarrow.dataset
import torch
from torch import nn

from ebbflow import ElasticRun


def read(directory: str, target: str, rows: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return standardised inputs, what is to be predicted, and whether that is yes or no."""
    table = pyarrow.dataset.dataset(directory, format="parquet").head(rows)
    columns = {
        name: torch.tensor(table[name].to_pylist(), dtype=torch.float32) for name in table.column_names
    }
    y = columns.pop(target)
    x = torch.stack(list(columns.values()), dim=1)
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-6)
    binary = bool(((y == 0) | (y == 1)).all())
    return x, y if binary else (y - y.mean()) / y.std(), binary


def score(model: nn.Module, x: torch.Tensor, y: torch.Tensor, binary: bool) -> float:
    """Return the share of right answers, or the part of the variance that is explained (R²)."""
    with torch.no_grad():
        guess = model(x).squeeze(1).cpu()
    if binary:
        return float(((guess > 0) == (y > 0.5)).float().mean())
    return 1 - float(((guess - y) ** 2).mean() / y.var())


def main() -> None:
    """Train a network to predict the target column, and report its metrics after each pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="directory of Parquet files")
    parser.add_argument("--target", required=True, help="column to predict")
    parser.add_argument("--rows", type=int, default=40_000, help="read at most")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    x, y, binary = read(options.data, options.target, options.rows)
    test = len(x) // 5
    loss = nn.functional.binary_cross_entropy_with_logits if binary else nn.functional.mse_loss
    with ElasticRun.start(seed=1) as run:
        model, _ = run.prepare(
            nn.Sequential(
                nn.Linear(x.shape[1], options.width),
                nn.ReLU(),
                nn.Linear(options.width, options.width),
                nn.ReLU(),
                nn.Linear(options.width, 1),
            ),
            lambda parameters: torch.optim.SGD(parameters, lr=options.lr, momentum=0.9),
            batch_size=64,
            max_batch_size=1024,
        )
        for _ in run.epochs(options.epochs):
            for inputs, wanted in run.batches((x[test:], y[test:])):
                run.backward(loss(model(inputs).squeeze(1), wanted))
                run.step()
            run.report(score=score(model, x[:test].to(run.device), y[:test], binary))


if __name__ == "__main__":
    main()
