"""The experiments on Tiresias: the testbed's 480 jobs on 60 GPUs, and a trace like Microsoft's."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.jobs.plain import Locality, plain_jobs
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.generators import WEEK, philly_like, tiresias_testbed
from ebbflow.infra.simulation.traces.workloads import Workload
from ebbflow.planners.model.scheduling import App, Placement, Policy
from ebbflow.planners.model.skew import TENSORS, is_skewed
from ebbflow.planners.scheduling.gangs.gittins import ServiceDistribution
from ebbflow.planners.scheduling.gangs.ordered import best_effort, smallest_first, srsf, srtf, yarn_cs
from ebbflow.planners.scheduling.gangs.tiresias import Tiresias
from ebbflow.planners.scheduling.placement import FreeCapacity, Placer, by_skew
from tests.evaluation.experiments import Experiment
from tests.evaluation.runs import Run, kept
from tests.evaluation.tiresias.time_sharing import TimeSharing

TESTBED = (15, 4)  # nodes, GPUs each
TESTBED_QUEUE = 3200.0  # GPU-s
TESTBED_SEEDS = (0, 1, 2, 3, 4, 5)
PREEMPTION = 60.0  # s: the testbed's seconds over its preemptions are 57 to 62

TRACE = (32, 8)
TRACE_JOBS = 2800
TRACE_WEEKS = 4.0
TRACE_SEEDS = (0, 1, 2)
HOUR = 3600.0

SLOWDOWN = 1.67  # of a skewed model that is spread: the largest that the testbed saw

POLICIES = (
    "yarn-cs",
    "best-effort",
    "srtf",
    "srsf",
    "smallest-first",
    "time-sharing",
    "tiresias-g",
    "tiresias-l",
)
THRESHOLDS = (0.5, 1.0, 2.0, 4.0)  # GPU-hours
QUEUES: tuple[tuple[float, ...], ...] = ((1.0,), (1.0, 2.0), (1.0, 2.0, 4.0))
KNOBS = (1.0, 2.0, 4.0, 8.0)


def on_testbed(policy: str, seed: int, preemption: float = 0.0, jobs: int | None = None) -> Run:
    """Run the testbed's workload; every preemption costs a job ``preemption`` s."""
    given = tiresias_testbed(np.random.default_rng(seed))
    given = given.first(jobs) if jobs else given
    return _run(given, TESTBED, _policy(policy, given, (TESTBED_QUEUE,)), preemption)


def on_trace(
    policy: str,
    seed: int,
    thresholds: Sequence[float] = (1.0,),
    knob: float | None = None,
    jobs: int = TRACE_JOBS,
) -> Run:
    """Run the trace; ``thresholds`` in GPU-hours."""
    given = _trace(seed, jobs)
    ends = tuple(HOUR * value for value in thresholds)
    return _run(given, TRACE, _policy(policy, given, ends, knob), 0.0)


def placed(by: str, seed: int, jobs: int | None = None) -> Run:
    """Run the testbed's workload under 2D-LAS with GPUs taken by skew, or at random.

    A gang of a skewed model that one node could hold but does not is slowed down.
    """
    given = tiresias_testbed(np.random.default_rng(seed))
    given = given.first(jobs) if jobs else given
    placer: Placer = by_skew if by == "skew" else anywhere(np.random.default_rng([seed, 1]))
    slow = Locality(rack=SLOWDOWN, cluster=SLOWDOWN)
    models = plain_jobs({model: slow for model in TENSORS if is_skewed(model)})
    result = simulate(
        given,
        Cluster.grid(*TESTBED),
        Tiresias((TESTBED_QUEUE,), placer=placer),
        models=models,
        restart_delay=0.0,
    )
    return kept(result)


@cache
def _trace(seed: int, jobs: int) -> Workload:
    span = TRACE_WEEKS * WEEK * jobs / TRACE_JOBS
    return philly_like(np.random.default_rng(seed), jobs, span=span)


