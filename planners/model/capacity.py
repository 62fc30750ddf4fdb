"""Nodes, capacity and shares."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Market = Literal["spot", "on-demand"]
NoticeKind = Literal["interruption", "rebalance"]


class Resources(NamedTuple):
    """A resource vector: what a task demands, or what a node or share offers."""

    cores: float = 0.0
    memory: float = 0.0  # GiB
    disk: float = 0.0  # MB/s
    network: float = 0.0  # MB/s

    def plus(self, other: "Resources", times: float = 1.0) -> "Resources":
        """Return ``self + times * other``, dimension by dimension."""
        return Resources(*(a + times * b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> "Resources":
        """Return every dimension multiplied by ``factor``."""
        return Resources(*(a * factor for a in self))

    def fits(self, room: "Resources", slack: float = 1e-9) -> bool:
        """Tell whether this demand fits ``room``. Dimensions not demanded (0) never matter."""
        return all(a <= b + slack for a, b in zip(self, room, strict=True) if a > 0)


@dataclass(frozen=True, slots=True)
class Node:
    """One machine."""

    id: str
    cores: int
    memory: float  # GiB usable by tasks
    host: str = ""
    instance_type: str = "local"
    market: Market = "spot"
    zone: str = ""
    rack: str = ""
    gpus: int = 0
    price: float = 0.0  # dollars per hour


@dataclass(frozen=True, slots=True)
class Notice:
    """A node will leave at ``deadline``. An interruption is firm, a rebalance advice is not."""

    node_id: str
    deadline: float  # seconds since the Unix epoch
    kind: NoticeKind = "interruption"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The observed nodes at one epoch. The epoch grows at every change."""

    epoch: int
    nodes: tuple[Node, ...]  # sorted by id
    notices: tuple[Notice, ...] = ()
    at: float = 0.0  # seconds since the Unix epoch
    hazard: float = 0.0  # expected losses per node-hour

    @property
    def usable(self) -> tuple[Node, ...]:
        """Return the nodes that planning may count on: those without a firm notice."""
        leaving = {n.node_id for n in self.notices if n.kind == "interruption"}
        return tuple(n for n in self.nodes if n.id not in leaving)

    @property
    def cores(self) -> int:
        return sum(n.cores for n in self.usable)

    @property
    def memory(self) -> float:
        """Return usable memory, GiB."""
        return sum(n.memory for n in self.usable)

    def same_nodes(self, other: "Capacity") -> bool:
        """Tell whether both mean the same usable and leaving nodes."""
        return self.nodes == other.nodes and self.notices == other.notices


@dataclass(frozen=True, slots=True)
class Share:
    """What one app may count on now."""

    epoch: int
    total: Resources  # summed over nodes
    largest: Resources  # the largest single node: no task may demand more
    nodes: int
    hazard: float = 0.0  # expected losses per node-hour

    @classmethod
    def of(cls, capacity: Capacity, fraction: float = 1.0) -> "Share":
        """Return the ``fraction`` of ``capacity`` as a share (weighted 1-over-n, QOOP 2.3.1)."""
        usable = capacity.usable
        return cls(
            epoch=capacity.epoch,
            total=Resources(capacity.cores * fraction, capacity.memory * fraction),
            largest=Resources(
                max((float(n.cores) for n in usable), default=0.0),
                max((n.memory for n in usable), default=0.0),
            ),
            nodes=len(usable),
            hazard=capacity.hazard,
        )

    @classmethod
    def uniform(
        cls, cores: float, memory: float, nodes: int = 1, epoch: int = 0, hazard: float = 0.0
    ) -> "Share":
        """Return ``nodes`` equal nodes that sum to ``cores`` and ``memory`` (GiB)."""
        per = max(nodes, 1)
        return cls(epoch, Resources(cores, memory), Resources(cores / per, memory / per), nodes, hazard)


@dataclass(frozen=True, slots=True)
class CapacityDiff:
    """What changed between two capacities."""

    arrived: tuple[str, ...] = field(default=())
    left: tuple[str, ...] = field(default=())
    noticed: tuple[str, ...] = field(default=())

    @classmethod
    def between(cls, before: Capacity | None, after: Capacity) -> "CapacityDiff":
        """Return node ids that arrived, left or got a notice, each sorted."""

        def ids(nodes: Iterable[Node]) -> set[str]:
            return {n.id for n in nodes}

        old = ids(before.nodes) if before else set()
        new = ids(after.nodes)
        told = {n.node_id for n in before.notices} if before else set()
        return cls(
            tuple(sorted(new - old)),
            tuple(sorted(old - new)),
            tuple(sorted({n.node_id for n in after.notices} - told)),
        )

    def __str__(self) -> str:
        parts = [("arrived", self.arrived), ("left", self.left), ("notice", self.noticed)]
        return "; ".join(f"{word}: {', '.join(ids)}" for word, ids in parts if ids) or "no change"
