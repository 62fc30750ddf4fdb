"""One run: the world that a workload's kind implies, and the policy with what its apps report.

What runs beside a simulated job and chooses its batch.
"""

from collections.abc import Callable, Mapping
from time import process_time
from typing import Any

import numpy as np

from ebbflow.infra.simulation.engine import Result, simulate
from ebbflow.infra.simulation.faults import slow_nodes, slowed
from ebbflow.infra.simulation.jobs.adaptdl import adaptdl_jobs
from ebbflow.infra.simulation.jobs.plain import plain_jobs
from ebbflow.infra.simulation.jobs.profiles import Profile
from ebbflow.infra.simulation.jobs.tuning import Pause, TunedApp, tuned_apps
from ebbflow.infra.simulation.protocols import ModelOf, Saves
from ebbflow.infra.simulation.rounds.scenario import RoundsScenario
from ebbflow.infra.simulation.rounds.setting import SHOCKWAVE
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.prices import cost
from ebbflow.infra.simulation.traces.workloads import Job
from ebbflow.planners.model.scheduling import App, Decision, Policy, View
from ebbflow.planners.scheduling.catalogue import Entry, Setting
from ebbflow.planners.scheduling.locality import Slowdown
from ebbflow.planners.training.speed.batch_agent import GoodputAgent
from ebbflow.planners.training.speed.batch_size import BatchLimits
from ebbflow.tasks.simulation.bidding import Agents, TunedBidder
from ebbflow.tasks.simulation.informed import NO_SLOWDOWN, PolicyWithReports
from ebbflow.tasks.simulation.inputs import Inputs
from ebbflow.tasks.simulation.records import Record, of_outcome, of_result
from ebbflow.tasks.simulation.sources import Loaded

FIXED_TOTALS: Mapping[str, int] = {"ncf": 32768}  # what the authors of Pollux set by hand, examples


def limits_of(profile: Profile) -> BatchLimits:
    """Return the batches that an application was measured with."""
    return BatchLimits(profile.first_batch, profile.last_batch, profile.local_min, profile.local_max)


def goodput_agent(job: Job, profile: Profile) -> GoodputAgent:
    """Return Pollux's agent for ``job``; the batch and the GPUs that its user asks for do not count."""
    return GoodputAgent(limits_of(profile), FIXED_TOTALS.get(profile.name), profile.most_gpus)


TICK = 60.0  # s between decisions where profiles say how jobs progress (AdaptDL's simulator)
RESTART = 30.0  # s
LONGER = 8  # times that the time with failures is doubled at most

Ended = Callable[[int, int], None] | None
"""Hears of (jobs that ended, jobs)."""


def run_world(inputs: Inputs, loaded: Loaded, entry: Entry, seed: int, ended: Ended) -> Record:
    """Simulate one policy on one workload."""
    if loaded.kind == "rounds":
        return _rounds(inputs, loaded, entry, seed, ended)
    assert loaded.workload is not None
    horizon = 2 * max(job.arrival for job in loaded.workload.jobs) + 2 * 86_400.0
    for attempt in range(LONGER + 1):
        cluster, listed = inputs.cluster(seed, horizon)
        result = _simulate(inputs, loaded, entry, cluster, seed, ended)
        last = max((job.finish for job in result.jobs), default=0.0)
        if not inputs.request.failures or last <= horizon or attempt == LONGER:
            break
        horizon *= 2  # the same failures, and those after them
    inputs.check_prices(last)
    notes = inputs.notes(last)
    if inputs.request.failures and last > horizon:
        notes.append(f"nodes fail until {horizon:,.0f} s only; the last job ends at {last:,.0f} s")
    return of_result(result, len(loaded.workload.jobs), _on_demand(listed, result), notes)


