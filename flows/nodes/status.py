"""The status of a local fleet and the list of local fleets, for readers and for programs."""

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ebbflow.infra.machine.network.plan import rate_text

if TYPE_CHECKING:
    from ebbflow.infra.local_fleet import LocalFleet
    from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState
    from ebbflow.infra.local_fleet.view import NodeView

_STATES = {"noticed": "interruption pending"}


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A node pool of a local fleet, as ``local status`` shows it.

    Args:
        name: the pool's name.
        kind: ``spark`` or ``gpu``.
        desired: planned number of nodes.
        nodes: number of nodes that are up.
        max_nodes: maximum number of nodes.
        price: simulated price, $/h of a node.
        reason: why there are fewer nodes than desired; empty: there are not.
    """

    name: str
    kind: str
    desired: int
    nodes: int
    max_nodes: int
    price: float
    reason: str


@dataclass(frozen=True, slots=True)
class AppRow:
    """What an app runs on a node: the slots that it holds, and its number of processes."""

    app: str
    slots: tuple[int, ...]
    processes: int


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node of a local fleet; ``memory`` in GiB, ``terminates_in`` in seconds, ``price`` in $/h."""

    id: str
    pool: str
    state: str
    cores: int
    slots: int
    memory: float
    price: float
    terminates_in: float | None
    apps: tuple[AppRow, ...]


@dataclass(frozen=True, slots=True)
class SparkRow:
    """The Spark master of a fleet: its address, its web page, a properties file for applications, CPU quotas."""

    master: str
    page: str
    properties: str
    cpu_quota: str


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """A local fleet: ``dollars`` are at simulated prices, ``gpus`` are those that slots share (none: CPU cores).

    ``network`` has the bit/s of each link of a node; empty: nodes are on loopback.
    """

    name: str
    revision: int
    dollars: float
    gpus: tuple[str, ...]
    network: tuple[float, ...]
    spark: SparkRow | None
    pools: tuple[PoolRow, ...]
    nodes: tuple[NodeRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON can hold."""
        return asdict(self)


def status_of_fleet(fleet: "LocalFleet") -> FleetStatus:
    """Return the status of ``fleet`` now. Raises ``ClusterError`` once it is down."""
    seen, state, now = fleet.observe(), fleet.state, time.time()
    kinds = {pool.name: pool.kind for pool in state.pools}
    pools = tuple(
        PoolRow(
            pool.name,
            kinds[pool.name],
            pool.planned,
            len(pool.nodes),
            pool.max_nodes,
            next(one.price for one in fleet.offers(pool.name)),
            pool.short_why,
        )
        for pool in seen.pools
    )
    nodes = tuple(_node(node, now) for node in fleet.view())
    rates = () if state.network is None else tuple(link.rate for link in state.network.links)
    dollars, gpus = fleet.dollars(), tuple(state.gpus)
    return FleetStatus(state.name, seen.revision, dollars, gpus, rates, _spark(state), pools, nodes)


def _node(node: "NodeView", now: float) -> NodeRow:
    return NodeRow(
        node.id,
        node.pool,
        _STATES.get(node.state, node.state),
        node.cores,
        node.slots,
        node.memory,
        node.price,
        None if node.deadline is None else max(node.deadline - now, 0.0),
        tuple(AppRow(one.app, one.slots, len(one.pids)) for one in node.occupants),
    )


def _spark(state: "LocalFleetState") -> SparkRow | None:
    if state.spark is None:
        return None
    from ebbflow.infra.spark.cluster.state import StateFile

    file = StateFile.of(state.spark.name)
    cluster_state = file.read()
    if cluster_state is None:
        return None
    return SparkRow(
        cluster_state.master_url, cluster_state.master_ui, str(file.properties), cluster_state.cap
    )


def print_status(status: FleetStatus, out: Console) -> None:
    """Print the status of a fleet as tables."""
    out.print(f"fleet {status.name}, revision {status.revision}", highlight=False)
    if status.spark is not None:
        out.print(f"Spark master {status.spark.master}, page {status.spark.page}", soft_wrap=True)
        out.print(f"CPU: {status.spark.cpu_quota}")
        out.print(
            f"other applications: spark-submit --properties-file {status.spark.properties}", soft_wrap=True
        )
    if status.network:
        out.print(f"links of each node: {', '.join(map(rate_text, status.network))}", highlight=False)
    if any(pool.kind == "gpu" for pool in status.pools):
        out.print(f"slots are GPUs {', '.join(status.gpus)}" if status.gpus else _cpu_slots())
    out.print(f"${status.dollars:.4f} so far, at simulated prices")
    table = Table("pool", "desired", "nodes", "max", "price", "", box=None, header_style="bold")
    for pool in status.pools:
        numbers = (str(pool.desired), str(pool.nodes), str(pool.max_nodes))
        table.add_row(pool.name, *numbers, f"${pool.price:g}/h", pool.reason)
    out.print(table)
    table = Table("node", "state", "cores", "slots", "terminates in", "apps", box=None, header_style="bold")
    for node in status.nodes:
        left = "" if node.terminates_in is None else f"{node.terminates_in:.0f} s"
        table.add_row(node.id, node.state, str(node.cores), str(node.slots or ""), left, _apps(node))
    out.print(table)


def _apps(node: NodeRow) -> str:
    return ", ".join(
        f"{one.app} on {', '.join(map(str, one.slots))}" if one.slots else one.app for one in node.apps
    )


def _cpu_slots() -> str:
    from ebbflow.infra.machine import devices

    there = len(devices.visible())
    return "slots are CPU cores" + (f": this machine's {there} GPUs are too few for them" if there else "")


def running_apps(fleet: "LocalFleet") -> list[str]:
    """Return what runs on the nodes of ``fleet``: apps of trainings, and applications of its Spark master."""
    apps = sorted({app for app, _ in fleet.present()})
    state = fleet.state
    if state.spark is not None:
        import httpx

        from ebbflow.infra.spark.cluster.state import StateFile
        from ebbflow.infra.spark.master_api import get_master, new_client

        cluster_state = StateFile.of(state.spark.name).read()
        if cluster_state is not None:
            try:
                with new_client(timeout=2.0) as client:
                    apps += [one.name for one in get_master(client, cluster_state.master_ui).applications]
            except (httpx.HTTPError, ValueError):  # a master that does not answer runs nothing
                pass
    return apps
