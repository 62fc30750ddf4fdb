"""How many servers trainings of a trace occupy: private ones, shared aggregators under a scaling rule, or an ideal.

Arrivals, exits, feedback and ends of periods are events; durations are those of the trace, so what a training loses
is reported and does not lengthen it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import ceil
from typing import Protocol

from ebbflow.planners.aggregation.assignment import RECOMMENDED, HeuristicOptions
from ebbflow.planners.aggregation.exact import max_loss
from ebbflow.planners.aggregation.model import AggregatorPool, JobProfile
from ebbflow.planners.aggregation.scaling import (
    HybridScaler,
    ScaleResult,
    on_feedback,
    on_job_arrival,
    on_job_exit,
)
from ebbflow.planners.aggregation.workload import TraceJob
from ebbflow.planners.errors import OptionError

Measure = Callable[[AggregatorPool, str], float]
"""The share of its speed that a training loses, as it would measure it."""


class ServerPolicy(Protocol):
    """Which servers trainings have."""

    period_s: float | None  # seconds between calls of ``period``

    @property
    def allocated(self) -> int:
        """Return the servers that are allocated."""

    @property
    def used(self) -> int:
        """Return the servers that have work."""

    def arrive(self, profile: JobProfile) -> int:
        """Take a training and return how many tensors are moved for it."""

    def exit(self, job_id: str) -> int:
        """Remove a training and return how many tensors are moved."""

    def feedback(self, job_id: str) -> int:
        """Judge a training after its monitoring window and return how many tensors are moved."""

    def period(self, mean_used: float) -> int:
        """Adjust to the demand of the period that ends and return how many tensors are moved."""

    def loss(self) -> float:
        """Return the largest planned loss of a training, a share of its speed."""


class _Counted(ABC):
    """A policy without sharing: a number for the trainings that run."""

    period_s: float | None = None

    def __init__(self) -> None:
        self._running: dict[str, JobProfile] = {}

    @property
    def used(self) -> int:
        return self.allocated

    @property
    @abstractmethod
    def allocated(self) -> int:
        """Return the servers that are rented."""

    def arrive(self, profile: JobProfile) -> int:
        self._running[profile.job_id] = profile
        return 0

    def exit(self, job_id: str) -> int:
        del self._running[job_id]
        return 0

    def feedback(self, job_id: str) -> int:
        return 0

    def period(self, mean_used: float) -> int:
        return 0

    def loss(self) -> float:
        return 0.0


class PrivateServers(_Counted):
    """Each training has the servers that it requested for as long as it runs."""

    @property
    def allocated(self) -> int:
        """Return the servers that all running trainings requested."""
        return sum(one.requested_servers for one in self._running.values())


class IdealPacking(_Counted):
    """Servers that are never idle: the sum of demands, which no assignment beats without slowing a training."""

    @property
    def allocated(self) -> int:
        """Return the servers that the sum of demands fills."""
        return ceil(sum(one.demand for one in self._running.values()))


class OnDemand:
    """Aggregators are allocated and released with each arrival and exit.

    Args:
        options: of the heuristic.
        measure: of a training's loss after its monitoring window; without it no feedback.
    """

    period_s: float | None = None

    def __init__(self, options: HeuristicOptions = RECOMMENDED, measure: Measure | None = None) -> None:
        self._options = options
        self._measure = measure
        self._own: dict[str, tuple[int, ...]] = {}  # aggregators added for a training by feedback
        self.pool = AggregatorPool()

    @property
    def allocated(self) -> int:
        """Return the aggregators that are allocated."""
        return len(self.pool)

    @property
    def used(self) -> int:
        """Return the aggregators that have tasks."""
        return self.pool.used

    def arrive(self, profile: JobProfile) -> int:
        """Place a training; what is placed already stays."""
        on_job_arrival(self.pool, profile, self._options)
        return 0

    def exit(self, job_id: str) -> int:
        """Remove a training and consolidate."""
        self._own.pop(job_id, None)
        result = on_job_exit(self.pool, job_id, self._options)
        gone = set(result.released)
        self._own = {job: tuple(one for one in own if one not in gone) for job, own in self._own.items()}
        return len(result.moves)

    def feedback(self, job_id: str) -> int:
        """Add aggregators for a training until its loss is tolerable or it has as many as it requested."""
        moved = 0
        while self._measure is not None and job_id in self.pool.profiles:
            own = self._own.get(job_id, ())
            lost = self._measure(self.pool, job_id)
            result = on_feedback(self.pool, job_id, lost, own, self._options)
            if not result.allocated:
                break
            self._own[job_id] = (*own, *result.allocated)
            moved += len(result.moves)
        return moved

    def period(self, mean_used: float) -> int:
        """Do nothing: there are no periods."""
        return 0

    def loss(self) -> float:
        return float(max_loss(self.pool))


class Periodic:
    """Aggregators follow demand once a period, in between only where more than a threshold is missing.

    Args:
        period_s: seconds.
        threshold: missing aggregators that are tolerated between periods; nothing: any number.
        options: of the heuristic.

    Raises ``OptionError`` for a period that is not positive or a negative threshold.
    """

    def __init__(
        self, period_s: float = 600.0, threshold: int | None = 1, options: HeuristicOptions = RECOMMENDED
    ) -> None:
        if not period_s > 0:
            raise OptionError(f"period_s must be positive, not {period_s}")
        self.period_s: float | None = period_s
        self.pool = AggregatorPool()
        self._scaler = HybridScaler(threshold, options)

    @property
    def allocated(self) -> int:
        """Return the aggregators that are allocated."""
        return len(self.pool)

    @property
    def used(self) -> int:
        """Return the aggregators that have tasks, or are missing."""
        return self.pool.used + sum(self._scaler.squeezed.values())

    def arrive(self, profile: JobProfile) -> int:
        """Place a training where there is room, or squeeze it in until more is allocated."""
        return _moved(self._scaler.on_arrival(self.pool, profile))

    def exit(self, job_id: str) -> int:
        """Remove a training; nothing is released before the period ends."""
        return _moved(self._scaler.on_exit(self.pool, job_id))

    def feedback(self, job_id: str) -> int:
        """Do nothing: what is squeezed waits for the period's end."""
        return 0

    def period(self, mean_used: float) -> int:
        """Allocate what is missing and release what the last period did not need."""
        return _moved(self._scaler.on_period(self.pool, mean_used))

    def loss(self) -> float:
        return float(max_loss(self.pool))


