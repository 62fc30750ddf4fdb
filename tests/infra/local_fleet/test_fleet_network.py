"""Fleets whose nodes have a network. Skipped, with the reason, where this process may not make any."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.infra.local_fleet.provider import network
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.machine import processes
from ebbflow.infra.machine.network import registry
from ebbflow.infra.protocols import TrainingJob
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from tests.flows.flowcases import eventually
from tests.infra.networks import left, skip_without_rights, throughput

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("summing_script.py")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    skip_without_rights()
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))


def gone(fleet, tag):
    """Wait until nothing of a network is left."""
    end = time.monotonic() + 150
    while left(tag) or any(entry.uid == fleet.uid for entry in registry.entries()):
        logs = "\n".join(log.read_text() for log in fleet.folder.glob("logs/*.log"))
        marked = [(pid, env[processes.MARK]) for pid, env in labels.environments(fleet.uid)]
        assert time.monotonic() < end, f"{left(tag)} {marked}\n{logs}"
        time.sleep(0.2)


def test_three_nodes_and_a_training_use_the_limited_links_and_all_goes_with_the_fleet(tmp_path):
    pool = LocalPool("gpu", "gpu", slots=1, initial=3)
    with LocalFleet.start([pool], "net", gpus=(), network=(1e8,)) as fleet:
        plan = fleet.state.network
        hosts = {node.id: node.host for node in fleet.state.nodes}
        assert len(set(hosts.values())) == 3
        one, two = plan.namespace("gpu-1"), plan.namespace("gpu-2")
        assert 0 < throughput(one, two, hosts["gpu-2"]) < 110

        nodes = fleet.nodes_for("sums")
        with TorchTrainer(nodes, preload=("torch.distributed",), replace=False, stragglers=False) as trainer:
            folder = str(tmp_path / "run")
            trainer.launch(
                TrainingJob("sums", str(SCRIPT), (str(tmp_path),), folder), {"gpu-1": 1, "gpu-3": 1}
            )
            end = time.monotonic() + 150
            while trainer.status().state not in ("finished", "failed"):
                assert time.monotonic() < end, f"{trainer.status()} {trainer.events()[-5:]}"
                time.sleep(0.1)
            assert trainer.status().state == "finished", trainer.events()[-5:]
        megabits, seen = (tmp_path / "speed").read_text().split()
        assert 0 < float(megabits) < 110
        assert seen in (hosts["gpu-1"], hosts["gpu-3"])

        fleet.kill("gpu-2")
        fleet.wait(lambda state: state.node("gpu-4") is not None and state.node("gpu-4").visible, 150)
        assert two.rpartition("/")[2] not in left(plan.tag)
        assert fleet.state.node("gpu-4").host not in hosts.values()
    assert left(plan.tag) == []
    assert fleet.uid not in {entry.uid for entry in registry.entries()}


def test_a_killed_supervisor_is_followed_by_one_that_finds_the_network_or_by_nothing_of_it():
    pool = LocalPool("gpu", "gpu", slots=1, initial=1)
    fleet = LocalFleet.start([pool], "net", stay=True, gpus=(), network=(1e8, 2e7))
    try:
        plan = fleet.state.network
        os.kill(fleet.state.supervisor.pid, signal.SIGKILL)
        fleet.repair()
        assert [node.id for node in fleet.capacity().nodes] == ["gpu-1"]
        assert len(left(plan.tag)) == 2 + 2 + 1

        os.kill(fleet.state.supervisor.pid, signal.SIGKILL)
        gone(fleet, plan.tag)

        fleet.repair()  # whoever needs the fleet later has its network again
        fleet.wait(lambda state: any(node.visible and node.id != "gpu-1" for node in state.nodes), 150)
        assert plan.bridge(0) in left(plan.tag)
    finally:
        fleet.down()
    assert left(plan.tag) == []


def test_a_supervisor_whose_pipe_is_closed_and_which_is_not_dead_yet_is_no_other() -> None:
    dying = labels.own()
    assert not network._is_another(dying, dying.pid)
    assert network._is_another(dying, dying.pid + 1)
    assert not network._is_another(None, dying.pid)
    assert not network._is_another(dying._replace(ticks=dying.ticks + 1), dying.pid + 1), "it is gone"


def test_when_nobody_is_left_the_next_fleet_removes_what_there_was():
    pool = LocalPool("gpu", "gpu", slots=1, initial=1)
    fleet = LocalFleet.start([pool], "net", stay=True, gpus=(), network=(1e8,))
    plan = fleet.state.network
    for pid in processes.members(f"{fleet.uid}-supervisor"):  # the supervisor, and who watches it
        os.kill(pid, signal.SIGKILL)
    for pid in processes.members(f"{fleet.uid}/"):
        os.kill(pid, signal.SIGKILL)
    assert plan.bridge(0) in left(plan.tag)
    os.utime(registry.FOLDER / plan.tag, (time.time() - 90, time.time() - 90))
    entry = next(entry for entry in registry.entries() if entry.uid == fleet.uid)
    eventually(lambda: not network.lives(entry))
    with LocalFleet.start([pool], "other", gpus=(), network=(1e8,)) as other:
        assert left(plan.tag) == []
        assert re.match(r"198\.18\.", other.state.nodes[0].host)
    fleet.down()
