"""Running checkpoints in nodes' memory: what counts there, what the store gets, what is read after losses."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbflow.infra.errors import StorageError
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.running import levels, memory
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.infra.training.running.folder import RunningFolder, read_whole
from ebbflow.infra.training.running.memory import MemoryFiles, NodeMemory
from ebbflow.infra.training.running.store import MANIFEST
from tests.infra.memory.lenders import Lender
from tests.infra.training.memory_nodes import Gate, Nodes
from tests.infra.training.running import Walk
from tests.infra.training.worlds import ROOT

pytestmark = pytest.mark.usefixtures("no_sync")


@pytest.fixture(name="gate")
def _gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(memory, "CHUNK", 64)  # files of many entries
    monkeypatch.setattr(levels, "MEASURED", 1000)  # that either is slow is no matter here
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def started(place: Path, walk: Walk, nodes: Nodes | NodeMemory, **options: Any) -> RunningCheckpoint:
    memory = nodes.memory() if isinstance(nodes, Nodes) else nodes
    return RunningCheckpoint(
        StorageLocation(place),
        walk.now,
        **{"period": 2, "fraction": 0.5, "shard_rows": 2, "memory": memory, **options},
    )


def save(made: RunningCheckpoint, walk: Walk) -> int:
    """Save an iteration, and wait until it counts."""
    iteration = walk.move()
    made.step(iteration, {"iteration": iteration})
    made._finish(150)
    return iteration


def stored(place: Path) -> int:
    """Return the iteration that the store alone has, every block of which can be read."""
    state, iteration, _ = read_whole(RunningFolder(StorageLocation(place)))
    assert state["run"] == {"iteration": iteration}
    return iteration


def check(made: RunningCheckpoint, walk: Walk) -> None:
    """Check that each block that was read back is what it was at its iteration."""
    for number, block in enumerate(made.blocks):
        then = block.of(walk.past[made.cached[number]][block.tensor])
        assert torch.equal(block.of(made._live.tensors[block.tensor]), then)


def test_a_save_counts_once_memory_has_it_and_the_store_gets_the_newest_of_each_block(
    tmp_path: Path, gate: Gate
) -> None:
    nodes, walk = Nodes(), Walk()
    made = started(tmp_path, walk, nodes)
    made.initialize({"iteration": 0})
    assert not nodes.kept, "a start is in the store, as a whole"
    gate.open.clear()
    last = [save(made, walk) for _ in range(9)][-1]
    assert (made.skipped, made.failures, stored(tmp_path)) == (0, 0, 0)

    assert made._store is not None
    gate.killed.add(id(made._store._store))
    again = started(tmp_path, Walk(1), nodes)  # memory has all that counted
    found = again.recover_all()
    assert (found.iteration, found.state) == (last, {"iteration": last})
    assert (again.cached == made.cached).all()
    check(again, walk)

    gate.open.set()
    again.wait(150)  # what only memory had is in the store before anything else is saved
    assert stored(tmp_path) == last
    assert read_whole(RunningFolder(StorageLocation(tmp_path)))[2] == made.cached.min()
    again.close(150)
    assert not nodes.kept, "nothing is left on nodes"


def test_what_memory_loses_is_read_from_the_store_as_a_whole_and_memory_begins_anew(
    tmp_path: Path, gate: Gate
) -> None:
    nodes, walk = Nodes(), Walk()
    made = started(tmp_path, walk, nodes)
    made.initialize({"iteration": 0})
    for _ in range(4):
        save(made, walk)
    made.wait(150)
    gate.open.clear()
    save(made, walk)
    nodes.drop([sorted(nodes.kept)[0]])  # one entry of all, such as a slab that a host took back
    again = started(tmp_path, Walk(1), nodes)
    assert again.recover_all().iteration in (4, 5), "5 where it was of nothing that counts any more"
    check(again, walk)

    nodes.kept.clear()
    again = started(tmp_path, Walk(1), nodes)
    assert (again.recover_all().iteration, stored(tmp_path)) == (4, 4)
    check(again, walk)
    gate.open.set()
    assert save(made, walk) == 6
    assert made._store is not None
    assert made._store.refusals == 1
    assert stored(tmp_path) == 6, "memory had lost what it had, so the store was waited for"
    assert save(made, walk) == 7
    assert made._store.refusals == 1
    assert nodes.kept


@pytest.mark.parametrize("room", [0, 1, 3, 7, 20])
def test_a_save_that_is_cut_off_or_finds_no_room_leaves_the_one_before(
    tmp_path: Path, gate: Gate, room: int
) -> None:
    nodes, walk = Nodes(), Walk()
    made = started(tmp_path, walk, nodes, period=1, fraction=1.0)
    made.initialize({"iteration": 0})
    gate.open.clear()
    save(made, walk)
    nodes.room = room
    iteration = walk.move()
    made.step(iteration, {"iteration": iteration})
    kept = dict(nodes.kept)
    again = started(tmp_path, Walk(1), nodes, period=1, fraction=1.0)
    found = again.recover_all()
    assert found.iteration == found.oldest in (0, 1, 2)
    check(again, walk)
    nodes.kept |= kept
    gate.open.set()
    made.wait(150)
    assert stored(tmp_path) == 2


def test_nothing_is_left_of_processes_that_were_killed_once_another_one_ends(
    tmp_path: Path, gate: Gate
) -> None:
    nodes, walk = Nodes(), Walk()
    place, saved = tmp_path / "run", tmp_path / "saved"
    made = started(place, walk, nodes)
    made.initialize({"iteration": 0})
    for _ in range(4):
        save(made, walk)
    made.wait(150)
    shutil.copytree(place, saved)
    nodes.moments = []
    for _ in range(3):  # one of them copies what is left of several segments into one, and deletes them
        save(made, walk)
    made.wait(150)
    chosen = nodes.moments[:: max(1, len(nodes.moments) // 16)]
    for number, moment in enumerate([*chosen, dict(nodes.kept)]):
        shutil.rmtree(place)
        shutil.copytree(saved, place)
        after = Nodes()
        after.kept = dict(moment)
        again = started(place, walk, after)
        again.recover_all()
        for _ in range(number % 4):
            save(again, walk)
        assert after.kept
        again.close(150)
        assert not after.kept


def manifest_of(made: RunningCheckpoint) -> bytes:
    """Return the key of the manifest in memory."""
    assert made._store is not None
    assert made._store._memory is not None
    place: Any = made._store._memory._place
    key: bytes = place._key(MANIFEST, -1)
    return key


def test_a_node_that_comes_back_has_pieces_of_no_segment_that_was_written_since(
    tmp_path: Path, gate: Gate
) -> None:
    nodes, walk = Nodes(), Walk()
    made = started(tmp_path, walk, nodes)
    made.initialize({"iteration": 0})
    for _ in range(4):
        save(made, walk)
    made.wait(150)
    away = dict(nodes.kept)  # of a node that cannot be reached from now on
    nodes.kept.clear()  # the host of the other one took its memory back
    save(made, walk)
    gate.open.clear()
    for _ in range(6):
        last, manifest = save(made, walk), manifest_of(made)
        after = Nodes()
        after.kept = nodes.kept | away | {manifest: nodes.kept[manifest]}  # it is asked first for all pieces
        again = started(tmp_path, Walk(1), after)
        assert again.recover_all().iteration == last
        check(again, walk)


def test_a_writer_that_continues_uses_no_number_of_a_killed_one_and_deletes_what_that_left(
    tmp_path: Path, gate: Gate
) -> None:
    nodes, walk = Nodes(), Walk()

    def cut_off(made: RunningCheckpoint) -> dict[bytes, bytes]:
        """Return what nodes keep where a save is cut off just before it counts."""
        assert made._store is not None
        gate.killed.add(id(made._store._store))
        nodes.moments = []
        save(made, walk)
        manifest = manifest_of(made)
        return [kept for kept in nodes.moments if kept[manifest] != nodes.kept[manifest]][-1]

    made = started(tmp_path, walk, nodes)
    made.initialize({"iteration": 0})
    for _ in range(2):
        save(made, walk)
    made.wait(150)
    before = dict(nodes.kept)
    left = cut_off(made)
    for _ in range(2):
        half = left.keys() - before.keys()
        assert half
        nodes = Nodes()
        nodes.kept = dict(left)
        again = started(tmp_path, walk, nodes)
        again.recover_all()
        before, left = left, cut_off(again)
        assert not half & nodes.kept.keys()


def test_what_is_not_needed_any_more_is_forgotten_though_the_store_is_slow(
    tmp_path: Path, gate: Gate
) -> None:
    nodes, walk = Nodes(), Walk()
    made = started(tmp_path, walk, nodes)
    made.initialize({"iteration": 0})
    gate.open.clear()
    save(made, walk)
    with pytest.raises(StorageError, match="has not taken all blocks"):
        made.close(0.01)
    assert nodes.kept, "it may be all that there is of this save"
    made.close(0.01, needed=False)
    assert not nodes.kept
    gate.open.set()
    save(made, walk)
    assert not nodes.kept


def test_a_directory_that_was_deleted_and_made_again_has_nothing_of_the_run_before(
    tmp_path: Path, gate: Gate
) -> None:
    nodes, walk = Nodes(), Walk()
    made = started(tmp_path / "run", walk, nodes)
    made.initialize({"iteration": 0})
    save(made, walk)
    made.wait(150)
    shutil.rmtree(tmp_path / "run")
    nodes.peers = ()  # no node lends memory when the next run begins
    other = Walk(7)
    started(tmp_path / "run", other, nodes).initialize({"iteration": 0})
    nodes.peers = ("node-1",)
    again = started(tmp_path / "run", Walk(1), nodes)
    assert again.recover_all().iteration == 0
    check(again, other)


def test_why_memory_is_not_used_is_told_once(tmp_path: Path, gate: Gate) -> None:
    nodes, walk = Nodes(), Walk()
    nodes.peers, nodes.problems = (), ("node-1 at 127.0.0.1:1 does not answer",)
    memory = nodes.memory()
    made = started(tmp_path, walk, memory)
    made.initialize({"iteration": 0})
    said = memory.problem()
    assert "no node lends memory in" in said
    assert "node-1 at 127.0.0.1:1 does not answer" in said
    assert "ebbflow memory lend" in said
    save(made, walk)
    nodes.peers, nodes.room = ("node-1",), 0
    for _ in range(3):
        save(made, walk)
    assert "has no room" in memory.problem()
    assert (memory.problem(), made.failures) == ("", 0), "the store has it"
    assert stored(tmp_path) == 4


def test_a_store_that_refuses_is_told_of_and_gets_everything_later(tmp_path: Path, gate: Gate) -> None:
    nodes, walk = Nodes(), Walk()
    made = started(tmp_path, walk, nodes)
    made.initialize({"iteration": 0})
    gate.refuses = True
    save(made, walk)
    with pytest.raises(StorageError, match="the disk is full"):
        made.wait(150)
    save(made, walk)
    assert made.failures >= 1
    assert made.last_error == "the disk is full"
    assert started(tmp_path, Walk(1), nodes).recover_all().iteration == 2, "it counts: memory has it"
    gate.refuses = False
    made.wait(150)
    assert stored(tmp_path) == 2


def test_a_new_start_has_nodes_forget_the_one_before(tmp_path: Path, gate: Gate) -> None:
    nodes, walk = Nodes(), Walk()
    made = started(tmp_path, walk, nodes)
    made.initialize({"iteration": 0})
    save(made, walk)
    made.wait(150)
    assert nodes.kept
    started(tmp_path, walk, nodes).initialize({"iteration": 0})
    assert not nodes.kept


def test_memory_that_is_slower_than_the_store_is_used_no_longer(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "MEASURED", 1)
    nodes, walk = Nodes(), Walk()
    made = started(tmp_path, walk, nodes)
    made.initialize({"iteration": 0})
    assert made._store is not None
    made._store._behind.bandwidth = 1e18
    save(made, walk)
    assert made._store.off
    assert not nodes.kept
    assert stored(tmp_path) == 1
    save(made, walk)
    assert not nodes.kept
    assert stored(tmp_path) == 2


def test_files_in_memory_are_what_was_written(gate: Gate) -> None:
    nodes = Nodes()
    files = MemoryFiles(nodes, "file:///a")  # type: ignore[arg-type]
    data = bytes(range(256)) * 3
    with files.writing("long") as sink:
        sink.write(data[:100])
        sink.write(data[100:])
    files.write("short", b"abc")
    nodes.room = 5
    with pytest.raises(StorageError, match="no node has room"), files.writing("refused") as sink:
        sink.write(data)
    files.remove("refused")
    nodes.room = 1 << 30
    other = MemoryFiles(nodes, "file:///a")  # type: ignore[arg-type]
    assert (other.read("long"), other.read("short")) == (data, b"abc")
    assert other.read_range("long", 60, 200) == data[60:260]
    assert other.have(["long", "short"])
    assert not other.have(["long", "never"])
    assert [one.base_name for one in files.entries()] == ["long", "short"]
    assert len(nodes.kept) == 12 + 1 + 1
    elsewhere = MemoryFiles(nodes, "file:///b")  # type: ignore[arg-type]
    assert not elsewhere.have(["long"])
    other.remove("long")
    other.remove("short")
    other.remove("never")
    assert not nodes.kept
    for read in (lambda: other.read("long"), lambda: other.read_range("long", 0, 1)):
        with pytest.raises(FileNotFoundError):
            read()


TRAINER = """
import sys
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.training.running.memory import NodeMemory
from tests.benchmarks.slow_store import SlowLocation
from tests.infra.memory.lenders import Lender
from tests.infra.training.memory_nodes import Gate, Nodes
from tests.infra.training.running import Walk
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint

