"""A local fleet of real processes: what runs on a node goes with the node, and nothing is ever left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet import LocalFleet, LocalPool, list_fleets
from ebbflow.infra.local_fleet.begin import supervisor_label
from ebbflow.infra.local_fleet.provider import machine
from ebbflow.infra.local_fleet.provider.life import collect
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.infra.machine import processes
from ebbflow.infra.training import local_nodes as training_nodes
from ebbflow.infra.training.channel.wire import Entry
from ebbflow.planners.model.fleet import Target

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
POOL = LocalPool("gpu", "gpu", cores=2, slots=3, initial=2, max_nodes=6)
_SLEEPER = "tests.infra.local_fleet.sleeper"
_LAUNCHER = """
import sys, time
from ebbflow.infra.local_fleet import LocalFleet
from ebbflow.infra.training import local_nodes as nodes
from ebbflow.infra.training.channel.wire import Entry
nodes._NODE = {sleeper!r}
pool = LocalFleet.attach({name!r}).nodes_for({app!r}, grace={grace}, environment={{"PYTHONPATH": {root!r}}})
pool.start({node!r}, len({slots}), Entry("x:1", "00" * 32, "run", {node!r}, "key", "", "", devices={slots}))
while not (pool.folder / "key" / "said.json").exists():
    time.sleep(0.01)
print("started", flush=True)
sys.stdin.read()
"""


def eventually(reached, seconds=150.0):
    end = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)
    return found


def left_of(fleet_uid):
    mine = [pid for pid, _ in labels.environments(labels.below(fleet_uid))]
    return mine + processes.members(supervisor_label(fleet_uid))


@pytest.fixture(scope="module", autouse=True)
def _home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EBBFLOW_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(training_nodes, "_NODE", _SLEEPER)
        yield


@pytest.fixture(scope="module")
def shared():
    with LocalFleet.start([POOL], "shared", gpus=()) as fleet:
        yield fleet
    assert not left_of(fleet.uid)


@pytest.fixture
def fleet(shared):
    """Return the fleet with two nodes that have no notice, and nothing on them."""
    eventually(lambda: len(two(shared)) == 2)
    yield shared
    for one in shared.occupants():
        shared.evict(one.app, one.node)


@pytest.fixture
def run(fleet):
    """Start what stands for an app's node process; return what it says of itself."""
    pools = []

    def start(app, node, slots, gpus=None):
        pool = fleet.nodes_for(app, environment={"PYTHONPATH": str(ROOT)})
        pools.append(pool)
        pool.start(
            node, len(slots), Entry("x:1", "00" * 32, "run", node, "key", "", "", devices=tuple(slots))
        )
        said = pool.folder / "key" / "said.json"
        eventually(said.exists)
        return pool, json.loads(said.read_text())

    yield start
    for pool in pools:
        pool.close()


