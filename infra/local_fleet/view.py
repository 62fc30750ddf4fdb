"""A fleet's nodes as people see them, and what they pretend to cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ebbflow.infra.local_fleet.provider.provider import NodeProvider
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState, LocalNode, by_number
from ebbflow.infra.local_fleet.state.labels import Occupant
from ebbflow.infra.local_fleet.state.pools import LocalPool, PoolKind
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Market
from ebbflow.planners.model.fleet import Offer

NodeState = Literal["starting", "alive", "noticed", "paused", "ending"]


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as people see it."""

    id: str
    pool: str
    kind: PoolKind
    state: NodeState
    since: float  # Unix time, s, of its grant
    price: float  # $/h
    market: str
    cores: int
    memory: float  # GiB
    slots: int
    deadline: float | None = None  # Unix time, s
    occupants: tuple[Occupant, ...] = ()


def view(
    state: LocalFleetState, providers: Mapping[PoolKind, NodeProvider], by: float = 0.0
) -> tuple[NodeView, ...]:
    """Return all nodes, those that start too, with what runs on them, as people count; times are later ``by`` s."""
    running = labels.occupants(state.uid)
    found = []
    for node in sorted(state.nodes, key=lambda node: by_number(node.id)):
        pool = state.pool(node.pool)
        assert pool is not None
        found.append(
            NodeView(
                node.id,
                node.pool,
                pool.kind,
                _state(node, providers[pool.kind]),
                node.since + by,
                node.price,
                node.market,
                pool.cores,
                pool.memory,
                pool.gpus,
                None if node.deadline is None else node.deadline + by,
                tuple(one for one in running if one.node == node.id),
            )
        )
    return tuple(found)


def _state(node: LocalNode, provider: NodeProvider) -> NodeState:
    if node.fate:
        return "ending"
    if node.phase == "starting":
        return "starting"
    if provider.paused(node):
        return "paused"
    return "alive" if node.deadline is None else "noticed"


def known(state: LocalFleetState, name: str) -> LocalPool:
    """Return a pool. Raises ``OptionError`` where there is none of this name."""
    found = state.pool(name)
    if found is None:
        raise OptionError(f"pool must be one of {', '.join(pool.name for pool in state.pools)}; got {name!r}")
    return found


def offers(pool: LocalPool) -> tuple[Offer, ...]:
    """Return what a pool's nodes pretend to cost, by market."""
    markets: list[Market] = [pool.market]
    if pool.market == "spot" and (pool.base or pool.on_demand_price is not None):
        markets.append("on-demand")
    return tuple(
        Offer(
            pool.instance_type,
            pool.zone,
            market,
            pool.price_in(market),
            pool.cores,
            pool.memory,
            pool.gpus,
        )
        for market in sorted(markets)
    )
