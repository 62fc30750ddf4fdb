"""Simulated GPU clusters: nodes at the start, and what comes and goes later."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ebbflow.infra.simulation.traces.rows import read_spot_rows
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node, Notice


@dataclass(frozen=True, slots=True)
class CapacityChange:
    """Nodes that come, leave or get a notice at one moment, and new prices."""

    at: float  # s
    add: tuple[Node, ...] = ()
    remove: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()
    prices: tuple[tuple[str, float], ...] = ()  # (node id, $/h); nodes that are absent do not matter


@dataclass(frozen=True)
class Cluster:
    """GPU nodes, and their changes in order of time."""

    nodes: tuple[Node, ...]
    changes: tuple[CapacityChange, ...] = ()

    def __post_init__(self) -> None:
        ids = [node.id for node in self.nodes]
        if len(set(ids)) != len(ids):
            raise OptionError(f"node ids must differ; twice: {next(i for i in ids if ids.count(i) > 1)}")
        if any(a.at > b.at for a, b in zip(self.changes, self.changes[1:], strict=False)):
            raise OptionError("capacity changes must be in order of time")

    @classmethod
    def grid(cls, nodes: int, gpus: int, *, per_rack: int = 0, price: float = 0.0) -> "Cluster":
        """Return equal nodes of ``gpus`` GPUs at ``price`` $/h, ``per_rack`` to a rack (0: all in one).

        Raises ``OptionError``.
        """
        if nodes < 1 or gpus < 1:
            raise OptionError(f"a cluster needs at least one node and one GPU on each; got {nodes}x{gpus}")
        width = len(str(nodes - 1))
        return cls(
            tuple(
                gpu_node(
                    f"node-{i:0{width}}",
                    gpus,
                    rack=f"rack-{i // per_rack:03}" if per_rack else "",
                    price=price,
                )
                for i in range(nodes)
            )
        )

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Return the cluster that ``NODESxGPUS`` means, such as ``16x4``. Raises ``OptionError``."""
        match = re.fullmatch(r"\s*(\d+)\s*[xX×]\s*(\d+)\s*", text)
        if not match:
            raise OptionError(f"a cluster is written NODESxGPUS, such as 16x4; got {text!r}")
        return cls.grid(int(match[1]), int(match[2]))

    @cached_property
    def gpus(self) -> int:
        """Return the GPUs at the start."""
        return sum(node.gpus for node in self.nodes)

    def most_ahead(self) -> list[float]:
        """Return, before each change and after the last, the most GPUs that will exist at once from then on."""
        here = {node.id: node.gpus for node in self.nodes}
        totals = [sum(here.values())]
        for change in self.changes:
            for id_ in change.remove:
                here.pop(id_, None)
            here.update({node.id: node.gpus for node in change.add})
            totals.append(sum(here.values()))
        most = 0
        ahead = []
        for total in reversed(totals):
            most = max(most, total)
            ahead.append(float(most))
        return ahead[::-1]


def gpu_node(id_: str, gpus: int, *, rack: str = "", price: float = 0.0, market: str = "on-demand") -> Node:
    """Return a GPU node; cores and memory play no part in GPU scheduling."""
    return Node(
        id=id_,
        cores=0,
        memory=0.0,
        gpus=gpus,
        rack=rack,
        price=price,
        market="spot" if market == "spot" else "on-demand",
    )


def read_spot_trace(path: Path, gpus: int, *, notice: float = 0.0, price: float = 0.0) -> Cluster:
    """Read ``time_ms,add|remove,node`` rows without header into a cluster that is empty until its first event.

    Events of one moment are one change. ``notice`` is how many seconds ahead a removal is announced, ``price`` $/h.

    Raises:
        WorkloadError: malformed row, time going back, a node added twice or removed while absent.
    """
    moments: dict[float, tuple[list[Node], list[str]]] = {}
    present: dict[str, float] = {}
    notices: dict[float, list[Notice]] = {}
    for row in read_spot_rows(path):
        at = row.at / 1000
        added, removed = moments.setdefault(at, ([], []))
        if row.kind == "add":
            present[row.node] = at
            added.append(gpu_node(row.node, gpus, price=price, market="spot"))
            continue
        since = present.pop(row.node)
        if since == at:
            moments[at] = ([other for other in added if other.id != row.node], removed)
            continue
        removed.append(row.node)
        if notice > 0:
            notices.setdefault(max(since, at - notice), []).append(Notice(row.node, at))
    return Cluster((), _changes(moments, notices))


def _changes(
    moments: dict[float, tuple[list[Node], list[str]]], notices: dict[float, list[Notice]]
) -> tuple[CapacityChange, ...]:
    empty: tuple[Sequence[Node], Sequence[str]] = ((), ())
    return tuple(
        CapacityChange(
            at, tuple(moments.get(at, empty)[0]), tuple(moments.get(at, empty)[1]), tuple(notices.get(at, ()))
        )
        for at in sorted({*moments, *notices})
    )
