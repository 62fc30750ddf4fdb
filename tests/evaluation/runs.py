"""Simulated runs as the experiments keep them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ebbflow.infra.simulation.engine import Result

Run = dict[str, Any]


def kept(result: Result) -> Run:
    """Return of a run what pages are made of: per job its times, and a few totals."""
    jobs = {
        "name": [job.name for job in result.jobs],
        "model": [job.model for job in result.jobs],
        "gpus": [job.gpus for job in result.jobs],
        "arrival": [job.arrival for job in result.jobs],
        "start": [job.start for job in result.jobs],
        "finish": [job.finish for job in result.jobs],
        "run": [job.run_time for job in result.jobs],
        "restarts": [job.restarts for job in result.jobs],
    }
    first = min(job.arrival for job in result.jobs)
    last = max(job.finish for job in result.jobs)
    return {
        "jobs": jobs,
        "rejected": len(result.rejected),
        "gpu_hours": result.gpu_hours,
        "utilisation": result.usage.utilisation(first, last),
        "decisions": result.decisions,
        "policy_s": result.policy_seconds,
        "notes": dict(result.notes),
    }


def column(run: Run, name: str) -> np.ndarray[Any, Any]:
    """Return one column of the jobs."""
    return np.array(run["jobs"][name])


def jct(run: Run) -> np.ndarray[Any, Any]:
    """Return completion times, s."""
    return np.asarray(column(run, "finish") - column(run, "arrival"))


def waited(run: Run) -> np.ndarray[Any, Any]:
    """Return the time that each job did not hold GPUs, s."""
    return np.asarray(np.maximum(jct(run) - column(run, "run"), 0.0))


def makespan(run: Run) -> float:
    """Return the time from the first arrival to the last finish, s."""
    return float(column(run, "finish").max() - column(run, "arrival").min())


def average(values: Sequence[float]) -> float:
    """Return the mean."""
    return float(np.mean(values))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, least and largest."""
    return float(np.mean(values)), float(np.min(values)), float(np.max(values))


def ratios(over: Sequence[Run], under: Sequence[Run], measure: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return, for each measure of completion times, its ratio in each pair of runs."""
    return {
        name: [float(of(jct(a)) / of(jct(b))) for a, b in zip(over, under, strict=True)]
        for name, of in measure.items()
    }


MEASURES: dict[str, Any] = {
    "average": np.mean,
    "median": np.median,
    "95th percentile": lambda values: np.percentile(values, 95),
}
