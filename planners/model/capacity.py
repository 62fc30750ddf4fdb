"""Nodes, capacity and shares."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal, NamedTuple

Market = Literal["spot", "on-demand"]
NoticeKind = Literal["interruption", "rebalance"]
WARM = 30.0  # s of tasks after which a core's process is warm, on a third of a core
ARRIVAL = (
    6.0  # s after which an executor takes tasks on a node that has come: a JVM starts, on a third of a core
)


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
class Portion:
    """What one of several queries on a cluster may count on (weighted 1-over-n, QOOP 2.3.1)."""

    cores: float  # whole ones where the engine gives whole cores
    entitled: float  # cores before they were rounded
    queries: int  # that share the cluster, this one included


@dataclass(frozen=True, slots=True)
class Capacity:
    """The observed nodes at one revision. The revision grows at every change."""

    revision: int
    nodes: tuple[Node, ...]  # sorted by id
    notices: tuple[Notice, ...] = ()
    at: float = 0.0  # seconds since the Unix epoch
    hazard: float = 0.0  # expected losses per node-hour
    slot: Resources | None = None  # the most that one task can be given; None: a whole node
    portion: Portion | None = None  # of it all that the query may count on; None: all
    network: float = 0.0  # MB/s of each node's link, each way; 0: not known, taken for unlimited
    cold: float = (
        0.0  # of the cores, those whose processes have yet to warm up (``warming``); 0 also if not known
    )
    held: float | None = None  # of the cores, those of the query's own executors; None: of all or not known

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

    def lost(self, after: "Capacity") -> float:
        """Return the fraction of nodes that are gone ``after``; those with a notice do not count: they pass on what
        they have."""
        told = {notice.node_id for notice in self.notices}
        gone = {node.id for node in self.nodes} - {node.id for node in after.nodes} - told
        return len(gone) / len(self.nodes) if self.nodes else 0.0

    def same_nodes(self, other: "Capacity") -> bool:
        """Tell whether both mean the same usable and leaving nodes, links, and the same portion of them."""
        return (self.nodes, self.notices, self.portion, self.network) == (
            other.nodes,
            other.notices,
            other.portion,
            other.network,
        )


@dataclass(frozen=True, slots=True)
class Share:
    """What one app may count on now."""

    revision: int
    total: Resources  # summed over nodes
    largest: Resources  # the largest single node: no task may demand more
    nodes: int
    hazard: float = 0.0  # expected losses per node-hour
    cold: float = 0.0  # of the total cores, those whose processes have yet to warm up
    absent: float = 0.0  # likewise those that take no tasks yet: executors start on their nodes
    arrival: float = ARRIVAL  # seconds until those do

    @property
    def link(self) -> float:
        """Return the MB/s, each way, that a node's link has for this app; 0: links limit nothing."""
        return self.total.network / self.nodes if self.nodes else 0.0

    def waited(self, seconds: float) -> float:
        """Return how much of so many ``seconds`` from now on goes with waiting for absent cores: what they could have
        done meanwhile, spread over all cores."""
        return min(seconds, self.arrival) * self.absent / self.total.cores if self.absent > 0.0 else 0.0

    @classmethod
    def of(cls, capacity: Capacity, fraction: float = 1.0) -> "Share":
        """Return the query's portion of ``capacity``, or the ``fraction`` of it, as a share.

        A portion counts on no more nodes than it has cores, and on its part of every link.
        """
        usable, nodes = capacity.usable, len(capacity.usable)
        network = capacity.network * nodes
        if capacity.portion is not None and capacity.cores:
            fraction = min(fraction, capacity.portion.cores / capacity.cores)
            nodes = min(nodes, ceil(capacity.portion.cores))
        largest = Resources(
            max((float(n.cores) for n in usable), default=0.0),
            max((n.memory for n in usable), default=0.0),
        )
        if capacity.slot is not None:
            largest = Resources(*(min(a, b) for a, b in zip(largest, capacity.slot, strict=True)))
        cores = capacity.cores * fraction
        return cls(
            revision=capacity.revision,
            total=Resources(cores, capacity.memory * fraction, network=network * fraction),
            largest=largest,
            nodes=nodes,
            hazard=capacity.hazard,
            cold=min(capacity.cold, capacity.cores) * fraction,
            absent=0.0 if capacity.held is None else max(cores - capacity.held, 0.0),
        )

    def after(self, task_seconds: float) -> "Share":
        """Return the share after its cores have run tasks of so many seconds in all, spread over them evenly."""
        if self.cold <= 0.0 or self.total.cores <= 0.0 or task_seconds <= 0.0:
            return self
        return replace(self, cold=self.cold * warming(task_seconds / self.total.cores))

    @classmethod
    def uniform(
        cls,
        cores: float,
        memory: float,
        nodes: int = 1,
        revision: int = 0,
        hazard: float = 0.0,
        network: float = 0.0,
    ) -> "Share":
        """Return ``nodes`` equal nodes that sum to ``cores``, ``memory`` (GiB) and ``network`` (MB/s; 0: no
        limit)."""
        per = max(nodes, 1)
        total = Resources(cores, memory, network=network)
        return cls(revision, total, Resources(cores / per, memory / per), nodes, hazard)


