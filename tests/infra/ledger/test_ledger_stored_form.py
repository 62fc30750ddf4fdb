"""What lies in databases, to the byte: states and reports; the tests of the codec have the changes."""

import math
from typing import Any

import pytest

from ebbflow.infra.ledger.rows import codec
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import AppReport, AppSpec, Lease, Slot
from ebbflow.planners.model.ledger_state import AppRecord, State

STATE = State(
    7,
    2.5,
    nodes={"n": Node("n", 4, 8.0, gpus=2)},
    notices={"n": Notice("n", math.inf)},
    apps={"a": AppRecord(AppSpec("a", "training", budget=2.0), 1.0, 1, ended=3.0)},
    leases={1: Lease(1, "a", "n", 0, 1.0, 2.0, 1, recalled=1.5)},
    booked={Slot("n", 0): 1},
    teams={"t": -math.inf},
    pipelines={"p": 0.5},
)
REPORT = AppReport(
    1.0,
    (1, 2),
    progress=0.5,
    job={"k": [math.inf, {"x\x00y": (1, None, True)}], 3: "\ud800"},  # type: ignore[dict-item]
    trials=({"lr": 0.1},),
    message="déjà",
)
STORED = [
    (STATE, '{"number":7,"at":2.5,"nodes":{"n":{"id":"n","cores":4,"memory":8.0,"gpus":2}},"notices":{"n":'
    '{"node_id":"n","deadline":{"$float":"inf"}}},"apps":{"a":{"spec":{"id":"a","kind":"training","budget":2.0},'
    '"entered":1.0,"number":1,"ended":3.0}},"leases":[[1,{"number":1,"app":"a","node":"n","slot":0,"since":1.0,'
    '"until":2.0,"revision":1,"recalled":1.5}]],"booked":[[["n",0],1]],"teams":{"t":{"$float":"-inf"}},'
    '"pipelines":{"p":0.5}}'),
    (REPORT, '{"at":1.0,"holds":[1,2],"progress":0.5,"job":{"k":[{"$float":"inf"},{"x\\ufffdy":[1,null,true]}],'
    '"3":"\\ufffd"},"trials":[{"lr":0.1}],"message":"d\\u00e9j\\u00e0"}'),
]  # fmt: skip


@pytest.mark.parametrize(("value", "stored"), STORED, ids=["state", "report"])
def test_a_value_is_stored_as_ever_and_what_was_stored_is_read(value: Any, stored: str) -> None:
    assert codec.dump(value) == codec.dump_known(value) == stored
    again = codec.load(type(value), codec.FORMAT, stored)
    assert codec.dump(again) == stored
    assert codec.load(type(value), 1, stored.replace('"revision":', '"epoch":')) == again
    assert value != STATE or again == value
