"""The experiments on Pollux: its workloads of 160 jobs on 16 nodes of 4 GPUs, and one job on rented nodes."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.engine import Result, simulate
from ebbflow.infra.simulation.jobs.adaptdl import AdaptdlJob, AgentOf, adaptdl_jobs, packed
from ebbflow.infra.simulation.jobs.profiles import Profile, Profiles
from ebbflow.infra.simulation.metrics import mean_active
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.workloads import Job, Workload, read_adaptdl
from ebbflow.planners.model.scheduling import Policy
from ebbflow.planners.scheduling.gangs.optimus import Optimus
from ebbflow.planners.scheduling.gangs.tiresias import Tiresias
from ebbflow.planners.scheduling.goodput.objective import Objective
from ebbflow.planners.scheduling.goodput.pollux import Pollux
from ebbflow.planners.scheduling.placement import most_free_first
from ebbflow.planners.training.speed.batch_agent import GoodputAgent
from ebbflow.tasks.simulation import sources
from ebbflow.tasks.simulation.scenarios import goodput_agent
from tests.evaluation.experiments import Experiment
from tests.evaluation.pollux.node_scaling import NodeScaling
from tests.evaluation.pollux.trials import LOCAL_BATCHES, TRIALS, trials
from tests.evaluation.runs import Run, kept

DATA = sources.DATA / "adaptdl"
NODES, PER_NODE = 16, 4
GPUS = NODES * PER_NODE
WORKLOADS = (1, 2, 3, 4)
SEEDS = (0, 1)
INTERVALS = (30.0, 120.0, 240.0, 480.0)  # s, besides 60
EXPONENTS = (1.0, -10.0)  # besides -1
SLOWDOWNS = (0.0, 0.25, 0.5)
LOADS: dict[str, tuple[tuple[int, ...], ...]] = {
    "0.5": ((-1,), (-2,), (-3,), (-4,)),
    "1.5": ((1, -2), (2, -3), (3, -4), (4, -1)),
    "2.0": ((1, 2), (3, 4)),
}
"""Workloads that are run together; a minus takes every second job of one."""

POLICIES = ("pollux", "tiresias", "optimus")


@cache
def profiles() -> Profiles:
    """Return the measured applications."""
    return Profiles(DATA / "traces")


@cache
def workload(parts: tuple[int, ...], jobs: int | None = None) -> Workload:
    """Return the jobs of some workloads together, by arrival; the first ``jobs`` of each."""
    found: list[Job] = []
    for part in parts:
        read = read_adaptdl(DATA / "workloads" / f"workload-{abs(part)}.csv", profiles()).jobs[:jobs]
        found += [replace(job, id=f"w{abs(part)}-{job.id}") for job in (read[::2] if part < 0 else read)]
    found.sort(key=lambda job: job.arrival)
    return Workload("pollux-" + "+".join(map(str, parts)), tuple(found))


def shared(
    policy: str,
    parts: list[int],
    seed: int = 0,
    interval: float = 60.0,
    p: float = -1.0,
    avoid: bool = True,
    slowdown: float = 0.0,
    seeded: bool = False,
    jobs: int | None = None,
) -> Run:
    """Run a workload under one policy; jobs carry ρ by their own policy's way of training."""
    agent: AgentOf | None = None
    chosen: Policy
    if policy == "pollux":
        agent = _seeded if seeded else goodput_agent
        chosen = Pollux(objective=Objective(p=p, avoid_interference=avoid))
    elif policy == "tiresias":
        chosen = Tiresias((57_600.0,), order="insertion", placer=most_free_first)
    else:
        chosen = Optimus()
    result = simulate(
        workload(tuple(parts), jobs),
        Cluster.grid(NODES, PER_NODE),
        chosen,
        models=adaptdl_jobs(profiles(), agent=agent, per_node=PER_NODE),
        tick=interval,
        restart_delay=30.0,
        interference=slowdown,
        seed=seed,
    )
    run = kept(result)
    run["jobs"]["rho"] = _rhos(result, workload(tuple(parts), jobs), policy == "pollux")
    return run


def _rhos(result: Result, given: Workload, adaptive: bool) -> list[float]:
    """Return each completion time over the time alone on an equal share of the cluster during the job's life."""
    by_id = {job.id: job for job in given.jobs}
    rhos = []
    for job, active in zip(result.jobs, mean_active(result.jobs), strict=True):
        share = max(1, round(GPUS / active))
        batch = by_id[job.name].batch
        rhos.append(job.jct / alone(job.model, batch or 0, share, adaptive))
    return rhos


