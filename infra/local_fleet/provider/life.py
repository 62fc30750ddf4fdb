"""Seeing to it that the book and the processes of a fleet agree. Several may do it at once, and twice."""

import contextlib
import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError, InfraError
from ebbflow.infra.local_fleet.provider import network
from ebbflow.infra.local_fleet.provider.provider import BY, RUNS, NodeProvider, work
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.fleet_state import Identity, LocalFleetState, LocalNode
from ebbflow.infra.local_fleet.state.pools import PoolKind
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.infra.machine import cgroups

Rooms = Mapping[PoolKind, NodeProvider]
LOST = "its process exited"
OVERDUE = "its notice period expired"
_LEFT = 5.0  # s, beyond its grace, for what a launcher left behind to end by itself

log = logging.getLogger(__name__)


def look(file: LocalFleetStateFile, book: LocalFleetState, rooms: Rooms, clock: Clock) -> LocalFleetState:
    """See which nodes are gone or due, end those, and return the book afterwards."""
    now = clock.now()
    fates: dict[str, str] = {}
    deadlines: dict[str, float] = {}
    for node in book.nodes:
        if node.phase != "up" or node.fate:
            continue
        room = _room(book, node, rooms)
        if node.deadline is not None and node.deadline <= now:
            fates[node.id] = OVERDUE
        elif not room.alive(book, node):
            fates[node.id] = LOST
        elif node.deadline is None and (told := room.deadline(book, node)) is not None:
            deadlines[node.id] = told
    if fates or deadlines or book.short(now) != book:

        def change(current: LocalFleetState) -> LocalFleetState:
            for id_, how in fates.items():
                found = current.node(id_)
                if found is not None and not found.fate:
                    current = current.noted(id_, fate=how)
            for id_, deadline in deadlines.items():
                current = current.noted(id_, deadline=deadline)
            return current.short(now)

        book = file.change(book.uid, change)
    for node in book.nodes:
        if node.fate and node.phase == "up":
            finish(file, book, node, rooms, clock)
        elif node.visible and node.deadline is not None:
            with contextlib.suppress(ClusterError):
                _room(book, node, rooms).tell(book, node, node.deadline)
    return file.read() or book


def finish(
    file: LocalFleetStateFile, book: LocalFleetState, node: LocalNode, rooms: Rooms, clock: Clock
) -> None:
    """End a node whose fate is known, and take it out of the book. Raises ``ClusterError``."""
    _room(book, node, rooms).end(book, node)
    network.disconnect(book, node)
    shutil.rmtree(work(file.folder, node.id), ignore_errors=True)
    now = clock.now()
    lost = node.fate in (LOST, OVERDUE) or node.fate.startswith("killed")
    file.change(book.uid, lambda current: current.without(node.id, node.fate, now, lost=lost).short(now))
    log.info("%s terminated: %s", node.id, node.fate)


def sweep(book: LocalFleetState, clock: Clock) -> None:
    """End what runs on nodes that the fleet does not have: started in the moment in which they went."""
    known = {node.id for node in book.nodes}
    for id_ in labels.nodes(book.uid) - known:
        with contextlib.suppress(ClusterError):
            log.warning("processes still ran on %s, which is terminated", id_)
            labels.destroy(labels.below(book.uid, id_), clock)


def collect(
    book: LocalFleetState, silent: Mapping[tuple[str, ...], float], clock: Clock
) -> dict[tuple[str, ...], float]:
    """End what launchers left behind that are gone, once it has had the time to save; return since when they are."""
    now = clock.now()
    still: dict[tuple[str, ...], float] = {}
    for one in labels.occupants(book.uid):
        if one.owner is None or labels.alive(one.owner):
            continue
        since = still[one.parts] = silent.get(one.parts, now)
        if now - since > one.grace + _LEFT:
            log.warning("%s left processes behind on %s", one.app, one.node)
            with contextlib.suppress(ClusterError):
                labels.destroy(labels.mark(book.uid, *one.parts), clock)
    return still


def abandoned(folder: Path, clock: Clock) -> None:
    """Remove what pools of launchers have kept that are gone, once nothing of them runs any more."""
    for run in list((folder / RUNS).iterdir()) if (folder / RUNS).is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            pid, ticks = map(int, (run / BY).read_text().split())
            if labels.alive(Identity(pid, ticks)) or labels.pool_lives(run.name):
                continue
            controller = cgroups.find_controller()
            for group in controller.folder.glob(f"ebbflow-{run.name}-*") if controller is not None else ():
                cgroups.remove(group, clock)
            shutil.rmtree(run, ignore_errors=True)


def teardown(file: LocalFleetStateFile, uid: str, rooms: Rooms, clock: Clock) -> None:
    """End all that belongs to one life of a fleet. What must not be used twice, ids and revisions, stays stored."""
    with contextlib.suppress(InfraError):
        file.change(uid, lambda book: replace(book, up=False))
    labels.destroy(labels.below(uid), clock)
    book = None
    with contextlib.suppress(InfraError):
        book = file.read()
    if book is None or book.uid != uid:
        return
    for room in rooms.values():
        room.close(book)
    network.remove(book)
    for name in ("work", RUNS):
        shutil.rmtree(file.folder / name, ignore_errors=True)

    def empty(current: LocalFleetState) -> LocalFleetState:
        now = clock.now()
        for node in current.nodes:
            current = current.without(node.id, node.fate or "the fleet was taken down", now, lost=False)
        return replace(current, supervisor=None, spark=None)

    with contextlib.suppress(ClusterError):
        file.change(uid, empty)


def _room(book: LocalFleetState, node: LocalNode, rooms: Rooms) -> NodeProvider:
    pool = book.pool(node.pool)
    assert pool is not None
    return rooms[pool.kind]
