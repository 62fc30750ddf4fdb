"""Pools and nodes of a cluster as ``ebbflow fleet status`` tells them: the same for tables, JSON and artifacts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.fleet import PoolState
from ebbflow.tasks.fleet.steps import Observation


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node."""

    id: str
    pool: str
    instance_type: str
    zone: str
    market: str
    host: str
    cores: int
    memory: float  # GiB
    gpus: int
    dollars_per_hour: float | None  # None: not known
    state: str  # "ok", "draining", "leaving" (a firm notice) or "advised" (it may leave)
    seconds_left: float | None = None  # to the deadline of its notice


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One pool."""

    name: str
    planned: int
    requested: int
    observed: int
    spot: int  # observed
    on_demand: int  # observed
    on_demand_planned: int
    min_nodes: int
    max_nodes: int
    leaving: int  # nodes with a firm notice
    advised: int  # nodes with a rebalance recommendation
    draining: int
    seconds_left: float | None  # to the first deadline of a firm notice
    short_since: float | None  # seconds since the Unix epoch
    short_why: str
    dollars_per_hour: float | None  # None: the price of one of its nodes is not known


@dataclass(frozen=True, slots=True)
class Status:
    """A cluster at one moment."""

    cluster: str
    region: str
    at: float  # seconds since the Unix epoch
    revision: int
    pools: tuple[PoolRow, ...]
    nodes: tuple[NodeRow, ...]
    dollars_per_hour: float | None
    limit_dollars_per_hour: float | None  # None: none is set
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as values that JSON has."""
        return asdict(self)


def status(
    seen: Observation, cluster: str, region: str, limit: float, problems: Iterable[str] = ()
) -> Status:
    """Return what there is; ``limit`` in dollars per hour, infinite for none."""
    fleet = seen.fleet
    notices = {notice.node_id: notice for notice in fleet.notices}
    nodes = tuple(_node_row(node, pool, notices, fleet.at) for pool in fleet.pools for node in pool.nodes)
    pools = tuple(_pool_row(pool, [n for n in nodes if n.pool == pool.name]) for pool in fleet.pools)
    return Status(
        cluster,
        region,
        fleet.at,
        fleet.revision,
        pools,
        nodes,
        _total(pool.dollars_per_hour for pool in pools),
        limit if isfinite(limit) else None,
        (*seen.problems, *problems),
    )


def _node_row(node: Node, pool: PoolState, notices: Mapping[str, Notice], at: float) -> NodeRow:
    notice = notices.get(node.id)
    state = "ok"
    if notice is not None:
        state = "leaving" if notice.kind == "interruption" else "advised"
    if node.id in pool.draining and state != "leaving":
        state = "draining"
    return NodeRow(
        node.id,
        pool.name,
        node.instance_type,
        node.zone,
        node.market,
        node.host,
        node.cores,
        node.memory,
        node.gpus,
        node.price or None,
        state,
        None if notice is None else max(0.0, notice.deadline - at),
    )


def _pool_row(pool: PoolState, nodes: Sequence[NodeRow]) -> PoolRow:
    leaving = [node for node in nodes if node.state == "leaving"]
    return PoolRow(
        pool.name,
        pool.planned,
        pool.requested,
        len(nodes),
        sum(node.market == "spot" for node in nodes),
        sum(node.market == "on-demand" for node in nodes),
        pool.on_demand,
        pool.min_nodes,
        pool.max_nodes,
        len(leaving),
        sum(node.state == "advised" for node in nodes),
        sum(node.id in pool.draining for node in nodes),
        min((node.seconds_left for node in leaving if node.seconds_left is not None), default=None),
        pool.short_since,
        pool.short_why,
        _total(node.dollars_per_hour for node in nodes),
    )


def _total(prices: Iterable[float | None]) -> float | None:
    known = list(prices)
    return None if None in known else sum(price for price in known if price is not None)
