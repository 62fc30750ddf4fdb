"""DDP's gradients through the enforcer: a communication hook that submits each bucket as a collective of the plan."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.infra.communication.all_to_all import Submit
from ebbflow.infra.communication.payloads import Payload, Summed

BUCKETS = "bucket/"  # what names of buckets begin with


def bucket_name(index: int) -> str:
    """Return the name of a bucket's collective in plans."""
    return f"{BUCKETS}{index}"


class PlannedReduction:
    """Sums buckets by a plan in place of DDP's own reduction; the mean is taken once, after the sum.

    Args:
        submit: carries collectives out, such as ``Enforcer.submit``.
        ranks: over which gradients are averaged.
    """

    def __init__(self, submit: Submit, ranks: int) -> None:
        self.submit, self._ranks = submit, ranks

    def __call__(self, bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":
        """Submit a bucket and return the future of its mean."""
        future = self.submit(bucket_name(bucket.index()), Summed(bucket.buffer()))

        def mean(done: "torch.futures.Future[Payload]") -> Tensor:
            payload = done.value()
            assert isinstance(payload, Summed)
            return payload.tensor.div_(self._ranks)

        return future.then(mean)


def register(model: Any, reduction: PlannedReduction) -> None:
    """Let a ``DistributedDataParallel`` without a hook reduce by ``reduction``."""
    model.register_comm_hook(reduction, _reduce)


def _reduce(state: PlannedReduction, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state(bucket)  # DDP checks the annotations of a hook