def warming(seconds: float) -> float:
    """Return which part of its warming up a core has before it that has run tasks for ``seconds``, in [0, 1].

    A process is slow at first: it loads code, translates it, opens connections.
    """
    return max(1.0 - seconds / WARM, 0.0)


@dataclass(frozen=True, slots=True)
class CapacityDiff:
    """What changed between two capacities."""

    arrived: tuple[str, ...] = field(default=())
    left: tuple[str, ...] = field(default=())
    noticed: tuple[str, ...] = field(default=())
    share: str = ""  # how the query's portion changed, for people
    links: str = ""  # how the nodes' links changed, for people

    @classmethod
    def between(cls, before: Capacity | None, after: Capacity) -> "CapacityDiff":
        """Return node ids that arrived, left or got a notice, each sorted, and how the portion changed."""

        def ids(nodes: Iterable[Node]) -> set[str]:
            return {n.id for n in nodes}

        old = ids(before.nodes) if before else set()
        new = ids(after.nodes)
        told = {n.node_id for n in before.notices} if before else set()
        return cls(
            tuple(sorted(new - old)),
            tuple(sorted(old - new)),
            tuple(sorted({n.node_id for n in after.notices} - told)),
            _shared(before, after) if before else "",
            _relinked(before, after) if before else "",
        )

    def __str__(self) -> str:
        parts = [("arrived", self.arrived), ("left", self.left), ("notice", self.noticed)]
        said = [f"{word}: {', '.join(ids)}" for word, ids in parts if ids]
        return "; ".join([*said, *(text for text in (self.share, self.links) if text)]) or "no change"


def _shared(before: Capacity, after: Capacity) -> str:
    """Return what became of the query's portion: ``2 queries share the cluster: 3 -> 1.5 cores``."""
    if before.portion == after.portion:
        return ""
    had = before.portion.cores if before.portion else before.cores
    has, queries, entitled = float(after.cores), 1, ""
    if after.portion is not None:
        has, queries = after.portion.cores, after.portion.queries
        if abs(after.portion.entitled - has) > 0.005:
            entitled = f" (entitled to {after.portion.entitled:.3g})"
    who = "alone on the cluster" if queries == 1 else f"{queries} queries share the cluster"
    cores = f"{had:g} -> {has:g} cores" if had != has else f"{has:g} cores as before"
    return f"{who}: {cores}{entitled}"


def _relinked(before: Capacity, after: Capacity) -> str:
    """Return what became of the links: ``links: 25 -> 12.5 MB/s``."""
    if before.network == after.network:
        return ""
    had, has = (f"{rate:.3g}" if rate else "no limit" for rate in (before.network, after.network))
    return f"links: {had} -> {has} MB/s"
