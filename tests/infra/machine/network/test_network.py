"""Networks of nodes as the kernel has them. Skipped, with the reason, where this process may not make any."""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine import processes
from ebbflow.infra.machine.network import links, namespaces, registry
from ebbflow.infra.machine.network.plan import NetworkPlan, parse_rates
from tests.flows.flowcases import eventually
from tests.infra.networks import left, skip_without_rights, throughput


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[NetworkPlan]:
    skip_without_rights()
    uid = os.urandom(6).hex()
    plan = registry.reserve(uid, "/nowhere", parse_rates(getattr(request, "param", "100mbit")))
    try:
        links.make_bridges(plan)
        yield plan
    finally:
        registry.release(plan.tag)
    assert left(plan.tag) == []
    assert uid not in {entry.uid for entry in registry.entries()}


@pytest.mark.parametrize("network", ["100mbit,20mbit"], indirect=True)
def test_links_carry_their_rates_and_no_more(network: NetworkPlan) -> None:
    for number in (1, 2):
        links.add_node(network, f"gpu-{number}", number)
    names = [network.namespace(f"gpu-{number}") for number in (1, 2)]
    assert 0 < throughput(names[0], names[1], network.links[0].address(2)) < 110
    assert 0 < throughput(names[1], names[0], network.links[1].address(1)) < 23
    assert 0 < throughput("", names[0], network.links[0].address(1)) < 110


def test_all_may_be_made_and_removed_twice(network: NetworkPlan) -> None:
    links.make_bridges(network)
    for _ in range(2):
        links.add_node(network, "gpu-1", 1)
        assert namespaces.exists(network.namespace("gpu-1"))
        links.remove_node(network, "gpu-1", 1)
        links.remove_node(network, "gpu-1", 1)
        assert left(network.tag) == [network.bridge(0)]


def test_a_bridge_keeps_its_hardware_address_as_nodes_come_and_go(network: NetworkPlan) -> None:
    name = network.bridge(0)
    seen = set()
    for _ in range(3):  # the kernel gives nodes' ends addresses at random
        links.add_node(network, "gpu-1", 1)
        seen.add(Path(f"/sys/class/net/{name}/address").read_text().strip())
        links.remove_node(network, "gpu-1", 1)
    assert seen == {network.links[0].hardware}


def test_namespaces_leave_no_mounts_behind(network: NetworkPlan) -> None:
    # not those of other fleets
    own = {"netns", *(network.namespace(f"gpu-{number}") for number in range(1, 5))}

    def mounts() -> int:
        points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
        return sum("/netns" in point and point.rpartition("/")[2] in own for point in points)

    links.add_node(network, "gpu-1", 1)
    before = mounts()
    for number in (2, 3, 4):
        links.add_node(network, f"gpu-{number}", number)
        links.remove_node(network, f"gpu-{number}", number)
    assert mounts() == before


def test_a_namespace_may_be_removed_by_several_at_once(network: NetworkPlan) -> None:
    name = network.namespace("gpu-1")
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            namespaces.create(name)
            together = threading.Barrier(4)

            def remove(together: threading.Barrier = together) -> None:
                together.wait(150.0)
                namespaces.remove(name)

            for removed in [threads.submit(remove) for _ in range(4)]:
                removed.result()
            assert not namespaces.names(name)


def test_processes_are_born_where_their_node_is(network: NetworkPlan, tmp_path: Path) -> None:
    links.add_node(network, "gpu-1", 1)
    name = network.namespace("gpu-1")
    child = processes.spawn(["sleep", "60"], {}, f"{network.tag}/x", tmp_path / "log", namespace=name)
    try:
        theirs, ours = (os.readlink(f"/proc/{pid}/ns/net") for pid in (child.pid, "self"))
        assert theirs != ours
        assert namespaces.within(name, lambda: os.readlink("/proc/thread-self/ns/net")) == theirs
        assert os.readlink("/proc/thread-self/ns/net") == ours
    finally:
        child.kill()
        child.wait(150)


