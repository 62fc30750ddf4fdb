"""How much memory this machine, or the control group that this process is in, has and has left."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ebbflow.infra.errors import MemoryTierError

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryCounters:
    """Bytes of memory of the tightest of the machine and the groups around this process.

    Args:
        total: what there is.
        free: what can be taken before something has to be swapped or killed; caches of files count as free.
    """

    total: int
    free: int


def read(proc: Path = _PROC, groups: Path = _GROUPS) -> MemoryCounters:
    """Return the counters as they are now.

    Args:
        proc: where the kernel tells of memory and of this process.
        groups: where control groups, version 1 or 2, are mounted.

    Raises ``MemoryTierError`` where the kernel does not tell.
    """
    try:
        fields = dict(
            line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line
        )
        machine = MemoryCounters(_kib(fields["MemTotal"]), _kib(fields["MemAvailable"]))
    except (OSError, KeyError, ValueError) as exc:
        raise MemoryTierError(f"{proc / 'meminfo'} must tell MemTotal and MemAvailable ({exc!r})") from exc
    # the one with the least left; of equal ones the smallest
    return min((machine, *_limits(proc, groups)), key=lambda one: (one.free, one.total))


def _kib(text: str) -> int:
    return int(text.split(maxsplit=1)[0]) << 10


def _limits(proc: Path, groups: Path) -> Iterator[MemoryCounters]:
    for folder, limit, usage in _around(proc, groups):
        with suppress(OSError, ValueError):  # "max": no limit
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            said = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield MemoryCounters(most, max(0, most - used + _reclaimable(said)))


def _reclaimable(said: Mapping[str, str]) -> int:
    """Return the bytes of files that the kernel drops before it runs out."""
    return int(said.get("total_inactive_file", said.get("inactive_file", "0")))


def _around(proc: Path, groups: Path) -> Iterator[tuple[Path, str, str]]:
    """Return the groups around this process with the names of their limit and usage."""
    try:
        own = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for number, controllers, path in (one for one in own if len(one) == 3):
        if number == "0":
            root, names = groups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        while folder.is_relative_to(root):
            yield folder, *names
            folder = folder.parent
