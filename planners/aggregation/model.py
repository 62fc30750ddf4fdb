"""Values of planning: aggregation tasks, profiles of trainings, and the pool of aggregators with what each executes.

Durations are integer microseconds and ratios exact fractions: a floor of a rounded ratio can be off by one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from ebbflow.planners.errors import OptionError

LOSS_LIMIT = Fraction(1, 10)  # LossLimit of the thesis: largest tolerated share of a training's speed


@dataclass(frozen=True, slots=True)
class AggregationTask:
    """The aggregation of one tensor of one training, requested once per iteration.

    Args:
        job_id: of the training.
        tensor_id: unique within the training.
        execution_us: microseconds on an aggregator per iteration.
        size_bytes: of the tensor's parameters, without optimizer state.

    Raises ``OptionError`` for a time that is not positive or a negative size.
    """

    job_id: str
    tensor_id: str
    execution_us: int
    size_bytes: int = 0

    def __post_init__(self) -> None:
        if self.execution_us <= 0:
            raise OptionError(
                f"execution_us of tensor {self.tensor_id!r} must be positive, not {self.execution_us}"
            )
        if self.size_bytes < 0:
            raise OptionError(
                f"size_bytes of tensor {self.tensor_id!r} must not be negative, not {self.size_bytes}"
            )

    @property
    def key(self) -> tuple[str, str]:
        """Return the training and the tensor, which name a task."""
        return self.job_id, self.tensor_id


@dataclass(frozen=True, slots=True)
class JobProfile:
    """What a training needs of the service, measured alone over a few iterations.

    Args:
        job_id: of the training.
        iteration_us: microseconds of an iteration on servers of its own.
        tasks: aggregation of each of its tensors.
        requested_servers: private servers that it would have; also its maximum number of new aggregators.

    Raises ``OptionError`` for numbers that are not positive, a task of another training, or a tensor named twice.
    """

    job_id: str
    iteration_us: int
    tasks: tuple[AggregationTask, ...]
    requested_servers: int = 1

    def __post_init__(self) -> None:
        if self.iteration_us <= 0:
            raise OptionError(
                f"iteration_us of training {self.job_id!r} must be positive, not {self.iteration_us}"
            )
        if self.requested_servers < 1:
            raise OptionError(
                f"requested_servers of training {self.job_id!r} must be at least 1, not {self.requested_servers}"
            )
        if foreign := next((task for task in self.tasks if task.job_id != self.job_id), None):
            raise OptionError(
                f"a profile of training {self.job_id!r} must not hold a task of {foreign.job_id!r}"
            )
        if len({task.tensor_id for task in self.tasks}) != len(self.tasks):
            raise OptionError(f"tensor ids of training {self.job_id!r} must be unique")

    @property
    def execution_us(self) -> int:
        """Return the microseconds that all its tensors need per iteration."""
        return sum(task.execution_us for task in self.tasks)

    @property
    def demand(self) -> Fraction:
        """Return the aggregators that it keeps busy on average at its full speed."""
        return Fraction(self.execution_us, self.iteration_us)


class Move(NamedTuple):
    """A tensor that changes its aggregator."""

    task: AggregationTask
    source: int
    target: int


@dataclass(slots=True)
class Aggregator:
    """An aggregator and its tasks, by training and tensor.

    Args:
        tasks: by training and tensor.
        execution_us: microseconds that a training needs of it per iteration.
        kept_cycle_us: microseconds of a longer cycle that it keeps after a training has left; see ``remove_job``.
    """

    tasks: dict[str, dict[str, AggregationTask]] = field(default_factory=dict)
    execution_us: dict[str, int] = field(default_factory=dict)
    kept_cycle_us: int = 0

    def add(self, task: AggregationTask) -> None:
        """Give it a task; an empty one begins with that training's cycle."""
        if not self.tasks:
            self.kept_cycle_us = 0
        self.tasks.setdefault(task.job_id, {})[task.tensor_id] = task
        self.execution_us[task.job_id] = self.execution_us.get(task.job_id, 0) + task.execution_us

    def remove(self, task: AggregationTask) -> None:
        """Take a task from it."""
        own = self.tasks[task.job_id]
        del own[task.tensor_id]
        self.execution_us[task.job_id] -= task.execution_us
        if not own:
            del self.tasks[task.job_id], self.execution_us[task.job_id]


