"""A small elastic training: three classes from sixteen numbers."""

import argparse
import time

import torch

from ebbflow.infra.training import ElasticRun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.02)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    x, true = torch.randn(512, 16, generator=generator), torch.randn(16, 3, generator=generator)
    y = (x @ true).argmax(1)
    with ElasticRun.start() as run:
        model, _ = run.prepare(torch.nn.Linear(16, 3), lambda p: torch.optim.SGD(p, lr=0.2), batch_size=32)
        for _ in run.epochs(options.epochs):
            for features, labels in run.batches((x, y)):
                run.backward(torch.nn.functional.cross_entropy(model(features), labels))
                run.step()
                time.sleep(options.pause)
            with torch.no_grad():
                run.report(accuracy=float((model(x).argmax(1) == y).float().mean()))


if __name__ == "__main__":
    main()
