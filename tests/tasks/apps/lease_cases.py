"""Leases on GPUs of two nodes, a book of them, and a clock that a test moves."""

from ebbflow.infra.clock import SystemClock
from ebbflow.planners.model.ledger import Lease
from ebbflow.tasks.apps.lease_table import LeaseTable, Rules

RULES = Rules(grace=20.0, leave=5.0, fence=5.0)


class Hands(SystemClock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 1000.0

    def now(self) -> float:
        return self.time


def lease(number: int, node: str = "a", slot: int = 0, since: float = 1000.0, until: float = 1100.0) -> Lease:
    return Lease(number, "app", node, slot, since, until, 1)


def book_of(*leases: Lease, clock: Hands | None = None, lead: float = 1e9) -> tuple[LeaseTable, Hands]:
    clock = clock or Hands()
    book = LeaseTable("app", clock, RULES)
    book.learn(leases, lead)
    book.settle()
    return book, clock