def offered_load(seed: int, jobs: int = TRACE_JOBS) -> float:
    """Return the GPU time that the trace's jobs ask for over what there is while they arrive."""
    given = _trace(seed, jobs)
    asked = sum((job.duration or 0.0) * job.gpus for job in given.jobs)
    return asked / (TRACE_WEEKS * WEEK * jobs / TRACE_JOBS * TRACE[0] * TRACE[1])


def _run(given: Workload, shape: tuple[int, int], policy: Policy, preemption: float) -> Run:
    result = simulate(given, Cluster.grid(*shape), policy, restart_delay=preemption, start_delay=0.0)
    return kept(result)


def _policy(name: str, given: Workload, ends: tuple[float, ...], knob: float | None = None) -> Policy:
    promote = float("inf") if knob is None else knob
    if name == "tiresias-l":
        return Tiresias(ends, promote_knob=promote)
    if name == "tiresias-g":
        services = [(job.duration or 0.0) * job.gpus for job in given.jobs]
        return Tiresias(ends, promote_knob=promote, distribution=ServiceDistribution(services), refresh=600.0)
    makers: dict[str, Callable[[], Policy]] = {
        "yarn-cs": yarn_cs,
        "best-effort": best_effort,
        "srtf": srtf,
        "srsf": srsf,
        "smallest-first": smallest_first,
        "time-sharing": lambda: TimeSharing(60.0 if given.name.startswith("tiresias") else 600.0),
    }
    return makers[name]()


def anywhere(rng: np.random.Generator) -> Placer:
    """Return a placer that takes free GPUs at random."""

    def place(room: FreeCapacity, app: App, gpus: int) -> Placement | None:
        if room.total < gpus:
            return None
        free = np.repeat(np.arange(len(room.free)), room.free)
        nodes, counts = np.unique(rng.choice(free, gpus, replace=False), return_counts=True)
        return room.take([(int(at), int(count)) for at, count in zip(nodes, counts, strict=True)])

    return place


def experiments(quick: bool) -> list[Experiment]:
    """Return all of them; the quick ones use fewer jobs and seeds."""
    testbed_seeds, trace_seeds = (
        (TESTBED_SEEDS[:1], TRACE_SEEDS[:1]) if quick else (TESTBED_SEEDS, TRACE_SEEDS)
    )
    few = {"jobs": 60} if quick else {}
    made: list[Experiment] = []

    def add(name: str, run: Callable[..., Run], weight: float, **parameters: Any) -> None:
        made.append(Experiment(name, run, parameters, weight))

    for seed in testbed_seeds:
        for policy in POLICIES:
            add(f"testbed-{policy}-{seed}", on_testbed, 0.2, policy=policy, seed=seed, **few)
        for policy in ("tiresias-l", "tiresias-g", "srtf"):
            name = f"testbed-60-{policy}-{seed}"
            add(name, on_testbed, 0.2, policy=policy, seed=seed, preemption=PREEMPTION, **few)
        for by in ("skew", "random"):
            add(f"placed-{by}-{seed}", placed, 0.2, by=by, seed=seed, **few)
    for seed in trace_seeds:
        for policy in POLICIES:
            add(f"trace-{policy}-{seed}", on_trace, 1.0, policy=policy, seed=seed, **few)
        for policy in ("tiresias-l", "tiresias-g"):
            for threshold in THRESHOLDS:
                name = f"trace-{policy}-threshold-{threshold:g}-{seed}"
                add(name, on_trace, 1.0, policy=policy, seed=seed, thresholds=[threshold], **few)
            for knob in KNOBS:
                name = f"trace-{policy}-knob-{knob:g}-{seed}"
                add(name, on_trace, 1.0, policy=policy, seed=seed, knob=knob, **few)
        for ends in QUEUES[1:]:
            name = f"trace-tiresias-l-queues-{len(ends) + 1}-{seed}"
            add(name, on_trace, 1.0, policy="tiresias-l", seed=seed, thresholds=list(ends), **few)
        made.append(Experiment(f"load-{seed}", offered_load, {"seed": seed, **few}, 0.0))
    return made
