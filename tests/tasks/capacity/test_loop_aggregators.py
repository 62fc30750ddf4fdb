"""The loop launches nodes for a training's aggregators, drains one at a notice, charges for them, gives them back."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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
from ebbflow.tasks.capacity.node_sources import opened_nodes
from ebbflow.tasks.capacity.request import CapacityRequest
from tests.aws.aggregator_instances import AggregatorInstances
from tests.infra.training.service.fake_run import FakeRun

if TYPE_CHECKING:
    from tests.aws.emulator import AccountAt

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

ENDS = "TerminateInstanceInAutoScalingGroup"
PRICES = 'source = "made up"\nregion = "us-east-1"\n[on_demand]\n"m5.large" = 0.096\n'
LOOKS = "[intervals]\nfleet_poll_interval = 0.5\n"
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
    for log in sorted((tmp_path / "home").glob("fleets/*/logs/*.log")):  # shown where the test fails
        print(log.name, log.read_text(errors="replace"))


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
            _until(lambda: ledger.state().held(SERVICE), "a lease of the node")
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


@pytest.mark.slow
def test_on_aws_a_noticed_node_gives_its_tensors_to_one_that_is_rented_in_its_place(
    ledger: Ledger, aws_account: "AccountAt", tmp_path: Path
) -> None:
    from tests.aws.emulator import PoolShape

    aws_account.configure(drain_seconds=120)  # a node whose service has ended may stay as long
    lab = aws_account.cluster("lab", PoolShape("sums", "cpu", types=("m5.large",), most=2))
    (tmp_path / "prices.toml").write_text(PRICES)
    (tmp_path / "fleet.toml").write_text(LOOKS)
    request = CapacityRequest(
        source=f"aws:{lab.write(tmp_path / 'ebbflow.json')}",
        prices=str(tmp_path / "prices.toml"),
        config=str(tmp_path / "fleet.toml"),
    )
    stop = threading.Event()
    instances = AggregatorInstances(lab, "sums", "local", tmp_path)
    run = None
    with opened_nodes(request, ledger, ledger.clock) as nodes:
        loop = nodes.loop(ledger, settings(scaling=RULES), pace=replace(FAST, fleet_poll_interval=0.5))
        thread = threading.Thread(target=loop.run, args=(stop,))
        thread.start()
        try:
            registry = ServiceRegistry(ledger.records)
            _until(lambda: registry.read().provisions() == 2, "the loop says that it can launch aggregators")
            run = FakeRun("nightly", servers=1)
            _until(lambda: run.rounds > 5, "rounds")
            _until(lambda: ledger.state().held(SERVICE), "a lease of the node")
            [lease] = ledger.state().held(SERVICE)
            assert 0 < lease.price <= 0.096
            instances.notice(lease.node, 120.0)
            _until(lambda: instances.services[lease.node].poll() == 0, "its aggregator has nothing left")
            _until(
                lambda: [one.node for one in ledger.state().held(SERVICE)] not in ([], [lease.node]),
                "another",
            )
            before = run.rounds
            _until(lambda: run.rounds > before + 5, "rounds on another node")
            assert not run.aggregators.ended(), "nothing was lost"
            ended, run = run, None
            ended.finish()  # and sees that every round counted once
            _until(lambda: not ledger.state().held(SERVICE), "end of the lease")
            _until(lambda: len(aws_account.calls(ENDS)) == 2, "the other node is terminated")
        finally:
            stop.set()
            thread.join(PATIENCE)
            instances.close()
            if run is not None:
                run.finish()


@pytest.mark.parametrize(
    ("kind", "given", "rule"),
    [("cpu", {}, "must name the cluster"), ("gpu", {"aggregation": "shop"}, "must have no aggregation")],
)
def test_pools_name_the_cluster_that_they_serve(kind: str, given: dict[str, str], rule: str) -> None:
    with pytest.raises(OptionError, match=rule):
        LocalPool("agg", kind, **given)  # type: ignore[arg-type]
