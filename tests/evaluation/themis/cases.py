"""One run of Themis' evaluation (NSDI 2020, section 6; thesis, section 3.6)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from time import process_time
from typing import Any

import numpy as np

from ebbflow.infra.simulation.engine import Result, simulate
from ebbflow.infra.simulation.jobs.tuning import NO_PAUSE, Pause, TunedApp, tuned_apps
from ebbflow.infra.simulation.jobs.tuning_workloads import HOUR, Apps, identical_apps, inventory, tuning_apps
from ebbflow.infra.simulation.traces.workloads import Job
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import Policy
from ebbflow.planners.scheduling.auction.auction import AuctionOptions
from ebbflow.planners.scheduling.gangs.las import leased_las
from ebbflow.planners.scheduling.leased.gandiva import gandiva, throughput_first
from ebbflow.planners.scheduling.leased.leased import Leased
from ebbflow.planners.scheduling.leased.simple import leased_srsf, leased_srtf, worst_off_first
from ebbflow.planners.scheduling.leased.slaq import slaq
from ebbflow.planners.scheduling.themis.themis import Leftovers, Themis
from ebbflow.tasks.simulation.bidding import Agents, BidDistortion, TunedBidder, believed_slowdown

APPS, HOURS, BUSY = 60, 16.0, 80.0  # the trace of 85 apps in two weeks, made smaller
POOL = 0.1

Case = dict[str, Any]
Record = dict[str, Any]

POLICIES: Mapping[str, str] = {
    "themis": "Themis",
    "gandiva": "Gandiva",
    "las": "Tiresias",
    "srtf": "Optimus (SRTF)",
    "throughput": "Optimus (throughput)",
    "slaq": "SLAQ",
    "srsf": "SRSF",
    "strawman": "strawman",
}
"""What the sources call them, by the rule that they stand for."""


def run_cases(cases: list[Case]) -> list[Record]:
    """Return a record for each case, with the case in it."""
    return [run_case(**case) | {"case": case} for case in cases]


def run_case(
    policy: str = "themis",
    workload: str = "w1",
    cluster: str = "testbed-64",
    seed: int = 0,
    knob: float = 0.8,
    lease_s: float = 600.0,
    network: float | None = None,
    error: float = 0.0,
    lie: float = 0.0,
    lie_about: str = "",
    paused: bool = False,
    apps: int = APPS,
    hours: float = HOURS,
    gpus: float = BUSY,
    pool: float = POOL,
    leftovers: Leftovers = "gpu",
    payments: bool = True,
    probe: int = 0,
) -> Record:
    """Run one workload under one policy.

    ``pool``: share of a lease within which leases that end are taken as ended, to be sold together. ``gpus``: GPUs
    that the workload would keep busy for ``hours``. ``error``: relative, of work and of S, uniform by app. ``lie``:
    by which the first app inflates S of spread bundles or deflates S of dense ones (``lie_about``). ``leftovers``
    and ``payments`` change Themis' rule. ``probe``: see :class:`Agents`.
    """
    machines = inventory(cluster)
    given = _workload(workload, seed, network, apps, hours, gpus)
    rng = np.random.default_rng([seed, 1])
    sizes = tuple(node.gpus for node in machines.nodes)
    bidders: dict[str, TunedBidder] = {}

    def bidder(job: Job, model: TunedApp) -> TunedBidder:
        belief = BidDistortion()
        if error:
            work, spread = (float(1 + error * (2 * rng.random() - 1)) for _ in range(2))
            belief = BidDistortion(work, spread)
        if lie and job.id == given.workload.jobs[0].id:
            belief = _lied(lie, lie_about)
        bidders[job.id] = TunedBidder(
            arrival=job.arrival, cluster_gpus=machines.gpus, model=model, belief=belief,
            sizes=sizes,
        )  # fmt: skip
        return bidders[job.id]

    options = AuctionOptions("search", payments="auto" if payments else "none")
    themis = Themis(knob, lease_s, pool_s=pool * lease_s, leftovers=leftovers, options=options)
    chosen = themis if policy == "themis" else _baseline(policy, lease_s, pool, bidders)
    agents = Agents(chosen, bidders, probe)
    began = process_time()
    result = simulate(
        given.workload,
        machines,
        agents,
        models=tuned_apps(given.tunings, machines.gpus, Pause() if paused else NO_PAUSE, bidder),
        restart_delay=0.0,  # pauses are the apps' own
        contention="lifetime",
        seed=seed,
    )
    return _record(result, agents, process_time() - began)


def _workload(name: str, seed: int, network: float | None, apps: int, hours: float, gpus: float) -> Apps:
    if name == "identical":
        return identical_apps()
    if name not in ("w1", "w2"):
        raise OptionError(f"a workload must be w1, w2 or identical; got {name!r}")
    rng = np.random.default_rng(seed)
    return tuning_apps(
        rng, halving=name == "w2", apps=apps, span=hours * HOUR, gpus=gpus, network_share=network
    )


def _lied(lie: float, about: str) -> BidDistortion:
    if about == "spread":
        return BidDistortion(spread=1 + lie)
    if about == "dense":
        return BidDistortion(dense=1 / (1 + lie))
    raise OptionError(f"a lie must be about spread or dense; got {about!r}")


def _baseline(name: str, lease_s: float, pool: float, bidders: Mapping[str, TunedBidder]) -> Policy:
    slowdown = believed_slowdown(bidders)
    made: Mapping[str, Callable[[], Leased]] = {
        "gandiva": lambda: gandiva(lease_s, slowdown),
        "las": lambda: leased_las(lease_s),
        "srtf": lambda: leased_srtf(lease_s),
        "throughput": lambda: throughput_first(lease_s, slowdown),
        "slaq": lambda: slaq(lease_s),
        "srsf": lambda: leased_srsf(lease_s),
        "strawman": lambda: worst_off_first(lease_s),
    }
    if name not in made:
        raise OptionError(f"a policy must be themis or one of {', '.join(made)}; got {name!r}")
    return replace(made[name](), pool_s=pool * lease_s)


def _record(result: Result, agents: Agents, cpu_s: float) -> Record:
    jobs = result.jobs
    total = sum(job.gpu_seconds for job in jobs)
    return {
        "rho": [round(job.rho, 4) for job in jobs],
        "jct_s": [round(job.jct, 1) for job in jobs],
        "gpu_min": [round(job.gpu_seconds / 60, 2) for job in jobs],
        "score": [round(job.score, 4) for job in jobs],
        "mean_score": sum(job.score * job.gpu_seconds for job in jobs) / total,
        "gpu_hours": result.gpu_hours,
        "restarts": sum(job.restarts for job in jobs) / len(jobs),
        "makespan_s": max(job.finish for job in jobs),
        "decisions": result.decisions,
        "notes": {name: value for name, value in result.notes.items() if isfinite(value)},
        "cpu_s": cpu_s,
        "policy_s": result.policy_seconds,
        "rounds_s": agents.rounds_s,
        "bids_s": agents.bids_s,
    }
