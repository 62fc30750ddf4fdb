"""What is simulated: machines, containers with growing working sets, and what a miss costs (after Infiniswap).

The working sets, the mix of limits and the losses on disk are the source's. It does not say how fast working sets
grow, how long containers compute, or what a page costs: those are this module's assumptions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.random import Generator as Rng
from numpy.typing import NDArray

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.tiers import Tier

GB = 2**30
PAGE = 4096
LIMITS = ((1.0, 0.5), (0.75, 0.3), (0.5, 0.2))
"""Memory limits of containers, as fractions of their working sets, and how many of them have each."""


@dataclass(frozen=True, slots=True)
class Application:
    """A workload of the source's cluster experiment.

    Args:
        name: of the application.
        working_set: bytes at its peak.
        loss_on_disk: time that a run with half of its working set in memory takes on disk, over that with all.
        exponent: how what is lost grows with the part of the working set that is missing.
    """

    name: str
    working_set: float
    loss_on_disk: float
    exponent: float


# exponents: of the losses at 75 % and 50 %, 5.5 and 24 times for VoltDB, 2.1 and 17 for Memcached, whose is taken for
# those that lose little at 75 %; Spark, which does not finish at 50 %, has GraphX' losses
APPLICATIONS = (
    Application("voltdb", 11.5 * GB, 24.0, 2.35),
    Application("memcached-etc", 9 * GB, 4.0, 3.9),
    Application("memcached-sys", 14.5 * GB, 17.4, 3.9),
    Application("powergraph", 9 * GB, 8.0, 3.9),
    Application("graphx", 12 * GB, 23.0, 3.9),
    Application("spark", 16 * GB, 23.0, 3.9),
)


@dataclass(frozen=True, slots=True)
class DaemonFault:
    """A machine's daemon dies.

    Args:
        at_s: seconds after the start.
        machine: its number.
        down_s: seconds until it starts again, empty.
    """

    at_s: float
    machine: int
    down_s: float = inf


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and its load.

    Args:
        machines: at least 2.
        containers: at least 1.
        memory: bytes of a machine.
        headroom: bytes that a daemon keeps free.
        slab: bytes.
        system: bytes that a machine uses without containers.
        occupancy: bytes of slabs touched for a byte that does not fit (slab occupancy factor), at least 1.
        until_s: seconds after which the simulation ends.
        measure_s: seconds after which use of memory is measured.
        grow_s: shortest and longest time in which a container's working set grows to its peak.
        compute_s: shortest and longest time that a container computes with all its memory.
        start_s: time in which containers start; 0: all together, as in the source.
        peer: cost of a page in peers' memory.
        disk: cost of a page on disk.
        faults: of daemons.

    Raises ``OptionError`` for numbers outside their ranges.
    """

    machines: int = 32
    containers: int = 90
    memory: int = 64 * GB
    headroom: int = 8 * GB
    slab: int = GB
    system: int = 3 * GB // 2
    occupancy: float = 2.1
    until_s: float = 600.0
    measure_s: float = 240.0
    grow_s: tuple[float, float] = (60.0, 180.0)
    compute_s: tuple[float, float] = (300.0, 600.0)
    start_s: float = 0.0
    peer: Tier = field(default=Tier("peer memory", 20e-6, inf))
    disk: Tier = field(default=Tier("local disk", 1e-3, inf))
    faults: Sequence[DaemonFault] = ()

    def __post_init__(self) -> None:
        if self.machines < 2 or self.containers < 1:
            raise OptionError(
                f"machines must be at least 2 and containers at least 1, not {self.machines} and {self.containers}"
            )
        if not self.occupancy >= 1:
            raise OptionError(f"occupancy must be at least 1, not {self.occupancy}")
        if not 0 < self.measure_s <= self.until_s < inf:
            raise OptionError(
                f"measure_s must be above 0 and at most until_s, not {self.measure_s} with {self.until_s}"
            )
        for one in self.faults:
            if not 0 <= one.machine < self.machines or not one.at_s >= 0 or not one.down_s > 0:
                raise OptionError(
                    f"a fault must be of a machine from 0 to {self.machines - 1}, at 0 s or later, and last a time; "
                    f"got {one}"
                )


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Containers:
    """Containers as drawn, one an entry.

    Args:
        machine: on which each runs.
        working_set: bytes at its peak.
        limit: bytes that it may have on its machine.
        fraction: the limit over the peak.
        start_s: when each starts.
        grow_s: time in which it grows to its peak.
        compute_s: time that it computes with all its memory.
        loss: what a run with half of the memory loses on disk, over its computing time.
        exponent: of its losses.
    """

    machine: Ints
    working_set: Floats
    limit: Floats
    fraction: Floats
    start_s: Floats
    grow_s: Floats
    compute_s: Floats
    loss: Floats
    exponent: Floats


def draw_containers(scenario: Scenario, rng: Rng) -> Containers:
    """Return containers on machines drawn at random, whether they fit or not: equal numbers of each application."""
    n = scenario.containers
    apps = [APPLICATIONS[i % len(APPLICATIONS)] for i in range(n)]
    counts = [round(share * n) for _, share in LIMITS[1:]]
    fractions = np.repeat([one for one, _ in LIMITS], [n - sum(counts), *counts])
    fraction = rng.permutation(fractions)
    peak = np.array([one.working_set for one in apps])
    return Containers(
        machine=rng.integers(scenario.machines, size=n),
        working_set=peak,
        limit=peak * fraction,
        fraction=fraction,
        start_s=rng.uniform(0.0, scenario.start_s, size=n),
        grow_s=rng.uniform(*scenario.grow_s, size=n),
        compute_s=rng.uniform(*scenario.compute_s, size=n),
        loss=np.array([one.loss_on_disk - 1 for one in apps]),
        exponent=np.array([one.exponent for one in apps]),
    )
