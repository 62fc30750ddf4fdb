"""What a local fleet must not forget, and how it changes: plans, nodes, notices, what nodes have cost.

Pure values. ``store`` keeps the state of one fleet in a file that several processes read and change.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.infra.machine.cgroups import Controller
from ebbflow.infra.machine.network.plan import NetworkPlan
from ebbflow.planners.model.capacity import Market, Node, Notice
from ebbflow.planners.model.fleet import PoolState

NodePhase = Literal["starting", "up"]
KEPT = 200  # nodes that are gone of which it is still known how
FORGET = 300.0  # s after its deadline that a notice is kept of which nothing came
HOUR = 3600.0


class Identity(NamedTuple):
    """A process that can be told from a later one with the same number."""

    pid: int
    ticks: int  # of the kernel's clock at its start


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What one pool is to be, and how far that is."""

    nodes: int
    on_demand: int = 0  # of ``nodes``
    drain: tuple[str, ...] = ()  # nodes that are to leave and were not ended yet
    reason: str = ""
    on_demand_since: float = 0.0  # Unix time, s
    short_since: float | None = None  # Unix time, s: since then fewer have arrived than are planned
    outage: float = 0.0  # Unix time, s, at which a simulated capacity outage ends
    failed: str = ""  # why the last start did not work
    again: float = 0.0  # Unix time, s, before which no start is tried
    tries: int = 0  # starts in a row that did not work
    dollars: float = 0.0  # that nodes have cost that are gone
    seconds: float = 0.0  # that they had worked
    losses: int = 0  # of them, those that nobody here wanted to end


@dataclass(frozen=True, slots=True)
class LocalNode:
    """One node from the moment it was asked for."""

    id: str
    pool: str
    phase: NodePhase
    since: float  # Unix time, s, of its grant: it is paid for from then on
    market: Market
    price: float  # $/h
    host: str = ""
    gpus: tuple[str, ...] = ()  # of this machine, as CUDA_VISIBLE_DEVICES names them, one a slot
    process: Identity | None = None  # that stands for the machine
    deadline: float | None = None  # Unix time, s, at which it will be ended: it has had a firm notice
    fate: str = ""  # it is being ended, and how

    @property
    def visible(self) -> bool:
        """Tell whether it has arrived and is there."""
        return self.phase == "up" and not self.fate

    @property
    def lasting(self) -> bool:
        """Tell whether it is there or to come, and not about to leave."""
        return not self.fate and self.deadline is None


@dataclass(frozen=True, slots=True)
class TerminatedNode:
    """How a node went."""

    id: str
    since: float  # Unix time, s
    until: float
    how: str


@dataclass(frozen=True, slots=True)
class SparkPart:
    """The Spark cluster whose workers are the fleet's Spark nodes."""

    name: str
    uid: str
    master_url: str


