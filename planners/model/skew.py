"""Skew of a model's tensor sizes: whether training suffers from being spread over machines (Tiresias, NSDI 2019)."""

from collections.abc import Sequence
from typing import NamedTuple

PACK_LIMIT = 0.38
"""Midpoint between the largest insensitive and the smallest sensitive model of the paper's Table 3.3."""


class Tensors(NamedTuple):
    """Tensor sizes of a model, MiB (Tiresias, Table 3.3)."""

    total: float
    largest: float

    @property
    def skew(self) -> float:
        """Return the share of the largest tensor."""
        return self.largest / self.total


TENSORS: dict[str, Tensors] = {
    "vgg19": Tensors(548.1, 392.0),
    "vgg16": Tensors(527.8, 392.0),
    "vgg11": Tensors(506.8, 392.0),
    "alexnet": Tensors(235.9, 144.0),
    "resnet152": Tensors(230.2, 9.0),
    "resnet101": Tensors(170.4, 9.0),
    "resnet50": Tensors(97.7, 9.0),
    "inception4": Tensors(162.9, 5.9),
    "inception3": Tensors(91.0, 7.8),
    "googlenet": Tensors(26.7, 3.9),
}


def is_skewed(model: str, limit: float = PACK_LIMIT) -> bool:
    """Tell whether ``model`` is known and its largest tensor takes more than ``limit`` of it."""
    known = TENSORS.get(model.lower())
    return known is not None and known.skew > limit


def tensor_skew(sizes: Sequence[float]) -> float:
    """Return the share of the largest of ``sizes`` (any unit)."""
    return max(sizes) / sum(sizes)


def server_loads(sizes: Sequence[float], servers: int) -> list[float]:
    """Return the load of each parameter server when tensors are dealt round robin in order (TensorFlow's default)."""
    return [sum(sizes[first::servers]) for first in range(servers)]
