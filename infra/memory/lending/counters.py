"""How much memory this machine, or the control group that this process is in, has and has left."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.machine.granted import GROUPS, MEMORY_LIMIT, PROC, around

_USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}  # names of files, by version


@dataclass(frozen=True, slots=True)
class MemoryCounters:
    """Bytes of memory of the tightest of the machine and the groups around this process.

    Args:
        total: what there is.
        free: what can be taken before something has to be swapped or killed; caches of files count as free.
    """

    total: int
    free: int


def read(proc: Path = PROC, groups: Path = GROUPS) -> MemoryCounters:
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
    for version, folder in around("memory", proc, groups):
        with suppress(OSError, ValueError):  # "max": no limit
            most = int((folder / MEMORY_LIMIT[version]).read_text())
            used = int((folder / _USAGE[version]).read_text())
            said = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield MemoryCounters(most, max(0, most - used + _reclaimable(said)))


def _reclaimable(said: Mapping[str, str]) -> int:
    """Return the bytes of files that the kernel drops before it runs out."""
    return int(said.get("total_inactive_file", said.get("inactive_file", "0")))
