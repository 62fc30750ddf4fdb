"""What commands do for the aggregation service: serve, tell who serves what, and simulate what sharing saves."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ebbflow.infra.ledger import Ledger
from ebbflow.planners.aggregation.accounts import SharedAccounts
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
from ebbflow.planners.model.ledger import REMEMBERED
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


def serve(
    ledger: Ledger,
    name: str,
    host: str,
    port: int,
    threads: int,
    within_s: float,
    started: Callable[[str], None],
    node: str = "",
) -> None:
    """Run an aggregator of a cluster until SIGINT or SIGTERM, after which its tensors are moved to others.

    Args:
        ledger: of the cluster.
        name: of the aggregator.
        host: address to listen on.
        port: number; 0: any free one.
        threads: that sum and update.
        within_s: seconds in which others must have taken its tensors; a second signal does not wait.
        started: called with its address.
        node: ID of the node that it is on; empty: not known.

    Raises ``AggregationError`` where it cannot listen or its name is taken, and ``LedgerError``.
    """
    from ebbflow.infra.aggregation.shared_process import serve_shared

    serve_shared(ledger, name, host, port, threads, within_s, started, node)


def drain(ledger: Ledger, name: str, within_s: float) -> None:
    """Ask an aggregator to give its tensors to others and to end.

    Raises ``OptionError`` for one that does not serve, and ``LedgerError``.
    """
    from ebbflow.infra.aggregation.registry import ServiceRegistry, plain_name

    registry = ServiceRegistry(ledger.records)
    there = {plain_name(one): one for one in registry.read().aggregators()}
    if name not in there:
        known = ", ".join(there) or "none"
        raise OptionError(f"no aggregator {name!r} serves cluster {ledger.cluster}; there are {known}")
    registry.drain(there[name], registry.now + within_s)


def service_status(ledger: Ledger) -> dict[str, Any]:
    """Return who serves whom, as plain values.

    Returns:
        ``manager`` and its ``term``; ``aggregators`` (``name``, ``address``, ``state``, ``node``, ``trainings``,
        ``tensors``, ``bytes``, ``updates``, ``moved``, ``waited_s``); ``trainings`` (``training``, ``aggregators``,
        ``servers``, ``iteration_s``, ``update_s``); ``private_servers``, ``used_aggregators``; the fraction
        ``saved``; ``missing_aggregators``; ``launchable``, the aggregators that a capacity loop can have;
        ``dollars``, what leased nodes have cost, by run, under the empty name what no training used, ``None`` where
        another version's account cannot be read;
        ``finished_dollars``, of runs that are over for a quarter of an hour; ``reasons`` with their times.

    Raises ``LedgerError``.
    """
    from ebbflow.infra.aggregation.registry import ACCOUNTS, MANAGER, ServiceRegistry, plain_name, savings

    view = ServiceRegistry(ledger.records).read()
    manager = view.kind(MANAGER.kind).get(MANAGER.name, {})
    accounts: SharedAccounts | None = None
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        accounts = SharedAccounts.of(view.kind(ACCOUNTS.kind).get(ACCOUNTS.name, {}))
    aggregators = []
    for name, one in view.aggregators().items():
        held = [tensor for own in one.held.values() for tensor in own.values()]
        aggregators.append(
            {
                "name": plain_name(name),
                "address": one.address,
                "state": "serving" if one.leaving is None else "draining",
                "node": one.node,
                "trainings": sorted(one.held),
                "tensors": len(held),
                "bytes": sum(tensor.bytes for tensor in held),
                "updates": one.updates,
                "moved": one.moved,
                "waited_s": one.waited,
            }
        )
    hosts, profiles = view.hosts(), view.profiles()
    trainings = []
    for job, training in view.trainings().items():
        profile = profiles.get(job)
        trainings.append(
            {
                "training": job,
                "aggregators": sorted({plain_name(host) for (own, _), host in hosts.items() if own == job}),
                "servers": training.servers,
                "iteration_s": profile.iteration_us / 1e6 if profile else None,
                "update_s": profile.execution_us / 1e6 if profile else None,
            }
        )
    saved = savings(view)
    return {
        "manager": plain_name(manager.get("holder", "")),
        "term": manager.get("term", 0),
        "aggregators": aggregators,
        "trainings": trainings,
        "private_servers": saved["private"],
        "used_aggregators": saved["used"],
        "saved": saved["saved"],
        "missing_aggregators": manager.get("missing", 0),
        "launchable": view.provisions(),
        **_dollars(accounts, view.now),
        "reasons": list(manager.get("reasons", [])),
    }


def _dollars(accounts: SharedAccounts | None, now: float) -> dict[str, Any]:
    if accounts is None:
        return {"dollars": None, "finished_dollars": None}
    finished = accounts.finished(now - REMEMBERED)
    return {
        "dollars": {run: one for run, one in accounts.dollars.items() if run not in finished},
        "finished_dollars": accounts.forgotten + sum(finished.values()),
    }
