"""Changes of the ledger in words, for tables and timelines."""

from collections.abc import Sequence

from ebbflow.planners.model import ledger
from ebbflow.tasks.drawing.wording import plural

_SHOWN = 4  # names in a sentence


def sentence(change: ledger.Change) -> str:
    """Return what happened, in one line without its reason: ``3 leases granted: a on n1, n2``."""
    match change:
        case ledger.LoopBegan():
            return f"loop {change.holder} is the leader (fencing token {change.token})"
        case ledger.CapacityChanged():
            parts = [
                ("nodes", [node.id for node in change.nodes]),
                ("left", list(change.left)),
                ("notices", [notice.node_id for notice in change.notices]),
            ]
            said = [f"{word} {_names(ids)}" for word, ids in parts if ids]
            return f"capacity is at revision {change.revision}" + (": " + "; ".join(said) if said else "")
        case ledger.AppEntered():
            team = f" of team {change.spec.team}" if change.spec.team else ""
            return f"{change.spec.kind} {change.spec.id}{team} registered"
        case ledger.AppMoved():
            return f"{change.app} is {change.phase}"
        case ledger.Granted():
            return f"{plural(len(change.leases), 'lease')} granted: {_grants(change)}"
        case ledger.Extended():
            return f"{plural(len(change.leases), 'lease')} extended: {_names(change.leases)}"
        case ledger.Recalled():
            return f"{plural(len(change.leases), 'lease')} preempted: {_names(change.leases)}"
        case ledger.Ended():
            return f"{plural(len(change.leases), 'lease')} ended: {_names(change.leases)}"
        case ledger.Decided():
            return change.kind + (f" for {change.app}" if change.app else "")
        case ledger.Saved():
            return f"{change.app} saved step {change.step}"


def reason(change: ledger.Change) -> str:
    """Return why it happened, where that is known."""
    return getattr(change, "reason", "") or (change.uri if isinstance(change, ledger.Saved) else "")


def _grants(change: ledger.Granted) -> str:
    nodes: dict[str, dict[str, int]] = {}
    for lease in change.leases:
        of_app = nodes.setdefault(lease.app, {})
        of_app[lease.node] = of_app.get(lease.node, 0) + 1
    said = [
        f"{app} on " + _names([f"{node} ({count})" if count > 1 else node for node, count in on.items()])
        for app, on in nodes.items()
    ]
    return _names(said)


def _names(names: Sequence[object]) -> str:
    shown = ", ".join(str(name) for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
