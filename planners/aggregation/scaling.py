"""How the number of aggregators follows trainings: on arrival, on feedback, on exit, per period, and before an
interruption (AutoPS 5.8, 5.9 and 5.11 of its reference).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from ebbflow.planners.aggregation.assignment import (
    RECOMMENDED,
    HeuristicOptions,
    JobAssignment,
    assign_job,
    by_execution,
    place_tasks,
)
from ebbflow.planners.aggregation.model import AggregationTask, AggregatorPool, JobProfile, Move
from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """What a change of the pool does.

    Args:
        allocated: new aggregators.
        released: aggregators that are not needed any more, once the moves are done.
        moves: of tensors that are placed already.
    """

    allocated: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()


def on_job_arrival(
    pool: AggregatorPool, profile: JobProfile, options: HeuristicOptions = RECOMMENDED
) -> JobAssignment:
    """Place a new training, on new aggregators where the present ones do not suffice.

    Args:
        pool: changed.
        profile: of the training.
        options: of the heuristic.

    Raises ``OptionError`` for a training that is registered already.
    """
    result = assign_job(pool, profile, options)
    assert result is not None, "without a limit of its own every training is placed"
    return result


def on_feedback(
    pool: AggregatorPool,
    job_id: str,
    measured_loss: float,
    own: Iterable[int] = (),
    options: HeuristicOptions = RECOMMENDED,
) -> ScaleResult:
    """Reassign a training that measured too great a loss, with one more aggregator.

    The aggregators that were added for it come first, so that what was judged too slow is not chosen again; only what
    does not fit them goes to shared ones.

    Args:
        pool: changed where the loss is above the limit.
        job_id: of the training that came last; an older one that suffers is helped by moving the new one.
        measured_loss: share of its speed that it loses, the median of its monitoring window.
        own: aggregators that earlier feedback has added for it.
        options: of the heuristic.

    Raises ``OptionError`` for an unknown training.
    """
    profile = pool.profiles.get(job_id)
    if profile is None:
        raise OptionError(f"training {job_id!r} is not registered")
    added = list(own)
    if measured_loss <= options.loss_limit or len(added) >= profile.requested_servers:
        return ScaleResult()
    before = dict(pool.remove_job(job_id))
    pool.register(profile)
    new = pool.allocate()
    added.append(new)
    shared = [one for one in pool.aggregators if one not in added]
    left: list[AggregationTask] = []
    for task in by_execution(profile.tasks):
        if place_tasks(pool, profile, [task], options, exclude=shared) is None:
            left.append(task)
    for task in left:
        if place_tasks(pool, profile, [task], options) is None:
            squeeze(pool, profile, [task])
    where = {task.key: one for task, one in pool.placed(job_id)}
    moves = tuple(Move(task, old, where[task.key]) for task, old in before.items() if where[task.key] != old)
    return ScaleResult((new,), (), moves)


def squeeze(pool: AggregatorPool, profile: JobProfile, tasks: Iterable[AggregationTask]) -> dict[str, int]:
    """Place tasks where they cost least although their training loses more than the limit, and return where.

    Args:
        pool: with at least one aggregator; changed.
        profile: of the training.
        tasks: of it, not placed yet.

    Raises ``OptionError`` for a pool without aggregators.
    """
    if not pool.aggregators:
        raise OptionError("a pool must have an aggregator on which tasks can be placed")
    where = {}
    for task in tasks:
        loads = {}
        for one in pool.aggregators:
            cycle = max(pool.cycle_us(one), profile.iteration_us)
            needs = pool.aggregators[one].execution_us
            busy = sum(cycle // own * needs[job] for job, own in pool.iterations(one).items())
            loads[one] = Fraction(busy + cycle // profile.iteration_us * task.execution_us, cycle)
        chosen = min(loads, key=lambda one: (loads[one], one))
        pool.aggregators[chosen].add(task)
        where[task.tensor_id] = chosen
    return where


def evacuate(
    pool: AggregatorPool, one: int, options: HeuristicOptions = RECOMMENDED, *, max_new: int = 0
) -> ScaleResult | None:
    """Move all tasks of an aggregator to others: all-or-nothing; the aggregator stays, empty.

    Args:
        pool: changed only where every task has a destination.
        one: the aggregator.
        options: of the heuristic.
        max_new: maximum number of new aggregators.
    """
    state = pool.aggregators[one]
    cycle = state.kept_cycle_us
    jobs = sorted(state.tasks, key=lambda job: (-state.execution_us[job], job))
    moves: list[Move] = []
    allocated: list[int] = []
    for job in jobs:
        tasks = by_execution(state.tasks[job].values())
        for task in tasks:
            state.remove(task)
        room = max_new - len(allocated)
        placed = place_tasks(pool, pool.profiles[job], tasks, options, max_new=room, exclude=(one,))
        if placed is None:
            for task in tasks:
                state.add(task)
            for move in reversed(moves):
                pool.move(Move(move.task, move.target, move.source))
            state.kept_cycle_us = cycle
            pool.discard(allocated)
            return None
        allocated += placed.allocated
        moves += [Move(task, one, placed.where[task.tensor_id]) for task in tasks]
    return ScaleResult(tuple(allocated), (), tuple(moves))


def consolidate(
    pool: AggregatorPool, options: HeuristicOptions = RECOMMENDED, *, keep: int = 0
) -> ScaleResult:
    """Release aggregators whose tasks fit others, the least loaded first, until one's do not.

    Args:
        pool: changed; nothing is allocated.
        options: of the heuristic.
        keep: minimum number of aggregators that stay, with or without tasks.
    """
    released: list[int] = []
    moves: list[Move] = []
    while len(pool) > keep:
        loads = {one: pool.load(one) for one in pool.aggregators}
        one = min(loads, key=lambda one: (loads[one], one))
        result = evacuate(pool, one, options)
        if result is None:
            break
        moves += result.moves
        pool.release([one])
        released.append(one)
    return ScaleResult((), tuple(released), tuple(_shortened(moves)))


def _shortened(moves: Iterable[Move]) -> Iterable[Move]:
    """Return one move for a tensor that was moved several times."""
    first: dict[tuple[str, str], Move] = {}
    for move in moves:
        earlier = first.get(move.task.key)
        first[move.task.key] = Move(move.task, earlier.source if earlier else move.source, move.target)
    return first.values()


def on_job_exit(pool: AggregatorPool, job_id: str, options: HeuristicOptions = RECOMMENDED) -> ScaleResult:
    """Remove a training and release what is not needed without it; nothing is allocated.

    Args:
        pool: changed.
        job_id: of the training.
        options: of the heuristic.

    Raises ``OptionError`` for an unknown training.
    """
    pool.remove_job(job_id)
    return consolidate(pool, options)


@dataclass(frozen=True, slots=True)
class DrainPlan:
    """How an aggregator is emptied before it ends.

    Args:
        moves: in their order, with the seconds from the notice at which each is done.
        late: tensors whose copy ends after the deadline; they are restored from their mirror on the same targets.
        allocated: new aggregators.
    """

    moves: tuple[tuple[Move, float], ...]
    late: tuple[Move, ...]
    allocated: tuple[int, ...]


def drain(
    pool: AggregatorPool,
    one: int,
    deadline_s: float,
    bytes_per_second: float,
    options: HeuristicOptions = RECOMMENDED,
    *,
    state_factor: float = 1.0,
) -> DrainPlan:
    """Move all tensors of an aggregator elsewhere, largest first, and remove it.

    Args:
        pool: changed; aggregators are allocated where the others have no room.
        one: the aggregator that ends.
        deadline_s: seconds until it ends.
        bytes_per_second: rate at which it sends, above 0.
        options: of the heuristic.
        state_factor: bytes sent for a byte of parameters, 3 with two moments of an optimizer; at least 1.

    Raises ``OptionError`` for an unknown aggregator or a rate or factor outside its range.
    """
    if one not in pool.aggregators:
        raise OptionError(f"aggregator {one} is not in the pool")
    if not bytes_per_second > 0:
        raise OptionError(f"bytes_per_second must be positive, not {bytes_per_second}")
    if not state_factor >= 1:
        raise OptionError(f"state_factor must be at least 1, not {state_factor}")
    tasks = sum(len(own) for own in pool.aggregators[one].tasks.values())
    result = evacuate(pool, one, options, max_new=tasks)
    assert result is not None, "each task fits a new aggregator"
    pool.release([one])
    moves, late, now = [], [], 0.0
    for move in sorted(result.moves, key=lambda move: (-move.task.size_bytes, move.task.key)):
        seconds = move.task.size_bytes * state_factor / bytes_per_second
        if now + seconds > deadline_s:
            late.append(move)
        else:
            now += seconds
            moves.append((move, now))
    return DrainPlan(tuple(moves), tuple(late), result.allocated)


class HybridScaler:
    """Allocates between periods only what exceeds a threshold, and releases at their ends only.

    Tasks for which nothing may be allocated yet are squeezed onto the present aggregators until then.

    Args:
        threshold: missing aggregators that are tolerated between periods; nothing: any number, which is the purely
            periodic mode.
        options: of the heuristic.

    Raises ``OptionError`` for a negative threshold.
    """

    def __init__(self, threshold: int | None = 1, options: HeuristicOptions = RECOMMENDED) -> None:
        if threshold is not None and threshold < 0:
            raise OptionError(f"threshold must not be negative, not {threshold}")
        self._threshold = threshold
        self._options = options
        self._missing: dict[str, int] = {}  # squeezed trainings, and the aggregators that each lacks

    @property
    def squeezed(self) -> Mapping[str, int]:
        """Return the trainings that run with a greater loss until more is allocated, and what each lacks."""
        return self._missing

    def on_arrival(self, pool: AggregatorPool, profile: JobProfile) -> ScaleResult:
        """Place a new training.

        Raises ``OptionError`` for a training that is registered already.
        """
        if assign_job(pool, profile, self._options, max_new=0) is not None:
            return ScaleResult()
        result = on_job_arrival(pool, profile, self._options)
        lacking = len(result.allocated) + sum(self._missing.values())
        if self._threshold is not None and lacking > self._threshold:
            return self._allocate(pool, list(result.allocated))
        if len(pool) == len(result.allocated):  # there is nothing to squeeze it onto
            return ScaleResult(result.allocated)
        pool.remove_job(profile.job_id)
        pool.discard(result.allocated)
        pool.register(profile)
        squeeze(pool, profile, by_execution(profile.tasks))
        self._missing[profile.job_id] = len(result.allocated)
        return ScaleResult()

    def on_exit(self, pool: AggregatorPool, job_id: str) -> ScaleResult:
        """Remove a training; its aggregators stay until the period ends.

        Raises ``OptionError`` for an unknown training.
        """
        pool.remove_job(job_id)
        self._missing.pop(job_id, None)
        return ScaleResult()

    def on_period(self, pool: AggregatorPool, mean_used: float) -> ScaleResult:
        """Give squeezed trainings what they lack, and release what the last period's demand does not need.

        Args:
            pool: changed.
            mean_used: aggregators with tasks, on average over the period that ends.
        """
        before = pool.where()
        result = self._allocate(pool, [])
        released = consolidate(pool, self._options, keep=ceil(mean_used)).released
        where = pool.where()
        tasks = {task.key: task for job in pool.profiles for task, _ in pool.placed(job)}
        moves = tuple(Move(tasks[key], old, where[key]) for key, old in before.items() if where[key] != old)
        gone = set(released)
        return ScaleResult(
            tuple(one for one in result.allocated if one not in gone),
            tuple(one for one in released if one not in result.allocated),
            moves,
        )

    def _allocate(self, pool: AggregatorPool, allocated: list[int]) -> ScaleResult:
        moves: list[Move] = []
        waiting, self._missing = self._missing, {}
        profiles = [pool.profiles[job] for job in waiting]
        before = {profile.job_id: pool.remove_job(profile.job_id) for profile in profiles}
        for profile in profiles:
            allocated += on_job_arrival(pool, profile, self._options).allocated
        for profile in profiles:
            where = {task.key: one for task, one in pool.placed(profile.job_id)}
            moves += [
                Move(task, old, where[task.key])
                for task, old in before[profile.job_id]
                if where[task.key] != old
            ]
        return ScaleResult(tuple(allocated), (), tuple(moves))
