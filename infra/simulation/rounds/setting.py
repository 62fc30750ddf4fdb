"""What a round-based simulation is given and gives back: the rules of two simulators, the cluster, the outcome."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any, NamedTuple

import numpy as np

from ebbflow.infra.simulation.metrics import JobResult, summary
from ebbflow.planners.model.capacity import Capacity, Node


@dataclass(frozen=True, slots=True)
class Rules:
    """Where the two simulators differ. Times in seconds."""

    name: str
    round_s: float
    reset_s: float  # least time between allocations, for the policy
    overhead_s: float  # lost by a job that did not run in the round before
    overhead_slack_s: float  # a micro-round shorter than the round by more than this loses nothing
    fails_on_either: bool  # no steps or no time is a failure; else only both are
    batches_change: bool
    failed_jobs_count: bool  # a job removed after failures has a completion time
    stops_when_idle: bool  # even with arrivals outstanding
    longest_run: float  # times the run time alone, after which a job counts as done; 0: never
    failures: int = 5  # in a row, after which a job is removed
    reference: str = "v100"  # GPU type of the run alone


SHOCKWAVE = Rules("shockwave", 120.0, 1000.0, 20.0, 5.0, False, True, True, True, 1.5)
GAVEL = Rules("gavel", 360.0, 1920.0, 0.0, 0.0, True, False, False, False, 0.0)


class Dropped(NamedTuple):
    """A job without a completion time, and why."""

    number: int
    status: str  # `rejected`, `removed` or `unfinished`
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to. Every job of the trace is in ``jobs`` or in ``dropped``, in its order."""

    policy: str
    jobs: tuple[JobResult, ...]  # ρ is time over (time alone × jobs per GPU), five digits
    dropped: tuple[Dropped, ...]
    makespan: float  # clock when the last job was booked, s
    rounds: tuple[float, ...]  # start of each, s
    chosen: tuple[tuple[tuple[int, str], ...], ...]  # who ran where in each round: job, GPU type
    allocations: tuple[float, ...]  # when the policy computed shares anew, s
    busy: float  # GPU-seconds
    gpus: int

    @property
    def utilisation(self) -> float:
        """Return busy GPU time over all GPU time."""
        return self.busy / (self.gpus * self.makespan) if self.makespan else 0.0

    def summary(self, policy_seconds: float = nan) -> dict[str, float]:
        """Return the figures of the run under the names that all simulated runs share, and ``utilisation``."""
        figures = summary(self.jobs, gpu_hours=self.busy / 3600, dollars=nan, policy_seconds=policy_seconds)
        return figures | {"makespan_s": self.makespan, "utilisation": self.utilisation}


def python_generator(seed: int) -> np.random.Generator:
    """Return a generator whose 32-bit words are those of Python's ``random.Random(seed)``, for seeds below 2³²."""
    twister = np.random.MT19937()
    state: Any = np.random.RandomState([seed]).get_state(legacy=False)
    twister.state = state
    return np.random.Generator(twister)


def gpu_cluster(gpus: Mapping[str, int], per_node: int = 1) -> Capacity:
    """Return that many GPUs of each type, on nodes of ``per_node``."""
    nodes: list[Node] = []
    for gpu, count in gpus.items():
        sizes: Iterable[int] = [per_node] * (count // per_node) + (
            [count % per_node] if count % per_node else []
        )
        nodes += [
            Node(f"{gpu}-{n:04d}", cores=size, memory=16.0 * size, instance_type=gpu, gpus=size)
            for n, size in enumerate(sizes)
        ]
    return Capacity(0, tuple(sorted(nodes, key=lambda node: node.id)))
