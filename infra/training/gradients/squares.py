"""Sums of squares of gradients, cheap and exact enough for differences of two of them.

Single precision over a whole bucket loses the digits that the noise of the gradient is made of. On a processor the
sums are therefore taken over pieces that fit a cache, and pieces are added in double precision; this also makes a
scaled copy of the gradient unnecessary.

What one rank finds out about the gradients of a step: their norms, by the samples that it has.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ebbflow.infra.training.checkpoints.shards import local

PIECE = (
    1 << 17
)  # elements: half a megabyte, so that a piece and its scratch space stay in the second-level cache


class SquareSums:
    """Sums of squares over lists of tensors of one device. Keeps scratch space of one piece."""

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, Tensor] = {}

    def of(self, tensors: Sequence[Tensor], factors: Sequence[Tensor] | None = None) -> Tensor:
        """Return the sum of ``(factor * x)**2`` over all elements: a double on the tensors' device.

        Of sharded tensors over the elements that lie in this process.
        """
        if not tensors:
            return torch.zeros((), dtype=torch.float64)
        tensors = [local(tensor) for tensor in tensors]
        factors = None if factors is None else [local(factor) for factor in factors]
        if not in_pieces(tensors[0]):
            scaled = tensors if factors is None else torch._foreach_mul(tensors, list(factors))
            return _squared_norm(scaled)
        total = 0.0
        for place, tensor in enumerate(tensors):
            if factors is None:
                for piece in _flat(tensor)[0].split(PIECE):
                    x = self._space(piece).copy_(piece) if _short(piece) else piece
                    total += torch.dot(x, x).item()
            else:
                for x, factor in pieces(tensor, factors[place]):
                    scaled = torch.mul(x, factor, out=self._space(x))
                    total += torch.dot(scaled, scaled).item()
        return torch.tensor(total, dtype=torch.float64)

    def rough(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares in one pass, for where no more is wanted than whether all elements are finite.

        On a processor it saves what calling so many pieces takes.
        """
        if not tensors or not in_pieces(tensors[0]) or any(map(_short, tensors)):
            return self.of(tensors)
        flat = [_flat(local(tensor))[0] for tensor in tensors]
        return torch.stack([torch.dot(x, x) for x in flat]).double().sum()

    def of_sum(
        self,
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        weights: tuple[float, float],
        factors: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Return the sum of ``(factor * (weights[0] * x + weights[1] * y))**2`` over pairs of elements."""
        if not first:
            return torch.zeros((), dtype=torch.float64)
        first, second = [local(tensor) for tensor in first], [local(tensor) for tensor in second]
        factors = None if factors is None else [local(factor) for factor in factors]
        if not in_pieces(first[0]):
            mixed = torch._foreach_mul(list(first), weights[0])
            torch._foreach_add_(mixed, list(second), alpha=weights[1])
            return self.of(mixed, factors)
        total = 0.0
        for place, (one, other) in enumerate(zip(first, second, strict=True)):
            more = (one, other) if factors is None else (one, other, factors[place])
            for x, y, *factor in pieces(*more):
                mixed = torch.mul(x, weights[0], out=self._space(x)).add_(y, alpha=weights[1])
                if factor:
                    mixed.mul_(factor[0])
                total += torch.dot(mixed, mixed).item()
        return torch.tensor(total, dtype=torch.float64)

    def _space(self, like: Tensor) -> Tensor:
        """Return scratch space of the size of ``like``, in single precision at the least."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(PIECE, dtype=dtype)
        return self._scratch[dtype][: like.numel()]


def in_pieces(tensor: Tensor) -> bool:
    """Return whether work on ``tensor`` is better done piece by piece; a GPU takes all tensors of a list at once."""
    return bool(tensor.device.type == "cpu")


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return views of the tensors as vectors of at most ``PIECE`` elements that correspond.

    They are copies where the tensors are laid out differently.
    """
    return zip(*(flat.split(PIECE) for flat in _flat(*tensors)), strict=True)


def _flat(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors as vectors whose elements correspond, without copies where all are laid out alike."""
    first = tensors[0]
    strides = first.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(first.shape, strides, strict=True))
    if span == first.numel() and all(t.stride() == strides for t in tensors):
        return [t.as_strided((span,), (1,)) for t in tensors]
    return [t.reshape(-1) for t in tensors]


def _squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    # a norm of 16-bit numbers is accumulated in single precision, but would be rounded to 16 bits at the end
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float32 if _short(tensors[0]) else None)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _short(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


class LocalNorms(NamedTuple):
    """What one rank adds to a step's all-reduce; the sums over ranks go to ``GradientMeter.finish``.

    A gradient with NaN or infinite elements makes ``local`` or ``total`` NaN or infinite, so the sums tell all ranks.
    So does one whose squared norm single precision cannot hold.
    """

    local: float  # sum of |h|**2 / w over the rank's samples
    samples: float  # gradients over examples of their own; 0 in a step whose noise is not measured
    total: float  # part of the squared norm of the mean gradient
    sync: float = 0.0  # seconds from the last local gradient to the end of the reduction


class Samples(Protocol):
    """Collects the gradients of one step after another."""

    @property
    def loss_factor(self) -> float:
        """Return what losses are multiplied by besides their weights."""

    @property
    def pair(self) -> float | None:
        """Return the examples of both steps, where the last norms are those of a pair of steps."""

    def begin(self, measured: bool) -> None:
        """Begin a step; one that is not ``measured`` only returns whether its gradient is finite."""
        ...

    def after_pass(self, weight: float, last: bool) -> None:
        """Inspect the gradients right after a backward pass with this weight."""
        ...

    def norms(self, examples: float, scale: float) -> LocalNorms:
        """Return the norms of the step over ``examples`` examples, whose loss was multiplied by ``scale``.

        Ends the step. Waits for a GPU.
        """
        ...

    def forget(self) -> None:
        """Drop the step that is under way, and what was kept of earlier ones."""
        ...
