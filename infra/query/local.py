"""One node that stays as it is: this machine for engines of this process, or a server that tells no more."""

import contextlib
import os
from pathlib import Path

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Capacity, Node

_USABLE = 0.8  # of the memory; the rest is the operating system's and other processes'
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory() -> float:
    """Return this machine's memory in GiB, or its container's limit where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # version 2 writes "max" for no limit
            total = min(total, int(Path(path).read_text()))
    return total / 2**30


def usable_memory() -> float:
    """Return the GiB of this machine's memory that an engine in this process may take."""
    return _USABLE * machine_memory()


class LocalCapacity:
    """A ``CapacitySource`` of one on-demand node that never changes.

    ``memory`` is what tasks may use, GiB; by default four fifths of the machine's. ``node`` is an id for people, and
    ``hazard`` its expected losses per hour. Raises ``OptionError``.
    """

    def __init__(
        self,
        cores: int | None = None,
        memory: float | None = None,
        clock: Clock | None = None,
        *,
        node: str = "local",
        hazard: float = 0.0,
    ) -> None:
        cores = len(os.sched_getaffinity(0)) if cores is None else cores
        memory = usable_memory() if memory is None else memory
        if cores < 1:
            raise OptionError(f"cores must be >= 1; got {cores}")
        if not memory > 0:
            raise OptionError(f"memory must be > 0 GiB; got {memory}")
        self._node = Node(
            node, cores, memory, host="localhost" if node == "local" else node, market="on-demand"
        )
        self._hazard = hazard
        self._clock = clock or SystemClock()

    def capacity(self) -> Capacity:
        """Return the one node, always with revision 1."""
        return Capacity(revision=1, nodes=(self._node,), at=self._clock.now(), hazard=self._hazard)