@dataclass(frozen=True, slots=True)
class LocalFleetState:
    """All that is kept of one fleet. It outlives the fleet itself: ids and revisions are never used twice."""

    name: str
    uid: str  # of this life of the fleet; in the labels of all its processes
    offset: float = 0.0  # s, of the clock by which all times here are; see ``MachineClock``
    up: bool = True
    owner: Identity | None = None  # whose end ends the fleet; None: nobody's
    supervisor: Identity | None = field(default=None, metadata={"former": "keeper"})
    revision: int = field(default=0, metadata={"former": "epoch"})
    pools: tuple[LocalPool, ...] = ()
    plans: Mapping[str, PoolPlan] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)  # pool -> nodes ever asked for
    nodes: tuple[LocalNode, ...] = ()
    reported: tuple[Notice, ...] = field(default=(), metadata={"former": "heard"})  # by others, by node
    terminated: tuple[TerminatedNode, ...] = field(default=(), metadata={"former": "gone"})  # newest last
    gpus: tuple[str, ...] = ()  # of this machine that nodes share out; empty: slots are CPU cores
    spark: SparkPart | None = None
    network: NetworkPlan | None = None  # of the nodes; None: they are on loopback
    memory_version: int = 0  # of the control groups that limit nodes' memory; 0: nothing does
    memory_folder: str = ""  # where these are

    @property
    def memory_controller(self) -> Controller | None:
        """Return where nodes' memory groups are made; ``None``: no pool limits its nodes' memory."""
        if not self.memory_version:
            return None
        return Controller(1 if self.memory_version == 1 else 2, Path(self.memory_folder))

    def pool(self, name: str) -> LocalPool | None:
        return next((pool for pool in self.pools if pool.name == name), None)

    def node(self, id_: str) -> LocalNode | None:
        return next((node for node in self.nodes if node.id == id_), None)

    def there(self, id_: str) -> LocalNode:
        """Return a node that is there. Raises ``ClusterError``."""
        found = self.node(id_)
        if found is None or not found.visible:
            known = (
                ", ".join(sorted((node.id for node in self.nodes if node.visible), key=by_number)) or "none"
            )
            raise ClusterError(
                f"there is no node {id_!r} in the fleet {self.name!r} now; there are: {known}"
                + (f" ({id_} went: {how})" if (how := self.ended(id_)) else "")
            )
        return found

    def ended(self, id_: str) -> str:
        """Return how a node went that is gone or going; empty for one that is there or never was."""
        found = self.node(id_)
        if found is not None:
            return found.fate
        return next((gone.how for gone in reversed(self.terminated) if gone.id == id_), "")

    def pending_notices(self) -> tuple[Notice, ...]:
        """Return one notice of each node that is there and has any: the firmest, then the earliest."""
        found: dict[str, Notice] = {}
        there = {node.id for node in self.nodes if node.visible}
        own = [Notice(n.id, n.deadline) for n in self.nodes if n.deadline is not None]
        for notice in (*own, *self.reported):
            known = found.get(notice.node_id)
            if notice.node_id in there and (known is None or firmness(notice) < firmness(known)):
                found[notice.node_id] = notice
        return tuple(found[id_] for id_ in sorted(found))

    def seen(self, pool: LocalPool) -> tuple[Node, ...]:
        """Return the nodes of one pool that have arrived, by id."""
        return tuple(
            Node(
                node.id,
                pool.cores,
                pool.memory,
                node.host,
                pool.instance_type,
                node.market,
                pool.zone,
                gpus=pool.gpus,
                price=node.price,
            )
            for node in sorted(self.nodes, key=lambda node: node.id)
            if node.pool == pool.name and node.visible
        )

    def pool_state(self, pool: LocalPool, now: float) -> PoolState:
        """Return one pool as it is planned and seen."""
        plan, nodes = self.plans[pool.name], self.seen(pool)
        lasting = sum(node.pool == pool.name and node.lasting for node in self.nodes)
        return PoolState(
            pool.name,
            plan.nodes,
            max(
                plan.nodes,
                sum(node.pool == pool.name and node.lasting and node.visible for node in self.nodes),
            ),
            nodes,
            on_demand=plan.on_demand,
            min_nodes=pool.min_nodes,
            max_nodes=pool.max_nodes,
            short_since=plan.short_since,
            short_why=self._why(plan, lasting, now),
            base=pool.base,
            on_demand_since=plan.on_demand_since,
            draining=plan.drain,
            purpose="aggregators" if pool.kind == "cpu" else "",
        )

    def _why(self, plan: PoolPlan, lasting: int, now: float) -> str:
        if plan.short_since is None:
            return ""
        if plan.outage > now and lasting < plan.nodes:
            return "insufficient capacity"
        return plan.failed or "nodes are being launched"

    def dollars(self, now: float) -> float:
        """Return what all nodes of this life have cost, those that are there up to ``now``."""
        gone = sum(plan.dollars for plan in self.plans.values())
        return gone + sum(cost(node, now) for node in self.nodes)

    def experience(self, now: float) -> tuple[int, float]:
        """Return losses, notices among them, and node-seconds of all nodes so far."""
        losses = sum(plan.losses for plan in self.plans.values())
        seconds = sum(plan.seconds for plan in self.plans.values())
        losses += sum(node.deadline is not None for node in self.nodes)
        return losses, seconds + sum(max(0.0, now - node.since) for node in self.nodes if node.phase == "up")

    # --- changes --------------------------------------------------------------------------------------------

    def after(self, later: "LocalFleetState") -> "LocalFleetState":
        """Return ``later`` with this revision, or the next where nodes or notices that are seen differ."""
        changed = (self._sight(), self.pending_notices()) != (later._sight(), later.pending_notices())
        return replace(later, revision=self.revision + changed)

    def _sight(self) -> tuple[tuple[Node, ...], ...]:
        return tuple(self.seen(pool) for pool in self.pools)

    def planned(self, pool: str, **changes: Any) -> "LocalFleetState":
        """Return the state with other values of one plan."""
        return replace(self, plans={**self.plans, pool: replace(self.plans[pool], **changes)})

    def noted(self, id_: str, **changes: Any) -> "LocalFleetState":
        """Return the state with other values of one node."""
        return replace(
            self, nodes=tuple(replace(node, **changes) if node.id == id_ else node for node in self.nodes)
        )

    def without(self, id_: str, how: str, now: float, *, lost: bool) -> "LocalFleetState":
        """Return the state after a node has gone. ``lost``: nobody here wanted its end."""
        node = self.node(id_)
        if node is None:
            return self
        plan = self.plans[node.pool]
        worked = max(0.0, now - node.since) if node.phase == "up" else 0.0
        later = self.planned(
            node.pool,
            drain=tuple(other for other in plan.drain if other != id_),
            dollars=plan.dollars + cost(node, now),
            seconds=plan.seconds + worked,
            losses=plan.losses + ((lost or node.deadline is not None) and node.phase == "up"),
        )
        return replace(
            later,
            nodes=tuple(other for other in self.nodes if other.id != id_),
            terminated=(*self.terminated, TerminatedNode(id_, node.since, now, how))[-KEPT:],
            reported=tuple(notice for notice in self.reported if notice.node_id != id_),
        )

    def short(self, now: float) -> "LocalFleetState":
        """Return the state with the shortage of each pool noted, and old notices forgotten."""
        later = self
        for name, plan in self.plans.items():
            arrived = sum(node.pool == name and node.visible and node.lasting for node in self.nodes)
            since = (plan.short_since or now) if arrived < plan.nodes else None
            failed = plan.failed if since is not None else ""
            if (since, failed) != (plan.short_since, plan.failed):
                later = later.planned(name, short_since=since, failed=failed)
        kept = tuple(notice for notice in self.reported if notice.deadline + FORGET > now)
        return later if kept == self.reported else replace(later, reported=kept)


def cost(node: LocalNode, now: float) -> float:
    """Return dollars of a node from its grant to ``now``."""
    return node.price * max(0.0, now - node.since) / HOUR


def firmness(notice: Notice) -> tuple[bool, float]:
    """Order notices of one node: the first counts."""
    return notice.kind != "interruption", notice.deadline


def by_number(id_: str) -> tuple[str, int]:
    """Order node ids as people count: gpu-2 before gpu-10."""
    pool, _, number = id_.rpartition("-")
    return pool, int(number) if number.isdecimal() else 0