SlowLocation.bandwidth = 100e3
walk = Walk(rows=200)
made = RunningCheckpoint(
    SlowLocation(sys.argv[1]), walk.now, period=2, fraction=0.5, shard_rows=2,
    memory=NodeMemory(MemoryRegistry(sys.argv[2])),
)
made.initialize({"iteration": 0})
while True:
    iteration = walk.move()
    made.step(iteration, {"iteration": iteration})
    made._finish(150)
    print(iteration, made._store.memory_saves, flush=True)
"""


@pytest.mark.processes
def test_the_trainer_and_then_a_daemon_are_killed_and_what_counted_is_read(tmp_path: Path) -> None:
    registry = MemoryRegistry(tmp_path / "memory")
    registry.token(create=True)
    place = tmp_path / "run"
    lenders = [Lender(registry, f"node-{n}") for n in (1, 2)]
    trainer = subprocess.Popen(
        [sys.executable, "-P", "-c", TRAINER, place, registry.folder], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert trainer.stdout is not None
        told = [tuple(map(int, trainer.stdout.readline().split())) for _ in range(12)]
        trainer.kill()
        trainer.wait(60)
        counted, in_memory = told[-1]
        assert in_memory >= 6, "that nodes had no memory yet must be the exception"
        walk = Walk(rows=200)
        for _ in range(counted + 2):
            walk.move()

        def recovered() -> int:
            nodes = NodeMemory(registry)
            try:
                again = started(place, Walk(1, rows=200), nodes)
                found = again.recover_all()
                check(again, walk)
                return found.iteration
            finally:
                nodes.close()

        newest = recovered()
        assert counted <= newest <= counted + 1
        lenders[0].kill()
        assert recovered() == newest, "the other node has all of it too"
        lenders[1].kill()
        behind = recovered()
        assert behind == stored(place)
        assert 0 <= behind <= newest
    finally:
        trainer.kill()
        trainer.wait(60)
        for lender in lenders:
            lender.close()
