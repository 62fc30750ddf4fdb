"""Trains a small network on scikit-learn's digits: alone, under torchrun, or on nodes that come and go.

python examples/train_digits.py
torchrun --nproc-per-node 2 examples/train_digits.py
ebbflow train examples/train_digits.py --min-gpus 1 --max-gpus 4 --nodes local:2x2
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from ebbflow import ElasticRun


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1500), slice(1500, None)
    with ElasticRun.start(seed=1) as run:
        model, _ = run.prepare(
            nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            batch_size=32,
            max_batch_size=512,
        )
        for epoch in run.epochs(20):
            for x, y in run.batches((images[train], labels[train])):
                run.backward(nn.functional.cross_entropy(model(x), y))
                run.step()
            with torch.no_grad():
                right = model(images[test].to(run.device)).argmax(1).cpu() == labels[test]
            run.report(accuracy=float(right.float().mean()))
            if run.is_main:
                now = run.statistics
                print(
                    f"epoch {epoch}: accuracy {run.metrics['accuracy']:.3f}, batch {now.batch}, steps {now.step}"
                )


if __name__ == "__main__":
    main()
