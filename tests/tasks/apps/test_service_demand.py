"""What a capacity loop reads of the aggregation service's records."""

from typing import Any, cast

import pytest

from ebbflow.infra.aggregation.registry import ACCOUNTS, DEMAND, MANAGER, TRAINING, ServiceView
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.ledger.records import RecordKey, ServiceRecord, ServiceRecords
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.aggregation import service_status
from ebbflow.tasks.apps.aggregation import ServiceWatch, service_demand

PEERS: dict[str, Any] = {"servers": 1, "peers": {}, "revision": 1}


def view(bodies: dict[RecordKey, dict[str, Any]]) -> ServiceView:
    records = {key: ServiceRecord(100.0, body) for key, body in bodies.items()}
    return ServiceView(records, 100.0, dict.fromkeys(records, 0.0))


def test_an_app_of_several_trainings_is_placed_one_by_one() -> None:
    bodies: dict[RecordKey, dict[str, Any]] = {
        RecordKey(DEMAND, f"sweep-{i}"): {"app": "sweep", "servers": i + 1} for i in range(3)
    }
    bodies |= {RecordKey(TRAINING, f"sweep-{i}/generation-1"): PEERS for i in range(2)}
    bodies[MANAGER] = {"placed": ["sweep-0/generation-1"], "squeezed": {"sweep-0/generation-1": 2}}
    runs = service_demand(view(bodies)).runs
    assert [(one.run, one.servers, one.placed, one.lacking) for one in runs] == [
        ("sweep", 1, True, 2),
        ("sweep", 2, False, 0),
        ("sweep", 3, False, 0),
    ]


class FakeLedger:
    """A ledger with this account and no other record."""

    cluster = "test"

    def __init__(self, account: dict[str, Any]) -> None:
        self.clock = SystemClock()
        self.written: list[RecordKey] = []
        self._account = account

    @property
    def records(self) -> ServiceRecords:
        return cast(ServiceRecords, self)

    def read(self) -> dict[RecordKey, ServiceRecord]:
        return {ACCOUNTS: ServiceRecord(100.0, self._account)}

    def put(self, key: RecordKey, body: dict[str, Any]) -> None:
        self.written.append(key)


@pytest.mark.parametrize("owner", [5, {"team": "vision"}, ["vision", "nightly", "soon"]])
def test_an_account_of_another_version_neither_ends_a_look_nor_is_written_over(owner: object) -> None:
    ledger = FakeLedger({"owners": {"a": owner}, "dollars": {"a": 2.0}})
    watch = ServiceWatch(ledger.records)
    assert not watch.look(State(), 200.0, 0)
    assert not watch.look(State(), 300.0, 0)
    assert (watch.demand, ledger.written) == (None, [])
    found = service_status(cast(Ledger, ledger))
    assert (found["dollars"], found["finished_dollars"]) == (None, None)


def test_an_account_that_can_be_read_is_continued() -> None:
    ledger = FakeLedger({"owners": {"a": ["vision", "", 150.0, "more"]}, "dollars": {"a": 2.0}})
    watch = ServiceWatch(ledger.records)
    assert watch.look(State(), 200.0, 0)
    assert watch.demand is not None
    assert (watch.demand.accounts.dollars, ledger.written) == ({"a": 2.0}, [ACCOUNTS])
    assert service_status(cast(Ledger, ledger))["finished_dollars"] == 2.0, "it was seen long ago"
