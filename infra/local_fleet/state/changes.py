"""What the provider and its users change in the state of a fleet: pure."""

from collections.abc import Sequence
from dataclasses import replace

from ebbflow.infra.local_fleet.state.fleet_state import Identity, LocalFleetState, LocalNode, firmness
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.infra.machine.network.plan import free_number
from ebbflow.infra.protocols import ProviderCall, Refusal
from ebbflow.planners.model.capacity import Market, Notice
from ebbflow.planners.model.fleet import Target


def missing(state: LocalFleetState, pool: LocalPool) -> int:
    """Return how many nodes are planned that are neither there to stay nor on their way."""
    lasting = sum(node.pool == pool.name and node.lasting for node in state.nodes)
    return max(0, state.plans[pool.name].nodes - lasting)


def give(state: LocalFleetState, name: str, most: int, now: float) -> LocalFleetState:
    """Return the state with nodes asked for that a pool misses, ``most`` at a time, as far as there are GPUs."""
    pool = state.pool(name)
    if pool is None or not state.up:
        return state
    for _ in range(min(most, missing(state, pool))):
        taken = {gpu for node in state.nodes for gpu in node.gpus}
        free = [gpu for gpu in state.gpus if gpu not in taken]
        if state.gpus and pool.kind == "gpu" and len(free) < pool.slots:
            why = f"a node needs {pool.slots} GPUs, and {len(free)} of {len(state.gpus)} are free"
            return state if state.plans[name].failed == why else state.planned(name, failed=why)
        plan = state.plans[name]
        firm = sum(n.pool == name and n.lasting and n.market == "on-demand" for n in state.nodes)
        market: Market = "on-demand" if firm < plan.on_demand else pool.market
        number = state.numbers.get(name, 0) + 1
        node = LocalNode(
            f"{name}-{number}",
            name,
            "starting",
            now,
            market,
            pool.price_in(market),
            host=_address(state, sum(state.numbers.values()) + 1),
            gpus=tuple(free[: pool.slots]) if state.gpus and pool.kind == "gpu" else (),
        )
        state = replace(state, numbers={**state.numbers, name: number}, nodes=(*state.nodes, node))
    return state


def _address(state: LocalFleetState, number: int) -> str:
    """Return the address of a node that nobody has had before it, as far as there are such; "" on loopback."""
    if state.network is None:
        return ""
    links = state.network.links
    return links[0].address(free_number(number, links, {node.host for node in state.nodes}))


def take(
    state: LocalFleetState, id_: str, host: str, process: Identity | None, now: float
) -> LocalFleetState:
    """Return the state after a node has come up; nothing changes for one that is being ended."""
    node = state.node(id_)
    if node is None or node.fate:
        return state
    later = state.noted(id_, phase="up", host=host, process=process)
    return later.planned(node.pool, failed="", again=0.0, tries=0).short(now)


def cancel(state: LocalFleetState, name: str) -> LocalFleetState:
    """Return the state in which nodes beyond the plan that have not arrived are being ended, the last first."""
    for node in reversed(state.nodes):
        lasting = sum(other.pool == name and other.lasting for other in state.nodes)
        if (
            lasting > state.plans[name].nodes
            and node.pool == name
            and node.phase == "starting"
            and node.lasting
        ):
            state = state.noted(node.id, fate="not needed any longer")
    return state


def plan(
    state: LocalFleetState, target: Target, now: float
) -> tuple[LocalFleetState, tuple[ProviderCall, ...], tuple[Refusal, ...]]:
    """Return the state with what ``target`` says, what that asks for, and what is refused."""
    pool = state.pool(target.pool)
    assert pool is not None
    if target.revision != state.revision:
        why = f"decided for revision {target.revision}; the fleet is at revision {state.revision}"
        return state, (), (Refusal(pool.name, why),)
    old, refused = state.plans[pool.name], list[Refusal]()
    nodes = min(max(target.nodes, pool.min_nodes), pool.max_nodes)
    if nodes != target.nodes:
        bounds = f"{pool.min_nodes} to {pool.max_nodes}"
        why = f"desired {target.nodes} nodes, the pool allows {bounds}: {nodes} are planned"
        refused.append(Refusal(pool.name, why))
    on_demand = min(nodes, max(target.on_demand, pool.base))
    members = {node.id for node in state.nodes if node.pool == pool.name and node.visible}
    refused += [
        Refusal(id_, f"it is no node of the pool {pool.name}") for id_ in target.drain if id_ not in members
    ]
    drain = tuple(dict.fromkeys([*old.drain, *(id_ for id_ in target.drain if id_ in members)]))
    asked = [ProviderCall("size", pool.name, nodes)] if nodes != old.nodes else []
    if on_demand != old.on_demand:
        asked.append(ProviderCall("on-demand", pool.name, on_demand))
    later = state.planned(
        pool.name,
        nodes=nodes,
        on_demand=on_demand,
        drain=drain,
        reason=target.reason,
        on_demand_since=old.on_demand_since if on_demand == old.on_demand else now,
        again=0.0,  # whoever asks anew is not kept waiting for what went wrong before
    )
    return cancel(later, pool.name).short(now), tuple(asked), tuple(refused)


def end(
    state: LocalFleetState, ids: Sequence[str], how: str
) -> tuple[LocalFleetState, tuple[ProviderCall, ...], tuple[Refusal, ...]]:
    """Return the state in which these nodes are being ended, what that asks for, and what is refused."""
    asked, refused = list[ProviderCall](), list[Refusal]()
    left = {
        pool.name: sum(node.pool == pool.name and node.lasting and node.visible for node in state.nodes)
        for pool in state.pools
    }
    for id_ in dict.fromkeys(ids):
        node = state.node(id_)
        if node is None or not node.visible:
            went = state.ended(id_)
            refused.append(Refusal(id_, f"it is terminated: {went}" if went else "there is no such node"))
            continue
        # a plan is never below the pool's least, and what is within the plan is replaced
        surplus = left[node.pool] > state.plans[node.pool].nodes
        asked.append(ProviderCall("end", id_, int(node.lasting and not surplus)))
        left[node.pool] -= node.lasting
        state = state.noted(id_, fate=how)
    return state, tuple(asked), tuple(refused)


def record_notices(state: LocalFleetState, notices: Sequence[Notice]) -> LocalFleetState:
    """Return the state with what was told of nodes that are there, or may come: of each node what counts most."""
    kept = {notice.node_id: notice for notice in state.reported}
    for notice in notices:
        known = kept.get(notice.node_id)
        if known is None or firmness(notice) < firmness(known):
            kept[notice.node_id] = notice
    return replace(state, reported=tuple(kept[id_] for id_ in sorted(kept)))
