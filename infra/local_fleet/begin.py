"""How a local fleet begins: its name is taken, its state is written, its supervisor is started.

Directories of local fleets that are down: the newest are kept, older ones are removed.

A fleet's directory outlives the fleet: its logs are there, and its state keeps ids and revisions from being used
twice. Each run of a pipeline on this machine has a fleet of its own, though, and nobody takes those directories away.
"""

import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError, InfraError
from ebbflow.infra.ledger.address import VARIABLE, default_address
from ebbflow.infra.local_fleet.provider import network, node_memory
from ebbflow.infra.local_fleet.provider.lending import providers
from ebbflow.infra.local_fleet.provider.life import teardown
from ebbflow.infra.local_fleet.provider.provider import RUNS
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.clock import MachineClock
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState, PoolPlan
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.infra.local_fleet.state.store import LOCK, STARTING, STATE, LocalFleetStateFile
from ebbflow.infra.machine import processes
from ebbflow.infra.machine.network import registry
from ebbflow.infra.spark.cluster.state import ebbflow_home
from ebbflow.infra.storage import files, private

_SUPERVISOR = "ebbflow.infra.local_fleet.provider.supervisor"
_LEDGER = "ledger"  # file beside the state: whose life it is, and the ledger's address
_UP = 30.0  # s for the supervisor to be there
_POLL = 0.02  # s between looks for it


def supervisor_label(uid: str) -> str:
    """Return the mark of a fleet's supervisor, which is none of what it takes down."""
    return f"{uid}-supervisor"


def spawn_supervisor(file: LocalFleetStateFile, uid: str, clock: Clock) -> subprocess.Popen[bytes]:
    """Start a supervisor and wait until one is there. Raises ``ClusterError``."""
    log = file.folder / "logs" / "supervisor.log"
    command = [sys.executable, "-P", "-m", _SUPERVISOR, str(file.folder), uid]
    state = file.read()
    environment = processes.inherited()
    if state is not None and any(pool.aggregation for pool in state.pools):
        environment[VARIABLE] = _ledger(file, uid)  # aggregators, which it starts, find trainings there
    child = processes.spawn(command, environment, supervisor_label(uid), log)
    end = clock.now() + _UP
    while not _kept(file, uid):
        if child.poll() is not None and not _kept(file, uid):
            raise ClusterError(
                f"the fleet's node supervisor exited with status {child.returncode}; {log}"
                f" ends:\n{processes.tail(log)}"
            )
        if clock.now() > end:
            raise ClusterError(f"the fleet's node supervisor was not up within {_UP:g} s; see {log}")
        clock.sleep(_POLL)
    return child


def _ledger(file: LocalFleetStateFile, uid: str) -> str:
    """Return the ledger's address that the fleet began with, whichever this process would use.

    It may hold a password, so it is in a file of its own that only its owner reads.
    """
    path = file.folder / _LEDGER
    with contextlib.suppress(OSError):
        life, _, address = path.read_text(encoding="utf-8").partition("\n")
        if life == uid and address:
            return address
    address = default_address()
    if "://" not in address:  # another process may work in another directory
        address = str(Path(address).expanduser().absolute())
    private.write_secret(path, f"{uid}\n{address}")
    return address


def _kept(file: LocalFleetStateFile, uid: str) -> bool:
    state = file.read()
    if state is None or state.uid != uid:
        raise ClusterError(f"the fleet {file.folder.name!r} has been taken down")
    return labels.alive(state.supervisor)


