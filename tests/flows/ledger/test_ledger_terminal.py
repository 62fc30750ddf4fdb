"""Changes of the ledger in words."""

import pytest

from ebbflow.flows.ledger.terminal import reason, sentence
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import (
    CHANGES,
    AppEntered,
    AppMoved,
    AppSpec,
    CapacityChanged,
    Change,
    Decided,
    Ended,
    Extended,
    Granted,
    Lease,
    LoopBegan,
    Recalled,
    Saved,
)

_LEASES = tuple(Lease(n, "a", "n1" if n < 3 else "n2", n, 0.0, 9.0, 1) for n in (1, 2, 3))
SAID: dict[str, tuple[Change, str, str]] = {
    "leader-elected": (LoopBegan(2, "h"), "loop h is the leader (fencing token 2)", ""),
    "capacity-changed": (
        CapacityChanged(1, (Node("n1", 4, 8.0),), ("n2",), (Notice("n3", 9.5),), reason="arrived"),
        "capacity is at revision 1: nodes n1; left n2; notices n3",
        "arrived",
    ),
    "app-registered": (AppEntered(AppSpec("a", "training", team="t")), "training a of team t registered", ""),
    "app-phase-changed": (AppMoved("a", "lost", "silent"), "a is lost", "silent"),
    "lease-granted": (Granted(_LEASES), "3 leases granted: a on n1 (2), n2", ""),
    "lease-extended": (Extended((1,), 9.0), "1 lease extended: 1", ""),
    "lease-revoked": (
        Recalled((1, 2, 3, 4, 5, 6), 9.0, "r"),
        "6 leases preempted: 1, 2, 3, 4 and 2 more",
        "r",
    ),
    "lease-ended": (Ended((1, 2)), "2 leases ended: 1, 2", ""),
    "decided": (Decided("guard", "r", "a"), "guard for a", "r"),
    "checkpoint-saved": (Saved("a", "s3://b/3", 3), "a saved step 3", "s3://b/3"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_every_kind_of_change_has_words(kind: str) -> None:
    change, words, why = SAID[kind]
    assert type(change) is CHANGES[kind]
    assert (sentence(change), reason(change)) == (words, why)
