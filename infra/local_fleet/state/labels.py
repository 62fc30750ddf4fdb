"""Who runs on which node: found in the environment of processes, across all processes of this machine.

The mark of a process (``infra.machine.processes``) is ``<fleet>/<node>/<app>/<pool>/<key>``: the fleet's uid, the
node's id, the app it belongs to, the ``NodePool`` that started it, and the launcher's key. The process that stands
for a machine, and the daemon that lends its memory, have the app ``*``. A mark is handed down to whatever a process
starts and is never used twice.
"""

import contextlib
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from ebbflow.infra.clock import Clock
from ebbflow.infra.local_fleet.state.fleet_state import Identity
from ebbflow.infra.machine import processes

SLOTS = "EBBFLOW_SLOTS"  # numbers of the node's slots that a process may use: "0,2"
OWNER = "EBBFLOW_NODE_OWNER"  # "pid ticks grace" of the launcher's process
MACHINE = "*"  # in the place of an app; no quoted app has it
_DEAD = ("Z", "X", "x")
_STOPPED = ("T", "t")
_MARK = f"{processes.MARK}=".encode()


@dataclass(frozen=True, slots=True)
class Occupant:
    """What one launcher runs on one node."""

    node: str
    app: str
    pool: str  # uid of the ``NodePool``
    key: str
    slots: tuple[int, ...]
    pids: tuple[int, ...]
    owner: Identity | None = None  # process of the launcher
    grace: float = 0.0  # s that it may save once the launcher is gone

    @property
    def parts(self) -> tuple[str, ...]:
        return self.node, self.app, self.pool, self.key


def mark(fleet: str, node: str, app: str, pool: str, key: str) -> str:
    """Return the mark of what ``pool`` starts for ``app`` on ``node``."""
    return f"{below(fleet, node, app)}{pool}/{key}"


def machine_mark(fleet: str, node: str) -> str:
    """Return the mark of the process that stands for a node."""
    return f"{fleet}/{node}/{MACHINE}/machine"


def memory_mark(fleet: str, node: str) -> str:
    """Return the mark of the daemon that lends a node's memory."""
    return f"{fleet}/{node}/{MACHINE}/memory"


def aggregator_mark(fleet: str, node: str) -> str:
    """Return the mark of the aggregator that a node is for."""
    return f"{fleet}/{node}/{MACHINE}/aggregator"


def below(fleet: str, node: str = "", app: str = "") -> str:
    """Return what the labels of a whole fleet, of one node, or of one app on it begin with, with the last slash."""
    parts = [fleet, *([node] if node else []), *([quote(app, safe="")] if app else [])]
    return "/".join(parts) + "/"


def environments(beginning: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the live processes whose mark begins so, with their environments. Others' processes are passed over."""
    wanted = _MARK + beginning.encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            content = Path(f"/proc/{name}/environ").read_bytes()
            if content.startswith(wanted) or b"\0" + wanted in content:
                pairs = (item.partition("=") for item in content.decode(errors="replace").split("\0"))
                yield int(name), {key: value for key, _, value in pairs if key}


def occupants(fleet: str, node: str = "", app: str = "") -> tuple[Occupant, ...]:
    """Return what apps run on the fleet's nodes: all, those of ``node``, those of ``app``. Sorted."""
    found: dict[str, tuple[list[int], Mapping[str, str]]] = {}
    for pid, environment in environments(below(fleet, node)):
        found.setdefault(environment[processes.MARK], ([], environment))[0].append(pid)
    seen = [_occupant(name, pids, environment) for name, (pids, environment) in found.items()]
    return tuple(
        sorted((one for one in seen if one and (not app or one.app == app)), key=lambda one: one.parts)
    )


def nodes(fleet: str) -> set[str]:
    """Return the nodes on which anything runs, machines included."""
    return {env[processes.MARK].split("/")[1] for _, env in environments(below(fleet))}


def _occupant(name: str, pids: list[int], environment: Mapping[str, str]) -> Occupant | None:
    parts = name.split("/")
    if len(parts) != 5 or parts[2] == MACHINE:
        return None
    owner, grace = None, 0.0
    with contextlib.suppress(ValueError):
        pid, ticks, seconds = environment.get(OWNER, "").split()
        owner, grace = Identity(int(pid), int(ticks)), float(seconds)
    slots = tuple(int(n) for n in environment.get(SLOTS, "").split(",") if n.isdecimal())
    return Occupant(parts[1], unquote(parts[2]), parts[3], parts[4], slots, tuple(sorted(pids)), owner, grace)


def pool_lives(uid: str) -> bool:
    """Tell whether anything runs that the ``NodePool`` with this uid has started, in any fleet or none."""
    ours = f"/{uid}/"
    for _, environment in environments(""):
        name = environment[processes.MARK]
        if name.startswith(f"{uid}/") or ours in name:
            return True
    return False


# --- processes ----------------------------------------------------------------------------------------------


def identity(pid: int) -> Identity | None:
    """Return who process ``pid`` is; ``None`` when it is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in _DEAD else Identity(pid, int(fields[19]))


def own() -> Identity:
    """Return who this process is."""
    found = identity(os.getpid())
    assert found is not None
    return found


def alive(process: Identity | None) -> bool:
    """Tell whether this very process is still there."""
    return process is not None and process.pid > 0 and identity(process.pid) == process


def stopped(pid: int) -> bool:
    """Tell whether a process stands still (SIGSTOP)."""
    fields = _stat(pid)
    return fields is not None and fields[0] in _STOPPED


def parent(pid: int) -> int:
    """Return the parent's id; 0 when the process is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[1])


def catches(pid: int, number: signal.Signals) -> bool:
    """Tell whether a process handles a signal rather than ends by it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third, the state, on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def leaders(pids: Collection[int]) -> list[int]:
    """Return the processes whose parent is not among them: the first of each launcher's."""
    return [pid for pid in sorted(pids) if parent(pid) not in pids]


def destroy(beginning: str, clock: Clock, timeout: float = 20.0) -> int:
    """SIGKILL all processes whose mark begins so, until none is left; return how many there were at first.

    Raises ``ClusterError`` when some are still there after ``timeout`` seconds.
    """
    first = {pid for pid, _ in environments(beginning)}
    if first:
        processes.destroy(beginning, leaders(first), clock, timeout)
    return len(first)


def send(beginning: str, number: signal.Signals) -> int:
    """Send a signal to all processes whose mark begins so; return to how many."""
    reached = 0
    for pid, _ in list(environments(beginning)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached += 1
    return reached
