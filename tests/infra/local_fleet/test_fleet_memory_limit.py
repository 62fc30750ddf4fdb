"""Nodes whose memory is limited by control groups: held while they are there, and nothing left once they are gone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.infra.local_fleet.provider import node_memory
from ebbflow.infra.local_fleet.provider.life import abandoned
from ebbflow.infra.local_fleet.provider.provider import BY, RUNS
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState
from ebbflow.infra.local_fleet.state.labels import identity
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.infra.machine import cgroups, processes
from ebbflow.infra.training import local_nodes as training_nodes
from ebbflow.infra.training.channel.wire import Entry
from ebbflow.planners.errors import OptionError
from tests.training_fakes import ScriptedClock

ROOT = Path(__file__).parents[3]
POOL = LocalPool("gpu", "gpu", memory=0.125, initial=1, max_nodes=1, memory_limit=0.25)
_HOG = "import sys; sys.stdin.readline(); held = b'x' * (400 << 20); print('held', len(held), flush=True)"
_OWNER = """
import sys
from ebbflow.infra.local_fleet import LocalFleet, LocalPool
pool = LocalPool("gpu", "gpu", memory=0.125, initial=1, memory_limit=0.25)
with LocalFleet.start([pool], "killed", gpus=()) as fleet:
    print(fleet.uid, fleet.state.supervisor.pid, fleet.state.nodes[0].process.pid, flush=True)
    sys.stdin.read()
"""


def eventually(reached, seconds=150.0):
    end = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)
    return found


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Return what finds a fleet's memory groups."""
    controller = cgroups.find_controller(kind="memory")
    if controller is None:
        pytest.skip("no writable control group with a limit of memory")
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path))
    return lambda uid: [path.name for path in controller.folder.glob(f"ebbflow-memory-{uid}-*")]


@pytest.mark.processes
def test_what_runs_on_a_node_has_its_memory_together_and_groups_go_with_nodes(groups, monkeypatch):
    monkeypatch.setattr(training_nodes, "_NODE", "tests.infra.local_fleet.sleeper")
    with LocalFleet.start([POOL], "limited", gpus=()) as fleet:
        (node,) = fleet.state.nodes
        place = node_memory.group(fleet.state, node.id)
        assert groups(fleet.uid) == [place.name]
        assert str(node.process.pid) in (place / "cgroup.procs").read_text().split()
        training = fleet.nodes_for("app", environment={"PYTHONPATH": str(ROOT)})
        training.start(node.id, 1, Entry("x:1", "00" * 32, "run", node.id, "key", "", ""))
        said = training.folder / "key" / "said.json"
        eventually(said.exists)
        pids = json.loads(said.read_text())["pids"]
        assert {str(pid) for pid in pids} <= set((place / "cgroup.procs").read_text().split())
        hog = subprocess.Popen(
            [sys.executable, "-c", _HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        node_memory.hold(fleet.state, node.id, [hog.pid])
        output, _ = hog.communicate("go\n", timeout=150)
        assert (hog.returncode, output) == (-signal.SIGKILL, "")
        assert fleet.lost(node.id) == ""  # the largest process was killed, and no other
        fleet.kill(node.id)
        assert place.name not in groups(fleet.uid)
        assert all(not processes.carries(pid, "") for pid in pids)
        eventually(lambda: len(groups(fleet.uid)) == 1)  # of the node that replaces it
        training.close()
    assert groups(fleet.uid) == []


@pytest.mark.processes
def test_no_group_is_left_when_owner_supervisor_and_nodes_are_killed(groups):
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    uid, *pids = owner.stdout.readline().split()
    assert len(groups(uid)) == 1
    owner.kill()
    for pid in map(int, pids):
        os.kill(pid, signal.SIGKILL)
    owner.communicate(timeout=150)
    eventually(lambda: groups(uid) == [])


def test_what_outlives_a_supervisor_removes_groups_until_none_is_left(monkeypatch, tmp_path):
    clock, groups = ScriptedClock(), tmp_path / "groups"
    state = LocalFleetState("lab", "uid", memory_version=2, memory_folder=str(groups))
    LocalFleetStateFile(tmp_path / "lab").write(state)
    busy = groups / "ebbflow-memory-uid-gpu-1" / "cgroup.procs"
    busy.parent.mkdir(parents=True)
    busy.touch()
    (groups / "ebbflow-memory-uid-gpu-2").mkdir()
    (groups / "ebbflow-memory-other-gpu-1").mkdir()
    began = clock.now()

    def pause(seconds):
        clock.time += seconds
        if clock.time - began > 30.0:
            busy.unlink(missing_ok=True)  # the kernel sees that the processes are gone

    clock.sleep = pause
    monkeypatch.setattr(node_memory, "outlive", lambda *_: True)
    node_memory._watch(tmp_path / "lab", "uid", 0, clock)
    assert [path.name for path in groups.iterdir()] == ["ebbflow-memory-other-gpu-1"]


def test_groups_of_launchers_that_are_gone_are_removed_wherever_they_are(monkeypatch, tmp_path):
    """In version 2 the CPU groups of a node's processes are in the group of its memory."""
    alone, memory = tmp_path / "cpu", tmp_path / "groups"
    state = LocalFleetState("lab", "uid", memory_version=2, memory_folder=str(memory))
    for place in (alone, memory / "ebbflow-memory-uid-gpu-1"):
        for run in ("gone", "there"):
            (place / f"ebbflow-{run}-1").mkdir(parents=True)
            owner = tmp_path / "lab" / RUNS / run / BY
            owner.parent.mkdir(parents=True, exist_ok=True)
            mine = identity(os.getpid())
            owner.write_text(f"{mine.pid} {mine.ticks + (run == 'gone')}")
    monkeypatch.setattr(cgroups, "find_controller", lambda: cgroups.Controller(2, alone))
    abandoned(tmp_path / "lab", state, ScriptedClock())
    left = [path.relative_to(tmp_path) for path in tmp_path.rglob("ebbflow-*-1") if "memory" not in path.name]
    assert {str(path.name) for path in left} == {"ebbflow-there-1"}
    assert len(left) == 2
    assert [path.name for path in (tmp_path / "lab" / RUNS).iterdir()] == ["there"]


def test_without_control_groups_a_limit_is_refused_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path))
    monkeypatch.setattr(cgroups, "find_controller", lambda **_: None)
    with pytest.raises(ClusterError, match=r"nodes of gpu cannot be limited: .* needs root .* --node-memory"):
        LocalFleet.start([POOL], "refused", gpus=())
    assert not (tmp_path / "fleets" / "refused" / "fleet.json").exists()
    assert node_memory.controller_for([LocalPool("gpu", "gpu")]) is None


def test_a_limit_holds_all_that_a_node_is_said_to_have() -> None:
    with pytest.raises(OptionError, match=r"of a Spark worker's own 0\.375 GiB: 2\.375 GiB; got 2 GiB"):
        LocalPool("spark", "spark", memory=2.0, memory_limit=2.0)
    with pytest.raises(OptionError, match=r"memory, of what it lends: 1\.5 GiB; got 1\.2 GiB"):
        LocalPool("gpu", "gpu", memory=1.0, memory_lend=0.5, memory_limit=1.2)
    assert LocalPool("spark", "spark", memory=2.0, memory_limit=2.375).memory_limit == 2.375
