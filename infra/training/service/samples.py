"""Samples of the gradient where it is summed by aggregators: each worker's, over all its passes."""

import time

from torch import Tensor

from ebbflow.infra.training.gradients.preconditioner import AdamPreconditioner
from ebbflow.infra.training.gradients.squares import LocalNorms, SquareSums
from ebbflow.infra.training.service.optimizer import ServiceOptimizer


class ServiceSamples:
    """Takes the squared norm of each gradient that is pushed; aggregators have that of the sum.

    Where gradients are pre-conditioned, the sums themselves are fetched in steps that are measured, each by one
    worker.

    Args:
        service: that pushes gradients.
        sums: of squares.
        preconditioner: of Adam.
    """

    pair = None

    def __init__(
        self, service: ServiceOptimizer, sums: SquareSums, preconditioner: AdamPreconditioner | None
    ) -> None:
        self._service, self._sums = service, sums
        self._preconditioner = preconditioner
        self._measured = True
        self._weight = self._square = 0.0
        self._ready = 0.0
        service.on_push = self._take

    @property
    def loss_factor(self) -> float:
        """Return what a loss is multiplied by, so that the sum of gradients is their mean."""
        return 1.0 / self._service.world.size

    def begin(self, measured: bool) -> None:
        self._measured = measured

    def after_pass(self, weight: float, last: bool) -> None:
        self._weight += weight
        self._ready = time.monotonic()

    def norms(self, examples: float, scale: float) -> LocalNorms:
        squares = self._service.squares()
        first = self._service.world.rank == 0
        total = sum(squares.values()) if first else 0.0
        conditioned = self._measured and self._preconditioner is not None and self._preconditioner.on
        if conditioned:
            names = self._service.names[self._service.world.rank :: self._service.world.size]
            found = self._service.sums(names)
            total = sum(self._squared(name, one) for name, one in found.items())
        found_norms = LocalNorms(0.0, 0.0, total / scale**2, time.monotonic() - self._ready)
        if self._measured and self._weight > 0:
            unscaled = self._square / (scale * self.loss_factor) ** 2
            found_norms = found_norms._replace(local=unscaled / self._weight, samples=1.0)
        self._weight = self._square = 0.0
        return found_norms

    def forget(self) -> None:
        self._weight = self._square = 0.0
        self._service.abandon()

    def _take(self, name: str, gradient: Tensor) -> None:
        if self._measured:
            self._square += self._squared(name, gradient)

    def _squared(self, name: str, gradient: Tensor) -> float:
        factors = None
        if self._preconditioner is not None and self._preconditioner.on:
            factors = self._preconditioner.of([self._service.parameter(name)])
        return float(self._sums.of([gradient], factors))
