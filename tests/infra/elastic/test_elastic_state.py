"""States as bytes, snapshots as folders, and running checkpoints."""

from pathlib import Path

import numpy as np
import pytest

from ebbflow.infra.elastic import Executor, codec
from ebbflow.infra.elastic.running import RunningCopy
from ebbflow.infra.elastic.snapshot import MANIFEST, Snapshot, SnapshotFolder, read, write
from ebbflow.infra.errors import ElasticError


def test_decoded_arrays_are_own_and_writable() -> None:
    array = np.arange(6.0).reshape(2, 3)
    frames = codec.encode({"a": array, "b": [array.T, array[:, ::2], "text"]})
    decoded = codec.decode([bytes(frame) for frame in frames])
    assert (decoded["a"] == array).all()
    assert (decoded["b"][0] == array.T).all()
    assert (decoded["b"][1] == array[:, ::2]).all()
    decoded["a"][0, 0] = 7
    assert array[0, 0] == 0
    assert codec.size(frames) > 2 * array.nbytes


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 100])
def test_damage_is_seen(damage: bytes) -> None:
    with pytest.raises(ElasticError, match=r"part\.bin is"):
        codec.unpack(damage, "part.bin")
    packed = bytearray(codec.pack({"state": np.ones(9)}))
    assert (codec.unpack(bytes(packed), "part.bin")["state"] == 1).all()
    packed[-3] ^= 1
    with pytest.raises(ElasticError, match=r"part\.bin is damaged"):
        codec.unpack(bytes(packed), "part.bin")


def test_an_executor_that_sends_what_it_cannot_take_is_told_what_to_define() -> None:
    class HalfDone(Executor):
        def load_input(self) -> None: ...

        async def run(self, context: object, args: object) -> None: ...

    with pytest.raises(ElasticError, match="HalfDone sends its input_state; define set_input"):
        HalfDone().set_input([1])
    with pytest.raises(ElasticError, match="HalfDone has a state_dict; define load_state_dict"):
        HalfDone().load_state_dict({"a": 1})


def take(folder: SnapshotFolder) -> Snapshot:
    number, path = folder.begin()
    write(f"{path}/n1-worker.bin", {0: "executor"})
    write(f"{path}/n1-server.bin", {0: "shard"})
    snapshot = Snapshot(number, path, (f"{path}/n1-worker.bin",), (f"{path}/n1-server.bin",))
    folder.commit(snapshot, {"number": number})
    return snapshot


def test_the_newest_whole_snapshot_counts(tmp_path: Path) -> None:
    folder = SnapshotFolder(str(tmp_path), keep=2)
    assert folder.latest() is None
    first, second, third = take(folder), take(folder), take(folder)
    assert not Path(first.folder).exists()
    assert folder.latest() == third
    assert third.master() == {"number": 2}
    Path(third.shards[0]).write_bytes(b"")
    assert SnapshotFolder(str(tmp_path)).latest() == second
    (Path(second.folder) / MANIFEST).unlink()
    assert folder.latest() is None
    assert SnapshotFolder(str(tmp_path)).begin()[0] == 3
    with pytest.raises(ElasticError, match="cannot be read: No such file"):
        read(str(tmp_path / "nothing"))


def test_a_running_copy_saves_what_moved_farthest(tmp_path: Path) -> None:
    values = {key: np.zeros(4) for key in range(8)}
    copy = RunningCopy.open(str(tmp_path), 3)
    copy.refresh(values, 0.25)
    assert sorted(RunningCopy.open(str(tmp_path), 3).saved) == list(range(8))  # at first everything
    now = {key: np.full(4, float(key)) for key in range(8)}
    copy.refresh(now, 0.25)
    saved = RunningCopy.open(str(tmp_path), 3).saved
    assert {key for key in range(8) if saved[key][0]} == {6, 7}
    copy.refresh(now, 0.25)
    assert {key for key in range(8) if copy.saved[key][0]} == {4, 5, 6, 7}
    Path(copy.path).write_bytes(b"torn")
    assert RunningCopy.open(str(tmp_path), 3).saved == {}
