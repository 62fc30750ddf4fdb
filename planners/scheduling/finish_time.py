"""Finish-time fairness: an app's finish time in the shared cluster over its finish time alone on a 1/N share.

Themis (Mahajan et al., NSDI 2020), sections 3 and 5.2: ρ = T_sh / T_id for one job and for hyper-parameter
searches. An app answers for every (GPUs, level) at once (:meth:`FinishTime.rho_at`), since ρ depends on a bundle
only through both.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.scheduling import Placement, gpus_of
from ebbflow.planners.scheduling.locality import Array, Level, Slowdown, level_of

PhaseModel = Literal["malleable", "lpt"]


@dataclass(frozen=True, slots=True)
class Job:
    """One training job of an app."""

    iterations: float  # left
    serial_time: float  # s an iteration on one GPU
    max_gpus: int = 1
    slowdown: Slowdown = field(default_factory=Slowdown)

    def __post_init__(self) -> None:
        if not (self.iterations >= 0 and self.serial_time > 0 and self.max_gpus >= 1):
            raise OptionError(
                "a job needs iterations >= 0, a serial time > 0 s and max_gpus >= 1; "
                f"got {self.iterations}, {self.serial_time}, {self.max_gpus}"
            )

    @property
    def work(self) -> float:
        """Return GPU-seconds left without slowdown."""
        return self.iterations * self.serial_time


def phase_time(work: Sequence[float] | Array, gpus: Array, max_gpus: int, model: PhaseModel) -> Array:
    """Return seconds until the slowest of several jobs ends when ``gpus`` are split best among them.

    ``work``: GPU-seconds of each job with its slowdown in it; ``max_gpus``: of each. ``malleable``: GPUs are divided
    and moved at will. ``lpt``: the longest first onto single GPUs while there are fewer GPUs than jobs, else equal
    whole shares. No GPU: infinity.
    """
    works = np.sort(np.asarray(work, float))[::-1]
    have = np.asarray(gpus, float)
    if not works.size or works[0] <= 0.0:
        return np.zeros(have.shape)
    jobs = works.size
    with np.errstate(divide="ignore"):
        if model == "malleable":
            together = works.sum() / np.minimum(have, jobs * max_gpus)
            longest: Array = np.maximum(together, works[0] / np.minimum(have, max_gpus))
            return longest
        shares = np.where(have >= jobs, works[0] / np.clip(have // jobs, 1, max_gpus), inf)
    for few in np.unique(have[(have >= 1) & (have < jobs)]):
        loads = np.zeros(int(few))
        for one in works:
            loads[loads.argmin()] += one
        shares[have == few] = loads.max()
    return shares


@dataclass(slots=True)
class FinishTime(ABC):
    """What all apps share: elapsed time, the time alone (T_id), ρ. Whoever runs the app keeps its fields up to
    date."""

    arrival: float = 0.0  # s
    cluster_gpus: int = 1  # R_C: of the whole cluster, not the free ones
    n_avg: float = 1.0  # active apps averaged over the app's life, itself included

    @abstractmethod
    def remaining(self, gpus: Array, level: Level) -> Array:
        """Return seconds of work left if the app held ``gpus`` within ``level`` until its end."""

    @property
    @abstractmethod
    def total_work(self) -> float:
        """Return GPU-seconds of the whole app, without slowdown."""

    @property
    @abstractmethod
    def demand(self) -> int:
        """Return the most GPUs the app can use at once."""

    @property
    def time_alone(self) -> float:
        """Return T_id = T_cluster · N_avg, s (NSDI 2020, equation 1)."""
        return self.total_work / min(self.cluster_gpus, self.demand) * self.n_avg

    @property
    def time_on_share(self) -> float:
        """Return seconds alone on R_C / N_avg GPUs, capped by demand: T_id of an app too small for its share."""
        return self.total_work / min(self.cluster_gpus / self.n_avg, self.demand)

    def rho_at(self, gpus: Array, levels: Array, now: float) -> Array:
        """Return ρ for each pair of GPUs held and level (equal shapes); infinity without GPUs."""
        return self._over(self.time_alone, gpus, levels, now)

    def rho_share_at(self, gpus: Array, levels: Array, now: float) -> Array:
        """Return ρ against the time on a demand-capped share: above 1 exactly when sharing is worse than the
        share."""
        return self._over(self.time_on_share, gpus, levels, now)

    def rho(self, placement: Placement, capacity: Capacity, now: float) -> float:
        """Return ρ if the app held exactly ``placement`` from ``now`` on."""
        return self._one(self.time_alone, placement, capacity, now)

    def rho_share(self, placement: Placement, capacity: Capacity, now: float) -> float:
        """Return :meth:`rho` against the time on a demand-capped share."""
        return self._one(self.time_on_share, placement, capacity, now)

    def _one(self, alone: float, placement: Placement, capacity: Capacity, now: float) -> float:
        gpus, level = np.array([gpus_of(placement)]), np.array([level_of(placement, capacity)])
        return float(self._over(alone, gpus, level, now)[0])

    def _over(self, alone: float, gpus: Array, levels: Array, now: float) -> Array:
        left = np.empty(np.shape(gpus))
        for level in np.unique(levels):
            chosen = levels == level
            left[chosen] = self.remaining(np.asarray(gpus)[chosen], Level(level))
        return (max(now - self.arrival, 0.0) + left) / alone


@dataclass(slots=True)
class SingleJob(FinishTime):
    """An app of one job (NSDI 2020, equation 1)."""

    job: Job = field(kw_only=True)
    iterations_total: float = field(kw_only=True)

    def remaining(self, gpus: Array, level: Level) -> Array:
        work = [self.job.work * self.job.slowdown.levels[level]]
        return phase_time(work, gpus, self.job.max_gpus, "malleable")

    @property
    def total_work(self) -> float:
        return self.iterations_total * self.job.serial_time

    @property
    def demand(self) -> int:
        return self.job.max_gpus


@dataclass(slots=True)
class SuccessiveHalving(FinishTime):
    """A search in phases, the better half of the jobs going on to the next (NSDI 2020, equation 2).

    ``phases``: the jobs of each phase that is left, the current one first (:func:`halving_phases` makes them).
    """

    phases: Sequence[Sequence[Job]] = field(kw_only=True)
    budget: float = field(kw_only=True)  # B, GPU-seconds
    max_gpus: int = field(kw_only=True)  # of the app
    model: PhaseModel = "malleable"

    def remaining(self, gpus: Array, level: Level) -> Array:
        total = np.zeros(np.shape(gpus))
        for jobs in self.phases:
            total += _of_jobs(jobs, gpus, level, self.model)
        return total

    @property
    def total_work(self) -> float:
        return self.budget

    @property
    def demand(self) -> int:
        return self.max_gpus


@dataclass(slots=True)
class CurveStopping(FinishTime):
    """A search that stops jobs whose loss curve shows no promise (Hyperdrive, Vizier).

    ``jobs``: those that still run. ``bands``: for each, the iterations left by every curve within the error band; the
    longest survival counts, which is the conservative one.
    """

    jobs: Sequence[Job] = field(kw_only=True)
    bands: Sequence[Sequence[float]] = ()
    budget: float = field(kw_only=True)  # total work of all jobs, GPU-seconds
    model: PhaseModel = "malleable"

    def remaining(self, gpus: Array, level: Level) -> Array:
        if not self.bands:
            return _of_jobs(self.jobs, gpus, level, self.model)
        pairs = zip(self.jobs, self.bands, strict=True)
        longest = [replace(job, iterations=max(band, default=job.iterations)) for job, band in pairs]
        return _of_jobs(longest, gpus, level, self.model)

    @property
    def total_work(self) -> float:
        return self.budget

    @property
    def demand(self) -> int:
        return max(sum(job.max_gpus for job in self.jobs), 1)


def _of_jobs(jobs: Sequence[Job], gpus: Array, level: Level, model: PhaseModel) -> Array:
    work = [job.work * job.slowdown.levels[level] for job in jobs]
    return phase_time(work, gpus, max((job.max_gpus for job in jobs), default=1), model)


def halving_phases(jobs: Sequence[Job], iterations: Sequence[float]) -> tuple[tuple[Job, ...], ...]:
    """Return the phases of successive halving: ``jobs`` now, then half as many each time.

    ``iterations``: of each phase. Survivors are unknown, so later phases take the median iteration time; the log2(n)
    + 1 phases of n jobs end with one. Raises :class:`OptionError` when the phases outnumber the halvings.
    """
    if len(iterations) > max(len(jobs), 1).bit_length():
        raise OptionError(
            f"{len(jobs)} jobs can be halved into {len(jobs).bit_length()} phases; got {len(iterations)}"
        )
    median = float(np.median([job.serial_time for job in jobs]))
    phases = []
    for number, rounds in enumerate(iterations):
        members = jobs if number == 0 else [replace(jobs[0], serial_time=median)] * (len(jobs) >> number)
        phases.append(tuple(replace(job, iterations=rounds) for job in members))
    return tuple(phases)


@dataclass(slots=True)
class ActiveAverage:
    """The time-weighted average of the number of active apps over an app's life (N_avg)."""

    start: float  # s
    count: float  # apps active now, itself included
    area: float = 0.0  # app-seconds
    at: float | None = None

    def update(self, now: float, count: float) -> None:
        """Note that ``count`` apps are active from ``now`` on."""
        self.area += (now - (self.start if self.at is None else self.at)) * self.count
        self.at, self.count = now, count

    def value(self, now: float) -> float:
        """Return the average until ``now``; the present count at the start."""
        last = self.start if self.at is None else self.at
        span = now - self.start
        return (self.area + (now - last) * self.count) / span if span > 0 else self.count
