"""Which aggregator executes which task: the best-fit heuristic (AutoPS, Pseudocode 3) and its literal reading.

The literal reading tests neither the new training's own loss nor room for all its runs per cycle; it is kept to
measure what that costs.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heapreplace
from math import ceil

from ebbflow.planners.aggregation.model import LOSS_LIMIT, AggregationTask, AggregatorPool, JobProfile
from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class HeuristicOptions:
    """How the heuristic judges an aggregator.

    Args:
        loss_limit: share of its speed, above 0 and below 1, that no training may reach by sharing.
        check_new_job: whether the loss of the training that is placed counts too.
        count_repeats: whether there must be room for all its runs per cycle.

    Raises ``OptionError`` for a limit outside its range.
    """

    loss_limit: Fraction = LOSS_LIMIT
    check_new_job: bool = True
    count_repeats: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.loss_limit < 1:
            raise OptionError(f"loss_limit must be above 0 and below 1, not {self.loss_limit}")


RECOMMENDED = HeuristicOptions()
LITERAL = HeuristicOptions(check_new_job=False, count_repeats=False)


@dataclass(frozen=True, slots=True)
class JobAssignment:
    """Where the tasks of a training were placed.

    Args:
        where: aggregator of each tensor.
        allocated: new aggregators.
        private: whether the limit of new aggregators was reached, and the training is alone on its aggregators.
        overloaded: aggregators that its tasks overload, which is possible only where it is private or a single task
            is longer than the iteration.
    """

    where: dict[str, int]
    allocated: tuple[int, ...] = ()
    private: bool = False
    overloaded: tuple[int, ...] = ()


def judge(
    pool: AggregatorPool, one: int, profile: JobProfile, options: HeuristicOptions = RECOMMENDED
) -> tuple[int, int] | None:
    """Return the free time of an aggregator if a training joined it, and how often each of its tasks needs room.

    Args:
        pool: with the aggregator; unchanged.
        one: id of the aggregator.
        profile: of the training.
        options: of the heuristic.

    Returns:
        microseconds per cycle and number of times, or nothing where a training would lose too much.
    """
    state = pool.aggregators[one]
    iterations = pool.iterations(one)
    cycle = max(profile.iteration_us, pool.cycle_us(one))
    numerator, denominator = options.loss_limit.as_integer_ratio()
    checked = list(iterations.values())
    if options.check_new_job:
        checked.append(profile.iteration_us)
    if any((cycle % own) * denominator >= numerator * cycle for own in checked):
        return None
    free = cycle
    for job, own in iterations.items():
        if options.count_repeats:
            runs = cycle // own
        else:
            runs = ceil(cycle / max(Fraction(own), Fraction(cycle, cycle // own)))
        free -= runs * state.execution_us[job]
    return free, cycle // profile.iteration_us if options.count_repeats else 1


def assign_task(
    pool: AggregatorPool,
    task: AggregationTask,
    options: HeuristicOptions = RECOMMENDED,
    *,
    exclude: Collection[int] = (),
) -> int | None:
    """Return the aggregator that fits a task best: the least free time that suffices, ties to the lowest id.

    Args:
        pool: in which the task's training is registered; unchanged.
        task: to place.
        options: of the heuristic.
        exclude: aggregators that must not get it.
    """
    best: tuple[int, int] | None = None
    for one in pool.aggregators:
        judged = judge(pool, one, pool.profiles[task.job_id], options) if one not in exclude else None
        if judged is None:
            continue
        free, runs = judged
        if free >= runs * task.execution_us and (best is None or (free, one) < best):
            best = (free, one)
    return None if best is None else best[1]


class _BestFit:
    """The choice of ``assign_task`` for tasks of one training, with all free times computed once.

    While only this training's tasks are added, free times fall by what is added and no cycle changes.
    """

    def __init__(
        self, pool: AggregatorPool, profile: JobProfile, options: HeuristicOptions, exclude: Collection[int]
    ) -> None:
        self._iteration_us = profile.iteration_us
        self._fits: dict[int, list[tuple[int, int]]] = {}  # runs -> (free time, aggregator), ascending
        for one in pool.aggregators:
            if one not in exclude and (judged := judge(pool, one, profile, options)):
                insort(self._fits.setdefault(judged[1], []), (judged[0], one))

    def take(self, task: AggregationTask) -> int | None:
        best: tuple[int, int, int] | None = None  # free, aggregator, runs
        for runs, group in self._fits.items():
            at = bisect_left(group, (runs * task.execution_us, -1))
            if at < len(group) and (best is None or group[at] < best[:2]):
                best = (*group[at], runs)
        if best is None:
            return None
        free, chosen, runs = best
        group = self._fits[runs]
        del group[bisect_left(group, (free, chosen))]
        insort(group, (free - runs * task.execution_us, chosen))
        return chosen

    def add(self, one: int, task: AggregationTask) -> None:
        """Count a new aggregator that has this task."""
        insort(self._fits.setdefault(1, []), (self._iteration_us - task.execution_us, one))


def place_tasks(
    pool: AggregatorPool,
    profile: JobProfile,
    tasks: Iterable[AggregationTask],
    options: HeuristicOptions = RECOMMENDED,
    *,
    max_new: int = 0,
    exclude: Collection[int] = (),
) -> JobAssignment | None:
    """Place tasks of one training in this order, each as ``assign_task`` would: all-or-nothing.

    Args:
        pool: in which the training is registered; changed only where all tasks are placed.
        profile: of the training.
        tasks: of it, not placed yet, in the order of placing.
        options: of the heuristic.
        max_new: maximum number of new aggregators.
        exclude: aggregators that must not get any of them.
    """
    # once the literal reading has placed a task, it judges its training as one of those that are there
    fast = options.check_new_job and options.count_repeats
    fits = _BestFit(pool, profile, options, exclude) if fast else None
    done: list[tuple[AggregationTask, int]] = []
    allocated: list[int] = []
    overloaded: list[int] = []
    for task in tasks:
        chosen = fits.take(task) if fits else assign_task(pool, task, options, exclude=exclude)
        if chosen is None:
            if len(allocated) == max_new:
                for placed, where in done:
                    pool.aggregators[where].remove(placed)
                pool.discard(allocated)
                return None
            chosen = pool.allocate()
            allocated.append(chosen)
            if fits:
                fits.add(chosen, task)
            if task.execution_us > profile.iteration_us:
                overloaded.append(chosen)
        pool.aggregators[chosen].add(task)
        done.append((task, chosen))
    where_of = {task.tensor_id: where for task, where in done}
    return JobAssignment(where_of, tuple(allocated), overloaded=tuple(overloaded))


def by_execution(tasks: Iterable[AggregationTask]) -> list[AggregationTask]:
    """Return tasks in the order of placing: longest execution first, ties by tensor."""
    return sorted(tasks, key=lambda task: (-task.execution_us, task.tensor_id))


def assign_job(
    pool: AggregatorPool,
    profile: JobProfile,
    options: HeuristicOptions = RECOMMENDED,
    *,
    max_new: int | None = None,
) -> JobAssignment | None:
    """Register a training and place all its tasks.

    Where more new aggregators were needed than the training's requested servers, it runs on so many new ones alone,
    as it would on servers of its own; this bounds its loss and the number of aggregators.

    Args:
        pool: changed, except where nothing is returned.
        profile: of the training.
        options: of the heuristic.
        max_new: maximum number of new aggregators; nothing is placed where it does not suffice. Default: the
            requested servers, with the private placement above.

    Raises ``OptionError`` for a training that is registered already.
    """
    pool.register(profile)
    limit = profile.requested_servers if max_new is None else max_new
    order = by_execution(profile.tasks)
    result = place_tasks(pool, profile, order, options, max_new=limit)
    if result is None and max_new is None:
        return _privately(pool, profile, order)
    if result is None:
        del pool.profiles[profile.job_id]
    return result


def _privately(pool: AggregatorPool, profile: JobProfile, order: list[AggregationTask]) -> JobAssignment:
    own = [pool.allocate() for _ in range(min(profile.requested_servers, len(order)))]
    loads = [(0, one) for one in own]
    heapify(loads)
    where = {}
    for task in order:
        load, one = loads[0]
        heapreplace(loads, (load + task.execution_us, one))
        pool.aggregators[one].add(task)
        where[task.tensor_id] = one
    overloaded = tuple(sorted(one for load, one in loads if load > profile.iteration_us))
    return JobAssignment(where, tuple(own), private=True, overloaded=overloaded)


def spread_tensors(
    sizes: Mapping[str, int], aggregators: Sequence[str], mirrors: int = 0
) -> dict[str, tuple[str, ...]]:
    """Return aggregators for the tensors of a training that has not been profiled yet: bytes spread evenly.

    Largest first, each to the aggregator with the fewest bytes; its mirrors are the next ones in order.

    Args:
        sizes: bytes of each tensor.
        aggregators: names, at least one more than ``mirrors``.
        mirrors: further aggregators that hold each tensor.

    Returns:
        the aggregator and then the mirrors of each tensor.

    Raises ``OptionError`` for fewer aggregators than copies, or fewer than 0 mirrors.
    """
    if not 0 <= mirrors < len(aggregators):
        raise OptionError(
            f"mirrors must be at least 0 and below the number of aggregators, {len(aggregators)}; got {mirrors}"
        )
    load = dict.fromkeys(aggregators, 0)
    order = list(aggregators)
    found = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        first = min(order, key=lambda one: load[one])
        load[first] += sizes[name]
        at = order.index(first)
        found[name] = tuple(order[(at + turn) % len(order)] for turn in range(mirrors + 1))
    return {name: found[name] for name in sizes}