def _simulate(
    inputs: Inputs, loaded: Loaded, entry: Entry, cluster: Cluster, seed: int, ended: Ended
) -> Result:
    request = inputs.request
    assert loaded.workload is not None
    delay = RESTART if request.restart_delay is None else request.restart_delay
    first, tick, models = 0.0, request.interval, plain_jobs()
    policy = _policy(inputs, loaded, entry)
    if loaded.kind == "profiles":
        assert loaded.profiles is not None
        agent = goodput_agent if entry.agents else None
        models = adaptdl_jobs(loaded.profiles, agent=agent, per_node=inputs.spec.per_node)
        first, tick = delay, TICK if request.interval is None else request.interval
    elif loaded.kind == "searches":
        pause = Pause() if request.restart_delay is None else Pause(0.0, delay)
        models, policy = _searches(loaded, cluster, policy, pause)
        delay = 0.0  # pauses are the apps' own
    if request.stragglers:
        models = slowed(models, slow_nodes(cluster, request.stragglers, seed))
    lossy = any(change.remove for change in cluster.changes)
    return simulate(
        loaded.workload,
        cluster,
        policy,
        models=models,
        tick=tick,
        restart_delay=delay,
        start_delay=first,
        interference=request.interference,
        saves=Saves(every=request.checkpoint_interval) if lossy else None,
        contention="lifetime" if loaded.kind == "searches" else "static",
        seed=seed,
        on_finished=ended,
    )


def _searches(loaded: Loaded, cluster: Cluster, policy: Policy, pause: Pause) -> tuple[ModelOf, Policy]:
    """Return the models of searches and ``policy`` with their agents; both see the most GPUs that there will be."""
    gpus = max(int(cluster.most_ahead()[0]), 1)
    nodes = (*cluster.nodes, *(node for change in cluster.changes for node in change.add))
    sizes = tuple(node.gpus for node in nodes)
    bidders: dict[str, TunedBidder] = {}

    def bidder(job: Job, model: TunedApp) -> TunedBidder:
        bidders[job.id] = TunedBidder(arrival=job.arrival, cluster_gpus=gpus, model=model, sizes=sizes)
        return bidders[job.id]

    return tuned_apps(loaded.tunings, gpus, pause, bidder), Agents(policy, bidders)


def _on_demand(listed: Cluster, result: Result) -> float | None:
    first = min((job.arrival for job in result.jobs), default=0.0)
    last = max((job.finish for job in result.jobs), default=0.0)
    dollars = cost(listed, first, last, lambda node: node.price)
    return dollars if dollars > 0 else None


def _policy(inputs: Inputs, loaded: Loaded, entry: Entry) -> Policy:
    rules = loaded.rules or SHOCKWAVE
    types = Setting(loaded.kind).types
    if loaded.kind != "rounds":
        types = tuple(
            sorted({node.instance_type for node in (*inputs.spec.cluster.nodes, inputs.spec.template)})
        )
    jobs = loaded.workload.jobs if loaded.workload else ()
    services = [job.duration * job.gpus for job in jobs if job.duration is not None]
    policy = entry.make(Setting(loaded.kind, services, types, rules.round_s, rules.reset_s))
    if loaded.kind not in entry.reports or loaded.kind == "searches":
        return policy
    profiled = loaded.kind == "profiles"
    return PolicyWithReports(
        policy,
        within_request=profiled,
        slowdown=Slowdown() if profiled else NO_SLOWDOWN,
        costs=inputs.costs if profiled else {},
        per_node=inputs.spec.per_node,
    )


class _Timed:
    """A policy, and the CPU seconds that it took; it says when how many jobs are still there."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.name, self.seconds = policy, policy.name, 0.0

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Ask the policy."""
        began = process_time()
        decision = self.policy.decide(view, memory, rng)
        self.seconds += process_time() - began
        return decision


def _rounds(inputs: Inputs, loaded: Loaded, entry: Entry, seed: int, ended: Ended) -> Record:
    assert loaded.rules is not None
    assert loaded.table is not None
    gpus = inputs.spec.by_type(loaded.rules.reference)
    apps: dict[str, App] = {}
    world = RoundsScenario(
        loaded.trace,
        loaded.table,
        gpus,
        loaded.rules,
        agent=lambda app, alone: apps.update({app.id: app}),
        gpus_per_node=inputs.spec.per_node,
    )
    policy = _Timed(_policy(inputs, loaded, entry))
    outcome = world.run(policy, seed, (lambda count: ended(count, loaded.jobs)) if ended else None)
    hourly = sum(node.price for node in inputs.spec.cluster.nodes)
    return of_outcome(outcome, apps, seed, policy.seconds, [], hourly)
