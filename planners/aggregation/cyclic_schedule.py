"""Cyclic execution: cycles, runs, losses, and when a request is executed (AutoPS 5.4 and 5.7 of its reference).

An aggregator repeats a cycle as long as the longest iteration of its trainings; shorter ones run several times in it.
Each request has a slot; one that misses its slot gets free time of the cycle or its training's next slot, so that no
other training waits for it.
"""

from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Mapping
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from ebbflow.planners.aggregation.model import AggregationTask
from ebbflow.planners.errors import OptionError

Time = int | Fraction


def execution_cycle(iterations_us: Iterable[int]) -> int:
    """Return the cycle of an aggregator that serves these standalone iterations, microseconds; 0 without any."""
    return max(iterations_us, default=0)


def runs_per_cycle(cycle_us: Time, iteration_us: Time) -> int:
    """Return how many iterations of a training an aggregator's cycle has.

    Args:
        cycle_us: microseconds of the cycle, at least the iteration.
        iteration_us: microseconds of the iteration.

    Raises ``OptionError`` for an iteration that is longer than the cycle or not positive.
    """
    if not 0 < iteration_us <= cycle_us:
        raise OptionError(
            f"iteration_us must be above 0 and at most the cycle of {cycle_us}, not {iteration_us}"
        )
    return int(cycle_us // iteration_us)


def local_duration(cycle_us: Time, iteration_us: Time) -> Fraction:
    """Return the microseconds of an iteration that the cycle of one aggregator leaves a training."""
    return Fraction(cycle_us) / runs_per_cycle(cycle_us, iteration_us)


def performance_loss(cycle_us: int, iteration_us: int) -> Fraction:
    """Return the share of its speed that a training loses on an aggregator, from 0 to below 1/(runs + 1)."""
    return 1 - Fraction(runs_per_cycle(cycle_us, iteration_us) * iteration_us, cycle_us)


def busy_time(cycle_us: int, needs: Iterable[tuple[int, int]]) -> int:
    """Return the execution time per cycle, microseconds.

    Args:
        cycle_us: microseconds of the cycle.
        needs: of each training its standalone iteration and its execution time per iteration, microseconds.
    """
    return sum(runs_per_cycle(cycle_us, iteration) * execution for iteration, execution in needs)


def free_time(cycle_us: int, needs: Iterable[tuple[int, int]]) -> int:
    """Return what ``busy_time`` leaves of a cycle, microseconds; negative under overload."""
    return cycle_us - busy_time(cycle_us, needs)


def duration_upper_bound(
    iterations_us: Mapping[str, int], served: Mapping[Hashable, Collection[str]]
) -> dict[str, Fraction]:
    """Return how long iterations can become when each aggregator's cycle stretches its trainings on all others.

    The estimate of one aggregator holds for it alone: a training that is stretched there is stretched everywhere, and
    stretches others. This fixed point bounds the effect from above, often by far.

    Args:
        iterations_us: standalone iteration of each training, microseconds.
        served: the trainings of each aggregator.
    """
    durations = {job: Fraction(own) for job, own in iterations_us.items()}
    while True:
        cycles = [(max(durations[job] for job in jobs), jobs) for jobs in served.values() if jobs]
        longer = dict(durations)
        for cycle, jobs in cycles:
            for job in jobs:
                longer[job] = max(longer[job], local_duration(cycle, durations[job]))
        if longer == durations:
            return durations
        durations = longer


class Admission(NamedTuple):
    """When a request is executed."""

    start_us: Time  # from the beginning of the schedule
    late: bool  # it has missed its slot
    postponed: bool  # and takes its training's next one


class CyclicSchedule:
    """The slots of an aggregator's cycle, and which requests have them.

    Slots are laid by earliest deadline, run r of a training not before r of its local durations; where that does not
    fit the cycle they follow each other without a gap.

    Args:
        tasks: on the aggregator.
        iterations_us: standalone iterations of their trainings, microseconds.

    Raises ``OptionError`` without tasks, or for tasks that need more than a cycle.
    """

    def __init__(self, tasks: Iterable[AggregationTask], iterations_us: Mapping[str, int]) -> None:
        self._tasks = {task.key: task for task in tasks}
        if not self._tasks:
            raise OptionError("a schedule must have at least one task")
        jobs = {task.job_id for task in self._tasks.values()}
        self.cycle_us = execution_cycle(iterations_us[job] for job in jobs)
        self._runs = {job: runs_per_cycle(self.cycle_us, iterations_us[job]) for job in jobs}
        need = sum(self._runs[task.job_id] * task.execution_us for task in self._tasks.values())
        if need > self.cycle_us:
            raise OptionError(
                f"tasks of a schedule must fit its cycle of {self.cycle_us} us, and need {need} us"
            )
        self._slots = self._laid()
        self._claimed: dict[tuple[str, str], int] = dict.fromkeys(
            self._tasks, -1
        )  # last slot, counted over cycles
        self._placed: list[tuple[Time, Time]] = []  # outside own slots: of the current cycle

    def slots(self, job_id: str, tensor_id: str) -> tuple[Time, ...]:
        """Return where in the cycle the slots of a tensor begin, microseconds."""
        return tuple(self._slots[job_id, tensor_id])

    def admit(self, job_id: str, tensor_id: str, now_us: Time) -> Admission:
        """Take a request and return when it is executed.

        A training sends the next request of a tensor only after the last one was executed.

        Args:
            job_id: of the training.
            tensor_id: of the tensor.
            now_us: microseconds from the beginning of the schedule; not before earlier requests'.

        Raises ``OptionError`` for a tensor that is not on the aggregator.
        """
        key = (job_id, tensor_id)
        if key not in self._tasks:
            raise OptionError(f"tensor {tensor_id!r} of training {job_id!r} has no slot in this schedule")
        following = self._first_slot(key, now_us)
        if following <= self._claimed[key] + 1:
            self._claimed[key] += 1
            return Admission(self._start(key, self._claimed[key]), late=False, postponed=False)
        if (start := self._gap(key, now_us)) is not None:
            self._claimed[key] = following - 1
            self._placed.append((start, start + self._tasks[key].execution_us))
            return Admission(start, late=True, postponed=False)
        self._claimed[key] = following
        return Admission(self._start(key, following), late=True, postponed=True)

    def _start(self, key: tuple[str, str], slot: int) -> Time:
        cycle, run = divmod(slot, self._runs[key[0]])
        return cycle * self.cycle_us + self._slots[key][run]

    def _first_slot(self, key: tuple[str, str], now: Time) -> int:
        cycle, offset = divmod(now, self.cycle_us)
        return int(cycle) * self._runs[key[0]] + bisect_left(self._slots[key], offset)

    def _gap(self, key: tuple[str, str], now: Time) -> Time | None:
        """Return the first time in the rest of the cycle that no other slot or request has, or nothing."""
        begin = now // self.cycle_us * self.cycle_us
        end = begin + self.cycle_us
        self._placed = [one for one in self._placed if one[1] > now]
        blocked = list(self._placed)
        for other, slots in self._slots.items():
            for run, offset in enumerate(slots):
                start = begin + offset
                running = start < now and self._is_claimed(other, begin, run)
                if start >= now or running:
                    blocked.append((start, start + self._tasks[other].execution_us))
        edges = [(now, now), *sorted(one for one in blocked if one[1] > now), (end, end)]
        free = now
        for (_, before), (after, _) in pairwise(edges):
            free = max(free, before)
            if after - free >= self._tasks[key].execution_us:
                return free
        return None

    def _is_claimed(self, key: tuple[str, str], begin: Time, run: int) -> bool:
        return int(begin // self.cycle_us) * self._runs[key[0]] + run <= self._claimed[key]

    def _laid(self) -> dict[tuple[str, str], list[Time]]:
        waiting = sorted(
            (
                Fraction(run * self.cycle_us, self._runs[job]),
                Fraction((run + 1) * self.cycle_us, self._runs[job]),
                key,
            )
            for key in self._tasks
            for job in (key[0],)
            for run in range(self._runs[job])
        )
        for released in (True, False):
            laid: dict[tuple[str, str], list[Time]] = {key: [] for key in self._tasks}
            left, now = list(waiting), Fraction(0)
            while left:
                ready = [one for one in left if one[0] <= now] if released else left
                if not ready:
                    now = left[0][0]
                    continue
                chosen = min(ready, key=lambda one: (one[1], one[0], one[2]))
                left.remove(chosen)
                laid[chosen[2]].append(now)
                now += self._tasks[chosen[2]].execution_us
            if now <= self.cycle_us:
                break
        return laid
