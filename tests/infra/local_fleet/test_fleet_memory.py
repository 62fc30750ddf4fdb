"""Nodes of a local fleet that lend memory: daemons restart after a crash, drain at a notice, go with their nodes."""

import os
import signal
from pathlib import Path

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.infra.local_fleet.provider import lending
from ebbflow.infra.local_fleet.provider.lender_keeper import LenderKeeper
from ebbflow.infra.local_fleet.provider.lending import lender_name
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState, LocalNode, PoolPlan
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.peer import PeerAddress
from ebbflow.infra.memory.registry import DIRECTORY, MemoryRegistry
from ebbflow.infra.memory.session import MemorySession
from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.restarts import RestartPolicy
from tests.infra.memory.lenders import FileBehind, until

SLAB, BLOCK = 16 << 20, 64 << 10


def _daemon(fleet: LocalFleet, node: str) -> list[int]:
    return [pid for pid, _ in labels.environments(labels.memory_mark(fleet.uid, node))]


@pytest.fixture(name="home")
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(DIRECTORY, raising=False)
    return tmp_path


@pytest.mark.processes
def test_daemons_restart_after_a_crash_drain_at_a_notice_and_go_with_their_nodes(home: Path) -> None:
    pool = LocalPool("gpu", "gpu", initial=2, max_nodes=2, memory_lend=32 / 1024)
    behind = FileBehind(home / "behind", SLAB, BLOCK)
    with LocalFleet.start([pool], "lending", gpus=()) as fleet:
        registry = MemoryRegistry()
        one, two = (lender_name(fleet.name, node) for node in ("gpu-1", "gpu-2"))
        assert [peer.name for peer in registry.addresses()] == [one, two]
        session = MemorySession(registry, behind, BlockSettings(4, SLAB, BLOCK), period=0.1)
        store = session.blocks
        try:
            assert [store.slabs.map(slab) for slab in range(2)] == [True, True]
            assert store.slabs.table.hosts.keys() == {one, two}
            for slab in range(2):
                store.write(slab * SLAB, bytes([slab + 1]) * BLOCK)
                store.settle(slab)

            (crashed,) = _daemon(fleet, "gpu-1")
            before = next(
                table for s in range(2) if (table := store.slabs.table.mapping(s)) and table.host == one
            )
            os.kill(crashed, signal.SIGKILL)
            until(lambda: store.slabs.table.hosts.keys() == {two})
            until(lambda: one in session.peers)  # it was started again
            assert _daemon(fleet, "gpu-1") not in ([], [crashed])
            assert store.slabs.map(before.slab)
            after = store.slabs.table.mapping(before.slab)
            assert after is not None
            assert (after.host, after.generation > before.generation) == (one, True)
            read = store.metrics.remote_hits
            assert store.read(before.slab * SLAB, 1) == bytes([before.slab + 1]), "not what the new slab has"
            assert store.metrics.remote_hits == read
            store.write(before.slab * SLAB, bytes([before.slab + 1]) * BLOCK)
            store.settle(before.slab)

            fleet.notice("gpu-1", 120.0)
            until(lambda: store.slabs.table.hosts.keys() == {two} and not _daemon(fleet, "gpu-1"))
            assert store.metrics.evictions == 1, "it has given its slab back before it ended"
            assert not fleet.lost("gpu-1"), "long before the node ends"

            assert _daemon(fleet, "gpu-2")
            fleet.kill("gpu-2")
            assert not _daemon(fleet, "gpu-2")
            assert registry.find(two) is None
            until(lambda: not store.slabs.table.hosts)
            assert [store.read(slab * SLAB, 1) for slab in range(2)] == [b"\1", b"\2"]

            until(lambda: len(registry.addresses()) > 0)  # of the nodes in their place
        finally:
            session.close()
            behind.close()
    assert not list(labels.environments(labels.below(fleet.uid)))
    assert registry.addresses() == ()


def test_a_daemon_that_crashes_again_and_again_stays_down_and_one_that_ended_is_left_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = LocalPool("gpu", "gpu", memory_lend=32 / 1024)
    nodes = tuple(LocalNode(f"gpu-{n}", "gpu", "up", 0.0, "spot", 0.0) for n in (1, 2))
    nodes = (*nodes, LocalNode("gpu-3", "gpu", "up", 0.0, "spot", 0.0, deadline=1e12))
    state = LocalFleetState("lab", "uid", pools=(pool,), plans={"gpu": PoolPlan(3)}, nodes=nodes)
    file = LocalFleetStateFile(home / "lab", SystemClock())
    file.write(state)
    registry, started = MemoryRegistry(), list[str]()
    for node in ("gpu-1", "gpu-3"):  # the second has ended on purpose, the third has a notice
        registry.announce(PeerAddress(lender_name("lab", node), "127.0.0.1", 1, SLAB))

    def launch(state: LocalFleetState, node: LocalNode, folder: Path, clock: SystemClock) -> None:
        started.append(node.id)
        if len(started) % 2:
            raise MemoryTierError("it does not come up")

    monkeypatch.setattr(lending, "launch_daemon", launch)
    keeper = LenderKeeper(file, SystemClock(), RestartPolicy(first=0.0, most=0.0, limit=4))
    for _ in range(30):
        keeper.tend(state)
        keeper.close(60)
    assert started == ["gpu-1"] * 3
    assert registry.find(lender_name("lab", "gpu-1")), "who asks for its status hears that it does not answer"

    file.write(state.without("gpu-1", "killed", 1.0, lost=True))
    keeper = LenderKeeper(file, SystemClock(), RestartPolicy(first=0.0, most=0.0, limit=4))
    keeper.tend(state)
    keeper.tend(state)
    keeper.close(60)
    assert registry.find(lender_name("lab", "gpu-1")) is None, "its node has gone meanwhile"


def test_a_node_lends_a_slab_at_least() -> None:
    with pytest.raises(OptionError, match=r"memory_lend of pool gpu must be 0 or .* 16 MiB; got 8 MiB"):
        LocalPool("gpu", "gpu", memory_lend=8 / 1024)
