"""Nodes of a local fleet that lend memory: their daemons drain at a notice, and go with their nodes."""

from pathlib import Path

import pytest

from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.infra.local_fleet.provider.lending import lender_name
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.registry import DIRECTORY, MemoryRegistry
from ebbflow.infra.memory.session import MemorySession
from ebbflow.planners.errors import OptionError
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
def test_daemons_drain_at_a_notice_and_go_with_their_nodes(home: Path) -> None:
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


def test_a_node_lends_a_slab_at_least() -> None:
    with pytest.raises(OptionError, match=r"memory_lend of pool gpu must be 0 or .* 16 MiB; got 8 MiB"):
        LocalPool("gpu", "gpu", memory_lend=8 / 1024)
