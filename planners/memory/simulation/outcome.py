"""What a simulation shows: how evenly memory is used, what paging costs, and what evictions and faults cost."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from math import nan

import numpy as np

from ebbflow.planners.memory.simulation.cluster import Cluster, seconds
from ebbflow.planners.memory.simulation.policies import SharingPolicy
from ebbflow.planners.memory.simulation.scenario import LIMITS, Floats, Scenario

AROUND_S = 10  # seconds before and after a fault over which throughput is compared


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulation.

    Args:
        utilization: memory in use over all memory, mean of the machines.
        max_over_median: of the machines' memory in use.
        max_over_min: of the machines' memory in use.
        unplaced: fraction of the touched slabs that have no host, when memory is measured.
        first_failed: fraction of slabs whose first placement found no host.
        messages: control messages per placement and eviction.
        slowdown_100: run time over computing time of containers that have all their memory, median.
        slowdown_75: of those that have three quarters.
        slowdown_50: of those that have half.
        evicted: slabs.
        evicted_activity: their mean activity over that of all slabs mapped on their machines; not a number without.
        lost: slabs of daemons that died.
        fault_loss: largest fraction of the cluster's throughput lost in the seconds after a fault; not a number
            without faults.
        network_bits_s: bits per second and machine.
    """

    utilization: float
    max_over_median: float
    max_over_min: float
    unplaced: float
    first_failed: float
    messages: float
    slowdown_100: float
    slowdown_75: float
    slowdown_50: float
    evicted: float
    evicted_activity: float
    lost: float
    fault_loss: float
    network_bits_s: float


def simulate(scenario: Scenario, policy: SharingPolicy, seed: int) -> Outcome:
    """Return the outcome of one simulation.

    A container that has not ended when the simulation does is taken to continue at its last speed.

    Args:
        scenario: the load.
        policy: of sharing.
        seed: of all that is drawn.
    """
    cluster = Cluster(scenario, policy, np.random.default_rng(seed))
    used, unplaced, throughput = cluster.used, 0.0, []
    for now in seconds(cluster):
        throughput.append(float(cluster.speed.sum()))
        if now <= scenario.measure_s:
            used = cluster.used
            unplaced = cluster.unplaced / max(cluster.wanted, 1)
    count = cluster.counters
    slowdown = slowdowns(cluster)
    by_limit = [_median(slowdown[cluster.containers.fraction == limit]) for limit, _ in LIMITS]
    tried = cluster.tried
    return Outcome(
        utilization=float(used.mean() / scenario.memory),
        max_over_median=float(used.max() / np.median(used)),
        max_over_min=float(used.max() / used.min()),
        unplaced=unplaced,
        first_failed=count.first_failed / max(tried, 1),
        messages=count.messages / max(count.attempts + count.evictions, 1),
        slowdown_100=by_limit[0],
        slowdown_75=by_limit[1],
        slowdown_50=by_limit[2],
        evicted=float(count.evicted),
        evicted_activity=count.evicted_activity / count.evicted if count.evicted else nan,
        lost=float(count.lost),
        fault_loss=_fault_loss(scenario, throughput),
        network_bits_s=network_rate(count.remote_bytes, cluster.now, scenario.machines),
    )


def network_rate(size: float, passed_s: float, machines: int) -> float:
    """Return the bits per second and machine of bytes that all machines exchanged."""
    return size * 8 / passed_s / machines


def slowdowns(cluster: Cluster) -> Floats:
    """Return each container's run time over its computing time; not a number for one that has not started."""
    all_ = cluster.containers
    with np.errstate(divide="ignore", invalid="ignore"):
        left = (all_.compute_s - cluster.done) / cluster.speed
        ended = np.where(np.isinf(cluster.finished_s), cluster.now + left, cluster.finished_s)
        found: Floats = np.where(np.isfinite(ended), (ended - all_.start_s) / all_.compute_s, nan)
    return found


def medians(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the median of each figure over simulations, of which there is at least one."""
    return _over(outcomes, _median)


def quartiles(outcomes: Iterable[Outcome]) -> tuple[Outcome, Outcome]:
    """Return the lower and the upper quartile of each figure over simulations, of which there is at least one."""
    rows = list(outcomes)
    return _over(rows, lambda x: _quantile(x, 0.25)), _over(rows, lambda x: _quantile(x, 0.75))


def _over(outcomes: Iterable[Outcome], of: Callable[[Floats], float]) -> Outcome:
    rows = np.array([[getattr(one, f.name) for f in fields(Outcome)] for one in outcomes])
    return Outcome(*(of(column) for column in rows.T))


def _median(values: Floats) -> float:
    return _quantile(values, 0.5)


def _quantile(values: Floats, q: float) -> float:
    known = values[~np.isnan(values)]
    return float(np.quantile(known, q)) if len(known) else nan


def _fault_loss(scenario: Scenario, throughput: list[float]) -> float:
    found = []
    for one in scenario.faults:
        at = int(np.ceil(one.at_s))
        before, after = throughput[max(at - AROUND_S, 0) : at], throughput[at : at + AROUND_S]
        if before and after and sum(before):
            found.append(1 - float(np.mean(after) / np.mean(before)))
    return max(found, default=nan)
