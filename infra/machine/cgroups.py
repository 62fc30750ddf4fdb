"""Hold a node's processes to a CPU quota by control groups, version 1 or 2.

Several one-core workers on a machine with fewer cores would otherwise borrow each other's time: losing one
would cost nothing, and capacity would be a fiction.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError

_PERIOD = 100_000  # microseconds, the kernel's default
_DRIVER_ROOM = 0.1  # fraction of the machine's cores left to the driver and the master


@dataclass(frozen=True, slots=True)
class Controller:
    """A directory in which this process may make groups with a CPU quota."""

    version: Literal[1, 2]
    folder: Path


def per_core_quota(machine_cores: int, asked_cores: int) -> float:
    """Return the CPUs that back one advertised core: at most 1, less when more are asked for than exist."""
    room = machine_cores * (1.0 - _DRIVER_ROOM)
    return min(1.0, room / max(asked_cores, 1))


def find_controller(
    mounts: Path = Path("/proc/self/mounts"), membership: Path = Path("/proc/self/cgroup")
) -> Controller | None:
    """Return where groups with a CPU quota can be made, or ``None`` when nowhere (tried by making one)."""
    with contextlib.suppress(OSError, ValueError):
        table = [line.split()[1:4] for line in mounts.read_text().splitlines()]
        own = [line.split(":", 2) for line in membership.read_text().splitlines()]
        for candidate in _candidates(table, own):
            if _works(candidate):
                return candidate
    return None


def _candidates(table: list[list[str]], own: list[list[str]]) -> Iterable[Controller]:
    for point, kind, options in table:
        if kind == "cgroup" and "cpu" in options.split(","):
            path = next((p for _, names, p in own if "cpu" in names.split(",")), "/")
            yield Controller(1, Path(point) / path.lstrip("/"))
            yield Controller(1, Path(point))
    for point, kind, _ in table:
        if kind == "cgroup2":
            path = next((p for number, _, p in own if number == "0"), "/")
            # A group with processes cannot hand controllers to children, so one of the parents has to.
            folder = Path(point) / path.lstrip("/")
            while folder.is_relative_to(point):
                yield Controller(2, folder)
                folder = folder.parent


def _works(controller: Controller) -> bool:
    folder = controller.folder
    if controller.version == 2 and not _hands_down_cpu(folder):
        return False
    if not os.access(folder / "cgroup.procs", os.W_OK):
        return False  # joining a child needs the right to move processes within the parent
    probe = folder / f"ebbflow-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        _limit(controller, probe, 1.0)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()
    return True


def _hands_down_cpu(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return "cpu" in (folder / "cgroup.subtree_control").read_text().split()
    return False


def _limit(controller: Controller, group: Path, cpus: float) -> None:
    quota = max(1000, round(cpus * _PERIOD))  # the kernel refuses less than 1 ms
    if controller.version == 1:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (group / "cpu.max").write_text(f"{quota} {_PERIOD}")


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
    """Move processes, with all their threads, into ``group``; those gone meanwhile are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def lift(group: Path) -> None:
    """Take the quota off a group whose processes are about to be ended, so that they end at once."""
    with contextlib.suppress(OSError):
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"max {_PERIOD}")
        else:
            (group / "cpu.cfs_quota_us").write_text("-1")


def remove(group: Path, clock: Clock, timeout: float = 10.0) -> None:
    """Remove a group whose processes are gone; the kernel may need a moment to see that they are."""
    end = clock.now() + timeout
    while group.is_dir():
        try:
            group.rmdir()
        except OSError:
            if clock.now() > end:
                return  # an empty group left behind costs nothing; the next stop tries again
            clock.sleep(0.05)
