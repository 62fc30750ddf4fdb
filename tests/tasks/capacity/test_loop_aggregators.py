"""The loop launches nodes for a training's aggregators, drains one at a notice, charges for them, gives them back."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from loopcases import FAST, settings

from ebbflow.infra.aggregation.registry import ServiceRegistry
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.ledger.address import VARIABLE
from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.planners.capacity.leases import SERVICE
from ebbflow.planners.capacity.values import Scaling
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import Granted, Recalled
from ebbflow.tasks.aggregation import service_status
from ebbflow.tasks.capacity.loop import CapacityLoop
from tests.infra.training.service.fake_run import FakeRun

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

PATIENCE = 150.0  # s; machines that run tests are busy
RULES = Scaling(
    provision_time_s=1.0, scale_out_after_s=0.0, scale_in_idle_s=2.0, cooldown_s=0.5, fallback=None
)


@pytest.fixture(name="ledger")
def _ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "ledger.db"))
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    with Ledger.open() as made:
        yield made


def _until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def test_a_training_gets_nodes_for_its_aggregators_and_keeps_training_through_a_notice(
    ledger: Ledger,
) -> None:
    pool = LocalPool("agg", "cpu", aggregation="local", max_nodes=2, price=3600.0)
    stop, runs = threading.Event(), []
    with LocalFleet.start([pool], "serving") as fleet:
        registry = ServiceRegistry(ledger.records)
        loop = CapacityLoop(
            ledger, fleet, fleet, settings(scaling=RULES), pace=replace(FAST, leader_lease=10.0)
        )
        thread = threading.Thread(target=loop.run, args=(stop,))
        thread.start()
        try:
            _until(lambda: registry.read().provisions() == 2, "the loop says that it can launch aggregators")
            run = FakeRun("nightly", servers=1)  # waits for a node to be launched
            runs.append(run)
            _until(lambda: run.rounds > 5, "rounds")
            [lease] = ledger.state().held(SERVICE)
            fleet.notice(lease.node, 150.0)
            _until(
                lambda: lease.number not in {one.number for one in ledger.state().held(SERVICE)}, "it is over"
            )
            before = run.rounds
            _until(lambda: run.rounds > before + 5, "rounds on another node")
            assert not run.aggregators.ended(), "nothing was lost"
            [other] = ledger.state().held(SERVICE)
            assert other.node != lease.node
            _until(lambda: service_status(ledger)["dollars"].get("nightly", 0.0) > 0, "it is charged")
            runs.clear()
            run.finish()  # and sees that every round counted once
            _until(
                lambda: not ledger.state().held(SERVICE) and not fleet.observe().pools[0].nodes, "given back"
            )
            status = service_status(ledger)
            spent = ledger.state().apps[SERVICE].dollars
            charged = sum(status["dollars"].values())
            assert (
                0 < charged <= spent + 3600 / 3600 * 5.0
            )  # a dollar a second: within some looks of each other
        finally:
            for one in runs:
                one.finish()
            stop.set()
            thread.join(PATIENCE)
    changes = [event.change for event in ledger.events(limit=1000)]
    assert any(isinstance(one, Recalled) and "terminates in" in one.reason for one in changes)
    granted = [lease for one in changes if isinstance(one, Granted) for lease in one.leases]
    assert all(one.price == 3600.0 and "serves the cluster's trainings" in one.reason for one in granted)


@pytest.mark.parametrize(
    ("kind", "given", "rule"),
    [("cpu", {}, "must name the cluster"), ("gpu", {"aggregation": "shop"}, "must have no aggregation")],
)
def test_pools_name_the_cluster_that_they_serve(kind: str, given: dict[str, str], rule: str) -> None:
    with pytest.raises(OptionError, match=rule):
        LocalPool("agg", kind, **given)  # type: ignore[arg-type]
