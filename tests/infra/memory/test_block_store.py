"""The block store on fake peers: reads return the last write under every order of faults (G1 to G4, G10)."""

import random

import pytest

from ebbflow.infra.errors import MemoryTierError, StorageError
from ebbflow.infra.memory.protocol import Frame, Kind, pack_slabs, unpack_activity
from ebbflow.planners.memory.slab_table import SlabState
from tests.infra.memory.fake_peers import BLOCK, PER_SLAB, SETTINGS, SLABS, FakeCluster

BLOCKS = PER_SLAB * SLABS


@pytest.mark.parametrize("seed", range(100))
def test_a_read_returns_the_last_write_whatever_happens(seed: int) -> None:
    cluster, rng = FakeCluster(seed), random.Random(1000 + seed)
    store, oracle = cluster.store, bytearray(BLOCKS * BLOCK)
    names = sorted(cluster.peers)
    for number in range(200):
        match rng.choice("wwwwrrrrsssstmuekv"):
            case "w":
                first = rng.randrange(BLOCKS)
                data = rng.randbytes(rng.randint(1, min(6, BLOCKS - first)) * BLOCK)
                store.write(first * BLOCK, data)
                oracle[first * BLOCK : first * BLOCK + len(data)] = data
            case "r":
                start = rng.randrange(len(oracle))
                size = rng.randint(0, min(7 * BLOCK, len(oracle) - start))
                assert store.read(start, size) == oracle[start : start + size], number
            case "s":
                cluster.step()
            case "t":
                store.tick(1.0)
            case "m":
                store.slabs.map(rng.randrange(SLABS))
            case "u":
                store.slabs.unmap(rng.randrange(SLABS))
            case "e" if cluster.peers:
                cluster.evict(rng.choice(sorted(cluster.peers)))
            case "k" if cluster.peers and rng.random() < 0.5:
                cluster.kill(rng.choice(sorted(cluster.peers)))
            case "v" if gone := [name for name in names if name not in cluster.peers]:
                cluster.revive(rng.choice(gone))
            case _:
                pass
        states = store.slabs.table.states
        assert sum(states.values()) == SLABS
    cluster.settle()
    assert store.read(0, len(oracle)) == oracle
    assert cluster.behind.data == oracle
    assert store.slabs.table.states[SlabState.EVICTING] == 0
    held = sum(len(one.slabs) for one in cluster.peers.values())
    assert held == store.slabs.table.states[SlabState.MAPPED]


def test_blocks_are_read_from_peers_and_after_their_loss_from_the_store() -> None:
    cluster = FakeCluster(1)
    store = cluster.store
    assert all(store.slabs.map(slab) for slab in range(3))
    assert store.slabs.table.hosts == {"node-0": 1, "node-1": 1, "node-2": 1}, (
        "each on a peer of its own (G4)"
    )
    data = bytes(range(3 * SETTINGS.slab_bytes))
    store.write(0, data)
    cluster.settle()
    assert store.read(0, len(data)) == data
    assert (store.metrics.remote_hits, store.metrics.store_hits) == (6, 0)
    target = store.slabs.table.mapping(1)
    assert target is not None
    cluster.kill(target.host)
    assert store.read(0, len(data)) == data
    assert (store.metrics.remote_hits, store.metrics.store_hits) == (10, 2), "only its slab is affected (G2)"


def test_a_slab_is_given_back_when_its_last_operation_has_ended() -> None:
    cluster = FakeCluster(1, peers=1)
    store, peer = cluster.store, cluster.peers["node-0"]
    store.slabs.map(0)
    store.write(0, b"x" * BLOCK)
    cluster.evict("node-0")
    cluster.control()
    assert peer.slabs, "a write is outstanding"
    peer.run()
    cluster.control()
    assert not peer.slabs
    assert store.read(0, BLOCK) == b"x" * BLOCK
    assert store.metrics.evictions == 1


def test_activity_is_told_for_ones_own_slabs_alone() -> None:
    cluster = FakeCluster(1, peers=1)
    store, peer = cluster.store, cluster.peers["node-0"]
    told: list[Frame] = []
    peer.tell = told.append  # type: ignore[method-assign]
    store.slabs.map(0)
    store.write(0, b"x" * 4 * BLOCK)
    store.tick(1.0)
    mine = next(iter(peer.slabs))
    store.slabs.receive(peer, Frame(Kind.CHECK_ACTIVITY, 7, payload=pack_slabs([mine, (99, 1)])))
    cluster.control()
    assert told[0].request == 7
    assert unpack_activity(told[0].payload) == {mine: pytest.approx(0.8)}


def test_writes_wait_for_an_entry_and_a_store_that_refuses_is_told() -> None:
    cluster = FakeCluster(1, peers=0)
    store = cluster.store
    for block in range(SETTINGS.entries + 1):
        store.write(block * BLOCK, b"y")
    assert store.metrics.stalls == 1
    cluster.settle()
    cluster.behind.broken = True
    store.write(0, b"z")
    with pytest.raises(StorageError, match="the disk is gone"):
        store.flush(0)
    with pytest.raises(StorageError, match="refused what no peer holds"):
        store.read(0, 1)


def test_addresses_outside_the_space_are_refused() -> None:
    store = FakeCluster(1).store
    with pytest.raises(MemoryTierError, match="outside the address space"):
        store.write((BLOCKS - 1) * BLOCK, b"x" * (BLOCK + 1))
    with pytest.raises(MemoryTierError, match="begin with a block"):
        store.write(3, b"x")
    with pytest.raises(MemoryTierError, match="must not be negative"):
        store.read(-1, 1)
