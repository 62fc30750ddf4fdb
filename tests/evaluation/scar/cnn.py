"""A small convolutional network by Adam, many runs at once; blocks are rows of its tensors, or whole tensors."""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.errors import OptionError
from tests.evaluation.scar.problems import States, batches, block_norms, digits

if TYPE_CHECKING:
    from torch import Tensor

By = Literal["shard", "layer"]

LAYERS = (
    (8, 9),
    (16, 72),
    (48, 64),
    (32, 48),
    (10, 32),
)  # (outputs, inputs to each): two 3 × 3 convolutions, then three dense
RATE, BETAS, EPS = 1e-3, (0.9, 0.999), 1e-8
BATCH = 64
MEASURED = 256  # images that the loss is taken on


class Network:
    """On the digits: two convolutions with ReLU and max-pooling, three dense layers; the loss is mean cross-entropy.

    By shard each row of a weight and each entry of a bias is a block (228), by layer each tensor (10). The planes of
    a state are the parameters and Adam's two moments; its last column is Adam's step.
    """

    chunk = 20
    look_every = 4

    def __init__(self, *, by: By = "shard", seed: int = 0, iterations: int = 400) -> None:
        try:
            import torch
        except ImportError as error:
            raise OptionError("the CNN needs PyTorch: pip install 'prefect-ebbflow[train]'") from error
        self.name = f"CNN by {by}"
        rng = np.random.default_rng([seed, 3])
        images, classes = digits()
        self.images = torch.from_numpy(images.reshape(-1, 8, 8))
        self.classes = torch.from_numpy(classes)
        self.order = batches(rng, len(images), BATCH, iterations)
        self.measured = rng.permutation(len(images))[:MEASURED]
        widths, values = [], []
        for outputs, inputs in LAYERS:
            bound = np.sqrt(6 / inputs)  # He et al., ICCV 2015
            values += [rng.uniform(-bound, bound, outputs * inputs), np.zeros(outputs)]
            rows, entries = [inputs] * outputs, [1] * outputs
            widths += rows + entries if by == "shard" else [sum(rows), sum(entries)]
        self.offsets = np.concatenate([[0], np.cumsum(widths)])
        self.first = np.concatenate(values).astype(np.float32)

    def start(self) -> States:
        state = np.zeros((1, 3, len(self.first) + 1), np.float32)
        state[0, 0, :-1] = self.first
        return state

    def advance(self, states: States, iteration: int, streams: NDArray[np.int64]) -> States:
        import torch

        chosen = self.order[iteration]
        weights = torch.from_numpy(np.ascontiguousarray(states[:, 0, :-1])).requires_grad_()
        scores = self._scores(weights, self.images[chosen])
        self._losses(scores, chosen).sum().backward()  # type: ignore[no-untyped-call]
        slope = weights.grad.numpy()  # type: ignore[union-attr]
        moved = states.copy()
        moved[:, :, -1] += 1
        step = moved[:, 0, -1:].astype(np.float64)
        first, second = moved[:, 1, :-1], moved[:, 2, :-1]
        first *= np.float32(BETAS[0])
        first += np.float32(1 - BETAS[0]) * slope
        second *= np.float32(BETAS[1])
        second += np.float32(1 - BETAS[1]) * slope * slope
        rate = (RATE / (1 - BETAS[0] ** step)).astype(np.float32)
        root = np.sqrt(second) / np.sqrt(1 - BETAS[1] ** step).astype(np.float32) + np.float32(EPS)
        moved[:, 0, :-1] -= rate * first / root
        return moved

    def loss(self, states: States) -> NDArray[np.float64]:
        import torch

        with torch.no_grad():
            weights = torch.from_numpy(np.ascontiguousarray(states[:, 0, :-1]))
            scores = self._scores(weights, self.images[self.measured])
            return np.asarray(self._losses(scores, self.measured).numpy(), np.float64)

    def distances(self, now: States, saved: States) -> NDArray[np.float64]:
        return block_norms(self, now[:, 0] - saved[:, 0])

    def _losses(self, scores: "Tensor", chosen: NDArray[np.int64]) -> "Tensor":
        import torch

        runs, examples, _ = scores.shape
        right = self.classes[chosen].expand(runs, examples)
        nats: Tensor = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), right.flatten(), reduction="none"
        )
        return nats.reshape(runs, examples).mean(1)

    def _scores(self, weights: "Tensor", images: "Tensor") -> "Tensor":
        """Return shape (runs, examples, classes). The patches of the images serve all runs at once."""
        from torch.nn.functional import pad

        parts = _layers(weights)
        runs, examples = len(weights), len(images)
        patches = _patches(pad(images, (1, 1, 1, 1))[None, ..., None])
        here = _dense(patches.expand(runs, -1, -1), parts[0])
        here = _pooled(here.reshape(runs, examples, 8, 8, -1))
        here = _dense(_patches(pad(here, (0, 0, 1, 1, 1, 1))), parts[1])
        here = _pooled(here.reshape(runs, examples, 4, 4, -1)).flatten(2)
        here = _dense(here, parts[2]).relu()
        here = _dense(here, parts[3]).relu()
        return _dense(here, parts[4])


def _layers(weights: "Tensor") -> list[tuple["Tensor", "Tensor"]]:
    parts, at = [], 0
    for outputs, inputs in LAYERS:
        middle, end = at + outputs * inputs, at + outputs * (inputs + 1)
        parts.append((weights[:, at:middle].reshape(-1, outputs, inputs), weights[:, middle:end]))
        at = end
    return parts


def _dense(values: "Tensor", layer: tuple["Tensor", "Tensor"]) -> "Tensor":
    import torch

    weight, bias = layer
    return torch.baddbmm(bias[:, None], values, weight.transpose(1, 2))


def _patches(padded: "Tensor") -> "Tensor":
    """Return each 3 × 3 neighbourhood as a row: (runs, examples × places, 9 × channels)."""
    found = padded.unfold(2, 3, 1).unfold(3, 3, 1)
    return found.reshape(len(padded), -1, 9 * padded.shape[-1])


def _pooled(values: Any) -> Any:
    runs, examples, high, wide, channels = values.shape
    return values.reshape(runs, examples, high // 2, 2, wide // 2, 2, channels).amax((3, 5)).relu()