class AggregatorPool:
    """All aggregators of a cluster with the trainings that they serve; what planning changes.

    Aggregators have rising ids, and an id is not used again.
    """

    def __init__(self) -> None:
        self.profiles: dict[str, JobProfile] = {}
        self.aggregators: dict[int, Aggregator] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self.aggregators)

    @property
    def used(self) -> int:
        """Return how many aggregators have a task."""
        return sum(1 for one in self.aggregators.values() if one.tasks)

    def allocate(self) -> int:
        """Add an empty aggregator and return its id."""
        self._next += 1
        self.aggregators[self._next - 1] = Aggregator()
        return self._next - 1

    def release(self, ids: Iterable[int]) -> None:
        """Remove empty aggregators.

        Raises ``OptionError`` for one that has tasks; those before it are removed.
        """
        for one in ids:
            if self.aggregators[one].tasks:
                raise OptionError(f"aggregator {one} must have no tasks when it is released")
            del self.aggregators[one]

    def discard(self, ids: Iterable[int]) -> None:
        """Remove the last aggregators that were allocated, of a plan that does not hold; their ids are used again.

        Raises ``OptionError`` for one that has tasks.
        """
        planned = list(ids)
        self.release(planned)
        self._next -= len(planned)

    def register(self, profile: JobProfile) -> None:
        """Add a training without placing its tasks.

        Raises ``OptionError`` for one that is there already.
        """
        if profile.job_id in self.profiles:
            raise OptionError(f"training {profile.job_id!r} must be registered only once")
        self.profiles[profile.job_id] = profile

    def remove_job(self, job_id: str) -> list[tuple[AggregationTask, int]]:
        """Remove a training and its tasks, and return where they were.

        Without its longest iteration an aggregator's cycle would be shorter, in which the others may lose more or
        need more than there is: it then keeps its cycle.

        Raises ``OptionError`` for an unknown training.
        """
        if job_id not in self.profiles:
            raise OptionError(f"training {job_id!r} is not registered")
        placed = list(self.placed(job_id))
        cycles = {where: self.cycle_us(where) for _, where in placed}
        for task, where in placed:
            self.aggregators[where].remove(task)
        del self.profiles[job_id]
        for where, cycle in cycles.items():
            self._shorten(where, cycle)
        return placed

    def _shorten(self, one: int, cycle: int) -> None:
        state = self.aggregators[one]
        state.kept_cycle_us = cycle
        kept = self._pressure(one)
        state.kept_cycle_us = 0
        if any(new > old for new, old in zip(self._pressure(one), kept, strict=True)):
            state.kept_cycle_us = cycle

    def _pressure(self, one: int) -> tuple[Fraction, Fraction]:
        """Return the largest loss of a training on an aggregator, and by how much it is overloaded."""
        cycle = self.cycle_us(one)
        losses = (Fraction(cycle % own, cycle) for own in self.iterations(one).values())
        return max(losses, default=Fraction(0)), max(self.load(one), Fraction(1))

    def placed(self, job_id: str) -> Iterator[tuple[AggregationTask, int]]:
        """Return the tasks of a training that are placed, with their aggregators."""
        for one, state in self.aggregators.items():
            for task in state.tasks.get(job_id, {}).values():
                yield task, one

    def where(self) -> dict[tuple[str, str], int]:
        """Return the aggregator of each placed task.

        Raises ``OptionError`` where a task is placed twice, which no planner does.
        """
        found: dict[tuple[str, str], int] = {}
        for one, state in self.aggregators.items():
            for task in (task for own in state.tasks.values() for task in own.values()):
                if task.key in found:
                    raise OptionError(f"tensor {task.key} is on aggregators {found[task.key]} and {one}")
                found[task.key] = one
        return found

    def move(self, move: Move) -> None:
        """Carry out a planned move."""
        self.aggregators[move.source].remove(move.task)
        self.aggregators[move.target].add(move.task)

    def iterations(self, one: int) -> dict[str, int]:
        """Return the trainings on an aggregator with their standalone iterations, microseconds."""
        return {job: self.profiles[job].iteration_us for job in self.aggregators[one].tasks}

    def cycle_us(self, one: int) -> int:
        """Return the cycle of an aggregator, microseconds; 0 for an empty one."""
        iterations = self.iterations(one)
        return max(self.aggregators[one].kept_cycle_us, *iterations.values()) if iterations else 0

    def busy_us(self, one: int) -> int:
        """Return the execution time of an aggregator per cycle, microseconds."""
        cycle = self.cycle_us(one)
        needs = self.aggregators[one].execution_us
        return sum(cycle // own * needs[job] for job, own in self.iterations(one).items())

    def free_us(self, one: int) -> int:
        """Return the free execution time of an aggregator per cycle, microseconds; negative under overload."""
        return self.cycle_us(one) - self.busy_us(one)

    def load(self, one: int) -> Fraction:
        """Return the busy share of an aggregator; 0 for an empty one, above 1 under overload."""
        return Fraction(self.busy_us(one), self.cycle_us(one)) if self.aggregators[one].tasks else Fraction(0)
