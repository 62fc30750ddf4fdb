"""``ServiceWatch``: what the cluster's aggregation service needs, as a loop sees it, and who pays its nodes."""

import logging
from dataclasses import replace

from ebbflow.infra.aggregation.registry import ACCOUNTS, MANAGER, ServiceRegistry, ServiceView
from ebbflow.infra.ledger.records import ServiceRecords
from ebbflow.planners.aggregation.accounts import SharedAccounts
from ebbflow.planners.aggregation.demand import AggregationDemand, RunDemand, ServingNode, shares
from ebbflow.planners.capacity.leases import SERVICE
from ebbflow.planners.model.ledger import RESUMABLE
from ebbflow.planners.model.ledger_state import State

log = logging.getLogger(__name__)

_SERVICE = 1.0  # s between looks at the aggregation service
_WRITTEN = 10.0  # s between two records of what its nodes have cost, and of what may be launched
_DATED = 300.0  # s after which the account is recorded for its dates alone


class ServiceWatch:
    """Looks at the cluster's aggregation service, and keeps the account of its nodes. For one thread.

    Args:
        records: of the cluster's ledger.
    """

    def __init__(self, records: ServiceRecords) -> None:
        self._registry = ServiceRegistry(records)
        self.demand: AggregationDemand | None = None  # as last seen
        self._due = self._write_due = float("-inf")
        self._accounts: SharedAccounts | None = None
        self._written: dict[str, float] = {}
        self._dated = float("-inf")

    def look(self, state: State, now: float, max_nodes: int) -> bool:
        """Look where a look is due; tell whether decisions may depend on what is new. Raises ``LedgerError``.

        Args:
            state: of the ledger.
            now: seconds since the Unix epoch.
            max_nodes: for aggregators that may be launched.
        """
        if now < self._due:
            return False
        self._due = now + _SERVICE
        view = self._registry.read()
        before = self.demand
        try:
            seen = service_demand(view)
            accounts = self._accounts = self._paid(view, state, seen, now)
        except (TypeError, KeyError, ValueError, AttributeError) as error:  # of another version's process
            log.warning(
                "a record of the aggregation service cannot be read, what it needs stays as it was: %s", error
            )
            return False
        self.demand = replace(seen, accounts=accounts)
        if now >= self._write_due:
            self._write_due = now + _WRITTEN
            if max_nodes:
                self._registry.put_provisioning(max_nodes)
            old = now - self._dated > _DATED and (accounts.owners or accounts.pipelines)
            if accounts.dollars != self._written or old:
                self._registry.records.put(ACCOUNTS, accounts.values)
                self._written, self._dated = dict(accounts.dollars), now
        return before is None or before.shape() != seen.shape()

    def drain(self, aggregator: str, by: float) -> None:
        """Have an aggregator give its tensors away by then, s since the Unix epoch. Raises ``LedgerError``."""
        self._registry.drain(aggregator, by)

    def _paid(self, view: ServiceView, state: State, seen: AggregationDemand, now: float) -> SharedAccounts:
        accounts = self._accounts
        if accounts is None:
            accounts = SharedAccounts.of(view.kind(ACCOUNTS.kind).get(ACCOUNTS.name, {}))
        costs: dict[str, float] = {}
        unknown = 0.0  # who used a node while no loop ran is not known
        for lease in state.leases.values():
            if lease.app == SERVICE:
                seconds = max(0.0, now - max(lease.since, accounts.until))
                seen_for = min(seconds, 2 * _WRITTEN)
                costs[lease.node] = costs.get(lease.node, 0.0) + seen_for / 3600 * lease.price
                unknown += (seconds - seen_for) / 3600 * lease.price
        accounts = accounts.paid(shares(seen, costs), now)
        if unknown > 0:
            accounts = accounts.paid({"": unknown}, now)
        apps = {id_: (record.spec.team, record.spec.pipeline) for id_, record in state.apps.items()}
        using = {one.run for one in seen.runs} | {run for one in seen.nodes for run in one.use}
        return accounts.settled(apps, using, now, RESUMABLE)


def service_demand(view: ServiceView) -> AggregationDemand:
    """Return what a service needs and who uses it: by measured time where all was measured, else by bytes."""
    demands, hosts = view.demands(), view.aggregators()
    manager = view.kind(MANAGER.kind).get(MANAGER.name, {})
    apps = {run: str(body["app"]) for run, body in demands.items()}

    def app_of(job: str) -> str:
        return apps.get(_run_of(job), _run_of(job))

    jobs: dict[str, set[str]] = {}
    for job in view.trainings():
        jobs.setdefault(_run_of(job), set()).add(job)
    placed = {run for run, own in jobs.items() if own <= set(manager.get("placed", ()))}
    lacking: dict[str, int] = {}
    for job, count in manager.get("squeezed", {}).items():
        lacking[_run_of(job)] = max(lacking.get(_run_of(job), 0), int(count))
    held = [tensor for one in hosts.values() for own in one.held.values() for tensor in own.values()]
    measured = all(tensor.execution_us and tensor.iteration_us for tensor in held)
    nodes = []
    for name, one in hosts.items():
        use: dict[str, float] = {}
        for job, own in one.held.items():
            for tensor in own.values():
                part = tensor.execution_us / tensor.iteration_us if measured else float(tensor.bytes)
                use[app_of(job)] = use.get(app_of(job), 0.0) + part
        asked = [by for by in (one.leaving, view.drain_of(name)) if by is not None]
        count = sum(len(own) for own in one.held.values())
        nodes.append(ServingNode(name, one.node, count, min(asked, default=None), use))
    runs = [
        RunDemand(app, max(int(demands[run]["servers"]), 1), run in placed, lacking.get(run, 0))
        for run, app in sorted(apps.items())
    ]
    return AggregationDemand(tuple(runs), tuple(nodes))


def _run_of(job: str) -> str:
    return job.rpartition("/")[0] or job