def _moved(result: ScaleResult) -> int:
    return len(result.moves)


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """What trainings of a trace occupied.

    Args:
        samples: at each sampling time with a running training: seconds, servers requested and servers allocated.
        requested_s: server-seconds that were requested.
        allocated_s: server-seconds that were allocated.
        moves: tensors that changed their aggregator.
        over_limit_s: seconds in which a training's planned loss was at or above the limit.
    """

    samples: tuple[tuple[float, int, int], ...]
    requested_s: float
    allocated_s: float
    moves: int
    over_limit_s: float

    @property
    def saving(self) -> float:
        """Return the share of the requested server time that was not allocated; negative where more was."""
        return 1 - self.allocated_s / self.requested_s if self.requested_s else 0.0

    @property
    def share_below(self) -> float:
        """Return the share of samples at which fewer servers were allocated than requested."""
        below = sum(1 for _, requested, allocated in self.samples if allocated < requested)
        return below / len(self.samples) if self.samples else 0.0

    @property
    def worst_ratio(self) -> float:
        """Return the largest ratio of allocated to requested servers at a sample."""
        return max((allocated / requested for _, requested, allocated in self.samples), default=0.0)


_EXIT, _PERIOD, _ARRIVAL, _FEEDBACK, _SAMPLE = range(5)  # the order at one time


@dataclass(slots=True)
class _Clock:
    """Integrals over time."""

    now: float = 0.0
    requested: int = 0
    requested_s: float = 0.0
    allocated_s: float = 0.0
    over_limit_s: float = 0.0
    used_s: float = 0.0  # in this period
    began: float = 0.0  # this period
    samples: list[tuple[float, int, int]] = field(default_factory=list)


def simulate(
    jobs: Iterable[TraceJob],
    policy: ServerPolicy,
    *,
    sample_s: float = 60.0,
    end_s: float | None = None,
    window: int = 100,
    loss_limit: float = float(RECOMMENDED.loss_limit),
) -> ServerUsage:
    """Return what the trainings of a trace occupy under a policy.

    Args:
        jobs: of the trace.
        policy: a new one; changed.
        sample_s: seconds between samples.
        end_s: seconds at which measuring ends; default: the last exit.
        window: iterations after which a training's loss is judged.
        loss_limit: share of its speed above which a training's time is counted in ``over_limit_s``.

    Raises ``OptionError`` for numbers that are not positive.
    """
    if not sample_s > 0 or window < 1:
        raise OptionError(f"sample_s must be positive and window at least 1, not {sample_s} and {window}")
    trace = list(jobs)
    events: list[tuple[float, int, int]] = [(one.arrival_s, _ARRIVAL, i) for i, one in enumerate(trace)]
    heapify(events)
    left, moves, clock = len(trace), 0, _Clock()
    if trace:
        clock.now = clock.began = events[0][0]
        heappush(events, (clock.now, _SAMPLE, 0))
        if policy.period_s is not None:
            heappush(events, (clock.now + policy.period_s, _PERIOD, 0))
    lossy = False
    while left:
        now, kind, i = heappop(events)
        if end_s is not None and now > end_s:
            _advance(clock, end_s, policy, lossy)
            break
        _advance(clock, now, policy, lossy)
        if kind == _SAMPLE:
            if clock.requested:
                clock.samples.append((now, clock.requested, policy.allocated))
            heappush(events, (now + sample_s, _SAMPLE, 0))
            continue
        if kind == _PERIOD:
            assert policy.period_s is not None
            moves += policy.period(clock.used_s / (now - clock.began))
            clock.used_s, clock.began = 0.0, now
            heappush(events, (now + policy.period_s, _PERIOD, 0))
        elif kind == _ARRIVAL:
            profile = trace[i].profile
            moves += policy.arrive(profile)
            clock.requested += profile.requested_servers
            heappush(events, (now + trace[i].duration_s, _EXIT, i))
            heappush(events, (now + window * profile.iteration_us / 1e6, _FEEDBACK, i))
        elif kind == _EXIT:
            moves += policy.exit(trace[i].profile.job_id)
            clock.requested -= trace[i].profile.requested_servers
            left -= 1
        else:
            moves += policy.feedback(trace[i].profile.job_id)
        lossy = policy.loss() >= loss_limit
    return ServerUsage(tuple(clock.samples), clock.requested_s, clock.allocated_s, moves, clock.over_limit_s)


def _advance(clock: _Clock, now: float, policy: ServerPolicy, lossy: bool) -> None:
    passed = now - clock.now
    clock.requested_s += passed * clock.requested
    clock.allocated_s += passed * policy.allocated
    clock.used_s += passed * policy.used
    clock.over_limit_s += passed if lossy else 0.0
    clock.now = now
