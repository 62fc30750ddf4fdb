"""The events of a cycle's changes, for listeners: pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ebbflow.planners.model.ledger import AppMoved, CapacityChanged, Change, Decided, Granted, Lease, Recalled
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.capacity.actuator import Done, ScaleResult
from ebbflow.tasks.capacity.listeners import LoopEvent
from ebbflow.tasks.drawing.wording import plural

_NAMED = 20  # leases that one event names


def of_changes(before: State, changes: Sequence[Change], at: float) -> Iterator[LoopEvent]:
    """Return what to tell of ``changes``, which were written; ``before`` has the leases that they are about."""
    granted = [lease for change in changes if isinstance(change, Granted) for lease in change.leases]
    for change in changes:
        match change:
            case CapacityChanged():
                yield LoopEvent("changed", change.reason, at, _capacity(before, change))
            case Decided(kind="auction"):
                yield LoopEvent("auction", change.reason, at, _decided(change) | _leases(granted))
            case Decided(kind="guard"):
                yield LoopEvent("rejected", change.reason, at, _decided(change))
            case Decided(kind="recovery"):
                yield LoopEvent("recovered", change.reason, at, _decided(change))
            case Recalled():
                payload = {
                    "leases": list(change.leases[:_NAMED]),
                    "count": len(change.leases),
                    "apps": sorted({before.leases[n].app for n in change.leases if n in before.leases}),
                    "nodes": sorted({before.leases[n].node for n in change.leases if n in before.leases}),
                    "deadline": change.deadline,
                    "reason": change.reason,
                }
                text = f"{plural(len(change.leases), 'lease')} revoked: {change.reason}"
                yield LoopEvent("revoked", text, at, payload)
            case AppMoved(phase="lost"):
                spec = before.apps[change.app].spec if change.app in before.apps else None
                payload = {
                    "app": change.app,
                    "reason": change.reason,
                    "flow_run": spec.flow_run if spec else "",
                    "resume": dict(spec.resume) if spec else {},
                }
                yield LoopEvent("lost", f"{change.app} marked lost: {change.reason}", at, payload)
            case _:
                pass  # the ledger has it; no listener acts on it


def of_done(done: Iterable[Done], at: float) -> Iterator[LoopEvent]:
    """Return what to tell of what was asked of the fleet."""
    for one in done:
        if isinstance(one, ScaleResult) and one.applied is not None:
            asked = [str(ask) for ask in one.applied.asked]
            refused = [f"{refusal.of}: {refusal.why}" for refusal in one.applied.refused]
            if asked:
                yield LoopEvent(
                    "scaled", f"{one.what}: {'; '.join(asked)}", at, {"requested": asked, "for": one.what}
                )
            if refused:
                text = f"{one.what}: {'; '.join(refused)}"
                yield LoopEvent("rejected", text, at, {"rejected": refused, "for": one.what})


def _capacity(before: State, change: CapacityChanged) -> Mapping[str, Any]:
    known = before.nodes
    return {
        "revision": change.revision,
        "nodes": len(known) - len(change.left) + sum(node.id not in known for node in change.nodes),
        "joined": [node.id for node in change.nodes if node.id not in known][:_NAMED],
        "left": list(change.left[:_NAMED]),
        "interruption_pending": [notice.node_id for notice in change.notices][:_NAMED],
        "change": change.reason,
    }


def _decided(change: Decided) -> dict[str, Any]:
    return {
        "app": change.app,
        "revision": change.revision,
        "seconds": round(change.seconds, 4),
        "reason": change.reason,
        "outcome": dict(change.outcome),
    }


def _leases(granted: Sequence[Lease]) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for lease in granted:
        counts[lease.app] = counts.get(lease.app, 0) + 1
    return {"granted": counts}