def test_a_node_reaches_its_own_network_and_nothing_else(network: NetworkPlan) -> None:
    links.add_node(network, "gpu-1", 1)

    def names() -> list[str]:
        return [name for _, name in socket.if_nameindex()]

    assert namespaces.within(network.namespace("gpu-1"), names) == ["lo", "eth0"]
    with pytest.raises(OSError, match="unreachable"):
        namespaces.within(network.namespace("gpu-1"), lambda: socket.create_connection(("192.0.2.77", 9), 5))


SENDS = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as out:
    out.setblocking(False)
    while True:
        try:
            out.send(bytes(65536))
        except BlockingIOError:  # what it holds takes the link a moment
            print("full", flush=True)
            out.setblocking(True)
            out.send(b"x")
"""


@pytest.mark.parametrize("network", ["20mbit"], indirect=True)
def test_peers_of_a_killed_node_learn_that_it_is_gone(network: NetworkPlan, tmp_path: Path) -> None:
    links.add_node(network, "gpu-1", 1)
    with socket.create_server((network.host, 0)) as listener:
        listener.settimeout(150)
        command = [sys.executable, "-c", SENDS, network.host, str(listener.getsockname()[1])]
        log, name = tmp_path / "log", network.namespace("gpu-1")
        child = processes.spawn(command, {}, f"{network.tag}/x", log, namespace=name)
        peer, _ = listener.accept()
        with peer:
            eventually(lambda: "full" in log.read_text())
            child.kill()
            child.wait(150)
            reader = threading.Thread(target=read_to_end, args=(peer, ended := threading.Event()))
            reader.start()
            assert links.close_connections(network, "gpu-1", timeout=20.0)
            links.remove_node(network, "gpu-1", 1)
            assert ended.wait(150)


def read_to_end(peer: socket.socket, ended: threading.Event) -> None:
    while peer.recv(1 << 16):
        pass
    ended.set()


def test_two_runs_have_addresses_of_their_own(network: NetworkPlan) -> None:
    other = registry.reserve("f" * 12, "/nowhere", parse_rates("1mbit"))
    try:
        assert other.links[0].subnet != network.links[0].subnet
    finally:
        registry.release(other.tag)


def test_what_a_crash_left_is_found_and_removed(
    network: NetworkPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    links.add_node(network, "gpu-1", 1)
    others = {entry.uid for entry in registry.entries() if entry.tag != network.tag}
    assert (
        registry.remove_leftovers(lambda entry: entry.uid in others) == []
    )  # a minute to show that it lives
    os.utime(registry.FOLDER / network.tag, (time.time() - 90, time.time() - 90))
    assert registry.remove_leftovers(lambda entry: True) == []
    gone = registry.remove_leftovers(lambda entry: entry.uid in others)
    assert set(gone) == {network.bridge(0), network.interface(0, 1), network.namespace("gpu-1")}


def test_a_namespace_that_is_not_there_cannot_be_entered() -> None:
    with pytest.raises(
        ClusterError, match="the network namespace ebbflow-none cannot be entered: No such file"
    ):
        namespaces.within("ebbflow-none", lambda: None)


def test_without_the_right_to_make_networks_it_says_so_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(do: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(namespaces, "aside", refuse)
    with pytest.raises(ClusterError, match=r"needs the right to make network namespaces \(root.*loopback"):
        links.check()


def test_a_node_that_another_process_removes_meanwhile_has_no_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = NetworkPlan("01234567", ())
    there = [True, False]  # when it is looked for, and after it could not be entered
    monkeypatch.setattr(namespaces, "exists", lambda name: there.pop(0))

    def gone(name: str, do: object) -> int:
        raise ClusterError(f"the network namespace {name} cannot be entered: No such file or directory")

    monkeypatch.setattr(namespaces, "within", gone)
    assert links.close_connections(plan, "gpu-1")
    there[:] = [True, True]
    with pytest.raises(ClusterError, match="cannot be entered"):
        links.close_connections(plan, "gpu-1")
