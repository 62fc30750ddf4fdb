"""What commands do for the aggregation service: simulate which servers the trainings of a trace occupy."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ebbflow.planners.aggregation.assignment import HeuristicOptions
from ebbflow.planners.aggregation.simulator import (
    IdealPacking,
    OnDemand,
    Periodic,
    PrivateServers,
    ServerPolicy,
    ServerUsage,
    simulate,
)
from ebbflow.planners.aggregation.workload import REDUCTION_RATE, TraceJob, WorkloadOptions, with_profiles
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.simulation.sources import Source


@dataclass(frozen=True, slots=True)
class AggregationSimulation:
    """What is simulated. Raises ``OptionError`` for a value that breaks its rule.

    Args:
        workload: file or name of jobs with durations.
        seed: draws what a trace lacks: models and iterations.
        loss_limit: largest fraction of its speed that a training may lose by sharing, above 0 and below 1.
        period_s: seconds between two scalings of the policies that have periods.
        threshold: missing aggregators that the hybrid policy tolerates within a period.
        slowdown: how many times longer servers take to sum and update than measured for VGG19 on one server.
    """

    workload: str = "philly:200"
    seed: int = 0
    loss_limit: float = 0.1
    period_s: float = 600.0
    threshold: int = 1
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.loss_limit < 1:
            raise OptionError(f"--loss-limit must be above 0 and below 1; got {self.loss_limit:g}")
        if not self.period_s > 0:
            raise OptionError(f"--period must be above 0 seconds; got {self.period_s:g}")
        if self.threshold < 0:
            raise OptionError(f"--threshold must be at least 0; got {self.threshold}")
        if not 0 < self.slowdown <= 1e6:
            raise OptionError(f"--slowdown must be above 0 and at most 1e6; got {self.slowdown:g}")

    @property
    def policies(self) -> Mapping[str, ServerPolicy]:
        """Return new policies by name, from most to least."""
        options = HeuristicOptions(Fraction(self.loss_limit).limit_denominator(10_000))
        return {
            "private": PrivateServers(),
            "periodic": Periodic(self.period_s, None, options),
            "hybrid": Periodic(self.period_s, self.threshold, options),
            "on-demand": OnDemand(options),
            "ideal": IdealPacking(),
        }

    def jobs(self) -> list[TraceJob]:
        """Return the trainings. Raises ``OptionError`` and ``WorkloadError``."""
        loaded = Source(self.workload).load(self.seed)
        if loaded.workload is None or loaded.kind != "durations":
            raise OptionError(f"--workload must be jobs with durations; {self.workload} has none")
        rows = [
            (job.id, job.arrival, job.gpus, job.duration)
            for job in loaded.workload.jobs
            if job.duration is not None
        ]
        options = WorkloadOptions(reduction_rate=REDUCTION_RATE / self.slowdown)
        return with_profiles(rows, np.random.default_rng(self.seed), options)

    def run(self) -> list[dict[str, Any]]:
        """Return the figures of each policy. Raises ``OptionError`` and ``WorkloadError``."""
        jobs = self.jobs()
        found = []
        for name, policy in self.policies.items():
            usage = simulate(jobs, policy, loss_limit=self.loss_limit)
            found.append({"policy": name, **figures(usage)})
        return found


def figures(usage: ServerUsage) -> dict[str, Any]:
    """Return what trainings occupied, as plain values; fractions from 0 to 1, times in hours."""
    return {
        "server_hours": usage.allocated_s / 3600,
        "saving": usage.saving,
        "fraction_below": usage.share_below,
        "largest_ratio": usage.worst_ratio,
        "moves": usage.moves,
        "hours_over_limit": usage.over_limit_s / 3600,
    }