def claim(
    file: LocalFleetStateFile,
    name: str,
    found: Sequence[LocalPool],
    gpus: tuple[str, ...],
    stay: bool,
    clock: Clock,
    rates: tuple[float, ...] = (),
) -> str:
    """Begin a new life of the fleet ``name``, after clearing what a crash has left of the last; return its uid.

    ``rates`` are of the links of each node, bit/s; none: nodes are on loopback.

    Raises ``ClusterError`` while the last one lives.
    """
    with file.locked():
        old = file.read()
    if old is not None:
        lives = labels.alive(old.supervisor) if old.owner is None else labels.alive(old.owner)
        if old.up and lives:
            raise ClusterError(
                f"the fleet {name!r} runs already; take it down (ebbflow local down"
                f"{'' if name == 'local' else f' --name {name}'}), attach to it, or choose another name"
            )
        processes.destroy(supervisor_label(old.uid), [], clock)
        teardown(file, old.uid, providers(file.folder, clock), clock)
    if rates:
        registry.remove_leftovers(network.lives)
    time, uid = MachineClock.begin(), secrets.token_hex(6)
    plans = {
        pool.name: PoolPlan(
            pool.start, min(pool.start, pool.base), reason="at the start", short_since=time.now()
        )
        for pool in found
    }
    controller = node_memory.controller_for(found)
    plan = registry.reserve(uid, str(file.folder), rates) if rates else None
    with file.locked():
        current = file.read()
        if current is not None and (old is None or current.uid != old.uid):
            raise ClusterError(f"the fleet {name!r} is being started by another process")
        shutil.rmtree(file.folder / RUNS, ignore_errors=True)
        last = current or LocalFleetState(name, uid)
        state = LocalFleetState(
            name,
            uid,
            time.offset,
            owner=None if stay else labels.own(),
            revision=last.revision + 1,
            pools=tuple(found),
            plans=plans,
            numbers=last.numbers,
            terminated=last.terminated,
            gpus=gpus,
            network=plan,
            memory_version=controller.version if controller is not None else 0,
            memory_folder=str(controller.folder) if controller is not None else "",
        )
        file.write(state)
    return uid


def list_fleets() -> list[LocalFleetState]:
    """Return the fleets of this machine that are up, by name. States that cannot be read are passed over."""
    found = []
    for path in sorted((ebbflow_home() / "fleets").glob("*/fleet.json")):
        try:
            state = LocalFleetStateFile(path.parent).read()
        except InfraError:
            continue
        if state is not None and state.up:
            found.append(state)
    return found


KEPT = 20
"""Fleets that are down whose folders are kept, those that went down last."""


_TRASH = ".removed-"  # begins the name of a directory that is being removed


log = logging.getLogger(__name__)


def prune(parent: Path, clock: Clock, keep: int = KEPT) -> list[str]:
    """Remove the directories of fleets in ``parent`` that are down but for the ``keep`` newest; return their names.

    A fleet that is up, that somebody starts just now, or of which a process lives is never touched, nor is a
    directory without a state file that can be read. Safe for several processes at once; what cannot be removed is
    left to the next.
    """
    removed = []
    for folder in _oldest(parent)[: -keep or None]:
        with contextlib.suppress(InfraError, OSError):
            if _take_away(folder, clock):
                removed.append(folder.name)
    for trash in parent.glob(f"{_TRASH}*"):
        shutil.rmtree(trash, ignore_errors=True)
    if removed:
        log.info("directories of stopped fleets were removed: %s", ", ".join(removed))
    return removed


def _oldest(parent: Path) -> list[Path]:
    """Return the directories of fleets that look as if they were down, the one that went down first at first."""
    found = []
    for path in parent.glob(f"*/{STATE}"):
        with contextlib.suppress(InfraError, OSError):
            at, state = path.stat().st_mtime, LocalFleetStateFile(path.parent).read()
            if state is not None and not _there(state):
                found.append((at, path.parent))
    return [folder for _, folder in sorted(found)]


def _there(state: LocalFleetState) -> bool:
    """Tell whether a fleet lives: it is up and so is its owner, or its supervisor is there."""
    return labels.alive(state.supervisor) or (state.up and (state.owner is None or labels.alive(state.owner)))


def _take_away(folder: Path, clock: Clock) -> bool:
    """Remove one directory, unless its fleet has begun to live again."""
    trash = folder.with_name(f"{_TRASH}{secrets.token_hex(6)}")
    # whoever starts the fleet holds the first lock all the while, whoever changes its state the second
    with files.locked(str(folder / STARTING), clock, 0.0), files.locked(str(folder / LOCK), clock, 1.0):
        state = LocalFleetStateFile(folder).read()
        if state is None or _there(state) or _runs(state):
            return False
        os.rename(folder, trash)  # at once: whoever comes now finds no directory, and makes a new one
    shutil.rmtree(trash, ignore_errors=True)
    return True


def _runs(state: LocalFleetState) -> bool:
    """Tell whether any process of the fleet's last life is there."""
    spark = state.spark is not None and processes.members(f"{state.spark.uid}/")
    return bool(spark or labels.nodes(state.uid) or processes.members(f"{state.uid}-supervisor"))
