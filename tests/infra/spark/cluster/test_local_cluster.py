"""A local Spark cluster of real processes: what can happen to it, and that nothing is ever left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ebbflow.infra.errors import ClusterError, EngineUnavailableError
from ebbflow.infra.machine import processes
from ebbflow.infra.spark.cluster import options
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster, NodeStatus, find_cluster, list_clusters
from ebbflow.infra.spark.cluster.state import ClusterState, StateFile

pytestmark = pytest.mark.spark


def eventually(reached: Callable[[], object], seconds: float = 150.0) -> bool:
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )


def groups(state: ClusterState) -> list[int]:
    """Return live processes in the recorded groups and sessions, or with the cluster's mark."""
    recorded = {state.master_pid, *(node.pid for node in state.nodes)}
    found = set(processes.members(state.mark))
    for pid in psutil.pids():
        try:
            if {os.getpgid(pid), os.getsid(pid)} & recorded and psutil.Process(pid).status() != "zombie":
                found.add(pid)
        except (ProcessLookupError, psutil.Error):
            continue
    return sorted(found)


def nothing_left(state: ClusterState) -> bool:
    groups_left = [node.cgroup for node in state.nodes if node.cgroup and Path(node.cgroup).exists()]
    scratch = list(Path(state.directory).glob("scratch*"))
    return not groups(state) and not groups_left and not scratch and StateFile.of(state.name).read() is None


def node(cluster: LocalSparkCluster, node_id: str) -> NodeStatus:
    return next(n for n in cluster.status().nodes if n.id == node_id)


def master_state(cluster: LocalSparkCluster, node_id: str) -> str:
    host = cluster.state.node(node_id).host
    return next((w.state for w in cluster._workers(cluster.state) if w.host == host), "absent")


