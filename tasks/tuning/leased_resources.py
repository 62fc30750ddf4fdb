"""The GPUs of a tuning run that is an app: its leases, dealt out to its trials one by one."""

import threading
from collections.abc import Iterable

from ebbflow.infra.clock import Clock
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import Lease
from ebbflow.planners.model.scheduling import Placement
from ebbflow.tasks.apps.lease_table import LeaseTable
from ebbflow.tasks.training.leased.nodes import LeasedNodes, NodeBackoff
from ebbflow.tasks.tuning.request import TuningRequest
from ebbflow.tasks.tuning.trial import Trial

LEAVING = 3.0  # s before a deadline by which a trial that pauses has to be saved
_LEAST = 1.0  # s to save in, however late it is


class LeasedTrialResources:
    """``TrialResources`` on leases. A lease is assigned to one trial at most, and to no other while it is in use.

    ``assigned`` may be called in any thread, all else in the tuning run's.
    """

    def __init__(self, request: TuningRequest, lease_table: LeaseTable, clock: Clock) -> None:
        self._request, self._lease_table, self._clock = request, lease_table, clock
        self._avoided = NodeBackoff(lease_table, clock)
        self._lock = threading.Lock()
        self._dealt: dict[str, frozenset[int]] = {}  # run -> leases

    def assigned(self, run: str) -> frozenset[int]:
        """Return the leases of one trial."""
        with self._lock:
            return self._dealt.get(run, frozenset())

    def nodes(self) -> tuple[Node, ...]:
        """See ``TrialResources``."""
        mine = self._all_assigned()
        used = self._lease_table.used()
        # what one trial uses and is not assigned any more is on its way from it to no other trial yet
        usable = [lease for lease in self._usable() if lease.number in mine or lease.number not in used]
        return tuple(Node(name, count, 0.0, gpus=count) for name, count in _counts(usable))

    def held(self, one: Trial) -> Placement:
        """See ``TrialResources``."""
        assigned = self.assigned(one.run)
        return _counts(lease for lease in self._usable() if lease.number in assigned)

    def give(self, one: Trial, placement: Placement) -> None:
        """See ``TrialResources``."""
        wanted = dict(placement)
        with self._lock:
            assigned = self._dealt.get(one.run, frozenset())
            others = frozenset().union(*(m for run, m in self._dealt.items() if run != one.run))
            used = self._lease_table.used()
            own = {lease.number for lease in self._usable() if lease.number in assigned}
            mine = set((assigned & used) - own)  # revoked, still in use: its processes are leaving
            for node in {lease.node for lease in self._usable()}:
                here = [lease.number for lease in self._usable() if lease.node == node]
                kept = [number for number in here if number in own]
                free = [n for n in here if n not in assigned and n not in others and n not in used]
                mine |= set((kept + free)[: wanted.get(node, 0)])
            self._dealt[one.run] = frozenset(mine)
        if one.nodes is None:
            request = self._request
            one.nodes = LeasedNodes(
                self._lease_table,
                request.most_gpus,
                request.gpus_per_trial,
                self._clock,
                lambda: self.assigned(one.run),
                self._avoided,
            )

    def recover(self, one: Trial) -> None:
        """Do nothing: a trial sees for itself what it has."""

    def deadline(self, one: Trial) -> float | None:
        """See ``TrialResources``."""
        due = self._lease_table.due(self.assigned(one.run))
        if not due:
            return None
        return max(min(due.values()) - LEAVING, self._clock.now() + _LEAST)

    def take_back(self, one: Trial) -> None:
        """See ``TrialResources``."""
        with self._lock:
            self._dealt.pop(one.run, None)

    def settled(self) -> bool:
        """See ``TrialResources``."""
        mine, used = self._all_assigned(), self._lease_table.used()
        return all(lease.number in mine or lease.number not in used for lease in self._usable())

    # --- how ------------------------------------------------------------------------------------------------

    def _usable(self) -> tuple[Lease, ...]:
        return self._avoided.without(self._lease_table.allowed())

    def _all_assigned(self) -> frozenset[int]:
        with self._lock:
            return frozenset().union(*self._dealt.values())


def _counts(leases: Iterable[Lease]) -> Placement:
    counts: dict[str, int] = {}
    for lease in leases:
        counts[lease.node] = counts.get(lease.node, 0) + 1
    return tuple(sorted(counts.items()))
