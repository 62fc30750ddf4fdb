"""An all-to-all that gradients go back through: requested in one place and waited for in another."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ebbflow.infra.communication.payloads import Exchanged, Payload

Submit = Callable[[str, Payload], "torch.futures.Future[Payload]"]
"""Takes a collective by its name; ``Enforcer.submit``."""


Wait = Callable[[str, "torch.futures.Future[Payload]"], Payload]
"""Waits for a collective by its name and returns what it brought; ``PlannedCommunication.wait``."""


class Exchange:
    """One all-to-all of a model and its reverse in the backward pass; compute may run between request and wait.

    Args:
        submit: carries collectives out.
        forward: name of the exchange.
        backward: name of the exchange of gradients.
        wait: waits for one by its name, such as ``PlannedCommunication.wait``; by its future alone unless given.
    """

    def __init__(self, submit: Submit, forward: str, backward: str, wait: Wait | None = None) -> None:
        self._submit, self._forward, self._backward = submit, forward, backward
        self._wait = wait or (lambda _, future: future.wait())
        self._under_way = forward
        self._rows: Exchanged | None = None
        self._future: torch.futures.Future[Payload] | None = None

    def request(self, sent: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Tensor:
        """Submit the exchange and return a token for ``wait``.

        Args:
            sent: elements for rank 0, then for rank 1, and so on.
            sent_rows: elements for each rank.
            received_rows: elements from each rank.
        """
        token: Tensor = _Request.apply(self, sent, tuple(sent_rows), tuple(received_rows))
        return token

    def wait(self, token: Tensor) -> Tensor:
        """Return what has come: elements of rank 0, then of rank 1, and so on."""
        received: Tensor = _Wait.apply(self, token)
        return received

    def begin(self, sent: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> None:
        """Submit the forward exchange."""
        received = sent.new_empty(sum(received_rows))
        self._rows = Exchanged(sent.contiguous(), received, sent_rows, received_rows)
        self._under_way = self._forward
        self._future = self._submit(self._forward, self._rows)

    def begin_reverse(self, gradient: Tensor) -> None:
        """Submit the exchange of gradients."""
        assert self._rows is not None
        into = gradient.new_empty(self._rows.sent.numel())
        self._under_way = self._backward
        self._future = self._submit(self._backward, self._rows.reversed(gradient.contiguous().view(-1), into))

    def end(self) -> Tensor:
        """Wait for the exchange that is on its way and return what it brought."""
        assert self._future is not None
        rows = self._wait(self._under_way, self._future)
        self._future = None
        assert isinstance(rows, Exchanged)
        return rows.received


class _Request(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, sent: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]
    ) -> Tensor:
        ctx.exchange, ctx.shape = exchange, sent.shape
        exchange.begin(sent.detach(), sent_rows, received_rows)
        return sent.new_empty(sum(received_rows))  # carries no values, only where gradients go

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.exchange.end().view(ctx.shape), None, None


class _Wait(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, token: Tensor) -> Tensor:
        ctx.exchange = exchange
        del token
        return exchange.end()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (gradient,) = gradients
        ctx.exchange.begin_reverse(gradient)
        return None, torch.zeros_like(gradient)
