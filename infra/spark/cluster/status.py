"""What people and programs see of a local cluster."""

from dataclasses import dataclass
from typing import Literal

from ebbflow.infra.machine import processes
from ebbflow.infra.spark.cluster.state import ClusterState, NodeRecord
from ebbflow.infra.spark.master_api import Worker


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node of a local cluster, now."""

    id: str
    host: str
    cores: int
    cores_used: int  # by executors of running applications
    memory: float  # GiB
    state: Literal["starting", "alive", "noticed", "dead"]
    pid: int
    deadline: float | None  # seconds since the Unix epoch; when it leaves, once it has a notice


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A local cluster, now."""

    name: str
    master_url: str
    master_ui: str
    alive: bool  # the master runs
    detached: bool  # survives the process that started it
    cap: str  # how nodes are held to their CPU share, or why they are not
    directory: str
    nodes: tuple[NodeStatus, ...]


def node_status(state: ClusterState, record: NodeRecord, worker: Worker | None) -> NodeStatus:
    """Return a node's status from its record, its process, and what the master says of its worker."""
    condition: Literal["starting", "alive", "noticed", "dead"]
    if record.phase == "killed" or not processes.carries(record.pid, state.mark_of(record.id)):
        condition = "dead"
    elif record.phase == "starting":
        condition = "starting"
    elif record.deadline is not None or (worker is not None and worker.state == "DECOMMISSIONED"):
        condition = "noticed"
    else:
        condition = "alive"
    return NodeStatus(
        id=record.id,
        host=record.host,
        cores=state.cores,
        cores_used=worker.cores_used if worker is not None and condition != "dead" else 0,
        memory=state.memory / 1024,
        state=condition,
        pid=record.pid,
        deadline=record.deadline,
    )
