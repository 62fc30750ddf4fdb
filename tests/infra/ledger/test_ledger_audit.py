"""The audit sees what must never happen, in events that ``fold`` would have refused."""

import pytest

from ebbflow.infra.ledger import audit
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.ledger import CapacityChanged, Change, Ended, Event, Extended, LoopBegan, Recalled
from ebbflow.planners.model.ledger_state import State, fold
from tests.infra.ledger.ledger_values import app, decision, grant, lease, node, nodes

START: tuple[Change, ...] = (app("a"), app("b"), LoopBegan(1, "x"), nodes("n1", "n2"))


def events(*changes: Change, first: int = 1) -> list[Event]:
    return [Event(n, 1_000_000.0 + n, change) for n, change in enumerate(changes, first)]


def test_nothing_is_said_of_a_clean_ledger() -> None:
    clean = events(
        *START, grant(lease(1), lease(2, slot=1)), Extended((1,), 9.0), Recalled((2,), 5.0), Ended((2,)),
        grant(lease(3, "b", slot=1)), CapacityChanged(2, left=("n2",)), nodes("n2", revision=3),
        grant(lease(9, "b", "n2"), lease(7, "b", "n2", 1)),
        CapacityChanged(4, notices=(Notice("n1", 9.0, "rebalance"),)), Ended((1,)), grant(lease(10)), decision(),
    )  # fmt: skip
    assert audit(clean) == []
    state = State()
    for n, event in enumerate(clean):
        fold(state, event)
        assert audit(clean[n + 1 :], state) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            (grant(lease(1)), grant(lease(2, "b"))),
            "GPU 0 of node 'n1' is allocated twice, lease 1 has not ended",
        ),
        ((grant(lease(1), lease(2, "b")),), "allocated twice"),
        ((grant(lease(1)), Recalled((1,), 3.0), grant(lease(2, "b"))), "allocated twice"),
        (
            (grant(lease(1)), CapacityChanged(2, left=("n1",)), nodes("n1", revision=3), grant(lease(2))),
            "allocated twice",
        ),
        ((CapacityChanged(2, left=("n1",)), grant(lease(1))), "node 'n1' has left"),
        ((grant(lease(1, node="n9")),), "node 'n9' was never there"),
        ((grant(lease(1, slot=2)),), "has 2 GPUs, none is 2"),
        ((CapacityChanged(2, (node("n1", 0),)), grant(lease(1))), "has 0 GPUs"),
        ((CapacityChanged(2, notices=(Notice("n1", 77.0),)), grant(lease(1))), "a firm notice for 77.000"),
        ((grant(lease(1, "ghost")),), "no such app is registered"),
        ((grant(lease(5)), Ended((5,)), grant(lease(5))), "the number was used before"),
        ((grant(lease(5)), grant(lease(4, slot=1))), "the number was used before"),
        ((Ended((1,)),), "lease 1 is not held"),
        ((Extended((1,), 2.0),), "lease 1 is not held"),
        ((grant(lease(1)), Ended((1,)), Recalled((1,), 2.0)), "lease 1 is not held"),
        ((LoopBegan(1, "y"),), "token 1 is not above 1"),
    ],
)
def test_each_violation_is_named(changes: tuple[Change, ...], said: str) -> None:
    found = audit(events(*START, *changes))
    assert len(found) == 1
    assert said in found[0]
    assert found[0].startswith(f"event {len(START) + len(changes)} at ")


def test_a_gap_is_named() -> None:
    assert "should have number 5" in audit(events(*START) + events(decision(), first=6))[0]


def test_a_notice_that_was_taken_back_no_longer_counts() -> None:
    taken_back = (CapacityChanged(2, notices=(Notice("n1", 7.0),)), CapacityChanged(3), grant(lease(1)))
    assert audit(events(*START, *taken_back)) == []
