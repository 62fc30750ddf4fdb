"""A training of so many steps of so many seconds, for the provider's tests."""

import argparse
import time

import torch

from ebbflow.infra.training import ElasticRun

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--seconds", type=float)
parser.add_argument("files", nargs="*")
given = parser.parse_args()

x = torch.linspace(-1, 1, 8 * given.steps).unsqueeze(1)
with ElasticRun.start(seed=1) as run:
    model, _ = run.prepare(
        torch.nn.Linear(1, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=8
    )
    for _ in run.epochs(1):
        for features, targets in run.batches((x, 3 * x)):
            run.backward(torch.nn.functional.mse_loss(model(features), targets))
            run.step()
            time.sleep(given.seconds)
        run.report(files=float(len(given.files)))
