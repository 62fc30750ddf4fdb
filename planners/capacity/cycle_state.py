"""The situation in the form in which one cycle works on it: leases by app, GPUs by node, who takes part."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from ebbflow.planners.aggregation.accounts import SharedAccounts
from ebbflow.planners.aggregation.demand import AggregationDemand
from ebbflow.planners.capacity.values import SchedulerInput, Settings
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import GONE, AppRecord, AppReport, Lease
from ebbflow.planners.model.ledger_state import State
from ebbflow.planners.model.scheduling import Placement
from ebbflow.planners.scheduling.placement_cost import ClusterLinks

HOUR = 3600.0
MOST_GPUS = 10_000
"""GPUs of one app, of which each number may be looked at in each cycle; to ask for more is a way of saying all."""


@dataclass(slots=True)
class CycleState:
    """What is there now. Whoever ends a lease in this cycle calls ``end``; nothing of the situation is changed."""

    now: float
    state: State
    settings: Settings
    reports: Mapping[str, AppReport]
    mine: dict[str, dict[int, Lease]]  # leases that have not ended, by app
    usable: tuple[Node, ...]  # with GPUs that may be granted, sorted by id
    closed: Mapping[str, tuple[float, str]]  # other nodes: by when they must be empty, and why
    taken: dict[str, set[int]]  # slots by node that are booked
    active: tuple[AppRecord, ...]  # neither over nor lost, in the order of their arrival
    draining: frozenset[str]  # nodes that are being drained, as last known
    links: ClusterLinks = field(default_factory=ClusterLinks)
    ended: list[int] = field(default_factory=list)
    aggregation: AggregationDemand | None = None

    @classmethod
    def of(
        cls, situation: SchedulerInput, settings: Settings, draining: frozenset[str] = frozenset()
    ) -> "CycleState":
        """Return what ``situation`` says; ``draining`` counts where it knows of no fleet."""
        state = situation.state
        if situation.fleet is not None:
            draining = frozenset(id_ for pool in situation.fleet.pools for id_ in pool.draining)
        mine: dict[str, dict[int, Lease]] = {}
        taken: dict[str, set[int]] = {}
        for number, lease in sorted(state.leases.items()):
            if state.apps[lease.app].spec.kind == "aggregation":
                continue  # ``planners.capacity.aggregation`` sees to those
            mine.setdefault(lease.app, {})[number] = lease
            taken.setdefault(lease.node, set()).add(lease.slot)
        closed = closed_nodes(situation, settings, draining)
        usable = tuple(
            node for id_, node in sorted(state.nodes.items()) if node.gpus > 0 and id_ not in closed
        )
        there = (a for a in state.apps.values() if a.phase not in GONE and a.spec.kind != "aggregation")
        active = sorted(there, key=lambda a: a.number)
        return cls(
            situation.now,
            state,
            settings,
            situation.reports,
            mine,
            usable,
            closed,
            taken,
            tuple(active),
            draining,
            settings.links.with_rack(situation.network * 1e6),
            aggregation=situation.aggregation,
        )

    def end(self, leases: Iterable[Lease]) -> None:
        """Free the GPUs of ``leases``."""
        for lease in leases:
            del self.mine[lease.app][lease.number]
            if not self.mine[lease.app]:
                del self.mine[lease.app]
            self.taken[lease.node].discard(lease.slot)
            self.ended.append(lease.number)

    def close(self, node: str, why: str) -> None:
        """Let nothing new start on ``node``."""
        self.closed = {**self.closed, node: (inf, why)}
        self.usable = tuple(one for one in self.usable if one.id != node)

    def held(self, app: str) -> Collection[Lease]:
        """Return the leases of ``app`` that have not ended, by number."""
        return self.mine.get(app, {}).values()

    def live(self, app: str) -> list[Lease]:
        """Return the leases of ``app`` on open nodes that were not called back."""
        return [lease for lease in self.held(app) if lease.recalled is None and lease.node not in self.closed]

    def free(self, node: Node) -> list[int]:
        """Return the slots of ``node`` that nobody holds, ascending."""
        taken = self.taken.get(node.id, ())
        return [slot for slot in range(node.gpus) if slot not in taken]

    def report(self, app: str) -> AppReport | None:
        return self.reports.get(app)

    def dollars(self, record: AppRecord) -> float:
        """Return what the leases of an app have cost until now, and its share of aggregators."""
        running = sum(
            max(0.0, self.now - lease.since) / HOUR * lease.price for lease in self.held(record.spec.id)
        )
        return record.dollars + running + self.accounts.dollars.get(record.spec.id, 0.0)

    @property
    def accounts(self) -> SharedAccounts:
        """Return what trainings have used of aggregators."""
        return SharedAccounts() if self.aggregation is None else self.aggregation.accounts

    def past(self) -> dict[str, Mapping[str, float]]:
        """Return what apps have cost that are forgotten, aggregators included, by pipeline and by team.

        The state forgets an app before the accounts of aggregators do, which keep its dollars under its own name.
        """
        accounts = self.accounts
        found: dict[str, Mapping[str, float]] = {}
        for kind, sums, shared in (
            ("pipeline", self.state.pipelines, accounts.pipelines),
            ("team", self.state.teams, accounts.teams),
        ):
            merged = {
                name: sums.get(name, 0.0) + shared.get(name, 0.0) for name in sums.keys() | shared.keys()
            }
            for run, owner in accounts.owners.items():
                if run not in self.state.apps and (name := getattr(owner, kind)):
                    merged[name] = merged.get(name, 0.0) + accounts.dollars.get(run, 0.0)
            found[kind] = merged
        return found

    def rate(self, app: str) -> float:
        """Return what the leases of an app cost, dollars an hour."""
        return sum(lease.price for lease in self.held(app))

    def trains(self, record: AppRecord) -> bool:
        """Tell whether an app takes part in auctions."""
        return record.phase not in GONE and is_trainer(record)


def is_trainer(record: AppRecord) -> bool:
    """Tell whether an app is one that wants GPUs."""
    return record.spec.kind != "query" and max(record.spec.gpus, record.spec.max_gpus) > 0


def bounds(record: AppRecord) -> tuple[int, int, int]:
    """Return the fewest GPUs that an app can use, those that it asked for, and the most; 0 means as asked for.

    The most is ``MOST_GPUS`` at most, unless more were asked for.
    """
    spec = record.spec
    asked = max(spec.gpus, spec.min_gpus, 1)
    return spec.min_gpus or asked, asked, max(min(spec.max_gpus, MOST_GPUS), asked)


def needs(record: AppRecord, elastic: bool) -> int:
    """Return the fewest GPUs with which an app can run under a policy that is ``elastic`` or not."""
    least, asked, _ = bounds(record)
    return least if elastic else asked


def is_gang(record: AppRecord, elastic: bool) -> bool:
    """Tell whether an app gets exactly the GPUs that it asked for or none."""
    least, asked, most = bounds(record)
    return not elastic or least >= asked >= most


def placement_of(leases: Iterable[Lease]) -> Placement:
    """Return the GPUs of ``leases`` by node, sorted."""
    counts: dict[str, int] = {}
    for lease in leases:
        counts[lease.node] = counts.get(lease.node, 0) + 1
    return tuple(sorted(counts.items()))


def closed_nodes(
    situation: SchedulerInput, settings: Settings, draining: Collection[str]
) -> dict[str, tuple[float, str]]:
    """Return the nodes on which nothing new may start: by when they must be empty, and why.

    A rebalance recommendation closes none: it is a weak signal, and the node may stay for days.
    """
    now = situation.now
    found = {id_: (inf, f"{id_} is being drained") for id_ in sorted(draining)}
    told = situation.fleet.notices if situation.fleet is not None else ()
    firm: dict[str, float] = {}
    for notice in (*situation.state.notices.values(), *told):
        if notice.kind == "interruption":
            firm[notice.node_id] = min(notice.deadline, firm.get(notice.node_id, inf))
    for id_, deadline in firm.items():
        left = max(0.0, deadline - now)
        # of a short notice most is for saving
        found[id_] = (now + left - min(settings.drain_lead_s, left / 4), f"{id_} terminates in {left:.0f} s")
    return found
