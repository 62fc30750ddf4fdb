"""One node that stays as it is: this machine for engines of this process, or a server that tells no more."""

from math import ceil

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.machine.granted import granted_cores, granted_memory
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Capacity, Node

_USABLE = 0.8  # of the memory; the rest is the operating system's and other processes'


def machine_memory() -> float:
    """Return this machine's memory in GiB, or the limit of a control group around this process where that is less."""
    return granted_memory() / 2**30


def usable_memory() -> float:
    """Return the GiB of this machine's memory that an engine in this process may take."""
    return _USABLE * machine_memory()


def slowness(engine: str) -> float:
    """Return how many times as long work takes on one of the cores of an engine in this process as on a whole one, at
    least 1: where a CPU quota grants 0.4 cores, the one there is takes 2.5 times as long. Others have cores of their
    own."""
    granted = granted_cores() if engine == "duckdb" else 1.0
    return ceil(granted) / granted


def quota_notes() -> tuple[str, ...]:
    """Return a sentence, for people, on a CPU quota that grants a part of a core; none where there is no such."""
    granted = granted_cores()
    if granted == ceil(granted):
        return ()
    return (f"a CPU quota grants this process {granted:.3g} cores, which plans count on",)


class LocalCapacity:
    """A ``CapacitySource`` of one on-demand node that never changes.

    ``cores`` are by default those that this process may use, a part of one counted as one that takes ``slowness``
    times as long. ``memory`` is what tasks may use, GiB; by default four fifths of the machine's. ``node`` is an id
    for people, and ``hazard`` its expected losses per hour. Raises ``OptionError``.
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
        cores = ceil(granted_cores()) if cores is None else cores
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
