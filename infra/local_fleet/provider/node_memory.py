"""The memory of a fleet's nodes: a control group for each, made before its first process and gone with the node.

Run as ``python -m ebbflow.infra.local_fleet.provider.node_memory FOLDER UID SUPERVISOR``, this module outlives the
node supervisor: once that is gone, and neither another one has come nor anything runs on the nodes, which terminate
themselves, it removes the groups, again and again until they are gone: the kernel may take long to see that they are
empty.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import ClusterError, InfraError
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState, LocalNode
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.infra.machine import cgroups, processes
from ebbflow.infra.machine.guardian import Guardian, outlive

_GIB = 1 << 30
_POLL = 0.5  # s between looks at a fleet without a supervisor
_TIMEOUT = 300.0  # s for its nodes to terminate, on a machine that is very busy
_FINAL = 1.0  # s for the kernel to see that processes are gone which have been killed


def controller_for(pools: Sequence[LocalPool]) -> cgroups.Controller | None:
    """Return where the groups of a fleet's nodes are made; ``None`` where no pool limits its nodes' memory.

    Raises ``ClusterError`` where one does and no group can be made.
    """
    limited = [pool.name for pool in pools if pool.memory_limit]
    if not limited:
        return None
    found = cgroups.find_controller(kind="memory")
    if found is None:
        raise ClusterError(
            f"the memory of nodes of {', '.join(limited)} cannot be limited: no control group with a limit of memory "
            "(cgroup v1 or v2) can be made here, which needs root or a delegated group; start without --node-memory"
        )
    return found


def group(state: LocalFleetState, node: str) -> Path | None:
    """Return the control group of a node's memory; ``None`` where nothing limits it."""
    found = state.node(node)
    pool = state.pool(found.pool) if found is not None else None
    if pool is None or not pool.memory_limit or state.memory_controller is None:
        return None
    return state.memory_controller.folder / _name(state.uid, node)


def connect(state: LocalFleetState, node: LocalNode) -> Path | None:
    """Make a node's group and return it; ``None`` where nothing limits its memory. Raises ``ClusterError``."""
    place, pool = group(state, node.id), state.pool(node.pool)
    if place is None or pool is None or state.memory_controller is None:
        return None
    return cgroups.create_memory(state.memory_controller, place.name, int(pool.memory_limit * _GIB))


def hold(state: LocalFleetState, node: str, pids: Iterable[int]) -> None:
    """Put processes of a node that are starting into its group. Raises ``ClusterError`` where that is gone."""
    if (place := group(state, node)) is not None:
        cgroups.join(place, pids)


def disconnect(state: LocalFleetState, node: LocalNode, clock: Clock) -> None:
    """Remove a node's group, once its processes have ended; nothing happens where there is none."""
    if (place := group(state, node.id)) is not None:
        cgroups.remove(place, clock)


def remove(state: LocalFleetState, clock: Clock) -> None:
    """Remove the groups of all of a fleet's nodes, those of earlier ones among them."""
    for place in groups(state):
        cgroups.remove(place, clock, _FINAL)


def guard(file: LocalFleetStateFile, state: LocalFleetState) -> Guardian | None:
    """Have the groups go when this process, the fleet's supervisor, is gone; nothing happens without groups."""
    if state.memory_controller is None:
        return None
    log = file.folder / "logs" / "memory-groups.log"
    return Guardian(__name__, [str(file.folder), state.uid, str(os.getpid())], file.folder, log)


def groups(state: LocalFleetState) -> list[Path]:
    """Return the groups of a fleet's nodes, those of earlier ones among them."""
    place = state.memory_controller
    return [] if place is None else list(place.folder.glob(_name(state.uid, "*")))


def _name(uid: str, node: str) -> str:
    return f"ebbflow-memory-{uid}-{node}"


def _watch(folder: Path, uid: str, supervisor: int, clock: Clock) -> None:
    file = LocalFleetStateFile(folder)
    first = file.read()
    if not outlive(supervisor, lambda: True, clock) or first is None or first.uid != uid:
        return
    end = clock.now() + _TIMEOUT
    while clock.now() < end:
        state = None
        with contextlib.suppress(InfraError):
            state = file.read()
        if state is not None and state.uid == uid:
            found = state.supervisor
            if found is not None and found.pid != supervisor and labels.alive(found):
                return  # another, with a guardian of its own
            first = state
        spark = first.spark is not None and processes.members(f"{first.spark.uid}/")
        if not spark and not labels.nodes(uid):
            remove(first, clock)
            if not groups(first):
                return
        clock.sleep(_POLL)


if __name__ == "__main__":
    _watch(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), SystemClock())
