"""Trainings over aggregators on a fleet of AWS, emulated: nodes and aggregators come and go, the others train on."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from rented import Interrupting, cluster_with, shop, until

from ebbflow.infra.aggregation.registry import ServiceRegistry, plain_name
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.ledger.address import VARIABLE
from ebbflow.planners.model.ledger import Decided, Granted
from ebbflow.tasks.pipeline.run import PipelineRequest, run_steps
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training
from tests.aws.aggregator_instances import AggregatorInstances
from tests.infra.aws.torch_hosts import Hosts
from tests.infra.training.elastic_runs import PER_PASS, SCRIPT, StepLog

if TYPE_CHECKING:
    from tests.aws.cluster import Cluster
    from tests.aws.emulator import AccountAt
    from tests.infra.aws.systems_manager import SystemsManager

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(600)]

EPOCHS = 40
NOTICE = 40.0  # s


@pytest.fixture
def shared_lab(aws_account: "AccountAt", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Cluster":
    """Return a cluster with two nodes to train on and two for aggregators."""
    from tests.aws.emulator import PoolShape

    monkeypatch.setenv("EBBFLOW_TERRAFORM_OUTPUT", str(tmp_path / "ebbflow.json"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "ledger.db"))
    monkeypatch.setattr("ebbflow.tasks.training.aws._POLL", 0.2)
    monkeypatch.setattr("ebbflow.tasks.training.aws._AGAIN", 2.0)
    gpu = PoolShape("gpu", "gpu", types=("g5.xlarge",), most=3, size=2)
    sums = PoolShape("sums", "cpu", types=("m5.large",), most=2, size=2)
    return cluster_with(aws_account, tmp_path, monkeypatch, gpu, sums)


class Training:
    """A training in a thread, whose steps are slow until they may be fast, and what it has written of them."""

    def __init__(self, folder: Path, store: str, **options: object) -> None:
        self._enough = folder / "enough"
        slow = SCRIPT.read_text().replace(
            "time.sleep(pause)", f"time.sleep(0.0 if Path({str(self._enough)!r}).exists() else pause)"
        )
        (folder / "fit.py").write_text(slow)
        arguments = (str(folder), str(EPOCHS), "adam", "0.5", "float32")
        self.log = StepLog(folder)
        self.report: TrainingReport | None = None
        given = {"preflight": "never", "adaptive": False, "checkpoint_interval": 1e6, **options}
        self._request = TrainingRequest(
            str(folder / "fit.py"), arguments=arguments, nodes="aws:gpu:2x1", runs_dir=f"{store}/runs",
            run_id="one", sync="service", **given,
        )  # type: ignore[arg-type] # fmt: skip
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        self.report = run_training(self._request)

    def trains(self, rank: int) -> bool:
        """Tell whether a worker has made steps; fail where the training is over."""
        assert self._thread.is_alive(), self.report
        return any(one["rank"] == rank for one in self.log.steps)

    def advance(self, steps: int) -> None:
        """Wait for as many steps."""
        begun = self.log.step
        until(lambda: self._thread.is_alive() and self.log.step >= begun + steps, f"{steps} more steps")

    def finish(self) -> TrainingReport:
        """Let it end, and see that each sample was used once a pass."""
        self._enough.touch()
        self._thread.join(150.0)
        assert self.report is not None, "it has not ended"
        assert self.report.state == "finished", self.report.reason
        self.log.check_samples(EPOCHS * PER_PASS, {1: 0})
        return self.report


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_an_instance_vanishes_one_is_noticed_and_others_take_their_places_within_one_generation(
    shared_lab: "Cluster", ssm: "SystemsManager", tmp_path: Path, shared: bool
) -> None:
    lab, account = shared_lab, shared_lab.account
    ssm.script = hosts = Hosts()
    instances = AggregatorInstances(lab, "sums", "local", tmp_path) if shared else None
    try:
        with Ledger.open() as ledger:
            registry = ServiceRegistry(ledger.records)
            if shared:
                until(lambda: len(registry.read().aggregators()) == 2, "aggregators")
            options = {"aggregation_cluster": "local"} if shared else {"aggregators": 2, "mirrors": 1}
            training = Training(tmp_path, lab.settings.store, **options)
            until(lambda: training.trains(0) and training.trains(1), "steps on both instances")
            first, second = (node for node, _ in hosts.processes)
            account.take([first])
            hosts.take(first)
            until(lambda: training.trains(2), "an instance that its group has started")
            account.interrupt([second], NOTICE)
            hosts.notice(second, NOTICE)
            until(lambda: training.trains(3), "another one")
            training.advance(3)
            if instances is not None:
                [holder] = {plain_name(host) for host in registry.read().hosts().values()}
                instances.notice(holder, NOTICE)
                until(lambda: instances.services[holder].poll() == 0, "an aggregator with nothing left")
                training.advance(3)
            report = training.finish()
            assert [one.number for one in report.generations] == [1], report.generations
            assert len(training.log.unwritten) <= 1
            kinds = [event.kind for event in report.events]
            assert kinds.count("worker-lost") >= 1, kinds
            assert (report.aggregation is None) == shared  # the ledger has what shared ones hold
            if shared:
                until(lambda: not registry.read().trainings(), "the service forgets the training")
    finally:
        hosts.close()
        if instances is not None:
            instances.close()


def test_a_pipelines_training_gets_aggregators_launched_by_its_ledger_and_gives_them_back(
    aws_account: "AccountAt", ssm: "SystemsManager", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.aws.emulator import PoolShape

    gpu = PoolShape("gpu", "gpu", types=("g5.xlarge",), most=3)
    sums = PoolShape("sums", "cpu", types=("m5.large",), most=1)
    lab = cluster_with(aws_account, tmp_path, monkeypatch, gpu, sums)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "another.db"))  # the pipeline names its cluster's own
    ssm.script = hosts = Hosts()
    ledger_of_nodes = {VARIABLE: str(tmp_path / "ledger.db")}
    instances = AggregatorInstances(lab, "sums", "lab", tmp_path, ledger_of_nodes)
    plain = shop(tmp_path, lab)
    plain["trainings"]["fit"] |= {"sync": "service", "aggregation_cluster": "lab"}
    file = tmp_path / "shop.yaml"
    file.write_text(yaml.safe_dump(plain, sort_keys=False))
    heard = Interrupting(lab)
    try:
        outcome = run_steps(PipelineRequest(str(file), run_id="one", runs_dir=str(tmp_path / "runs")), heard)
        assert outcome.state == "finished", (outcome, heard.lines)
        assert abs(float(outcome.step("fit").results["metrics.slope"]) - 2) < 0.2
        assert heard.taken
        assert len(instances.services) == 1
        assert "all launched nodes are terminated" in heard.lines, heard.lines
    finally:
        hosts.close()
        instances.close()
    with Ledger.open(str(tmp_path / "ledger.db"), cluster="lab", create=False) as ledger:
        assert ledger.verify() == []
        assert not ledger.state().leases
        changes = [event.change for event in ledger.events(limit=1000)]
    [serving] = instances.services
    assert serving in {lease.node for one in changes if isinstance(one, Granted) for lease in one.leases}
    reasons = [one.reason for one in changes if isinstance(one, Decided)]
    assert any("sums scale-out 0 → 1 node" in one for one in reasons), reasons
    assert any("sums scale-in 1 → 0 nodes: no training uses aggregators" in one for one in reasons), reasons
    assert not lab.nodes("gpu")
    assert not lab.nodes("sums")
