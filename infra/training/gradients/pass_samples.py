"""Samples of the gradient in a single process: its accumulation passes, or the steps of a pair."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ebbflow.infra.training.gradients.preconditioner import AdamPreconditioner
from ebbflow.infra.training.gradients.squares import LocalNorms, SquareSums


@dataclass(frozen=True, slots=True)
class _Step:
    """The gradient of a step without accumulation."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    examples: float
    scale: float


class PassSamples:
    """The passes of a single process, each over examples of its own.

    A pass finds no gradients there, so that autograd hands over those of the pass alone; they are added up here. That
    moves no more memory than autograd's own addition. Steps without accumulation are compared in pairs, so that each
    example counts once, and the copy of a gradient is kept for one step.
    """

    loss_factor = 1.0

    def __init__(
        self, parameters: Sequence[Tensor], sums: SquareSums, preconditioner: AdamPreconditioner | None
    ) -> None:
        self._parameters = list(parameters)
        self._sums = sums
        self._preconditioner = preconditioner
        self._added: dict[Tensor, Tensor] = {}
        self._found: list[Tensor] = []
        self._passes = 0
        self._measured = True
        self._first: _Step | None = None  # of a pair
        self.pair: float | None = None  # examples of both steps, where the last norms are a pair's

    def begin(self, measured: bool) -> None:
        self._measured = measured
        if not measured:
            self._first = None

    def after_pass(self, weight: float, last: bool) -> None:
        self._passes += 1
        if not self._measured or (last and self._passes == 1):
            return
        present = {p: p.grad for p in self._parameters if p.grad is not None}
        if weight > 0 and present:
            self._found.append(self._square(list(present), list(present.values())) / weight)
        both = [p for p in present if p in self._added]
        if both:
            torch._foreach_add_([self._added[p] for p in both], [present[p] for p in both])
        self._added.update((p, g) for p, g in present.items() if p not in self._added)
        for parameter in self._parameters:
            parameter.grad = self._added.get(parameter) if last else None

    def norms(self, examples: float, scale: float) -> LocalNorms:
        self.pair = None
        parameters = [p for p in self._parameters if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not self._measured:
            found = LocalNorms(0.0, 0.0, float(self._sums.rough(gradients)) / scale**2)
        elif self._passes == 1:
            found = self._of_pair(_Step(parameters, gradients, examples, scale))
        else:
            samples, unscale = len(self._found), scale**-2
            values = [*self._found, self._square(parameters, gradients)]
            *local, total = torch.stack(values).tolist()
            found = LocalNorms(sum(local) * unscale, samples, total * unscale)
        self._clear()
        return found

    def forget(self) -> None:
        self._first = None
        self._clear()

    def _clear(self) -> None:
        self._added.clear()
        self._found.clear()
        self._passes = 0

    def _of_pair(self, step: _Step) -> LocalNorms:
        before, self._first = self._first, None
        if before is None or list(map(id, before.parameters)) != list(map(id, step.parameters)):
            square = float(self._square(step.parameters, step.gradients)) / step.scale**2
            copied = [gradient.detach().clone() for gradient in step.gradients]
            self._first = _Step(step.parameters, copied, step.examples, step.scale)
            return LocalNorms(square, 1.0, square)
        self.pair = before.examples + step.examples
        share = before.examples / self.pair
        factors = self._factors(step.parameters)
        weights = share / before.scale, (1.0 - share) / step.scale
        values = (
            self._sums.of(before.gradients, factors) * (share / before.scale**2),
            self._sums.of(step.gradients, factors) * ((1.0 - share) / step.scale**2),
            self._sums.of_sum(before.gradients, step.gradients, weights, factors),
        )
        one, other, total = torch.stack(values).tolist()
        return LocalNorms(one + other, 2.0, total)

    def _square(self, parameters: list[Tensor], gradients: list[Tensor]) -> Tensor:
        return self._sums.of(gradients, self._factors(parameters))

    def _factors(self, parameters: list[Tensor]) -> list[Tensor] | None:
        if self._preconditioner is None or not self._preconditioner.on:
            return None
        return self._preconditioner.of(parameters)
