"""How a local fleet begins: its name is taken, its book is written, its keeper is started."""

import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError, InfraError
from ebbflow.infra.local_fleet.provider.life import teardown
from ebbflow.infra.local_fleet.provider.provider import RUNS, rooms
from ebbflow.infra.local_fleet.state import labels as marks
from ebbflow.infra.local_fleet.state.clock import MachineClock
from ebbflow.infra.local_fleet.state.fleet_state import FleetBook, PoolPlan
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.infra.local_fleet.state.store import BookFile
from ebbflow.infra.machine import processes
from ebbflow.infra.spark.cluster.state import ebbflow_home

_KEEPER = "ebbflow.infra.local_fleet.provider.supervisor"
_UP = 30.0  # s for the keeper to be there
_POLL = 0.02  # s between looks for it


def keeper_mark(uid: str) -> str:
    """Return the mark of a fleet's keeper, which is none of what it takes down."""
    return f"{uid}-keeper"


def spawn_keeper(file: BookFile, uid: str, clock: Clock) -> subprocess.Popen[bytes]:
    """Start a keeper and wait until one is there. Raises ``ClusterError``."""
    log = file.folder / "logs" / "keeper.log"
    command = [sys.executable, "-P", "-m", _KEEPER, str(file.folder), uid]
    child = processes.spawn(command, processes.inherited(), keeper_mark(uid), log)
    end = clock.now() + _UP
    while not _kept(file, uid):
        if child.poll() is not None and not _kept(file, uid):
            raise ClusterError(
                f"the fleet's keeper ended with status {child.returncode}; {log} ends:\n{processes.tail(log)}"
            )
        if clock.now() > end:
            raise ClusterError(f"the fleet's keeper was not there within {_UP:g} s; see {log}")
        clock.sleep(_POLL)
    return child


def _kept(file: BookFile, uid: str) -> bool:
    book = file.read()
    if book is None or book.uid != uid:
        raise ClusterError(f"the fleet {file.folder.name!r} has been taken down")
    return marks.alive(book.keeper)


def claim(
    file: BookFile, name: str, found: Sequence[LocalPool], gpus: tuple[str, ...], stay: bool, clock: Clock
) -> str:
    """Begin a new life of the fleet ``name``, after clearing what a crash has left of the last; return its uid.

    Raises ``ClusterError`` while the last one lives.
    """
    with file.locked():
        old = file.read()
    if old is not None:
        lives = marks.alive(old.keeper) if old.owner is None else marks.alive(old.owner)
        if old.up and lives:
            raise ClusterError(
                f"the fleet {name!r} runs already; take it down (ebbflow nodes down"
                f"{'' if name == 'local' else f' --name {name}'}), attach to it, or choose another name"
            )
        processes.destroy(keeper_mark(old.uid), [], clock)
        teardown(file, old.uid, rooms(file.folder, clock), clock)
    time, uid = MachineClock.begin(), secrets.token_hex(6)
    plans = {
        pool.name: PoolPlan(
            pool.start, min(pool.start, pool.base), reason="at the start", short_since=time.now()
        )
        for pool in found
    }
    with file.locked():
        current = file.read()
        if current is not None and (old is None or current.uid != old.uid):
            raise ClusterError(f"the fleet {name!r} is being started by another process")
        shutil.rmtree(file.folder / RUNS, ignore_errors=True)
        last = current or FleetBook(name, uid)
        book = FleetBook(
            name,
            uid,
            time.offset,
            owner=None if stay else marks.own(),
            epoch=last.epoch + 1,
            pools=tuple(found),
            plans=plans,
            numbers=last.numbers,
            gone=last.gone,
            gpus=gpus,
        )
        file.write(book)
    return uid


def list_fleets() -> list[FleetBook]:
    """Return the fleets of this machine that are up, by name. Books that cannot be read are passed over."""
    found = []
    for path in sorted((ebbflow_home() / "fleets").glob("*/fleet.json")):
        try:
            book = BookFile(path.parent).read()
        except InfraError:
            continue
        if book is not None and book.up:
            found.append(book)
    return found
