"""A training's nodes on instances: each started once, ended for good, and lost with its instance."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.infra.aws.remote import Outcome, RemoteRunner
from ebbflow.infra.aws.train_nodes import AwsNodes, own_address
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import AwsUnavailableError, ClusterError, EngineUnavailableError
from ebbflow.infra.protocols import TrainingJob
from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.wire import Entry, entry_from
from ebbflow.planners.model import Capacity, Node, Notice
from ebbflow.planners.model.trainings import RunSettings
from tests.aws.emulator import PoolShape
from tests.infra.aws.systems_manager import Split, SystemsManager
from tests.infra.aws.torch_hosts import Hosts

SCRIPT = Path(__file__).parents[1] / "training" / "launched_script.py"


class Instances:
    """A capacity that a test sets."""

    def __init__(self, *nodes):
        self.nodes = nodes
        self.notices = ()

    def capacity(self):
        return Capacity(1, tuple(sorted(self.nodes, key=lambda n: n.id)), self.notices)


class FakeRunner:
    """Runs nothing, and writes down what it was asked for."""

    def __init__(self):
        self.asked = []
        self.running = {}
        self.fails = {}
        self.says = keys.announcement("ab" * 32)
        self.go = threading.Event()
        self.go.set()

    def start_torch(self, node, name, entry, *, token=""):
        self.go.wait(300)
        self.asked.append(("start", node, name, token))
        if (error := self.fails.get(node)) is not None:
            if isinstance(error, Exception):
                raise error
            return error
        self.running[node, name] = entry_from(entry)
        return Outcome(node, "done", code=0, output=self.says)

    def stop_torch(self, node, name, *, token=""):
        self.go.wait(300)
        self.asked.append(("stop", node, name, token))
        self.running.pop((node, name), None)
        return Outcome(node, "done", code=0)

    def run(self, document, nodes, parameters, *, register=None):
        assert (document, parameters["action"], register) == ("torch-node", "status", 0.0)
        if isinstance(self.fails.get("status"), Exception):
            raise self.fails["status"]
        told = {n: ("active" if (n, parameters["name"]) in self.running else "inactive") for n in nodes}
        return {n: Outcome(n, "done", code=0, output=f"{word}\n") for n, word in told.items()}


def instance(name, gpus=4, cores=16):
    return Node(name, cores, 64.0, host=f"10.0.0.{name[-1]}", instance_type="g5.12xlarge", gpus=gpus)


def entry(name, number=1):
    return Entry("10.0.0.9:29400", "00" * 32, "run", name, f"{name}-{number}", "", "")


@pytest.fixture
def runner():
    return FakeRunner()


@pytest.fixture
def there():
    return Instances(instance("i-1"), instance("i-2"), instance("i-3", gpus=1))


@pytest.fixture
def nodes(runner, there):
    with AwsNodes(runner, there, host="10.0.0.9") as nodes:
        yield nodes


def until(true, seconds=150.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def test_a_placement_holds_what_is_free_and_stays(nodes, there):
    assert nodes.placement() == {"i-1": 4, "i-2": 4, "i-3": 1}
    assert nodes.placement(2) == {"i-1": 2, "i-2": 2, "i-3": 2}
    there.notices = (Notice("i-1", 1.0), Notice("i-3", 1.0, "rebalance"))
    nodes.start("i-2", 4, entry("i-2"))
    time.sleep(0.25)
    assert nodes.placement() == {"i-3": 1}


def test_nodes_that_others_have_chosen_run_nowhere_else(runner, there):
    with AwsNodes(runner, there, host="10.0.0.9", named=True) as nodes:
        nodes.start("i-2", 2, replace(entry("i-2"), devices=(1, 3)))
        until(lambda: runner.running)
        assert runner.running["i-2", nodes.uid].devices == (1, 3)
        with pytest.raises(ClusterError, match="there is no instance i-9"):
            nodes.start("i-9", 1, entry("i-9"))
        there.notices = (Notice("i-1", 1.0),)
        time.sleep(0.25)
        with pytest.raises(
            ClusterError, match="there is no instance i-1, or it is in use or about to terminate"
        ):
            nodes.start("i-1", 1, entry("i-1"))


def test_an_instance_that_is_not_known_yet_is_looked_for(runner, there):
    looks = []

    def look():
        looks.append(1)
        there.nodes = (*there.nodes, instance("i-4"))

    with AwsNodes(runner, there, host="10.0.0.9", named=True, look=look) as nodes:
        nodes.start("i-2", 1, entry("i-2"))
        assert looks == []
        nodes.start("i-4", 1, entry("i-4"))
        assert looks == [1]
        with pytest.raises(ClusterError, match="there is no instance i-9"):
            nodes.start("i-9", 1, entry("i-9"))


def test_a_node_is_quiet_once_its_instance_has_said_so_or_is_gone(nodes, runner, there):
    for name in ("i-1", "i-2"):
        nodes.start(name, 4, entry(name))
    until(lambda: len(runner.running) == 2)
    assert not nodes.quiet("i-1")
    runner.go.clear()
    nodes.end("i-1")
    assert nodes.lost("i-1")
    assert not nodes.quiet("i-1"), "it was told to end, no more"
    runner.go.set()
    until(lambda: nodes.quiet("i-1"))
    there.nodes = there.nodes[:1]
    time.sleep(0.25)
    assert nodes.quiet("i-2")


def test_a_node_runs_on_the_instance_of_its_name_with_its_address_and_a_folder(nodes, runner):
    nodes.start("i-2", 4, entry("i-2"))
    until(lambda: runner.running)
    ((where, name), started) = runner.running.popitem()
    assert (where, name) == ("i-2", nodes.uid)
    assert (started.address, started.key) == ("10.0.0.2", "i-2-1")
    assert started.folder == f"/var/lib/ebbflow/work/{nodes.uid}/i-2-1"
    assert runner.asked == [("start", "i-2", nodes.uid, "i-2-1")]
    assert nodes.lost("i-2") == ""


def test_a_node_of_another_name_runs_on_the_smallest_instance_that_will_do(nodes, runner):
    nodes.start("node-1", 1, entry("node-1"))
    nodes.start("node-2", 2, entry("node-2"))
    nodes.start("node-3", 2, entry("node-3"))
    until(lambda: len(runner.running) == 3)
    assert sorted(where for where, _ in runner.running) == ["i-1", "i-2", "i-3"]
    with pytest.raises(ClusterError, match="node-4 needs 1 slots, and none of the 3 instances is free"):
        nodes.start("node-4", 1, entry("node-4"))
    assert [name for name in ("node-3", "node-4") if nodes.failed(name)] == ["node-4"]
    nodes.end("node-3")
    nodes.start("node-4", 1, entry("node-4"))
    assert not nodes.failed("node-4")


def test_what_does_not_fit_or_is_there_is_refused(nodes, there):
    with pytest.raises(ClusterError, match=r"node i-3 needs 2 slots and g5\.12xlarge has 1"):
        nodes.start("i-3", 2, entry("i-3"))
    nodes.start("i-1", 1, entry("i-1"))
    with pytest.raises(ClusterError, match="there is a node 'i-1' already"):
        nodes.start("i-1", 1, entry("i-1"))
    there.notices = (Notice("i-2", 1.0),)
    time.sleep(0.25)
    with pytest.raises(ClusterError, match="scale out the fleet first"):
        nodes.start("i-2", 4, entry("i-2"))


def test_starting_returns_at_once_and_a_failure_is_a_loss(nodes, runner):
    runner.go.clear()
    runner.fails = {
        "i-1": Outcome("i-1", "failed", "Failed", 1, "this node is leaving\n"),
        "i-2": AwsUnavailableError("away"),
    }
    begun = time.monotonic()
    nodes.start("i-1", 1, entry("i-1"))
    nodes.start("i-2", 1, entry("i-2"))
    assert time.monotonic() - begun < 150  # a start lasts for as long as it is let
    assert nodes.lost("i-1") == nodes.lost("i-2") == ""
    runner.go.set()
    until(lambda: nodes.lost("i-1") and nodes.lost("i-2"))
    assert nodes.lost("i-1") == "it could not be started: i-1: failed, Failed: this node is leaving"
    assert nodes.lost("i-2") == "it could not be started: away"
    assert nodes.log("i-1") == "this node is leaving\n"
    assert nodes.failed("i-1")
    assert not nodes.failed("i-3"), "it was never started"


class Watch(SystemClock):
    """A clock that a test sets."""

    time = 1000.0

    def now(self):
        return self.time


def test_an_instance_on_which_starts_fail_is_left_out_for_longer_each_time(runner):
    watch, there = Watch(), Instances(instance("i-3", gpus=1))
    runner.fails = {"i-3": Outcome("i-3", "failed", "Failed", 1, "this node is leaving")}
    with AwsNodes(runner, there, host="10.0.0.9", clock=watch) as nodes:
        for name, avoided in (("node-1", 30.0), ("node-2", 60.0), ("node-3", 120.0)):
            nodes.start(name, 1, entry(name))
            until(lambda name=name: nodes.failed(name))
            assert nodes.placement() == {}
            watch.time += avoided - 0.5
            assert nodes.placement() == {}
            watch.time += 0.5
            assert nodes.placement() == {"i-3": 1}
        watch.time += 3600.0
        nodes.start("node-4", 1, entry("node-4"))
        until(lambda: nodes.failed("node-4"))
        watch.time += 30.0
        assert nodes.placement() == {"i-3": 1}, "an hour later the count begins anew"


def test_an_instance_that_has_not_failed_is_tried_before_one_that_has(nodes, runner):
    runner.fails = {"i-3": AwsUnavailableError("away")}
    nodes.start("node-1", 1, entry("node-1"))
    until(lambda: nodes.failed("node-1"))
    for name in ("node-2", "node-3", "node-4"):  # the last one on what is left
        nodes.start(name, 1, entry(name))
    found = [nodes._nodes[f"node-{number}"].instance for number in range(1, 5)]
    assert found == ["i-3", "i-1", "i-2", "i-3"]


def test_the_key_that_a_node_tells_is_admitted_and_a_node_that_tells_none_is_lost(nodes, runner):
    admitted = []
    nodes.start("i-1", 1, entry("i-1"), admitted.append)
    until(lambda: admitted)
    assert admitted == ["ab" * 32]
    runner.says = "started\n"
    nodes.start("i-2", 1, entry("i-2"), admitted.append)
    until(lambda: nodes.lost("i-2"))
    assert "it has told no public key" in nodes.lost("i-2")
    assert admitted == ["ab" * 32]


def test_a_node_is_lost_with_its_instance(nodes, there, runner):
    nodes.start("node-1", 4, entry("node-1"))
    assert nodes.lost("node-2") == "it was never started"
    until(lambda: runner.running)
    there.nodes = tuple(node for node in there.nodes if node.id != "i-1")
    time.sleep(0.25)
    assert nodes.lost("node-1") == "its instance i-1 is terminated"
    nodes.end("node-1")
    assert ("stop", "i-1", nodes.uid, "") not in runner.asked  # there is nobody to tell


def test_an_instance_is_used_again_only_after_its_last_node_was_stopped(nodes, runner):
    nodes.start("i-1", 4, entry("i-1", 1))
    until(lambda: runner.running)
    runner.go.clear()
    nodes.end("i-1")
    assert nodes.lost("i-1") == "ended by the launcher"
    nodes.start("i-1", 2, entry("i-1", 2))
    runner.go.set()
    until(lambda: ("start", "i-1", nodes.uid, "i-1-2") in runner.asked)
    assert [what for what, *_ in runner.asked] == ["start", "stop", "stop", "start"]
    assert nodes.lost("i-1") == ""


def test_a_node_that_is_ended_before_it_was_started_is_not_started(nodes, runner):
    runner.go.clear()
    for name in ("i-1", "i-2"):
        nodes.start(name, 1, entry(name))
    nodes.end("i-1")
    nodes.end("nobody")
    runner.go.set()
    until(lambda: ("stop", "i-1", nodes.uid, "") in runner.asked)
    until(lambda: ("i-2", nodes.uid) in runner.running)
    assert ("i-1", nodes.uid) not in runner.running


def test_closing_ends_all_nodes(runner, there):
    nodes = AwsNodes(runner, there, host="10.0.0.9")
    for name in ("i-1", "i-2"):
        nodes.start(name, 1, entry(name))
    until(lambda: len(runner.running) == 2)
    nodes.close()
    nodes.close()
    assert runner.running == {}
    with pytest.raises(ClusterError, match="have been closed"):
        nodes.start("i-3", 1, entry("i-3"))


def test_an_earlier_pool_is_gone_when_no_instance_runs_its_nodes(nodes, runner):
    runner.running["i-1", "earlier"] = entry("i-1")
    assert not nodes.gone("earlier")
    assert nodes.gone("another")
    runner.fails["status"] = AwsUnavailableError("away")
    assert not nodes.gone("another")


def test_a_capacity_that_never_could_be_seen_refuses_nodes(runner):
    def away():
        raise EngineUnavailableError("polling the fleet failed: away")

    there = Instances()
    there.capacity = away
    with (
        AwsNodes(runner, there, host="10.0.0.9") as nodes,
        pytest.raises(ClusterError, match="the instances are not known: polling the fleet failed"),
    ):
        nodes.start("node-1", 1, entry("node-1"))


def test_nodes_without_gpus_have_processors_for_slots(runner):
    nodes = AwsNodes(runner, Instances(instance("i-1", gpus=0, cores=8)), host="10.0.0.9")
    assert nodes.placement() == {"i-1": 8}
    assert not nodes.paused("i-1")
    nodes.close()


def test_this_machine_has_an_address():
    assert own_address().count(".") == 3


@pytest.fixture
def hosts():
    hosts = Hosts()
    yield hosts
    hosts.close()


@pytest.mark.processes
def test_a_training_whose_script_is_on_s3_survives_the_loss_of_an_instance(aws_account, hosts, tmp_path):
    from ebbflow.infra.training.launcher.trainer import TorchTrainer

    lab = aws_account.cluster("lab", PoolShape("gpu", kind="gpu", size=2))
    ids = sorted(node["id"] for node in lab.nodes("gpu"))
    bucket = lab.settings.bucket
    aws_account.client("s3").put_object(Bucket=bucket, Key="code/train.py", Body=SCRIPT.read_bytes())
    service = SystemsManager()
    service.online, service.script = set(ids), hosts
    there = Instances(*(Node(name, 1, 1.0, host="127.0.0.1") for name in ids))
    runner = RemoteRunner(Split(lab.settings.region, lab.account.emulator.url, service.url), lab.names)
    nodes = AwsNodes(runner, there, host="127.0.0.1", folder=str(tmp_path / "nodes"))
    preload = ("torch.distributed", "ebbflow.infra.training.process.world")
    try:
        with TorchTrainer(nodes, logs=tmp_path / "logs", preload=preload, form=120) as trainer:
            job = TrainingJob(
                "on-aws",
                f"s3://{bucket}/code/train.py",
                (str(tmp_path), "100", "0.02"),
                str(tmp_path / "run"),
                RunSettings(recovery="restart"),
            )
            trainer.launch(job, nodes.placement())
            until(lambda: trainer.status().step > 5 or trainer.status().state == "failed")
            assert trainer.status().placement == dict.fromkeys(ids, 1), trainer.status()
            hosts.take(ids[0])
            there.nodes = there.nodes[1:]
            status = trainer.wait(150)
        assert (status.state, status.placement) == ("finished", {ids[1]: 1}), status
        assert json.loads((tmp_path / "step").read_text()) == 100
        lost = next(event for event in trainer.events() if event.kind == "node-lost")
        assert lost.content["node"] == ids[0]
        assert "is terminated" in str(lost.content["how"])
    finally:
        service.close()
    assert service.problems == []
    assert all(process.poll() is not None for process in hosts.processes.values())
