"""Planned communication of one generation of a training: what its process makes once, and tells of each iteration."""

import time
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from ebbflow.infra.communication.channels import Channels
from ebbflow.infra.communication.control import ControlPlane, PlanningSettings
from ebbflow.infra.communication.ddp_hook import BUCKETS, PlannedReduction, register
from ebbflow.infra.communication.payloads import Payload
from ebbflow.infra.communication.plain import PlainCollectives
from ebbflow.infra.communication.profiler import IterationProfiler
from ebbflow.infra.communication.switching import PlanSwitch, Report


class PlannedCommunication:
    """Plain collectives first; a plan's as soon as one is found and all ranks have it.

    Args:
        settings: of planning.
        report: called with what became of it: ``state`` is ``profiled`` (with the recorded training and the
            measured links), ``committed`` (with the plan's prediction and bars), ``plan`` when it takes over, and
            ``ddp`` with a ``reason`` when plain collectives stay or are back. May be called in a thread of its own.
        timeout: s after which a collective that hangs is an error.
        store: in which ranks meet; that of the default process group unless given.
    """

    def __init__(
        self,
        settings: PlanningSettings,
        report: Report,
        *,
        timeout: float = 60.0,
        store: dist.Store | None = None,
    ) -> None:
        self.profiler = IterationProfiler(time.perf_counter)
        # pieces fail before the collectives of the training itself: those say then that all is lost
        self._channels = Channels(settings.channels, timeout=timeout / 2)
        rank = self._channels.rank
        self.switch = PlanSwitch(
            rank,
            self._channels.ranks,
            PlainCollectives().submit,
            self.profiler,
            report if rank == 0 else _silent,
        )
        self._control = ControlPlane(
            store if store is not None else dist.distributed_c10d._get_default_store(),
            rank,
            self.switch,
            self.profiler,
            self._channels,
            settings,
            report,
            stall_timeout=timeout / 2,
        )

    @classmethod
    def start(
        cls,
        settings: PlanningSettings,
        report: Report,
        *,
        timeout: float = 60.0,
        store: dist.Store | None = None,
    ) -> Self:
        """Make the channels and begin to profile: a collective call of all ranks."""
        made = cls(settings, report, timeout=timeout, store=store)
        made._control.start()
        return made

    def submit(self, op: str, payload: Payload) -> "torch.futures.Future[Payload]":
        """Take a collective; its future holds the payload once it is done. All ranks submit the same ones by name."""
        return self.switch.submit(op, payload)

    def reduce(self, model: Any) -> None:
        """Let a ``DistributedDataParallel`` without a hook exchange its gradients through ``submit``."""
        register(model, PlannedReduction(self.submit, self._channels.ranks))

    def begin(self) -> None:
        """Begin an iteration."""
        self.profiler.begin()

    def forward_done(self) -> None:
        """Note that the last backward pass of the iteration begins."""
        self.profiler.mark("forward")

    def reduced(self) -> None:
        """Note that DDP's buckets are reduced."""
        self.profiler.waited(prefix=BUCKETS)

    def wait(self, op: str, future: "torch.futures.Future[Payload]") -> Payload:
        """Wait for a collective of ``submit``, and take note of it; what it brought is returned."""
        since = time.perf_counter()
        payload: Payload = future.wait()
        self.profiler.waited(op, since=since)
        return payload

    def end(self) -> None:
        """End an iteration of a training that has no agreement of its own, by one small all-reduce of all ranks."""
        summed = torch.tensor(self.votes(), dtype=torch.float64)
        dist.all_reduce(summed)
        self.settle(summed.tolist())

    def votes(self) -> list[float]:
        """Return what this rank adds to the numbers that are summed over ranks at the end of an iteration."""
        return self.switch.votes()

    @property
    def width(self) -> int:
        """Return how many numbers ``votes`` are."""
        return self.switch.width

    def settle(self, summed: Sequence[float]) -> None:
        """End the agreement at the end of an iteration. ``summed``: the votes, summed over ranks."""
        self.profiler.mark("agreement", shared=True)
        self._control.observe(self.switch.settle(summed))

    def abandon(self) -> None:
        """Forget the iteration under way."""
        self.profiler.abandon()

    def close(self, timeout: float = 5.0) -> None:
        """End within ``timeout`` seconds. May be called twice. The channels end with the process group."""
        self._control.close(timeout)
        self.switch.close()


def _silent(said: dict[str, object]) -> None:
    pass
