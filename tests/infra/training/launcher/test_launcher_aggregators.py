"""What a launcher does when aggregators, or the ledger in which it finds them, do not answer."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import AggregationError, LedgerUnavailableError
from ebbflow.infra.protocols import Halt
from ebbflow.infra.training.channel.meeting import Meeting
from ebbflow.infra.training.channel.wire import Order
from ebbflow.infra.training.launcher import service
from ebbflow.infra.training.launcher.journal import Record
from ebbflow.infra.training.launcher.loop import Loop
from tests.infra.training.workforces import Channel

SLOTS = {"new": 1}
LOGS = {"new": "logs"}


class Aggregators:
    """Aggregators that take their time to admit nodes."""

    environment: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.admitted, self.problem = False, ""
        self.asked: list[Mapping[str, str]] = []

    def start(self) -> None: ...

    def ended(self) -> list[str]:
        return []

    def admit(self, job_id: str, peers: Mapping[str, str]) -> None: ...

    def admits(self, job_id: str, peers: Mapping[str, str]) -> bool:
        self.asked.append(peers)
        if self.problem:
            raise AggregationError(self.problem)
        return self.admitted

    def remove(self, job_id: str) -> None:
        raise AggregationError("they do not answer")

    def close(self) -> None:
        raise LedgerUnavailableError("the ledger does not answer")


class Exchange(Channel):
    """An exchange with one node that is there, whatever it is called."""

    there = True

    def public_of(self, name: str) -> str:
        return f"public-{name}" if self.there else ""


def make_workforce(aggregators: Aggregators) -> tuple[service.Workforce, Any]:
    exchange: Any = Exchange(Meeting.__new__(Meeting))
    made = service.Workforce(aggregators, exchange, 1, silence=10.0)  # type: ignore[arg-type]
    made.open({"a": range(1)}, {"a": range(1)}, 0)
    return made, exchange


def orders(workforce: service.Workforce) -> dict[str, Order]:
    member = SimpleNamespace(key="key", wire=SimpleNamespace(forget_end=lambda number: None))
    members: Any = {"new": member}
    order = Order("launch", script="fit.py", arguments=(), environment={}, generation=1)
    return workforce.orders(SLOTS, order, members, LOGS)


def test_a_node_joins_once_aggregators_have_admitted_it_and_nobody_waits_for_that() -> None:
    aggregators = Aggregators()
    workforce, exchange = make_workforce(aggregators)
    assert orders(workforce) == {}
    assert "new" not in workforce.ranks
    aggregators.admitted = True
    exchange.there = False
    assert orders(workforce) == {}
    exchange.there = True
    assert orders(workforce)["new"].first_rank == 1
    assert aggregators.asked == [{"key": "public-key"}] * 2
    workforce.close()  # whether or not tensors can be removed


@pytest.mark.parametrize("problem", ["a key must be 64 hexadecimal digits", ""])
def test_a_node_that_is_not_admitted_does_not_start(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    aggregators = Aggregators()
    workforce, _ = make_workforce(aggregators)
    aggregators.problem = problem
    monkeypatch.setattr(service, "_ADMISSION", -1.0)
    assert workforce.may_start("new")
    assert orders(workforce) == {}
    assert not workforce.may_start("new")


def test_a_run_ends_whether_or_not_the_ledger_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    loop = Loop.__new__(Loop)
    record = Record(SystemClock())
    stage: Any = loop
    stage._members = SimpleNamespace(names=["a"], end=lambda names: done.append("nodes"))
    stage._aggregators, stage._record = Aggregators(), record
    stage._look_for_refusals = lambda everything: done.append("refusals")
    stage._job = stage._pool = None
    monkeypatch.setattr(record, "write", lambda job, pool, state: done.append(state))
    stage.over = SimpleNamespace(set=lambda: done.append("over"))
    loop._finish(Halt("finished", "the script finished"), lambda: done.append("released"))
    assert done == ["nodes", "refusals", "finished", "released", "over"]
    assert record.status.state == "finished"
    assert record.status.reason == "the script finished; the ledger does not answer"
    assert [event.kind for event in record.events()] == ["ended"]
