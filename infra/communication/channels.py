"""Channels: process groups that carry pieces side by side, and how a piece is carried out on one."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.infra.communication.payloads import Exchanged, Payload, Summed
from ebbflow.infra.errors import TrainingError
from ebbflow.planners.communication.algebra import Motif
from ebbflow.planners.communication.plan import Piece

_GLOO = "GLOO_SOCKET_IFNAME"


class OrderError(TrainingError):
    """Ranks launched different pieces at the same place of a channel; nothing was summed."""


class Channels:
    """Process groups of all ranks, made in equal order everywhere: a collective call.

    Args:
        count: how many.
        timeout: s after which a collective that hangs is an error.
        backend: of torch.distributed; pieces that are not whole collectives need its point-to-point transfers.
        interfaces: of the network, which channels take in turns; unless given, those that gloo's own variable
            ``GLOO_SOCKET_IFNAME`` names, with commas between.
    """

    def __init__(
        self, count: int, *, timeout: float = 60.0, backend: str = "gloo", interfaces: Sequence[str] = ()
    ) -> None:
        within = timedelta(seconds=timeout)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.groups = []
        names = interfaces or os.environ.get(_GLOO, "").split(",")
        for channel in range(count):
            with _interface(names[channel % len(names)]):
                self.groups.append(dist.new_group(backend=backend, timeout=within))

    def close(self) -> None:
        """Destroy the groups; no piece may run."""
        for group in self.groups:
            dist.destroy_process_group(group)
        self.groups = []

    def verify(self, channel: int, label: int) -> None:
        """Compare what all ranks are about to launch. Raises ``OrderError``."""
        labels = torch.empty(self.ranks, dtype=torch.int64)
        dist.all_gather_single(labels, torch.tensor([label]), group=self.groups[channel])
        if (labels != label).any():
            raise OrderError(
                f"ranks launch different pieces on channel {channel}: their labels are {labels.tolist()}"
            )

    def run(self, channel: int, piece: Piece, payload: Payload) -> None:
        """Carry out a piece on a channel, and return when it is done.

        One thread at a time may use a channel, and all ranks must run the same pieces on it in the same order.
        """
        group = self.groups[channel]
        for motif in piece.motifs:
            if (self.rank in motif.ranks and len(motif.ranks) > 1) or motif.kind == "all-to-all":
                self._run(motif, piece.units, payload, group)

    def _run(self, motif: Motif, units: int, payload: Payload, group: dist.ProcessGroup) -> None:
        match motif.kind, payload:
            case "all-to-all", Exchanged():
                self._exchange(motif, units, payload, group)
            case "all-reduce", Summed() if len(motif.ranks) == self.ranks:
                dist.all_reduce(payload.part(motif.low, motif.high, units), group=group)
            case "all-reduce", Summed():
                self._ring(motif, units, payload, group, adds=True)
                self._ring(motif, units, payload, group, adds=False)
            case "reduce-scatter", Summed():
                self._ring(motif, units, payload, group, adds=True)
            case "all-gather", Summed():
                self._ring(motif, units, payload, group, adds=False)
            case "reduce", Summed():
                self._reduce(motif, payload.part(motif.low, motif.high, units), group)
            case "broadcast", Summed():
                self._broadcast(motif, payload.part(motif.low, motif.high, units), group)
            case _:
                raise TrainingError(f"a piece of {motif.kind} cannot work on {type(payload).__name__}")

    def _exchange(self, motif: Motif, units: int, rows: Exchanged, group: dist.ProcessGroup) -> None:
        ranks, i = motif.ranks, motif.ranks.index(self.rank)
        n, works = len(ranks), []
        for offset in range(*motif.offsets):
            to, source = ranks[(i + offset) % n], ranks[(i - offset) % n]
            out = rows.to_rank(to, motif.low, motif.high, units)
            into = rows.from_rank(source, motif.low, motif.high, units)
            if to == self.rank:
                into.copy_(out)
                continue
            if into.numel():
                works.append(dist.irecv(into, group=group, group_src=source))
            if out.numel():
                works.append(dist.isend(out, group=group, group_dst=to))
        _wait(works)

    def _ring(
        self, motif: Motif, units: int, summed: Summed, group: dist.ProcessGroup, *, adds: bool
    ) -> None:
        """Do the rounds of a reduce-scatter (``adds``), or of an all-gather."""
        ranks, i, n = motif.ranks, motif.ranks.index(self.rank), len(motif.ranks)
        before, behind = ranks[i - 1], ranks[(i + 1) % n]

        def piece(index: int) -> Tensor:
            return summed.part(*motif.piece(index % n), units)

        first = 1 if adds else 0
        for r in range(n - 1):
            out, into = piece(i + first + r), piece(i + 1 + first + r)
            staged = torch.empty_like(into) if adds else into
            works = []
            if into.numel():
                works.append(dist.irecv(staged, group=group, group_src=behind))
            if out.numel():
                works.append(dist.isend(out, group=group, group_dst=before))
            _wait(works)
            if adds:
                into.add_(staged)

    def _reduce(self, motif: Motif, part: Tensor, group: dist.ProcessGroup) -> None:
        if not part.numel():
            return
        if self.rank != motif.root:
            dist.send(part, group=group, group_dst=motif.root)
            return
        others = [rank for rank in motif.ranks if rank != motif.root]
        staged = [torch.empty_like(part) for _ in others]
        _wait(
            [dist.irecv(one, group=group, group_src=rank) for one, rank in zip(staged, others, strict=True)]
        )
        for one in staged:  # in the order of ranks, whoever came first: sums are the same in every run
            part.add_(one)

    def _broadcast(self, motif: Motif, part: Tensor, group: dist.ProcessGroup) -> None:
        if not part.numel():
            return
        if self.rank != motif.root:
            dist.recv(part, group=group, group_src=motif.root)
            return
        _wait([dist.isend(part, group=group, group_dst=rank) for rank in motif.ranks if rank != motif.root])


@contextmanager
def _interface(name: str) -> Iterator[None]:
    """Let gloo use an interface for the groups that are made meanwhile; "" is the one that it would use anyway."""
    before = os.environ.get(_GLOO)
    if name:
        os.environ[_GLOO] = name
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_GLOO, None)
        else:
            os.environ[_GLOO] = before


def _wait(works: "list[dist.Work | None]") -> None:
    for work in works:
        if work is not None:
            work.wait()
