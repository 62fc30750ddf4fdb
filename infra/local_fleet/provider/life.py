"""Seeing to it that the state and the processes of a fleet agree. Several may do it at once, and twice."""

import contextlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError, InfraError
from ebbflow.infra.local_fleet.provider import network, node_memory
from ebbflow.infra.local_fleet.provider.provider import BY, RUNS, NodeProvider, work
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.fleet_state import Identity, LocalFleetState, LocalNode
from ebbflow.infra.local_fleet.state.pools import PoolKind
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.infra.machine import cgroups

Providers = Mapping[PoolKind, NodeProvider]
LOST = "its process exited"
OVERDUE = "its notice period expired"
_LEFT = 5.0  # s, beyond its grace, for what a launcher left behind to end by itself

log = logging.getLogger(__name__)


def look(
    file: LocalFleetStateFile, state: LocalFleetState, providers: Providers, clock: Clock
) -> LocalFleetState:
    """See which nodes are gone or due, end those, and return the state afterwards."""
    now = clock.now()
    fates: dict[str, str] = {}
    deadlines: dict[str, float] = {}
    for node in state.nodes:
        if node.phase != "up" or node.fate:
            continue
        provider = _provider(state, node, providers)
        if node.deadline is not None and node.deadline <= now:
            fates[node.id] = OVERDUE
        elif not provider.alive(state, node):
            fates[node.id] = LOST
        elif node.deadline is None and (deadline := provider.deadline(state, node)) is not None:
            deadlines[node.id] = deadline
    if fates or deadlines or state.short(now) != state:

        def change(current: LocalFleetState) -> LocalFleetState:
            for id_, how in fates.items():
                found = current.node(id_)
                if found is not None and not found.fate:
                    current = current.noted(id_, fate=how)
            for id_, deadline in deadlines.items():
                current = current.noted(id_, deadline=deadline)
            return current.short(now)

        state = file.change(state.uid, change)
    over = [node for node in state.nodes if node.fate and node.phase == "up"]
    finish(file, state, over, providers, clock)
    for node in state.nodes:
        if node.visible and node.deadline is not None:
            with contextlib.suppress(ClusterError):
                _provider(state, node, providers).notify(state, node, node.deadline)
    return file.read() or state


def finish(
    file: LocalFleetStateFile,
    state: LocalFleetState,
    nodes: Sequence[LocalNode],
    providers: Providers,
    clock: Clock,
) -> None:
    """End nodes whose fate is known, all at once, and take them out of the state. Raises ``ClusterError``."""
    if not nodes:
        return
    # all of them before any link goes: connections among them close only while both ends are there
    with ThreadPoolExecutor(len(nodes), thread_name_prefix="ebbflow-end") as threads:
        list(threads.map(lambda node: _provider(state, node, providers).end(state, node), nodes))
    for node in nodes:
        node_memory.disconnect(state, node, clock)
        network.disconnect(state, node)
        shutil.rmtree(work(file.folder, node.id), ignore_errors=True)
    now = clock.now()

    def change(current: LocalFleetState) -> LocalFleetState:
        for node in nodes:
            lost = node.fate in (LOST, OVERDUE) or node.fate.startswith("killed")
            current = current.without(node.id, node.fate, now, lost=lost)
        return current.short(now)

    file.change(state.uid, change)
    for node in nodes:
        log.info("%s terminated: %s", node.id, node.fate)


def sweep(state: LocalFleetState, clock: Clock) -> None:
    """End what runs on nodes that the fleet does not have: started in the moment in which they went."""
    known = {node.id for node in state.nodes}
    for id_ in labels.nodes(state.uid) - known:
        with contextlib.suppress(ClusterError):
            log.warning("processes still ran on %s, which is terminated", id_)
            labels.destroy(labels.below(state.uid, id_), clock)


def collect(
    state: LocalFleetState, silent: Mapping[tuple[str, ...], float], clock: Clock
) -> dict[tuple[str, ...], float]:
    """End what launchers left behind that are gone, once it has had the time to save; return since when they are."""
    now = clock.now()
    still: dict[tuple[str, ...], float] = {}
    for one in labels.occupants(state.uid):
        if one.owner is None or labels.alive(one.owner):
            continue
        since = still[one.parts] = silent.get(one.parts, now)
        if now - since > one.grace + _LEFT:
            log.warning("%s left processes behind on %s", one.app, one.node)
            with contextlib.suppress(ClusterError):
                labels.destroy(labels.mark(state.uid, *one.parts), clock)
    return still


def abandoned(folder: Path, state: LocalFleetState, clock: Clock) -> None:
    """Remove what pools of launchers have kept that are gone, once nothing of them runs any more.

    Args:
        folder: of the fleet.
        state: of it, whose nodes may have memory groups with CPU groups of launchers in them.
        clock: the time.
    """
    for run in list((folder / RUNS).iterdir()) if (folder / RUNS).is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            pid, ticks = map(int, (run / BY).read_text().split())
            if labels.alive(Identity(pid, ticks)) or labels.pool_lives(run.name):
                continue
            controller = cgroups.find_controller()
            places = [controller.folder] if controller is not None else []
            for place in [*places, *node_memory.groups(state)]:
                for group in place.glob(f"ebbflow-{run.name}-*"):
                    cgroups.remove(group, clock)
            shutil.rmtree(run, ignore_errors=True)


def teardown(file: LocalFleetStateFile, uid: str, providers: Providers, clock: Clock) -> None:
    """End all that belongs to one life of a fleet. What must not be used twice, ids and revisions, stays stored."""
    with contextlib.suppress(InfraError):
        file.change(uid, lambda state: replace(state, up=False))
    labels.destroy(labels.below(uid), clock)
    state = None
    with contextlib.suppress(InfraError):
        state = file.read()
    if state is None or state.uid != uid:
        return
    for provider in providers.values():
        provider.close(state)
    node_memory.remove(state, clock)
    network.remove(state)
    for name in ("work", RUNS):
        shutil.rmtree(file.folder / name, ignore_errors=True)

    def empty(current: LocalFleetState) -> LocalFleetState:
        now = clock.now()
        for node in current.nodes:
            current = current.without(node.id, node.fate or "the fleet was taken down", now, lost=False)
        return replace(current, supervisor=None, spark=None)

    with contextlib.suppress(ClusterError):
        file.change(uid, empty)


def _provider(state: LocalFleetState, node: LocalNode, providers: Providers) -> NodeProvider:
    pool = state.pool(node.pool)
    assert pool is not None
    return providers[pool.kind]
