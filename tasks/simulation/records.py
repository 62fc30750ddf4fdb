"""What one simulated run came to, as a JSON value: the same whatever engine ran it, fresh or from the cache."""

from collections.abc import Mapping, Sequence
from math import isfinite, isnan, nan
from typing import Any

from ebbflow.infra.simulation.engine import Result
from ebbflow.infra.simulation.metrics import JobResult, summary
from ebbflow.infra.simulation.rounds.setting import Outcome
from ebbflow.infra.simulation.usage import Steps, Usage
from ebbflow.planners.model.scheduling import App

FORMAT = 1  # of a record; grows when a key changes its meaning

METRICS = (
    "avg_jct_s", "p50_jct_s", "p90_jct_s", "p99_jct_s", "makespan_s", "worst_rho", "jain_rho", "unfair_pct",
    "gpu_hours", "dollars", "restarts_mean", "placement_score", "policy_seconds",
)  # fmt: skip
JOB_FIELDS = ("name", "arrival", "start", "finish", "restarts", "rho")

Record = dict[str, Any]


def of_result(result: Result, submitted: int, on_demand: float | None, notes: Sequence[str]) -> Record:
    """Return the record of an interval- or event-driven run; ``on_demand`` dollars, ``None`` without list prices."""
    return _record(
        result.policy,
        result.seed,
        result.summary(),
        result.jobs,
        [{"name": job.name, "reason": job.reason} for job in result.rejected],
        result.usage,
        submitted,
        {
            "dollars_on_demand": on_demand,
            "decisions": result.decisions,
            "policy_notes": {name: _number(value) for name, value in result.notes.items()},
        },
        notes,
    )


def of_outcome(
    outcome: Outcome,
    gangs: Mapping[str, App],
    seed: int,
    policy_seconds: float,
    notes: Sequence[str],
    hourly: float,
) -> Record:
    """Return the record of a run in rounds. ``gangs`` are the apps by job, ``hourly`` $/h of the whole cluster."""
    usage = Usage()
    usage.capacity.set(outcome.rounds[0] if outcome.rounds else 0.0, outcome.gpus)
    held: dict[str, int] = {}
    for at, chosen in zip(outcome.rounds, outcome.chosen, strict=True):
        now = {str(job): gangs[str(job)].gpus for job, _ in chosen}
        for app in held.keys() - now.keys():
            usage.note(at, app, 0)
        for app, gpus in now.items():
            usage.note(at, app, gpus)
        held = now
        usage.held.set(at, sum(now.values()))
    for app in held:
        usage.note(outcome.makespan, app, 0)
    usage.held.set(outcome.makespan, 0)
    dollars = hourly * outcome.makespan / 3600
    usage.price.set(0.0, hourly)
    metrics = summary(
        outcome.jobs, gpu_hours=outcome.busy / 3600, dollars=dollars, policy_seconds=policy_seconds
    ) | {"makespan_s": outcome.makespan}
    rejected = [{"name": str(job.number), "reason": f"{job.status}: {job.reason}"} for job in outcome.dropped]
    more = {
        "dollars_on_demand": dollars if hourly else None,
        "decisions": len(outcome.rounds),
        "policy_notes": {},
    }
    submitted = len(outcome.jobs) + len(outcome.dropped)
    return _record(outcome.policy, seed, metrics, outcome.jobs, rejected, usage, submitted, more, notes)


def _record(
    policy: str,
    seed: int,
    metrics: Mapping[str, float],
    jobs: Sequence[JobResult],
    rejected: list[dict[str, str]],
    usage: Usage,
    submitted: int,
    more: Mapping[str, Any],
    notes: Sequence[str],
) -> Record:
    first = min((job.arrival for job in jobs), default=0.0)
    last = max((job.finish for job in jobs), default=0.0)
    assert len(jobs) + len(rejected) == submitted
    return {
        "format": FORMAT,
        "policy": policy,
        "seed": seed,
        "figures": {name: _number(metrics[name]) for name in METRICS},
        "jobs": [_job(job) for job in jobs],
        "rejected": rejected,
        "submitted": submitted,
        "first_arrival": first,
        "last_finish": last,
        "max_jct_s": _number(metrics["max_jct_s"]),
        "queueing_mean_s": _number(sum(job.start - job.arrival for job in jobs) / len(jobs) if jobs else nan),
        "utilisation": usage.utilisation(first, last) if jobs else 0.0,
        "lost_gpu_hours": sum(job.lost_gpu_seconds for job in jobs) / 3600,
        "usage": {
            "held": _steps(usage.held),
            "capacity": _steps(usage.capacity),
            "price": _steps(usage.price),
            "apps": {app: _steps(steps) for app, steps in usage.apps.items()},
        },
        "notes": list(notes),
        **more,
    }


def _job(job: JobResult) -> dict[str, Any]:
    return {
        "name": job.name,
        "arrival": job.arrival,
        "start": job.start,
        "finish": job.finish,
        "restarts": job.restarts,
        "rho": _number(job.rho),
        "gpus": job.gpus,
        "gpu_seconds": job.gpu_seconds,
        "lost_gpu_seconds": job.lost_gpu_seconds,
        "run_time": job.run_time,
        "alone": _number(job.alone),
        "score": job.score,
        "team": job.team,
        "model": job.model,
    }


def _number(value: float) -> float | None:
    """Return ``value``; ``None`` where there is nothing to measure."""
    return None if isnan(value) or not isfinite(value) else float(value)


def _steps(steps: Steps) -> list[list[float]]:
    return [steps.times, [float(value) for value in steps.values]]


def steps_of(stored: Sequence[Sequence[float]]) -> Steps:
    """Return the step function of a record."""
    return Steps(list(stored[0]), list(stored[1]))


def public(record: Record) -> dict[str, Any]:
    """Return one entry of the JSON file's ``results``."""
    jobs = [{name: job[name] for name in JOB_FIELDS} for job in record["jobs"]]
    head = {name: record[name] for name in ("workload", "policy", "seed")}
    return {**head, **record["figures"], "jobs": jobs, "rejected": record["rejected"]}


def details(record: Record) -> dict[str, Any]:
    """Return what the JSON file's ``details`` say of a run beyond its result."""
    names = (
        "workload", "policy", "seed", "submitted", "max_jct_s", "queueing_mean_s", "utilisation", "dollars_on_demand",
        "lost_gpu_hours", "decisions", "policy_notes", "notes", "cached",
    )  # fmt: skip
    return {name: record[name] for name in names}
