"""Measures of a simulated run (AdaptDL's and Shockwave's definitions, and Themis' finish-time fairness)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isnan, nan
from typing import Literal

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import UNFAIR

Contention = Literal["static", "lifetime", "share"]
"""What a job's time alone is multiplied by; see ``finish_time_fairness``."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of one job; all times in s."""

    name: str
    arrival: float
    start: float
    finish: float
    restarts: int  # placements after the first
    gpus: int  # asked for
    alone: float  # time on its GPUs alone; NaN: unknown
    rho: float = nan  # finish-time fairness
    gpu_seconds: float = 0.0  # held until it finished
    lost_gpu_seconds: float = 0.0  # trained, and lost with a node
    run_time: float = 0.0  # holding GPUs
    score: float = 1.0  # placement score, mean over held GPU time
    team: str = ""
    model: str = ""

    @property
    def jct(self) -> float:
        """Return the completion time: from arrival to finish."""
        return self.finish - self.arrival


def finish_time_fairness(
    jobs: Sequence[JobResult], gpus: float, contention: Contention = "static", *, submitted: int | None = None
) -> list[float]:
    """Return ρ of each job: its completion time over the time that a fair share would have taken.

    - ``static``: time alone x max(1, N/G), N all ``submitted`` jobs, G ``gpus`` (Shockwave, NSDI 2023, artefact).
    - ``lifetime``: time alone x the mean number of active jobs, itself included, over its life (Themis, NSDI 2020).
    - ``share``: time alone on a private 1/N of the GPUs, N that mean: alone x max(1, K N/G) for a gang of K.

    Raises:
        OptionError: unknown ``contention`` or no GPUs.
    """
    if gpus <= 0:
        raise OptionError(f"gpus must be > 0; got {gpus}")
    if contention == "static":
        factor = max(1.0, (len(jobs) if submitted is None else submitted) / gpus)
        return [job.jct / (job.alone * factor) for job in jobs]
    mean = mean_active(jobs)
    if contention == "lifetime":
        return [job.jct / (job.alone * active) for job, active in zip(jobs, mean, strict=True)]
    if contention == "share":
        return [
            job.jct / (job.alone * max(1.0, job.gpus * active / gpus))
            for job, active in zip(jobs, mean, strict=True)
        ]
    raise OptionError(f"contention must be static, lifetime or share; got {contention!r}")


def mean_active(jobs: Sequence[JobResult]) -> list[float]:
    """Return for each job the mean number of jobs between arrival and finish during its own such time."""
    moves = sorted([(job.arrival, 1) for job in jobs] + [(job.finish, -1) for job in jobs])
    times = np.array([time for time, _ in moves])
    active = np.array(list(accumulate(step for _, step in moves)), float)
    areas = np.concatenate([[0.0], np.cumsum(active[:-1] * np.diff(times))])
    means = []
    for job in jobs:
        start, end = np.interp([job.arrival, job.finish], times, areas)
        means.append(float((end - start) / job.jct) if job.jct > 0 else 1.0)
    return means


def jain(values: Sequence[float]) -> float:
    """Return Jain's index (Σx)²/(n Σx²): 1 if all are equal, 1/n if one has everything; NaN without values."""
    if not values:
        return nan
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def summary(
    jobs: Sequence[JobResult], *, gpu_hours: float, dollars: float, policy_seconds: float
) -> dict[str, float]:
    """Return the figures of a run; NaN where there is nothing to measure. Percentiles are linear.

    The placement score is weighted by GPU time.
    """
    if not jobs:
        names = "avg_jct_s p50_jct_s p90_jct_s p99_jct_s max_jct_s makespan_s worst_rho jain_rho unfair_pct"
        empty = dict.fromkeys([*names.split(), "restarts_mean", "placement_score"], nan)
        return empty | {"gpu_hours": gpu_hours, "dollars": dollars, "policy_seconds": policy_seconds}
    jcts = np.array([job.jct for job in jobs])
    rhos = [job.rho for job in jobs if not isnan(job.rho)]
    held = sum(job.gpu_seconds for job in jobs)
    p50, p90, p99 = (float(value) for value in np.percentile(jcts, [50, 90, 99]))
    return {
        "avg_jct_s": float(jcts.mean()),
        "p50_jct_s": p50,
        "p90_jct_s": p90,
        "p99_jct_s": p99,
        "max_jct_s": float(jcts.max()),
        "makespan_s": max(job.finish for job in jobs) - min(job.arrival for job in jobs),
        "worst_rho": max(rhos, default=nan),
        "jain_rho": jain(rhos),
        "unfair_pct": 100 * sum(rho > UNFAIR for rho in rhos) / len(rhos) if rhos else nan,
        "gpu_hours": gpu_hours,
        "dollars": dollars,
        "restarts_mean": sum(job.restarts for job in jobs) / len(jobs),
        "placement_score": sum(job.score * job.gpu_seconds for job in jobs) / held if held else nan,
        "policy_seconds": policy_seconds,
    }


def as_dict(job: JobResult) -> Mapping[str, float | int | str | None]:
    """Return the JSON fields of one job; an unknown ρ is ``None``."""
    return {
        "name": job.name,
        "arrival": job.arrival,
        "start": job.start,
        "finish": job.finish,
        "restarts": job.restarts,
        "rho": None if isnan(job.rho) else job.rho,
    }
