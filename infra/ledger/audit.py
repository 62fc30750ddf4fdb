"""Was any GPU ever promised to two, or promised where it could not be had?

Goes through the events by itself, without ``planners.model.ledger.fold``: what checks must not be what is checked.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ebbflow.planners.model.ledger import (
    AppEntered,
    CapacityChanged,
    Ended,
    Event,
    Extended,
    Granted,
    Lease,
    LoopBegan,
    Recalled,
)
from ebbflow.planners.model.ledger_state import State


def audit(events: Iterable[Event], start: State | None = None) -> list[str]:
    """Return every violation in ``events``, as sentences; nothing where there is none.

    A GPU granted while a lease on it had not ended, on a node that was not there, had left, had a firm notice or has
    no such GPU; a lease of an app that never entered, with a number that was used before, or ended, revoked or
    extended while not held; a gap in the numbers, or a token that did not grow. ``start`` is the state before
    the first event, where older ones were pruned (``Ledger.origin``).
    """
    book = _AuditState()
    if start is not None:
        book.begin(start)
    for event in events:
        book.look(event)
    return book.violations


@dataclass
class _AuditState:
    """What is known of GPUs, nodes and apps while the events go by."""

    violations: list[str] = field(default_factory=list)
    number: int | None = None
    token: int = 0
    apps: set[str] = field(default_factory=set)
    serving: set[str] = field(default_factory=set)  # apps to which a node without GPUs is one slot
    gpus: dict[str, int] = field(default_factory=dict)  # by node that is there
    gone: set[str] = field(default_factory=set)
    firm: dict[str, float] = field(default_factory=dict)  # deadlines by node
    held: dict[int, Lease] = field(default_factory=dict)
    by_gpu: dict[tuple[str, int], int] = field(default_factory=dict)
    used: int = 0  # the highest number of a lease

    def begin(self, state: State) -> None:
        self.number, self.token, self.used = state.number, state.token, state.last_lease
        self.apps |= set(state.apps)
        self.serving |= {id_ for id_, one in state.apps.items() if one.spec.kind == "aggregation"}
        self.gpus |= {node.id: node.gpus for node in state.nodes.values()}
        self.firm |= {n.node_id: n.deadline for n in state.notices.values() if n.kind == "interruption"}
        for lease in state.leases.values():
            self.held[lease.number] = lease
            self.by_gpu[lease.node, lease.slot] = lease.number

    def look(self, event: Event) -> None:
        expected = 1 if self.number is None else self.number + 1
        if event.number != expected:
            self._add_violation(event, f"should have number {expected}")
        self.number = event.number
        match event.change:
            case LoopBegan():
                if event.change.token <= self.token:
                    self._add_violation(event, f"token {event.change.token} is not above {self.token}")
                self.token = event.change.token
            case AppEntered():
                self.apps.add(event.change.spec.id)
                if event.change.spec.kind == "aggregation":
                    self.serving.add(event.change.spec.id)
            case CapacityChanged():
                self._capacity(event.change)
            case Granted():
                used = self.used
                for lease in event.change.leases:
                    self._grant(event, lease, used)
            case Extended() | Recalled():
                for number in event.change.leases:
                    if number not in self.held:
                        self._add_violation(event, f"lease {number} is not held")
            case Ended():
                for number in event.change.leases:
                    self._end(event, number)

    def _capacity(self, change: CapacityChanged) -> None:
        for node in change.nodes:
            self.gpus[node.id] = node.gpus
            self.gone.discard(node.id)
        for node_id in change.left:
            self.gpus.pop(node_id, None)
            self.gone.add(node_id)
        self.firm = {n.node_id: n.deadline for n in change.notices if n.kind == "interruption"}

    def _grant(self, event: Event, lease: Lease, used: int) -> None:
        what = f"lease {lease.number} of {lease.app!r}"
        where = f"GPU {lease.slot} of node {lease.node!r}"
        other = self.by_gpu.get((lease.node, lease.slot))
        if other is not None:
            self._add_violation(event, f"{what}: {where} is allocated twice, lease {other} has not ended")
        if lease.node in self.gone:
            self._add_violation(event, f"{what}: node {lease.node!r} has left")
        elif lease.node not in self.gpus:
            self._add_violation(event, f"{what}: node {lease.node!r} was never there")
        elif not 0 <= lease.slot < (self.gpus[lease.node] or lease.app in self.serving):
            self._add_violation(
                event, f"{what}: node {lease.node!r} has {self.gpus[lease.node]} GPUs, none is {lease.slot}"
            )
        if lease.node in self.firm:
            self._add_violation(
                event, f"{what}: node {lease.node!r} has a firm notice for {self.firm[lease.node]:.3f}"
            )
        if lease.app not in self.apps:
            self._add_violation(event, f"{what}: no such app is registered")
        if lease.number <= used or lease.number in self.held:
            self._add_violation(event, f"{what}: the number was used before")
        self.used = max(self.used, lease.number)
        self.held[lease.number] = lease
        self.by_gpu[lease.node, lease.slot] = lease.number

    def _end(self, event: Event, number: int) -> None:
        lease = self.held.pop(number, None)
        if lease is None:
            self._add_violation(event, f"lease {number} is not held")
        elif self.by_gpu.get((lease.node, lease.slot)) == number:
            del self.by_gpu[lease.node, lease.slot]

    def _add_violation(self, event: Event, what: str) -> None:
        self.violations.append(
            f"event {event.number} at {event.at:.3f} ({type(event.change).__name__}): {what}"
        )