@pytest.fixture(scope="module", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EBBFLOW_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def cluster(_home: None) -> Iterator[LocalSparkCluster]:
    """Start one; the port that is chosen first for its master has become somebody else's when that starts."""
    choose = options.choose_port
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        chosen = [server.getsockname()[1]]

        def first_taken(host: str, asked: int | None, avoid: int = 0) -> int:
            return chosen.pop() if chosen else choose(host, asked, avoid)

        taken = chosen[0]
        patch.setattr(options, "choose_port", first_taken)
        with LocalSparkCluster.start("shared", workers=2, memory="512m") as cluster:
            assert cluster.state.port != taken
            yield cluster


def test_workers_come_up_on_hosts_and_in_sessions_of_their_own(cluster: LocalSparkCluster) -> None:
    status = cluster.status()
    assert status.alive
    assert not status.detached
    rows = [(n.id, n.host, n.cores, n.memory, n.state) for n in status.nodes[:2]]
    assert rows == [("worker-1", "127.0.0.2", 1, 0.5, "alive"), ("worker-2", "127.0.0.3", 1, 0.5, "alive")]
    assert {os.getsid(n.pid) for n in status.nodes[:2]} == {n.pid for n in status.nodes[:2]}


def test_nodes_are_held_to_their_quota_or_status_says_why_not(cluster: LocalSparkCluster) -> None:
    state, status = cluster.state, cluster.status()
    if state.cpus is None:
        assert "no CPU cap" in status.cap
        return
    assert f"{state.cpus:.2f} of" in status.cap
    for record in state.nodes[:2]:
        assert str(record.pid) in (Path(record.cgroup) / "cgroup.procs").read_text().split()


def test_it_is_found_by_its_master(cluster: LocalSparkCluster) -> None:
    found = find_cluster(cluster.master_url)
    assert found is not None
    assert found.master_ui == cluster.master_ui
    assert "shared" in [c.name for c in list_clusters()]
    assert find_cluster("spark://127.0.0.1:1") is None


def test_its_name_cannot_be_taken_twice(cluster: LocalSparkCluster) -> None:
    with pytest.raises(ClusterError, match="'shared' runs already"):
        LocalSparkCluster.start("shared")
    assert cluster.status().alive


def test_another_process_can_attach_and_add_a_node(cluster: LocalSparkCluster) -> None:
    done = run(
        "from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster\n"
        "print(LocalSparkCluster.attach('shared').add())\n"
    )
    assert done.stdout.strip() == "worker-3", done.stderr
    assert node(cluster, "worker-3").state == "alive"
    assert master_state(cluster, "worker-3") == "ALIVE"


def test_a_notice_decommissions_the_worker_and_its_deadline_ends_it(cluster: LocalSparkCluster) -> None:
    deadline = cluster.notice("worker-1", 60)
    assert master_state(cluster, "worker-1") == "DECOMMISSIONED"
    status = node(cluster, "worker-1")
    assert (status.state, status.deadline) == ("noticed", deadline)
    pid = status.pid
    cluster.notice("worker-1", 0.5)
    assert eventually(lambda: node(cluster, "worker-1").state == "dead")
    # Its environment is gone first, which is how its death is seen; its threads end a moment later.
    assert eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
    with pytest.raises(ClusterError, match="node worker-1 is gone"):
        cluster.notice("worker-1")


def test_a_killed_node_is_gone_at_once_with_its_disk(cluster: LocalSparkCluster) -> None:
    record = cluster.state.node("worker-2")
    began = time.monotonic()
    assert cluster.kill("worker-2")
    assert time.monotonic() - began < 150
    assert processes.members(cluster.state.mark_of("worker-2")) == []
    assert not list(Path(cluster.state.directory).glob("scratch*/worker-2"))
    assert not record.cgroup or not Path(record.cgroup).exists()
    assert node(cluster, "worker-2").state == "dead"
    assert eventually(lambda: master_state(cluster, "worker-2") == "DEAD")
    assert not cluster.kill("worker-2")
    with pytest.raises(ClusterError, match="no node 'worker-9'"):
        cluster.kill("worker-9")


def test_a_worker_that_dies_by_itself_is_seen_as_dead(cluster: LocalSparkCluster) -> None:
    os.kill(node(cluster, "worker-3").pid, signal.SIGKILL)
    assert eventually(lambda: node(cluster, "worker-3").state == "dead")


def test_stop_leaves_nothing_but_logs(cluster: LocalSparkCluster) -> None:
    state = cluster.state
    cluster.stop()
    assert nothing_left(state)
    assert (Path(state.directory) / "master.log").stat().st_size > 0
    cluster.stop()
    with pytest.raises(ClusterError, match="has been stopped"):
        cluster.status()


def test_a_killed_owner_takes_its_cluster_along(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster\n"
        "LocalSparkCluster.start('owned', workers=1, memory='512m')\n"
        "print('up', flush=True)\n"
        "if os.fork() == 0: time.sleep(60)\n"  # a child that keeps the guardian's pipe open
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child: list[psutil.Process] = []
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        state = StateFile.of("owned").read()
        assert state is not None
        assert len(groups(state)) >= 2
        everyone = psutil.Process(owner.pid).children(recursive=True)
        child = [p for p in everyone if p.cmdline()[:2] == [sys.executable, "-c"]]
        owner.kill()
        assert eventually(lambda: nothing_left(state))
        guardians = [p for p in everyone if p not in child]
        assert eventually(lambda: not any(p.is_running() and p.status() != "zombie" for p in guardians))
    finally:
        for process in child:
            process.kill()
        owner.kill()
        owner.wait(timeout=150)


def test_a_detached_cluster_survives_its_starter_until_someone_stops_it() -> None:
    done = run(
        "from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster\n"
        "LocalSparkCluster.start('loose', workers=1, memory='512m', detached=True)\n"
    )
    assert done.returncode == 0, done.stderr
    cluster = LocalSparkCluster.attach("loose")
    try:
        state, status = cluster.state, cluster.status()
        assert status.alive
        assert status.detached
        assert [n.state for n in status.nodes] == ["alive"]
    finally:
        cluster.stop()
    assert nothing_left(state)


def test_a_cluster_that_does_not_come_up_in_time_leaves_nothing_and_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"master did not come up in 0.2 s; .*master\.log ends:"):
        LocalSparkCluster.start("slow", workers=1, timeout=0.2, directory=tmp_path)
    assert StateFile.of("slow").read() is None
    assert not list(tmp_path.glob("scratch*"))


def test_a_taken_port_is_named_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port {port} "):
            LocalSparkCluster.start("ports", master_port=port)
    assert StateFile.of("ports").read() is None


def test_without_java_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineUnavailableError, match="apt-get install openjdk-17-jre-headless"):
        LocalSparkCluster.start("nojava")
    assert StateFile.of("nojava").read() is None
