"""Hold a node's processes to a CPU quota and to a limit of memory by control groups, version 1 or 2.

Several one-core workers on a machine with fewer cores would otherwise borrow each other's time: losing one
would cost nothing, and capacity would be a fiction. So it is with memory.

Version 1 keeps both kinds of groups apart. In version 2 a process is in one group: the CPU groups of a node are in
that of its memory, whose other processes are in a group ``rest`` in it, as only the innermost groups have processes.
"""

import contextlib
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError

Kind = Literal["cpu", "memory"]

_PERIOD = 100_000  # microseconds, the kernel's default
_HAS = "cgroup.controllers"  # in a group of version 2: what can be limited in it
_REST = "rest"  # in a memory group of version 2: where its processes are
_DRIVER_ROOM = 0.1  # fraction of the machine's cores left to the driver and the master


@dataclass(frozen=True, slots=True)
class Controller:
    """A directory in which this process may make groups with a CPU quota, or with a limit of memory."""

    version: Literal[1, 2]
    folder: Path


def per_core_quota(machine_cores: int, asked_cores: int) -> float:
    """Return the CPUs that back one advertised core: at most 1, less when more are asked for than exist."""
    room = machine_cores * (1.0 - _DRIVER_ROOM)
    return min(1.0, room / max(asked_cores, 1))


def find_controller(
    mounts: Path = Path("/proc/self/mounts"),
    membership: Path = Path("/proc/self/cgroup"),
    *,
    kind: Kind = "cpu",
) -> Controller | None:
    """Return where groups with a limit of this kind can be made, or ``None`` when nowhere (tried by making one).

    In version 2 a group's memory is limited where its CPU can be, too, if there is such a place.
    """
    with contextlib.suppress(OSError, ValueError):
        table = [line.split()[1:4] for line in mounts.read_text().splitlines()]
        own = [line.split(":", 2) for line in membership.read_text().splitlines()]
        wanted: list[tuple[Kind, ...]] = [(kind, "cpu"), (kind,)] if kind == "memory" else [(kind,)]
        for kinds in wanted:
            for candidate in _candidates(table, own, kind):
                if _works(candidate, kinds if candidate.version == 2 else (kind,)):
                    return candidate
    return None


def _candidates(table: list[list[str]], own: list[list[str]], kind: Kind) -> Iterable[Controller]:
    for point, name, options in table:
        if name == "cgroup" and kind in options.split(","):
            path = next((p for _, names, p in own if kind in names.split(",")), "/")
            yield Controller(1, Path(point) / path.lstrip("/"))
            yield Controller(1, Path(point))
    for point, name, _ in table:
        if name == "cgroup2":
            path = next((p for number, _, p in own if number == "0"), "/")
            # A group with processes cannot hand controllers to children, so one of the parents has to.
            folder = Path(point) / path.lstrip("/")
            while folder.is_relative_to(point):
                yield Controller(2, folder)
                folder = folder.parent


def _works(controller: Controller, kinds: Sequence[Kind]) -> bool:
    folder = controller.folder
    if controller.version == 2 and not set(kinds) <= _listed(folder / "cgroup.subtree_control"):
        return False
    if not os.access(folder / "cgroup.procs", os.W_OK):
        return False  # joining a child needs the right to move processes within the parent
    probe = folder / f"ebbflow-probe-{os.getpid()}-{threading.get_ident()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        if "cpu" in kinds:
            _limit(controller, probe, 1.0)
        if "memory" in kinds:
            _limit_memory(controller, probe, 1 << 30)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()
    return True


def _listed(file: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return set(file.read_text().split())
    return set()


def _limit(controller: Controller, group: Path, cpus: float) -> None:
    quota = max(1000, round(cpus * _PERIOD))  # the kernel refuses less than 1 ms
    if controller.version == 1:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (group / "cpu.max").write_text(f"{quota} {_PERIOD}")


def _limit_memory(controller: Controller, group: Path, size: int) -> None:
    """Limit memory to ``size`` bytes, with nothing on swap, where the kernel keeps account of that."""
    if controller.version == 1:
        both = group / "memory.memsw.limit_in_bytes"  # never below the other
        if both.exists():
            both.write_text("-1")
        (group / "memory.limit_in_bytes").write_text(str(size))
        if both.exists():
            both.write_text(str(size))
    else:
        (group / "memory.max").write_text(str(size))
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")


def create_memory(controller: Controller, name: str, size: int) -> Path:
    """Make, or change, a group whose processes may have ``size`` bytes together, cached files and shared memory
    included; beyond, the kernel drops cached files, then kills one of them. Raises ``ClusterError``."""
    group = controller.folder / name
    try:
        group.mkdir(exist_ok=True)
        _limit_memory(controller, group, size)
        if controller.version == 2:
            if "cpu" in _listed(group / _HAS):
                (group / "cgroup.subtree_control").write_text("+cpu")
            (group / _REST).mkdir(exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"control group {group} cannot be made: {error}; go without a limit of memory"
        ) from error
    return group


def inside(controller: Controller, memory: Path | None) -> Controller | None:
    """Return where the CPU groups of a node are made whose memory group is ``memory``; ``None``: it has none.

    Returns ``None`` where the node can have no CPU group: it would have to be in a memory group that has no CPU.
    """
    if memory is None or controller.version == 1 or not (memory / _HAS).exists():
        return controller  # the two kinds are apart
    return Controller(2, memory) if "cpu" in _listed(memory / _HAS) else None


def create(controller: Controller, name: str, cpus: float) -> Path:
    """Make, or change, a group that may use ``cpus`` processors' time. Raises ``ClusterError``."""
    group = controller.folder / name
    try:
        group.mkdir(exist_ok=True)
        _limit(controller, group, cpus)
    except OSError as error:
        raise ClusterError(f"control group {group} cannot be made: {error}; go without a CPU cap") from error
    return group


def join(group: Path, pids: Iterable[int]) -> None:
    """Move processes, with all their threads, into ``group``; those gone meanwhile are passed over.

    Raises ``ClusterError`` for a group that is gone.
    """
    place = group / _REST if (group / _REST).is_dir() else group
    for pid in pids:
        try:
            with contextlib.suppress(ProcessLookupError):
                (place / "cgroup.procs").write_text(str(pid))
        except FileNotFoundError as error:
            raise ClusterError(f"control group {group} is gone") from error


def lift(group: Path) -> None:
    """Take the quota off a group whose processes are about to be ended, so that they end at once."""
    with contextlib.suppress(OSError):
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"max {_PERIOD}")
        else:
            (group / "cpu.cfs_quota_us").write_text("-1")


def remove(group: Path, clock: Clock, timeout: float = 10.0) -> None:
    """Remove a group, with those in it, whose processes are gone; the kernel may need a moment to see that."""
    end = clock.now() + timeout
    while group.is_dir():
        try:
            for path in group.iterdir():
                if path.is_dir():
                    with contextlib.suppress(FileNotFoundError):  # another process has removed that one
                        path.rmdir()
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if clock.now() > end:
                return  # an empty group left behind costs nothing; the next stop tries again
            clock.sleep(0.05)