def launch(fleet, app, node, slots, grace=0.0):
    """Start another process that runs ``app`` on ``node``."""
    code = _LAUNCHER.format(
        sleeper=_SLEEPER, name=fleet.name, app=app, node=node, slots=slots, root=str(ROOT), grace=grace
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "started\n"
    return process


def alive(pids):
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def two(fleet):
    return [node.id for node in fleet.view() if node.state == "alive"][:2]


def test_two_runs_on_one_node_have_the_slots_that_are_named_and_no_others(fleet, run):
    node, _ = two(fleet)
    first, said = run("one", node, (0, 2))
    assert (said["EBBFLOW_SLOTS"], said["CUDA_VISIBLE_DEVICES"]) == (
        "0,2",
        os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    other = launch(fleet, "two/b", node, (1,))
    try:
        assert [(o.app, o.slots) for o in fleet.occupants(node)] == [("one", (0, 2)), ("two/b", (1,))]
        assert first.in_use() == {node: (0, 2)}
        with pytest.raises(ClusterError, match=f"slot 1 of {node} is still in use by two/b"):
            run("three", node, (1,))
        with pytest.raises(ClusterError, match="it has 3, and 3 are in use"):
            fleet.nodes_for("three").start(node, 1, Entry("x:1", "00" * 32, "run", node, "key", "", ""))
        assert fleet.evict("two", node)
        assert fleet.present() == [("one", node), ("two/b", node)]  # whose name only begins so
        assert fleet.evict("two/b", node)
        assert [o.app for o in fleet.occupants(node)] == ["one"]
        assert alive(said["pids"]) == said["pids"]
        _, again = run("three", node, (1,))
        assert again["EBBFLOW_SLOTS"] == "1"
    finally:
        other.kill()
        other.wait()


def test_gpus_of_the_machine_are_those_of_the_slots():
    pool = LocalPool("gpu", "gpu", slots=2, initial=2, cpus_per_slot=0.25)
    with LocalFleet.start([pool], "gpus", gpus=("0", "3", "GPU-a", "7")) as fleet:
        nodes = fleet.nodes_for("app", environment={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "9"})
        nodes.start("gpu-2", 1, Entry("x:1", "00" * 32, "run", "gpu-2", "key", "", "", devices=(1,)))
        said = nodes.folder / "key" / "said.json"
        eventually(said.exists)
        shown = json.loads(said.read_text())["CUDA_VISIBLE_DEVICES"]
        taken = {node.id: node.gpus for node in fleet.state.nodes}
        assert sorted(taken.values()) == [("0", "3"), ("GPU-a", "7")]
        assert shown == taken["gpu-2"][1]
        assert nodes._nodes["gpu-2"].quota == 0.25
        nodes.close()
        assert nodes.in_use() == {}


def test_a_kill_takes_everything_of_the_node_and_nothing_of_others(fleet, run):
    node, spared = two(fleet)
    pool, here = run("one", node, (0,))
    _, there = run("one", spared, (0,))
    other = launch(fleet, "two", node, (1, 2))
    try:
        # a process that is just being replaced by its program has no environment to be seen
        of_other = eventually(
            lambda: len(pids := [pid for one in fleet.left_over("two") for pid in one.pids]) == 2 and pids
        )
        machine = fleet.state.node(node).process.pid
        assert len(alive([*here["pids"], *of_other, machine])) == 5
        revision = fleet.capacity().revision
        fleet.kill(node)
        assert alive([*here["pids"], *of_other, machine]) == []
        assert alive(there["pids"]) == there["pids"]
        assert pool.lost(node) == "killed without notice"
        assert fleet.capacity().revision > revision
        assert node not in {n.id for n in fleet.capacity().nodes}
        with pytest.raises(ClusterError, match=f"there is no node '{node}'"):
            pool.start(node, 1, Entry("x:1", "00" * 32, "run", node, "key2", "", ""))
    finally:
        other.kill()
        other.wait()


def test_a_machine_that_is_killed_from_outside_takes_its_node_down_within_seconds(fleet, run):
    node, _ = two(fleet)
    _, said = run("one", node, (0,))
    os.kill(fleet.state.node(node).process.pid, signal.SIGKILL)
    # nobody but the supervisor looks
    eventually(lambda: node not in {n.id for n in fleet.state.seen(POOL)} and not alive(said["pids"]))
    assert fleet.lost(node) == "its process exited"


def test_a_notice_reaches_what_runs_there_and_the_node_goes_at_its_deadline(fleet, run):
    node, _ = two(fleet)
    pool, said = run("one", node, (0,))
    folder = pool.folder / "key"
    deadline = fleet.notice(node, 600.0)
    eventually((folder / "told").exists)
    assert float((folder / "told").read_text()) == deadline
    with pytest.raises(ClusterError, match="interruption pending, it terminates in"):
        run("two", node, (1,))
    assert alive(said["pids"]) == said["pids"]
    deadline = fleet.notice(node, 0.5)
    eventually(lambda: fleet.lost(node))
    assert time.time() >= deadline - 0.05
    assert pool.lost(node) == "its notice period expired"
    eventually(lambda: not alive(said["pids"]))


def test_a_frozen_node_stands_still_and_goes_on(fleet, run):
    node, _ = two(fleet)
    pool, said = run("one", node, (0,))
    fleet.pause(node)
    eventually(lambda: pool.paused(node) and fleet.paused(node))
    assert {n.id: n.state for n in fleet.view()}[node] == "paused"
    with pytest.raises(ClusterError, match="it is paused"):
        run("two", node, (1,))
    fleet.resume(node)
    eventually(lambda: not pool.paused(node))
    eventually(lambda: "stopped" not in {psutil.Process(pid).status() for pid in said["pids"]})


def test_what_runs_on_a_node_that_is_gone_is_swept_away(fleet):
    mark = labels.mark(fleet.uid, "gpu-999", "late", "p", "k")
    late = processes.spawn(["sleep", "600"], dict(os.environ), mark, fleet.folder / "logs" / "late.log")
    eventually(lambda: late.poll() == -signal.SIGKILL)
    eventually(lambda: not fleet.present())


def test_what_a_launcher_that_was_killed_leaves_is_found_and_ended(fleet, clock):
    node, _ = two(fleet)
    launcher = launch(fleet, "gone", node, (0, 1))
    # a process that is just being replaced by its program has no environment to be seen
    (one,) = eventually(lambda: [one for one in fleet.left_over("gone") if len(one.pids) == 2])
    assert (one.node, one.slots) == (node, (0, 1))
    launcher.kill()
    launcher.wait()
    silent = collect(fleet.state, {}, clock)
    clock.sleep(one.grace + 1)
    assert collect(fleet.state, silent, clock) == silent  # it may save in its grace, and has a little more
    (still,) = fleet.left_over("gone")
    assert still.pids == one.pids
    clock.sleep(60)
    collect(fleet.state, silent, clock)
    assert fleet.left_over("gone") == ()
    assert fleet.evict("gone", node)
    eventually(lambda: not (fleet.folder / "runs" / one.pool).exists())  # the supervisor tidies up


def test_another_process_can_attach_and_do_all_of_it(fleet):
    node, _ = two(fleet)
    code = (
        "from ebbflow.infra.local_fleet import LocalFleet\n"
        f"fleet = LocalFleet.attach('shared')\nfleet.kill({node!r})\nprint(fleet.lost({node!r}))\n"
        "print(fleet.add('gpu'), fleet.add('gpu', -1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.stdout.split("\n")[:2] == ["killed without notice", "3 2"], done.stderr
    assert fleet.lost(node) == "killed without notice"
    assert "shared" in [state.name for state in list_fleets()]


def test_its_name_is_taken_while_it_lives(fleet):
    with pytest.raises(ClusterError, match="'shared' runs already"):
        LocalFleet.start([POOL], "shared")
    with pytest.raises(ClusterError, match=r"no local fleet 'other' \(running:.*shared"):
        LocalFleet.attach("other")


def test_nothing_is_left_when_the_owner_is_killed():
    code = (
        "import os, sys\nfrom ebbflow.infra.local_fleet import LocalFleet, LocalPool\n"
        "fleet = LocalFleet.start([LocalPool('gpu', 'gpu', initial=1)], 'owned', gpus=())\n"
        "print(fleet.uid, flush=True)\nsys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    uid = owner.stdout.readline().strip()
    other = launch(LocalFleet.attach("owned"), "app", "gpu-1", (0,), grace=60.0)
    try:
        eventually(lambda: len(left_of(uid)) == 4)  # the supervisor, the machine, and two of the app
        owner.kill()
        owner.wait()
        eventually(lambda: not left_of(uid))
        with pytest.raises(ClusterError, match="no local fleet 'owned'"):
            LocalFleet.attach("owned")
    finally:
        other.kill()
        other.wait()
    with LocalFleet.start([LocalPool("gpu", "gpu", initial=1)], "owned", gpus=()) as again:
        assert [node.id for node in again.view()] == ["gpu-2"]


def test_a_fleet_that_stays_outlives_its_supervisor_and_is_swept_when_all_is_killed():
    pool = LocalPool("gpu", "gpu", initial=1)
    fleet = LocalFleet.start([pool], "stays", stay=True, gpus=())
    fleet.close()
    (machine,) = [node.process.pid for node in fleet.state.nodes]
    os.kill(fleet.state.supervisor.pid, signal.SIGKILL)
    eventually(lambda: not fleet.kept)
    fleet.repair()
    assert fleet.kept
    assert alive([machine])  # the next supervisor found it there
    os.kill(fleet.state.supervisor.pid, signal.SIGKILL)
    eventually(lambda: not fleet.kept)
    with LocalFleet.start([pool], "stays", gpus=()) as again:
        assert [node.id for node in again.view()] == ["gpu-2"]
        assert not left_of(fleet.uid)
    assert not left_of(again.uid)


def test_a_supervisor_that_stands_still_loses_no_node_and_does_what_was_asked_meanwhile():
    pool = LocalPool("gpu", "gpu", initial=1, max_nodes=2)
    with LocalFleet.start([pool], "still", gpus=()) as fleet:
        (first,) = [node.process.pid for node in fleet.state.nodes]
        supervisor = fleet.state.supervisor.pid
        with LocalFleetStateFile(
            fleet.folder
        ).locked():  # a supervisor that is stopped while it holds the lock keeps it
            os.kill(supervisor, signal.SIGSTOP)
            eventually(lambda: psutil.Process(supervisor).status() == "stopped")
        try:
            fleet.apply(Target("gpu", 2, fleet.observe().revision, "for a test"))
            assert len(two(fleet)) == 1
        finally:
            os.kill(supervisor, signal.SIGCONT)
        eventually(lambda: len(two(fleet)) == 2)
        assert fleet.state.supervisor.pid == supervisor
        assert alive([first])
    assert not left_of(fleet.uid)


def test_a_machine_ends_itself_without_a_supervisor_and_when_the_fleet_has_it_no_more(fleet, clock):
    node, _ = two(fleet)
    begun = clock.now()
    machine.serve(fleet.folder, fleet.uid, "gpu-99", clock)
    machine.serve(fleet.folder, "another-life", node, clock)
    assert clock.now() - begun < machine.TIMEOUT
    (lonely := fleet.folder / "lonely").mkdir()
    state = replace(fleet.state, supervisor=fleet.state.supervisor._replace(ticks=1))  # as after its end
    LocalFleetStateFile(lonely).write(state)
    machine.serve(lonely, fleet.uid, node, clock)
    assert clock.now() - begun > machine.TIMEOUT
