"""DDP's reduction of gradients, with their squared norms before and after and the time that it takes.

The hook replaces DDP's own reduction. DDP divides by the number of ranks while it fills a bucket, but only without a
hook; a division here would be a pass of its own over all gradients, so where the back end cannot average by itself
the loss is divided instead (``loss_factor``). What the hook adds is one pass over the local gradient in steps whose
noise is measured. The mean gradient's norm is the same on all ranks, so each sums up its part of every bucket only,
and the parts meet in the all-reduce that a step needs anyway.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.infra.communication.all_to_all import Submit
from ebbflow.infra.communication.ddp_hook import bucket_name
from ebbflow.infra.communication.payloads import Summed
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.gradients.preconditioner import AdamPreconditioner
from ebbflow.infra.training.gradients.squares import LocalNorms, SquareSums

AVERAGING = ("cuda", "nccl")  # averages while it sums; gloo sums, and then divides in a pass of its own


class RankSamples:
    """Each rank's gradient, over all its passes, as one sample; seen by a communication hook of ``module``.

    ``module`` is a ``DistributedDataParallel`` without a hook. Accumulation passes cost nothing.
    ``submit`` sums buckets over all ranks in place of the module's process group. ``lost`` takes errors of that
    group, once a step: gradients are of no use then, and the backward pass ends as if they were.
    """

    pair = None

    def __init__(
        self,
        module: Any,
        sums: SquareSums,
        preconditioner: AdamPreconditioner | None,
        submit: Submit | None = None,
        lost: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._sums, self._submit, self._lost = sums, submit, lost
        self._failed = False
        self._preconditioner = preconditioner
        self._buffers: list[tuple[Tensor, Tensor | None]] = []
        self._squares: list[Tensor] = []
        self._weight = 0.0
        self._measured = True
        self._clock = _Clock()
        self._group = module.process_group
        self._averages = submit is None and _averages(module)
        self.loss_factor = 1.0 if self._averages else 1.0 / self._group.size()
        module.register_comm_hook(self, _reduce)

    def begin(self, measured: bool) -> None:
        self._measured = measured

    def after_pass(self, weight: float, last: bool) -> None:
        self._weight += weight
        if last:
            self._clock.end()

    def norms(self, examples: float, scale: float) -> LocalNorms:
        if not self._buffers:
            raise TrainingError("the last backward pass of a step must synchronise; it ran under no_sync()")
        total = self._part_of_mean()
        local = torch.stack(self._squares).sum() if self._squares else torch.zeros_like(total)
        local, total = torch.stack((local, total)).tolist()
        found = LocalNorms(0.0, 0.0, total / scale**2, self._clock.seconds())
        if self._measured and self._weight > 0:
            unscaled = local / (scale * self.loss_factor) ** 2
            found = found._replace(local=unscaled / self._weight, samples=1.0)
        self.forget()
        return found

    def forget(self) -> None:
        self._buffers.clear()
        self._squares.clear()
        self._weight = 0.0

    def _part_of_mean(self) -> Tensor:
        """Return this rank's part of the squared norm of the mean gradient."""
        rank, world = self._group.rank(), self._group.size()
        parts = []
        for buffer, factors in self._buffers:
            size = buffer.numel()
            part = slice(size * rank // world, size * (rank + 1) // world)
            if not self._measured:
                parts.append(self._sums.rough([buffer[part]]))
                continue
            parts.append(self._sums.of([buffer[part]], None if factors is None else [factors[part]]))
        return torch.stack(parts).sum()

    def __call__(self, bucket: Any) -> Any:
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._squares.clear()  # of a pass whose step was dropped
            self._buffers.clear()
            self._failed = False
        factors = None
        if self._measured and self._preconditioner is not None and self._preconditioner.on:
            factors = self._preconditioner.of_bucket(bucket)
        if self._measured:
            self._squares.append(self._sums.of([buffer], None if factors is None else [factors]))
        self._buffers.append((buffer, factors))
        self._clock.ready(buffer)
        if self._submit is not None:
            return self._submit(bucket_name(bucket.index()), Summed(buffer)).then(self._summed)
        operation = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        if self._lost is None:
            work = dist.all_reduce(buffer, op=operation, group=self._group, async_op=True)
            return work.get_future().then(self._reduced)
        return self._reduced_or_lost(buffer, operation, self._lost)

    def _summed(self, future: Any) -> Tensor:
        found: Tensor = future.value().tensor
        self._clock.reduced()
        return found

    def _reduced_or_lost(
        self, buffer: Tensor, operation: Any, lost: Callable[[BaseException], None]
    ) -> torch.futures.Future[Tensor]:
        def fail(error: BaseException) -> Tensor:
            self._failed = True
            lost(error)
            return buffer

        def taken(future: Any) -> Tensor:
            try:
                return self._reduced(future)
            except RuntimeError as exc:
                return fail(exc)

        if not self._failed:
            try:
                work = dist.all_reduce(buffer, op=operation, group=self._group, async_op=True)
                found: torch.futures.Future[Tensor] = work.get_future().then(taken)
                return found
            except RuntimeError as exc:
                fail(exc)
        ended: torch.futures.Future[Tensor] = torch.futures.Future()
        ended.set_result(buffer)
        return ended

    def _reduced(self, future: Any) -> Tensor:
        found: Tensor = future.value()[0]
        self._clock.reduced()
        return found


def _reduce(state: RankSamples, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state(bucket)  # DDP checks the annotations of a hook


def _averages(module: Any) -> bool:
    device = next(module.parameters()).device.type
    backends = str(dist.get_backend_config(module.process_group))  # such as "cpu:gloo,cuda:nccl"
    return device == AVERAGING[0] and ":".join(AVERAGING) in backends.split(",")


class _Clock:
    """When gradients were ready and when they were reduced: by events in a GPU's stream, else by the clock."""

    def __init__(self) -> None:
        self._ready = self._end = 0.0
        self._events: tuple[Any, Any] | None = None

    def ready(self, buffer: Tensor) -> None:
        """Note that a bucket's gradients are there; the last one counts."""
        if buffer.is_cuda:
            if self._events is None:
                self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        else:
            self._ready = time.monotonic()

    def reduced(self) -> None:
        self._end = time.monotonic()

    def end(self) -> None:
        """Note the end of the backward pass; on a GPU its stream has waited for the reduction by then."""
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        if self._events is None:
            return max(0.0, self._end - self._ready)
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3
