"""What runs where: machines, jobs and their runnable tasks, and the only way a scheduler changes anything."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, TypeAlias

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Resources, Share
from ebbflow.planners.query.running.progress import Remaining

Vector: TypeAlias = tuple[float, ...]  # per dimension that the cluster offers, in mean machines

_SLACK = 1e-9  # of a machine: rounding never keeps a task out


@dataclass(slots=True, eq=False)
class Pool:
    """The identical tasks of one started stage of a job."""

    fp: str  # output_fp of the stage
    demand: Vector  # of one task
    seconds: float  # of one task
    pending: int  # tasks that wait
    rank: float = 0.0  # upward rank of the stage in its plan: seconds
    index: int = 0  # topological position of the stage in its plan
    running: int = 0  # tasks that run
    done: int = 0  # tasks that ended

    @property
    def work(self) -> float:
        """Return Σ_r D_r/C_r · τ of one task, C being the mean machine: machine-seconds."""
        return sum(self.demand) * self.seconds


def _nothing_known() -> Remaining:
    raise OptionError("this job was made without a view of what remains of its plan")


@dataclass(slots=True, eq=False)
class Job:
    """A query as schedulers see it. Plans are opaque to all but the schedulers that say otherwise."""

    id: str
    order: int  # of arrival
    weight: float = 1.0
    pools: list[Pool] = field(default_factory=list)  # started stages whose tasks may run
    used: list[float] = field(default_factory=list)  # per dimension, in mean machines
    estimate: float = inf  # seconds of its plan alone on the whole cluster, as of its arrival
    work_left: float = 0.0  # Σ over tasks not done of Σ_r D_r/C_r · τ: machine-seconds
    version: int = 0  # grows whenever a stage starts, ends or is dropped
    remaining: Callable[[], Remaining] = _nothing_known  # what its plan still has to do

    @property
    def hungry(self) -> bool:
        """Tell whether some task waits."""
        return any(pool.pending for pool in self.pools)

    @property
    def load(self) -> float:
        """Return the most it uses of any resource, in mean machines per weight: its dominant share times n."""
        return max(self.used, default=0.0) / self.weight


class Scheduler(Protocol):
    """Gives free room to waiting tasks. Nothing is pre-empted."""

    def assign(self, ledger: "Ledger", jobs: Sequence[Job], now: float) -> None:
        """Place waiting tasks of ``jobs`` (in the order of arrival) through ``ledger.place``.

        ``now`` is in seconds. Equal inputs lead to equal placements.
        """
        ...


class Ledger:
    """Free room per machine. All amounts are fractions of the mean machine, dimension by dimension.

    Dimensions that no machine offers are left out. ``placed`` collects what was placed since ``collect``.
    """

    def __init__(self, machines: Sequence[Resources]) -> None:
        total = (
            Resources(*(sum(column) for column in zip(*machines, strict=True))) if machines else Resources()
        )
        if not (total.cores > 0 and total.memory > 0):
            raise OptionError(
                f"a cluster needs cores and memory; got {total.cores:g} and {total.memory:g} GiB"
            )
        self.machines = tuple(machines)
        self.total = total
        self._dimensions = [d for d in range(len(total)) if total[d] > 0]
        self._unit = [total[d] / len(machines) for d in self._dimensions]
        self.free = [[m[d] / u for d, u in zip(self._dimensions, self._unit, strict=True)] for m in machines]
        self._capacity = [list(room) for room in self.free]
        self._tasks = [0] * len(machines)
        self._placed: dict[Pool, dict[int, int]] = {}
        self._owner: dict[Pool, Job] = {}

    @property
    def whole(self) -> Share:
        """Return the whole cluster as a share."""
        largest = Resources(*(max(column) for column in zip(*self.machines, strict=True)))
        return Share(0, self.total, largest, len(self.machines))

    @property
    def open(self) -> list[int]:
        """Return the machines with some core free."""
        return [m for m, room in enumerate(self.free) if room[0] > _SLACK]

    def vector(self, demand: Resources) -> Vector:
        """Return a task's demand as the ledger counts."""
        return tuple(demand[d] / u for d, u in zip(self._dimensions, self._unit, strict=True))

    def idle(self) -> list[float]:
        """Return job usage of nothing, to begin with."""
        return [0.0] * len(self._dimensions)

    def room(self, demand: Vector, machine: int) -> int:
        """Return how many tasks of ``demand`` fit ``machine``."""
        fitting = inf
        for d, a in zip(demand, self.free[machine], strict=True):
            if d > 0:
                n = (a + _SLACK) // d
                fitting = min(fitting, n)
        return int(fitting) if 0 < fitting < inf else 0

    def fits(self, demand: Vector, machine: int) -> bool:
        """Tell whether one task of ``demand`` fits ``machine``."""
        for d, a in zip(demand, self.free[machine], strict=True):  # noqa: SIM110 the innermost loop
            if d > a + _SLACK and d > 0:
                return False
        return True

    def place(self, job: Job, pool: Pool, machine: int, tasks: int = 1) -> None:
        """Start ``tasks`` of ``pool`` on ``machine``; raises ``OptionError`` if they do not fit or do not wait."""
        if tasks > pool.pending or (tasks > 1 and tasks > self.room(pool.demand, machine)):
            raise OptionError(
                f"{tasks} tasks of {pool.fp} asked of machine {machine}, {pool.pending} waiting"
            )
        if tasks == 1 and not self.fits(pool.demand, machine):
            raise OptionError(f"a task of {pool.fp} does not fit machine {machine}: {self.free[machine]}")
        pool.pending -= tasks
        pool.running += tasks
        self._tasks[machine] += tasks
        room = self.free[machine]
        for r, d in enumerate(pool.demand):
            room[r] -= tasks * d
            job.used[r] += tasks * d
        on = self._placed.setdefault(pool, {})
        on[machine] = on.get(machine, 0) + tasks
        self._owner[pool] = job

    def release(self, job: Job, pool: Pool, machine: int, tasks: int) -> None:
        """Take back the room of ``tasks`` that ended or were stopped on ``machine``."""
        pool.running -= tasks
        self._tasks[machine] -= tasks
        room = self.free[machine]
        for r, d in enumerate(pool.demand):
            room[r] += tasks * d
            job.used[r] -= tasks * d
        if self._tasks[machine] == 0:
            self.free[machine] = list(self._capacity[machine])  # sums of many demands drift
        if not any(p.running for p in job.pools):
            job.used = self.idle()

    def collect(self) -> list[tuple[Job, Pool, dict[int, int]]]:
        """Return what was placed since the last call, tasks per machine and pool, in the order of placement."""
        placed = [(self._owner[pool], pool, machines) for pool, machines in self._placed.items()]
        self._placed, self._owner = {}, {}
        return placed
