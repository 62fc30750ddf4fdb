"""Predicts what an order costs from what it holds; examples/pipeline.yaml trains it on a query's result.

python examples/train_orders.py --data results/orders
ebbflow run examples/pipeline.yaml
"""

import argparse

import pyarrow.parquet
import torch
from torch import nn

from ebbflow import ElasticRun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="directory of Parquet files with a column total")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()

    table = pyarrow.parquet.read_table(options.data)
    names = [name for name in table.column_names if name != "total"]
    columns = [torch.tensor(table[name].to_pylist(), dtype=torch.float32) for name in [*names, "total"]]
    data = torch.stack(columns, dim=1)
    data = (data - data.mean(0)) / data.std(0)
    x, y = data[:, :-1], data[:, -1:]
    test = len(x) // 5
    with ElasticRun.start(seed=1) as run:
        model, _ = run.prepare(
            nn.Sequential(nn.Linear(len(names), options.width), nn.ReLU(), nn.Linear(options.width, 1)),
            lambda parameters: torch.optim.SGD(parameters, lr=options.lr, momentum=0.9),
            batch_size=64,
            max_batch_size=1024,
        )
        for _ in run.epochs(options.epochs):
            for inputs, wanted in run.batches((x[test:], y[test:])):
                run.backward(nn.functional.mse_loss(model(inputs), wanted))
                run.step()
            with torch.no_grad():
                error = (model(x[:test].to(run.device)).cpu() - y[:test]).square().mean()
            run.report(r2=1 - float(error / y[:test].var()))


if __name__ == "__main__":
    main()