@cache
def alone(application: str, batch: int, gpus: int, adaptive: bool) -> float:
    """Return the seconds that a job takes alone on ``gpus`` packed GPUs, or on as many of them as it can use."""
    profile = profiles()[application]
    job = Job("alone", 0.0, 1, model=application, batch=batch)
    if adaptive:
        agent = goodput_agent(job, profile)
        model = AdaptdlJob(job, profile, batch, agent, PER_NODE, whole_seconds=False)
        model.place(_nodes(min(gpus, agent.most_gpus)), {})
        seconds = 0.0
        while not model.done:
            seconds += model.advance(60.0)
        return seconds
    most = max(1, batch // profile.local_min)
    if profile.most_gpus is not None:
        most = min(most, profile.most_gpus)
    times = []
    for count in range(1, min(gpus, most) + 1):
        try:
            times.append(_fixed(job, profile, batch, count))
        except WorkloadError:  # a batch that was not measured on so many GPUs
            continue
    return min(times)


def _fixed(job: Job, profile: Profile, batch: int, gpus: int) -> float:
    one = replace(job, gpus=gpus)
    model: Callable[[Job], AdaptdlJob] = adaptdl_jobs({profile.name: profile}, per_node=PER_NODE)
    found = model(one)
    found.place(_nodes(gpus), {})
    return found.horizon()


def _nodes(gpus: int) -> tuple[tuple[str, int], ...]:
    return tuple((f"n{number}", count) for number, count in enumerate(packed(gpus, PER_NODE)))


def _seeded(job: Job, profile: Profile) -> GoodputAgent:
    """Return an agent that knows its application's speed from earlier jobs, on 1 to 32 packed GPUs."""
    agent = goodput_agent(job, profile)
    sqr, var = profile.gradient(profile.first_batch, 0)
    for gpus in (1, 2, 4, 8, 16, 32):
        if gpus > agent.most_gpus:
            break
        counts = packed(gpus, PER_NODE)
        for local in {profile.local_min, (profile.local_min + profile.local_max) // 2, profile.local_max}:
            try:
                step, sync = profile.speed(counts, local)
            except WorkloadError:
                continue
            agent.observe(len(counts), gpus, local, 0, step, sync, sqr, var)
    return agent


def scaled(by_goodput: bool, explore: float, application: str = "imagenet") -> Run:
    """Run one job on nodes that it rents as it needs them; ``nodes`` are [s, nodes] whenever they change."""
    job = Job("job", 0.0, 1, model=application, batch=None)
    found: dict[str, Any] = {application: profiles()[application]}
    result = simulate(
        Workload("one-job", (job,)),
        Cluster.grid(NODES, PER_NODE),
        NodeScaling(by_goodput=by_goodput, explore=explore),
        models=adaptdl_jobs(found, agent=goodput_agent, per_node=PER_NODE),
        tick=60.0,
        restart_delay=30.0,
    )
    run = kept(result)
    steps = result.usage.held
    run["nodes"] = [[time, value / PER_NODE] for time, value in zip(steps.times, steps.values, strict=True)]
    return run


def experiments(quick: bool) -> list[Experiment]:
    """Return all of them; the quick ones use the first jobs of each workload, and fewer settings."""
    jobs = 10 if quick else None
    sets = WORKLOADS[:1] if quick else WORKLOADS
    seeds = SEEDS[:1] if quick else SEEDS
    weights = {"pollux": 7.0, "tiresias": 0.5, "optimus": 1.0}
    made: list[Experiment] = []

    def add(name: str, weight: float = 1.0, **parameters: Any) -> None:
        given = {"jobs": jobs} | parameters
        cost = weight * weights[parameters["policy"]] * (0.05 if quick else 1.0)
        made.append(Experiment(name, shared, given, cost))

    for number in sets:
        for policy in POLICIES:
            for seed in seeds if policy == "pollux" else (0,):
                add(f"{policy}-{number}-seed-{seed}", policy=policy, parts=[number], seed=seed)
        for interval in INTERVALS:
            add(
                f"interval-{interval:g}-{number}",
                0.2 + 48 / interval,
                policy="pollux",
                parts=[number],
                interval=interval,
            )
        for slowdown in SLOWDOWNS:
            add(
                f"beside-{slowdown:g}-{number}",
                policy="pollux",
                parts=[number],
                avoid=False,
                slowdown=slowdown,
            )
        for p in EXPONENTS:
            add(f"p-{p:g}-{number}", policy="pollux", parts=[number], p=p)
        add(f"seeded-{number}", policy="pollux", parts=[number], seeded=True)
    add("avoiding-0.5-1", policy="pollux", parts=[1], slowdown=0.5)
    for load, groups in LOADS.items():
        for number, parts in enumerate(groups[: len(sets)]):
            for policy in POLICIES:
                add(
                    f"load-{load}-{policy}-{number + 1}",
                    float(load) ** 1.5,
                    policy=policy,
                    parts=list(parts),
                )
    application = "cifar10" if quick else "imagenet"
    for by_goodput in (True, False):
        for explore in (2.0, 16.0):
            name = f"scaling-{'goodput' if by_goodput else 'throughput'}-{explore:g}"
            parameters = {"by_goodput": by_goodput, "explore": explore, "application": application}
            made.append(Experiment(name, scaled, parameters, 2.0))
    count = 8 if quick else TRIALS
    for seed in seeds:
        for policy in ("pollux", "promising"):
            given = {"policy": policy, "seed": seed, "count": count}
            made.append(Experiment(f"trials-{policy}-{seed}", trials, given, 1.0))
        for local in LOCAL_BATCHES:
            given = {"policy": "fixed", "seed": seed, "count": count, "local": local}
            made.append(Experiment(f"trials-fixed-{local}-{seed}", trials, given, 0.1))
    return made
