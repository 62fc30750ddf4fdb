"""Collectives as they are submitted, each whole and at once: what runs without a plan, and after one has failed."""

import torch
import torch.distributed as dist

from ebbflow.infra.communication.payloads import Exchanged, Payload, Summed


class PlainCollectives:
    """Carries collectives out as the library does; all ranks must submit them in the same order.

    Args:
        group: of all ranks; the default group unless given.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def submit(self, op: str, payload: Payload) -> "torch.futures.Future[Payload]":
        """Begin a collective; its future holds the payload once it is done."""
        del op
        match payload:
            case Summed():
                work = dist.all_reduce(payload.tensor, group=self._group, async_op=True)
            case Exchanged():
                work = dist.all_to_all_single(
                    payload.received,
                    payload.sent,
                    list(payload.received_rows),
                    list(payload.sent_rows),
                    group=self._group,
                    async_op=True,
                )

        def done(future: "torch.futures.Future[list[torch.Tensor]]") -> Payload:
            future.value()  # raises what went wrong
            return payload

        return work.get_future().then(done)
