"""A gateway with memory before its store: what is discarded, replaced or gone there never shows in a file."""

import os
import random
import socket
import threading
from collections.abc import Callable, Hashable
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from ebbflow.infra.errors import StorageError
from ebbflow.infra.memory.client import BlockStore
from ebbflow.infra.memory.files import MemoryTier
from ebbflow.infra.memory.gateway import files as gateway_files
from ebbflow.infra.memory.gateway.files import PARTS, GatewayFiles
from ebbflow.infra.memory.peer import Answered
from ebbflow.infra.memory.protocol import Frame
from ebbflow.infra.storage.places import StorageLocation
from tests.infra.memory.fake_peers import BLOCK, PER_SLAB, SETTINGS, FakePeer
from tests.infra.memory.gateway_client import served
from tests.infra.memory.lenders import until

SLAB = BLOCK * PER_SLAB
DATA = "&op=CREATE&overwrite=true&ebbflow=data"


class _AtOnce:
    """``WorkQueues`` that do what is submitted before anything else: the order that threads rarely take."""

    def submit(self, lane: Hashable, work: Callable[[], None]) -> None:
        work()

    def wait(self, changed: threading.Condition, reached: Callable[[], bool], timeout: float) -> bool:
        return reached()

    def close(self) -> None:
        pass


class _Peer(FakePeer):
    """A daemon that answers at once."""

    def post(self, frame: Frame, answered: Answered) -> None:
        super().post(frame, answered)
        while self.run():
            pass


class Nodes:
    """Memory before a directory, with one node that lends."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root, self.tier, self.peer = root, MemoryTier("memory+file", SETTINGS), _Peer("node", 6)
        self.store = BlockStore(
            SETTINGS, self.tier.blocks_behind, _AtOnce(), lambda act: act(), np.random.default_rng(0)
        )
        self.tier.store = self.store
        self.store.slabs.add(self.peer)
        self.files = GatewayFiles(StorageLocation(root), self.tier)

    def write(self, path: str, data: bytes) -> None:
        with self.files.create(path, overwrite=True) as out:
            out.write(data)

    def cut(self, path: str, data: bytes) -> None:
        """Begin a file that never becomes whole."""
        with suppress(InterruptedError), self.files.create(path, overwrite=True) as out:
            out.write(data)
            raise InterruptedError

    def read(self, path: str) -> bytes:
        opened = self.files.open(path)
        return b"".join(opened.pieces(0, opened.size))

    def held(self, path: str) -> bool:
        return self.tier.find(str(self.root / path)) is not None


@pytest.fixture(name="nodes")
def _nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path / "root")


def test_no_two_files_share_a_block_whatever_is_discarded_dropped_or_deleted(nodes: Nodes) -> None:
    rng, written = random.Random(7), dict[str, bytes]()
    for number in range(200):
        pieces = {
            name: [rng.randbytes(rng.randint(1, BLOCK)) for _ in range(4)]
            for name in rng.sample("abcdef", rng.randint(1, 2))
        }
        with ExitStack() as stack:
            begun = {name: stack.enter_context(nodes.files.create(name, overwrite=True)) for name in pieces}
            for turn in range(4):
                for name, out in begun.items():
                    out.write(pieces[name][turn])
                if rng.random() < 0.2:
                    nodes.cut(rng.choice("abcdef"), bytes(rng.randint(1, SLAB)))
        written |= {name: b"".join(pieces[name]) for name in pieces}
        if number % 5 == 0:
            nodes.tier.drop_below(str(nodes.root / rng.choice("abcdef")))
        if number % 7 == 0:
            gone, _ = written.popitem()
            assert nodes.files.delete(gone, recursive=False)
        blocks = [one for file in nodes.tier.below(str(nodes.root)) for one in file.blocks]
        assert len(blocks) == len(set(blocks))
        for name, content in written.items():
            assert (nodes.root / name).read_bytes() == content, name
            assert nodes.read(name) == content, name
    for name in written:
        nodes.tier.drop_below(str(nodes.root / name))
    assert not nodes.peer.slabs, "all is returned"


def test_a_file_that_is_cut_leaves_its_memory_to_the_next_ones(nodes: Nodes) -> None:
    with served(nodes.root, nodes.tier) as client:
        begun = client.begin(f"/webhdfs/v1/cut?{DATA}", f"Content-Length: {SLAB}", b"x" * (2 * BLOCK))
        with begun as connection:
            until(lambda: bool(nodes.peer.slabs))
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1 << 16)
        until(lambda: not nodes.peer.slabs)
        assert not list((nodes.root / PARTS).iterdir())
        with (
            nodes.files.create("one", overwrite=True) as one,
            nodes.files.create("two", overwrite=True) as two,
        ):
            for number in range(PER_SLAB):
                one.write(b"%d" % number * 2 * BLOCK)
                two.write(b"%d" % (number + 4) * 2 * BLOCK)
        assert client.read("/one") == b"".join(b"%d" % number * 2 * BLOCK for number in range(4))
        assert client.read("/two") == b"".join(b"%d" % number * 2 * BLOCK for number in range(4, 8))
    assert nodes.held("one")


def test_a_file_of_which_the_store_has_other_bytes_is_not_published(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.write("file", b"old")
    monkeypatch.setattr(nodes.tier, "write_behind", lambda blocks, data: None)
    with pytest.raises(StorageError, match="0 bytes of 8"):
        nodes.write("file", b"new" + bytes(5))
    assert (nodes.root / "file").read_bytes() == b"old"
    assert not list((nodes.root / PARTS).iterdir())


def test_a_file_that_is_replaced_while_it_is_read_ends_with_an_error(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_files, "_FIRST", BLOCK)
    nodes.write("file", b"old." * 16)
    opened = nodes.files.open("file")
    pieces = opened.pieces(0, opened.size)
    assert next(pieces) == b"old.old."
    (nodes.root / "other").write_bytes(b"new." * 16)
    os.replace(nodes.root / "other", nodes.root / "file")
    assert next(pieces) == b"old." * 4, "memory has it"
    nodes.store.slabs.lose(nodes.peer)
    with pytest.raises(OSError, match="replaced"):
        next(pieces)
    assert nodes.read("file") == b"new." * 16


def test_a_file_that_memory_has_lost_is_read_as_the_store_has_it(nodes: Nodes) -> None:
    nodes.write("file", b"12345678" * 3)
    nodes.write("empty", b"")
    assert nodes.read("file") == b"12345678" * 3
    assert nodes.store.metrics.store_hits == 0
    nodes.store.slabs.lose(nodes.peer)
    assert nodes.read("file") == b"12345678" * 3
    assert nodes.read("empty") == b""
    assert nodes.store.metrics.store_hits == 0, "by the store's own stream"
    assert not nodes.held("file")
