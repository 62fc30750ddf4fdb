"""Options and state files of local clusters, without starting any."""

import os
import random
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.spark.cluster import options
from ebbflow.infra.spark.cluster.claim import hold
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.infra.spark.cluster.state import ClusterState, NodeRecord, StateFile, find_cluster, list_clusters
from ebbflow.planners.errors import OptionError

STATE = ClusterState(
    name="a", uid="u1", directory="/d", host="127.0.0.1", port=1, ui_port=2, cores=1, memory=512, owner=0,
    secret="of-a",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "mebibytes"), [("2g", 2048), ("512m", 512), ("1.5G", 1536), ("2048k", 2), ("1gb", 1024)]
)
def test_memory_sizes_are_read(text: str, mebibytes: int) -> None:
    assert options.parse_memory(text) == mebibytes


@pytest.mark.parametrize("text", ["", "2", "g", "-1g", "2 gigs", "1k", "0m", "nan"])
def test_other_memory_sizes_are_refused_by_name(text: str) -> None:
    with pytest.raises(OptionError, match="memory must be a size") as error:
        options.parse_memory(text)
    assert repr(text) in str(error.value)


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_loopback_addresses_are_distinct_and_never_the_masters(one: int, other: int) -> None:
    assert options.loopback(one) != "127.0.0.1"
    assert (options.loopback(one) == options.loopback(other)) == (one == other)
    assert all(0 <= int(part) <= 255 for part in options.loopback(one).split("."))
    assert options.loopback(one).split(".")[3] not in ("0", "255")


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port {port} on 127.0.0.1 is taken"):
            options.choose_port("127.0.0.1", port)


def test_free_ports_differ_from_the_one_to_avoid() -> None:
    port = options.choose_port("127.0.0.1", None)
    assert options.choose_port("127.0.0.1", port) == port
    with pytest.raises(ClusterError, match="is taken"):
        options.choose_port("127.0.0.1", port, avoid=port)


def test_scripts_that_seed_alike_choose_ports_of_their_own() -> None:
    chosen = set()
    for _ in range(4):
        random.seed(1)
        chosen.add(options.choose_port("127.0.0.1", None))
    assert len(chosen) > 1


def test_a_process_listens_on_its_own_ports_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        one, two = (socket.getsockname()[1] for socket in (server, other))
        assert options.listens(os.getpid(), one, two)
        other.close()
        assert not options.listens(os.getpid(), one, two)
        assert not options.listens(os.getppid(), one)
    assert not options.listens(2**22 + 1, one)  # no process has so high an id


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"workers": -1}, "workers must be >= 0; got -1"),
        ({"cores": 0}, "cores must be >= 1; got 0"),
        ({"memory": "much"}, "memory must be a size"),
        ({"name": "../up"}, "name begins with a letter"),
        ({"master_port": 70000}, "a port must be from 1 to 65535; got 70000"),
    ],
)
def test_options_outside_their_rule_start_nothing(
    wrong: dict[str, object], rule: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=rule):
        LocalSparkCluster.start(**wrong)  # type: ignore[arg-type]
    assert not list(tmp_path.rglob("state.json"))


def test_state_survives_the_file() -> None:
    node = NodeRecord("worker-1", "127.0.0.2", 7, "up", 12.5, "/group")
    state = replace(STATE, nodes=(node,), cpus=0.6, started=1)
    file = StateFile.of("a")
    file.write(state)
    assert file.read() == state
    assert state.node("worker-1") is node


def test_a_worker_whose_memory_group_has_no_cpu_is_in_that_alone(tmp_path: Path) -> None:
    memory, noted = tmp_path / "memory", list[str]()
    memory.mkdir()
    (memory / "cgroup.controllers").write_text("memory pids")
    (memory / "cgroup.procs").touch()
    node = NodeRecord("worker-1", "127.0.0.2", memory_group=str(memory))
    hold(
        replace(STATE, nodes=(node,), cpus=0.6, cap_version=2, cap_folder=str(tmp_path)),
        "worker-1",
        7,
        noted.append,
    )
    assert ((memory / "cgroup.procs").read_text(), noted) == ("7", [])
    assert sorted(path.name for path in memory.iterdir()) == ["cgroup.controllers", "cgroup.procs"]


def test_an_unknown_node_is_answered_with_the_known_ones() -> None:
    state = replace(STATE, nodes=(NodeRecord("worker-1", "h"), NodeRecord("worker-2", "i")))
    with pytest.raises(ClusterError, match="no node 'worker-9'; it has: worker-1, worker-2"):
        state.node("worker-9")


def test_concurrent_updates_are_all_kept() -> None:
    file = StateFile.of("a")
    file.write(STATE)

    def count() -> None:
        for _ in range(25):
            file.update("u1", lambda s: replace(s, started=s.started + 1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    state = file.read()
    assert state is not None
    assert state.started == 100


def test_updates_of_another_cluster_of_that_name_are_refused() -> None:
    file = StateFile.of("a")
    file.write(STATE)
    with pytest.raises(ClusterError, match="has been stopped"):
        file.update("u0", lambda s: s)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 1}', '{"format": 99, "nodes": []}'])
def test_a_foreign_state_file_is_named(content: str) -> None:
    file = StateFile.of("a")
    file.write(STATE)
    file.path.write_text(content)
    with pytest.raises(ClusterError, match=r"state\.json"):
        file.read()
    assert list_clusters() == []


def test_a_cluster_without_processes_is_not_found_but_can_be_cleared() -> None:
    StateFile.of("a").write(STATE)
    assert find_cluster(STATE.master_url) is None
    cluster = LocalSparkCluster.attach("a")
    assert not cluster.status().alive
    with pytest.raises(ClusterError, match="start it again"):
        cluster.add()
    cluster.stop()
    with pytest.raises(ClusterError, match="there is no local Spark cluster 'a'"):
        LocalSparkCluster.attach("a")
