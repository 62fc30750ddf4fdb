"""What this process may use of the machine: cores and memory, as the control groups around it limit them, version 1
or 2."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
MEMORY_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}  # names of files, by version


def around(
    kind: Literal["cpu", "memory"], proc: Path = PROC, groups: Path = GROUPS
) -> Iterator[tuple[int, Path]]:
    """Yield the groups around this process that may limit a kind of resource, each after those inside it, with their
    version. A container sees its own group as the outermost.

    Args:
        kind: of resource.
        proc: where the kernel tells of this process.
        groups: where control groups are mounted.
    """
    try:
        own = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for number, controllers, path in (one for one in own if len(one) == 3):
        if number == "0":
            version, root = 2, groups
        elif kind in controllers.split(","):
            version, root = 1, groups / kind
        else:
            continue
        folder = root / path.lstrip("/")
        while folder.is_relative_to(root):
            yield version, folder
            folder = folder.parent


def granted_cores(proc: Path = PROC, groups: Path = GROUPS) -> float:
    """Return how many cores' time this process may take: of the processors that it may run on as many as the CPU
    quotas around it allow, which may be a fraction. The arguments are those of ``around``."""
    found = float(len(os.sched_getaffinity(0)))
    for version, folder in around("cpu", proc, groups):
        with suppress(OSError, ValueError):  # version 2 writes "max" for no quota, version 1 -1
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{one}_us").read_text() for one in ("quota", "period"))
            if int(quota) > 0:
                found = min(found, int(quota) / int(period))
    return found


def granted_memory(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return how many bytes of memory this process and those in its groups may take together, of which all of the
    machine are the most. The arguments are those of ``around``."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for version, folder in around("memory", proc, groups):
        with suppress(OSError, ValueError):  # "max": no limit
            found = min(found, int((folder / MEMORY_LIMIT[version]).read_text()))
    return found
