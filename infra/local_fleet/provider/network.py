"""The network of a fleet whose nodes have one: made with the first node, gone with the fleet, whatever happens.

Run as ``python -m ebbflow.infra.local_fleet.provider.network FOLDER UID SUPERVISOR``, this module outlives the node
supervisor: once that is gone, and neither another one has come nor anything runs on the nodes, which terminate
themselves, it removes what there was.
"""

import contextlib
import os
import sys
from pathlib import Path

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import ClusterError, InfraError
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.fleet_state import Identity, LocalFleetState, LocalNode
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.infra.machine import processes
from ebbflow.infra.machine.guardian import Guardian, outlive
from ebbflow.infra.machine.network import links, registry

_POLL = 0.5  # s between looks at a fleet without a supervisor
_TIMEOUT = 300.0  # s for its nodes to terminate, on a machine that is very busy
_TRIES = 20  # times that the kernel is asked to remove what there was


def guard(file: LocalFleetStateFile, state: LocalFleetState) -> Guardian | None:
    """Make the bridges of a fleet, and have them go when this process, its supervisor, is gone.

    Nothing happens for one on loopback. Raises ``ClusterError``.
    """
    if state.network is None:
        return None
    links.make_bridges(state.network)
    log = file.folder / "logs" / "network.log"
    return Guardian(__name__, [str(file.folder), state.uid, str(os.getpid())], file.folder, log)


def connect(state: LocalFleetState, node: LocalNode) -> str:
    """Make a node's namespace and return its name; "" on loopback. Raises ``ClusterError``."""
    if state.network is None:
        return ""
    links.add_node(state.network, node.id, state.network.inside(node.host))
    return state.network.namespace(node.id)


def disconnect(state: LocalFleetState, node: LocalNode) -> None:
    """Remove what ``connect`` made, once the connections of the node's ended processes are closed.

    Nothing happens where it is gone. Raises ``ClusterError``.
    """
    if state.network is not None and node.host:
        links.close_connections(state.network, node.id)
        links.remove_node(state.network, node.id, state.network.inside(node.host))


def remove(state: LocalFleetState) -> None:
    """Remove all of a fleet's network; nothing happens where it is gone. Raises ``ClusterError``."""
    if state.network is not None:
        registry.release(state.network.tag)


def lives(entry: registry.Entry) -> bool:
    """Tell whether a network is of a fleet that has a supervisor, or of which any process is left."""
    state = None
    with contextlib.suppress(InfraError):
        state = LocalFleetStateFile(Path(entry.owner)).read()
    if state is None or state.uid != entry.uid:
        return bool(labels.nodes(entry.uid))
    spark = state.spark is not None and processes.members(f"{state.spark.uid}/")
    return labels.alive(state.supervisor) or bool(spark or labels.nodes(state.uid))


def _watch(folder: Path, uid: str, supervisor: int, clock: Clock) -> None:
    if not outlive(supervisor, lambda: True, clock):
        return
    entry = next((one for one in registry.entries() if one.uid == uid), None)
    end = clock.now() + _TIMEOUT
    while entry is not None and lives(entry) and clock.now() < end:
        state = LocalFleetStateFile(folder).read()
        if state is not None and state.uid == uid and _is_another(state.supervisor, supervisor):
            return  # with another guardian
        clock.sleep(_POLL)
    if entry is not None and not lives(entry):
        _release(entry.tag, clock)


def _is_another(found: Identity | None, former: int) -> bool:
    """Return whether a supervisor lives that is not ``former``, whose pipe closes before it counts as dead."""
    return found is not None and found.pid != former and labels.alive(found)


def _release(tag: str, clock: Clock) -> None:
    """Remove a network; the kernel may refuse it while others change theirs. Raises ``ClusterError`` at last."""
    for _ in range(_TRIES - 1):
        try:
            registry.release(tag)
            return
        except ClusterError as error:
            print(error, file=sys.stderr)
            clock.sleep(_POLL)
    registry.release(tag)


if __name__ == "__main__":
    _watch(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), SystemClock())
