"""What the provider and its users change in a book: pure."""

from collections.abc import Sequence
from dataclasses import replace

from ebbflow.infra.local_fleet.state.fleet_state import Identity, LocalFleetState, LocalNode, firmness
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.infra.machine.network.plan import free_number
from ebbflow.infra.protocols import ProviderCall, Refusal
from ebbflow.planners.model.capacity import Market, Notice
from ebbflow.planners.model.fleet import Target


def missing(book: LocalFleetState, pool: LocalPool) -> int:
    """Return how many nodes are planned that are neither there to stay nor on their way."""
    lasting = sum(node.pool == pool.name and node.lasting for node in book.nodes)
    return max(0, book.plans[pool.name].nodes - lasting)


def give(book: LocalFleetState, name: str, most: int, now: float) -> LocalFleetState:
    """Return the book with nodes asked for that a pool misses, ``most`` at a time, as far as there are GPUs."""
    pool = book.pool(name)
    if pool is None or not book.up:
        return book
    for _ in range(min(most, missing(book, pool))):
        taken = {gpu for node in book.nodes for gpu in node.gpus}
        free = [gpu for gpu in book.gpus if gpu not in taken]
        if book.gpus and pool.kind == "gpu" and len(free) < pool.slots:
            why = f"a node needs {pool.slots} GPUs, and {len(free)} of {len(book.gpus)} are free"
            return book if book.plans[name].failed == why else book.planned(name, failed=why)
        plan = book.plans[name]
        firm = sum(n.pool == name and n.lasting and n.market == "on-demand" for n in book.nodes)
        market: Market = "on-demand" if firm < plan.on_demand else pool.market
        number = book.numbers.get(name, 0) + 1
        node = LocalNode(
            f"{name}-{number}",
            name,
            "starting",
            now,
            market,
            pool.price_in(market),
            host=_address(book, sum(book.numbers.values()) + 1),
            gpus=tuple(free[: pool.slots]) if book.gpus and pool.kind == "gpu" else (),
        )
        book = replace(book, numbers={**book.numbers, name: number}, nodes=(*book.nodes, node))
    return book


def _address(book: LocalFleetState, number: int) -> str:
    """Return the address of a node that nobody has had before it, as far as there are such; "" on loopback."""
    if book.network is None:
        return ""
    links = book.network.links
    return links[0].address(free_number(number, links, {node.host for node in book.nodes}))


def take(book: LocalFleetState, id_: str, host: str, process: Identity | None, now: float) -> LocalFleetState:
    """Return the book after a node has come up; nothing changes for one that is being ended."""
    node = book.node(id_)
    if node is None or node.fate:
        return book
    later = book.noted(id_, phase="up", host=host, process=process)
    return later.planned(node.pool, failed="", again=0.0, tries=0).short(now)


def cancel(book: LocalFleetState, name: str) -> LocalFleetState:
    """Return the book in which nodes beyond the plan that have not arrived are being ended, the last first."""
    for node in reversed(book.nodes):
        lasting = sum(other.pool == name and other.lasting for other in book.nodes)
        if (
            lasting > book.plans[name].nodes
            and node.pool == name
            and node.phase == "starting"
            and node.lasting
        ):
            book = book.noted(node.id, fate="not needed any longer")
    return book


def plan(
    book: LocalFleetState, target: Target, now: float
) -> tuple[LocalFleetState, tuple[ProviderCall, ...], tuple[Refusal, ...]]:
    """Return the book with what ``target`` says, what that asks for, and what is refused."""
    pool = book.pool(target.pool)
    assert pool is not None
    if target.revision != book.revision:
        why = f"decided for revision {target.revision}; the fleet is at revision {book.revision}"
        return book, (), (Refusal(pool.name, why),)
    old, refused = book.plans[pool.name], list[Refusal]()
    nodes = min(max(target.nodes, pool.min_nodes), pool.max_nodes)
    if nodes != target.nodes:
        bounds = f"{pool.min_nodes} to {pool.max_nodes}"
        why = f"desired {target.nodes} nodes, the pool allows {bounds}: {nodes} are planned"
        refused.append(Refusal(pool.name, why))
    on_demand = min(nodes, max(target.on_demand, pool.base))
    members = {node.id for node in book.nodes if node.pool == pool.name and node.visible}
    refused += [
        Refusal(id_, f"it is no node of the pool {pool.name}") for id_ in target.drain if id_ not in members
    ]
    drain = tuple(dict.fromkeys([*old.drain, *(id_ for id_ in target.drain if id_ in members)]))
    asked = [ProviderCall("size", pool.name, nodes)] if nodes != old.nodes else []
    if on_demand != old.on_demand:
        asked.append(ProviderCall("on-demand", pool.name, on_demand))
    later = book.planned(
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
    book: LocalFleetState, ids: Sequence[str], how: str
) -> tuple[LocalFleetState, tuple[ProviderCall, ...], tuple[Refusal, ...]]:
    """Return the book in which these nodes are being ended, what that asks for, and what is refused."""
    asked, refused = list[ProviderCall](), list[Refusal]()
    left = {
        pool.name: sum(node.pool == pool.name and node.lasting and node.visible for node in book.nodes)
        for pool in book.pools
    }
    for id_ in dict.fromkeys(ids):
        node = book.node(id_)
        if node is None or not node.visible:
            went = book.ended(id_)
            refused.append(Refusal(id_, f"it is terminated: {went}" if went else "there is no such node"))
            continue
        # a plan is never below the pool's least, and what is within the plan is replaced
        surplus = left[node.pool] > book.plans[node.pool].nodes
        asked.append(ProviderCall("end", id_, int(node.lasting and not surplus)))
        left[node.pool] -= node.lasting
        book = book.noted(id_, fate=how)
    return book, tuple(asked), tuple(refused)


def hear(book: LocalFleetState, notices: Sequence[Notice]) -> LocalFleetState:
    """Return the book with what was told of nodes that are there, or may come: of each node what counts most."""
    kept = {notice.node_id: notice for notice in book.heard}
    for notice in notices:
        known = kept.get(notice.node_id)
        if known is None or firmness(notice) < firmness(known):
            kept[notice.node_id] = notice
    return replace(book, heard=tuple(kept[id_] for id_ in sorted(kept)))
