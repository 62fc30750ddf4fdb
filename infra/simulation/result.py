"""What a simulated run gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ebbflow.infra.simulation.metrics import Contention, JobResult, as_dict, finish_time_fairness, summary
from ebbflow.infra.simulation.usage import Usage


@dataclass(frozen=True, slots=True)
class RejectedJob:
    """A job that was not admitted, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a run gave. ``jobs`` are in the order of the workload, without the ``rejected``."""

    workload: str
    policy: str
    seed: int
    jobs: tuple[JobResult, ...]
    rejected: tuple[RejectedJob, ...]
    gpu_hours: float  # held
    dollars: float  # for all nodes that were there, first arrival to last finish, at their list price
    policy_seconds: float  # CPU
    intervals: int  # ticks; 0 by events
    decisions: int
    usage: Usage = field(compare=False, default_factory=Usage)
    notes: Mapping[str, float] = field(default_factory=dict)  # the policy's figures, mean over its decisions

    def summary(self) -> dict[str, float]:
        """Return the figures of the run by name."""
        return summary(
            self.jobs, gpu_hours=self.gpu_hours, dollars=self.dollars, policy_seconds=self.policy_seconds
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON fields of the run: its figures, jobs and rejected jobs."""
        head = {"workload": self.workload, "policy": self.policy, "seed": self.seed}
        rejected = [{"name": job.name, "reason": job.reason} for job in self.rejected]
        return {**head, **self.summary(), "jobs": [as_dict(job) for job in self.jobs], "rejected": rejected}


def result_of(
    jobs: Sequence[JobResult],
    rejected: tuple[RejectedJob, ...],
    usage: Usage,
    contention: Contention,
    **metrics: Any,
) -> Result:
    """Return the result of a run whose jobs have no ρ yet; ``metrics`` are the remaining fields."""
    gpus = max(usage.capacity.values, default=0.0)
    submitted = len(jobs) + len(rejected)
    rhos = finish_time_fairness(jobs, gpus, contention, submitted=submitted) if jobs else []
    first = min((job.arrival for job in jobs), default=0.0)
    last = max((job.finish for job in jobs), default=0.0)
    return Result(
        jobs=tuple(replace(job, rho=rho) for job, rho in zip(jobs, rhos, strict=True)),
        rejected=rejected,
        usage=usage,
        dollars=usage.price.integral(first, last) / 3600,
        **metrics,
    )
