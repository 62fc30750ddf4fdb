"""End nodes and whole clusters, from whichever process."""

import shutil
from pathlib import Path

from ebbflow.infra.clock import Clock
from ebbflow.infra.machine import cgroups, processes
from ebbflow.infra.spark.cluster.state import ClusterState, StateFile


def scratch(state: ClusterState, node_id: str = "") -> Path:
    """Return where a node's (or every node's) work and shuffle files are."""
    folder = Path(state.directory) / f"scratch-{state.uid}"
    return folder / node_id if node_id else folder


def end_node(file: StateFile, state: ClusterState, node_id: str, clock: Clock) -> None:
    """End a node as if its machine were gone: SIGKILL to all its processes, then its disk.

    Raises ``ClusterError`` when a process survives that, or the cluster has been stopped meanwhile.
    """
    record = state.node(node_id)
    if record.cgroup:
        cgroups.lift(Path(record.cgroup))
    processes.destroy(state.mark_of(node_id), [record.pid], clock)
    file.update(state.uid, lambda s: s.with_node(node_id, phase="killed"))
    if record.cgroup:
        cgroups.remove(Path(record.cgroup), clock)
    shutil.rmtree(scratch(state, node_id), ignore_errors=True)


def tear_down(file: StateFile, uid: str, clock: Clock) -> None:
    """End every process of the cluster ``uid`` and remove its control groups, scratch and state file.

    Logs stay. Processes are found by their mark, so that also those are ended that were started an instant
    ago and are not in the state file yet. Raises ``ClusterError`` when a process survives SIGKILL.
    """
    state = file.read()
    if state is not None and state.uid != uid:
        state = None
    for node in state.nodes if state else ():
        if node.cgroup:
            cgroups.lift(Path(node.cgroup))
    leaders = [state.master_pid, *(node.pid for node in state.nodes)] if state else []
    processes.destroy(f"{uid}/", leaders, clock)
    if state is None:
        return
    for node in state.nodes:
        if node.cgroup:
            cgroups.remove(Path(node.cgroup), clock)
    shutil.rmtree(scratch(state), ignore_errors=True)
    with file.lock():
        current = file.read()
        if current is not None and current.uid == uid:
            file.remove()
