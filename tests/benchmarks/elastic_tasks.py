"""The training script of ``elastic_training``: small models on real tasks, as a user would write it.

Arguments: the task (``digits``, ``covertype``, ``text``), a seed, epochs at most, the metric at which to stop,
``fixed`` or ``adaptive``, and a file with the step from which on training is slow, so that it is disturbed in time.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sklearn
import torch
from sklearn.datasets import load_digits, make_classification
from torch import Tensor, nn

from ebbflow.infra.training import ElasticRun

SLOW = 0.15  # seconds a step

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its data and how to train it."""

    model: Callable[[], nn.Module]
    train: Data
    test: Data
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: int  # M0
    largest: int
    accuracy: bool = True  # else bits per character, the lower the better
    noise: float = 0.0  # standard deviation of what is added to the features while training

    def loss(self, model: nn.Module, data: Data) -> Tensor:
        x, y = data
        if self.noise and model.training:
            x = x + self.noise * torch.randn_like(x)
        return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

    @torch.no_grad()
    def metric(self, model: nn.Module) -> float:
        model.eval()
        if self.accuracy:
            found = float((model(self.test[0]).argmax(-1) == self.test[1]).float().mean())
        else:
            found = float(self.loss(model, self.test)) / 0.6931471805599453
        model.train()
        return found

    def reached(self, found: float, target: float) -> bool:
        return found >= target if self.accuracy else found <= target


class Attention(nn.Module):
    """A causal transformer of two layers over characters."""

    def __init__(self, symbols: int, context: int, width: int = 48) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, symbols)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.symbols(x) + self.places, mask=self.mask, is_causal=True))


def digits() -> Task:
    """Return a small CNN on scikit-learn's 1,797 digits."""
    found = load_digits()
    x, y = torch.tensor(found.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(found.target)
    return Task(
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
        ),
        (x[:1347], y[:1347]),
        (x[1347:], y[1347:]),
        lambda p: torch.optim.SGD(p, lr=0.005, momentum=0.9),
        batch=16,
        largest=512,
        noise=0.3,
    )  # fmt: skip


def covertype() -> Task:
    """Return an MLP on synthetic data with the shape of the covertype set: 54 features, 7 classes."""
    x, y = make_classification(
        n_samples=40000, n_features=54, n_informative=20, n_redundant=10, n_classes=7,
        n_clusters_per_class=6, flip_y=0.03, class_sep=1.0, random_state=0,
    )  # fmt: skip
    features, classes = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    return Task(
        lambda: nn.Sequential(nn.Linear(54, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 7)),
        (features[:36000], classes[:36000]),
        (features[36000:], classes[36000:]),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        batch=32,
        largest=1024,
    )


def text(context: int = 48) -> Task:
    """Return a character transformer on the descriptions of data sets that scikit-learn ships."""
    folder = Path(sklearn.__file__).parent / "datasets" / "descr"
    letters = "\n".join(path.read_text() for path in sorted(folder.glob("*.rst")))
    symbols = sorted(set(letters))
    code = torch.tensor([symbols.index(letter) for letter in letters])
    windows = code.unfold(0, context + 1, 16)
    kept = int(0.9 * len(windows))  # later windows, none that overlap the training text
    train, test = windows[:kept], windows[kept + context // 16 + 1 :]
    return Task(
        lambda: Attention(len(symbols), context),
        (train[:, :-1].contiguous(), train[:, 1:].contiguous()),
        (test[:, :-1].contiguous(), test[:, 1:].contiguous()),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        batch=8,
        largest=128,
        accuracy=False,
    )


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "covertype": covertype, "text": text}


def main(name: str, seed: str, epochs: str, target: str, batch: str, pace: str = "") -> None:
    task = TASKS[name]()
    with ElasticRun.start(seed=int(seed)) as run:
        model, _ = run.prepare(
            task.model(),
            task.optimizer,
            batch_size=task.batch,
            max_batch_size=task.largest if batch == "adaptive" else None,
        )
        for _ in run.epochs(int(epochs)):
            for data in run.batches(task.train):
                run.backward(task.loss(model, data))
                run.step()
                if pace and run.progress.step >= int(Path(pace).read_text()):
                    time.sleep(SLOW)
            found = task.metric(getattr(model, "module", model))
            run.report(metric=found)
            if task.reached(found, float(target)):
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
