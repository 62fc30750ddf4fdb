"""``ServiceManager``: decides where the tensors of a shared aggregation service are to be (pMaster of AutoPS).

Each aggregator's process has one, and one of them is in charge: the one whose record in the ledger is fresh. What it
knows and decides is in the ledger, so another continues where it was killed. Aggregators move their tensors to where
the placement says.
"""

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ebbflow.infra.aggregation.registry import (
    ABANDONED,
    AGGREGATOR,
    DEMAND,
    DRAIN,
    HEARTBEAT,
    MANAGER,
    PLACEMENT,
    PROFILE,
    TRAINING,
    ServiceRegistry,
    ServiceView,
    TrainingRecord,
)
from ebbflow.infra.aggregation.timing import HeldTensor
from ebbflow.infra.ledger.records import RecordKey, Records, ServiceRecord
from ebbflow.planners.aggregation.assignment import RECOMMENDED, HeuristicOptions
from ebbflow.planners.aggregation.placement import ServiceState, plan_placement

LEASE = 5.0  # seconds without a record after which another takes over
_FORGOTTEN = 600.0  # seconds without one after which an aggregator's record is removed
_REASONS = 50  # that are kept

Changes = dict[RecordKey, Mapping[str, Any] | None]


class ServiceManager:
    """One candidate for being in charge.

    Args:
        registry: of the service.
        holder: its name.
        options: of the assignment.
    """

    def __init__(
        self, registry: ServiceRegistry, holder: str, options: HeuristicOptions = RECOMMENDED
    ) -> None:
        self._registry, self._holder, self._options = registry, holder, options

    def act(self, view: ServiceView) -> bool:
        """Decide what is to be decided, where this one is in charge or nobody is; return whether it is.

        Args:
            view: of the service, as it was read last.

        Raises ``LedgerError``.
        """
        body = view.kind(MANAGER.kind).get(MANAGER.name)
        resigned = body is not None and not body["holder"]
        silence = float("inf") if resigned else view.silence(*MANAGER)
        mine = body is not None and body["holder"] == self._holder
        if (not mine and silence < LEASE) or (mine and silence < HEARTBEAT / 2):
            return mine
        led = False

        def change(records: Records) -> Changes:
            nonlocal led
            found = self._change(self._registry.view(records))
            led = bool(found)
            return found

        self._registry.records.write(change)
        return led

    def resign(self) -> None:
        """Let another take over at once. Raises ``LedgerError``."""

        def change(records: Records) -> Changes:
            found = records.get(MANAGER)
            if found is None or found.body["holder"] != self._holder:
                return {}
            return {MANAGER: {**found.body, "holder": ""}}

        self._registry.records.write(change)

    def _change(self, view: ServiceView) -> Changes:
        before: Mapping[str, Any] = view.kind(MANAGER.kind).get(MANAGER.name, {})
        holder = before.get("holder", "")
        if holder not in ("", self._holder) and view.silence(*MANAGER) < LEASE:
            return {}
        changes: Changes = {}
        trainings = view.trainings()
        for job in [job for job in trainings if view.silence(TRAINING, job) > ABANDONED]:
            del trainings[job]
            changes[RecordKey(TRAINING, job)] = None
        for name in view.kind(DEMAND):
            if view.silence(DEMAND, name) > ABANDONED:
                changes[RecordKey(DEMAND, name)] = None
        for kind in (PROFILE, PLACEMENT):
            gone = view.kind(kind).keys() - trainings.keys()
            changes |= {RecordKey(kind, job): None for job in gone}
        for name in view.kind(AGGREGATOR):
            if view.silence(AGGREGATOR, name) > _FORGOTTEN:
                changes |= {RecordKey(kind, name): None for kind in (AGGREGATOR, DRAIN)}
        profiles = {job: one for job, one in view.profiles().items() if job in trainings}
        for job in trainings.keys() - profiles.keys():
            if (body := measured(view, job, trainings[job].servers)) is not None:
                changes[RecordKey(PROFILE, job)] = body
        placed = [job for job in before.get("placed", ()) if job in trainings]
        state = ServiceState(
            aggregators=view.aggregators().keys(),
            leaving=[name for name, one in view.aggregators().items() if one.leaving is not None],
            hosts={key: host for key, host in view.intended().items() if key[0] in trainings},
            mirrors=view.mirrors(),
            squeezed={job: lack for job, lack in before.get("squeezed", {}).items() if job in profiles},
            profiles=profiles,
            placed=placed,
            exited=bool(set(before.get("jobs", ())) - trainings.keys()),
        )
        plan = plan_placement(state, self._options)
        for job in {key[0] for key in plan.hosts}:
            old = dict(view.kind(PLACEMENT).get(job, {}).get("hosts", {}))
            new = {tensor: host for (one, tensor), host in plan.hosts.items() if one == job}
            changes[RecordKey(PLACEMENT, job)] = {"hosts": old | new}
        changes[MANAGER] = {
            "holder": self._holder,
            "term": before.get("term", 0) + (holder != self._holder),
            "jobs": sorted(trainings),
            "placed": list(plan.placed),
            "squeezed": dict(plan.squeezed),
            "missing": plan.missing or (before.get("missing", 0) if not plan.reasons else 0),
            "reasons": [*before.get("reasons", ()), *([view.now, one] for one in plan.reasons)][-_REASONS:],
        }
        return changes


def measured(view: ServiceView, job: str, servers: int) -> dict[str, Any] | None:
    """Return the profile of a training as plain values, once all of its tensors were measured.

    Args:
        view: of the service.
        job: the training.
        servers: private servers that it would have.
    """
    held: dict[str, HeldTensor] = {
        tensor: one
        for host in view.aggregators().values()
        for tensor, one in host.held.get(job, {}).items()
        if not one.mirror and not one.incomplete
    }
    known = {*view.kind(PLACEMENT).get(job, {}).get("hosts", ()), *held}
    known |= {tensor for host in view.aggregators().values() for tensor in host.held.get(job, {})}
    if not held or known != held.keys() or not all(one.execution_us for one in held.values()):
        return None
    return {
        "iteration_us": round(statistics.median(one.iteration_us for one in held.values())),
        "tensors": {tensor: [one.execution_us, one.bytes] for tensor, one in sorted(held.items())},
        "servers": servers,
    }


def private_view(aggregators: Mapping[str, Mapping[str, Any]], servers: int) -> ServiceView:
    """Return aggregators that a training has to itself as a service of their own, of which no ledger knows.

    Args:
        aggregators: plain values of the ``AggregatorRecord`` of each.
        servers: number of them that the training asks for.
    """
    records = {RecordKey(AGGREGATOR, name): ServiceRecord(0.0, body) for name, body in aggregators.items()}
    for job in sorted({job for body in aggregators.values() for job in body["held"]}):
        records[RecordKey(TRAINING, job)] = ServiceRecord(0.0, asdict(TrainingRecord(servers)))
        view = ServiceView(records, 0.0, dict.fromkeys(records, 0.0))
        if (profile := measured(view, job, servers)) is not None:
            records[RecordKey(PROFILE, job)] = ServiceRecord(0.0, profile)
    return ServiceView(records, 0.0, dict.fromkeys(records, 0.0))
