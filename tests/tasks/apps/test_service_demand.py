"""What a capacity loop reads of the aggregation service's records."""

from typing import Any

from ebbflow.infra.aggregation.registry import DEMAND, MANAGER, TRAINING, ServiceView
from ebbflow.infra.ledger.records import RecordKey, ServiceRecord
from ebbflow.tasks.apps.aggregation import service_demand

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
