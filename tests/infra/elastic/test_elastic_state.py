"""States as bytes, snapshots as folders, and running checkpoints."""

import functools
import math
import pickle
import struct
import zlib
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_samples import Mixing

from ebbflow.infra.elastic import Executor, MicroTask, Settings, register
from ebbflow.infra.elastic.settings import check
from ebbflow.infra.elastic.wire import codec
from ebbflow.infra.elastic.wire.messages import Place
from ebbflow.infra.elastic.wire.snapshot import MANIFEST, Snapshot, SnapshotFolder, read, write
from ebbflow.infra.elastic.worker.running import RunningCopy
from ebbflow.infra.errors import ElasticError
from ebbflow.planners.errors import OptionError


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
    assert isinstance(decoded["b"], list)


@register
@dataclass
class Progress:
    rounds: int
    losses: list[float]


class Trap:
    """What a pickle could do to its reader."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('code from a message was run')",)


def everything() -> dict[Any, Any]:
    return {
        "plain": [None, True, 3, -7, 2.5, "text \udc80", b"bytes", {"a": [{}]}],
        ("w", 3): (1, (2, [3]), ()),
        4: {5, 6},
        frozenset({7}): 1 + 2j,
        np.int64(8): np.float32(0.1),
        "wide": -(2**200),
        "kinds": [deque([1, 2], 3), Counter("aab"), OrderedDict(b=1, a=2), range(1, 9, 2), Path("a/b")],
        "progress": Progress(3, [0.5, math.inf]),
        "place": Place("n1/server", 2),
        "task": MicroTask(1, 2, {"deep": Progress(1, [])}, 4),
        "rng": np.random.default_rng(1).bit_generator.state,
    }


def test_what_is_sent_arrives_with_its_types() -> None:
    content = everything()
    decoded = codec.decode([bytes(frame) for frame in codec.encode(content)])
    assert decoded == content
    assert repr(decoded) == repr(content)  # types, order, and what equals across types, such as True and 1


@pytest.mark.parametrize("length", [0, 3, 2000])  # in the head, and in a buffer of its own
@pytest.mark.parametrize(
    "kind", ["f8", "i1", ">u4", "?", "c16", "U5", "S3", "M8[ns]", [("a", "f8"), ("b", "i4", (2,))]]
)
def test_arrays_of_every_kind_arrive_as_they_were(length: int, kind: Any) -> None:
    rng = np.random.default_rng(0)
    dtype = np.dtype(kind)
    flat = np.frombuffer(rng.integers(32, 90, 6 * length * dtype.itemsize, np.uint8).tobytes(), np.uint8)
    array = (flat.astype("U1")[: 6 * length].astype(dtype) if kind == "U5" else flat.view(dtype)).reshape(
        2, length, 3
    )
    for one in (
        array,
        array.T,
        array[:, ::2],
        np.asfortranarray(array),
        array[:1, :1, :1].reshape(-1)[:1].reshape(-1),
    ):
        decoded = codec.decode([bytes(frame) for frame in codec.encode(one)])
        assert (decoded.dtype, decoded.shape, decoded.tobytes()) == (one.dtype, one.shape, one.tobytes())
        assert decoded.flags.writeable


def test_large_arrays_are_not_copied_to_be_sent() -> None:
    array = np.zeros(100_000)
    head, buffer = codec.encode(Progress(1, array))  # type: ignore[arg-type]
    assert len(head) < 300
    array[7] = 5
    assert np.frombuffer(buffer)[7] == 5


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (Trap(), "test_elastic_state.Trap"),
        ({"a": [Progress(1, [lambda: 0])]}, r"builtins.function in test_elastic_state:Progress"),  # type: ignore[list-item]
        (np.array([Trap()]), "an array of object"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (np.random.default_rng(0), "Generator"),
        (print, "builtin_function_or_method"),
        (functools.reduce(lambda inner, _: (inner,), range(150), 1), "100 levels at most"),
        (functools.reduce(lambda inner, _: [inner], range(2000), 1), "nest|recursion|cannot be sent"),
    ],
)
def test_what_is_not_registered_is_refused_by_name_when_it_is_sent(content: Any, named: str) -> None:
    with pytest.raises(ElasticError, match=named):
        codec.encode(content)


def test_neither_messages_nor_files_run_code_or_name_a_class_that_is_not_registered(tmp_path: Path) -> None:
    pickled = pickle.dumps(Trap())
    unknown = codec.encode(Progress(1, []))[0].replace(b":Progress", b":Xrogress")  # type: ignore[union-attr]
    for head in (pickled, unknown, b"", b"\xc1", b"\xc9\xff\xff\xff\xff\x01", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(ElasticError, match="cannot be read"):
            codec.decode([head])
    # as the snapshots of earlier versions were: a pickle, guarded by CRC-32 only
    body = struct.pack("<Q", len(pickled)) + pickled
    old = struct.pack("<8sQI", b"EBBFLOW1", 1, zlib.crc32(body)) + body
    (tmp_path / "part.bin").write_bytes(old)
    with pytest.raises(ElasticError, match="no snapshot file of this version"):
        read(str(tmp_path / "part.bin"))


def test_bytes_of_any_form_are_refused_or_read_but_never_crash_the_reader() -> None:
    rng = np.random.default_rng(3)
    frames = [bytes(frame) for frame in codec.encode([everything(), np.zeros(1000), np.ones((3, 500)).T])]
    refused = 0
    for _ in range(1500):
        damaged = [bytearray(frame) for frame in frames]
        head = damaged[0]
        for _ in range(int(rng.integers(1, 4))):
            head[int(rng.integers(len(head)))] = int(rng.integers(256))
        if rng.random() < 0.2:
            del head[int(rng.integers(len(head))) :]
        if rng.random() < 0.2:
            del damaged[int(rng.integers(1, 3))]
        try:
            codec.decode([bytes(frame) for frame in damaged])
        except ElasticError:
            refused += 1
    assert refused > 300


def test_every_flipped_byte_of_a_file_is_seen() -> None:
    packed = codec.pack({"state": np.arange(600.0), "rest": everything()})
    for place in range(0, len(packed), 3):
        damaged = bytearray(packed)
        damaged[place] ^= 1 << (place % 8)
        with pytest.raises(ElasticError, match=r"part\.bin"):
            codec.unpack(bytes(damaged), "part.bin")


def test_an_application_that_workers_could_not_have_is_refused_at_once() -> None:
    class Local(Mixing):
        pass

    with pytest.raises(OptionError, match="Local is defined in a function"):
        check(Local(), 1, Settings())
    app = Mixing()
    app.keys = lambda: 3  # type: ignore[assignment]
    with pytest.raises(OptionError, match=r"Mixing cannot be sent to workers: builtins\.function"):
        check(app, 1, Settings())


def test_a_class_whose_state_cannot_be_seen_is_not_registered() -> None:
    class Slots:
        __slots__ = ("a",)

    class Mapped(dict[str, int]):
        pass

    for kind in (Slots, Mapped):
        with pytest.raises(ElasticError, match="make it a data class"):
            register(kind)


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
    third_file = Path(third.shards[0])
    third_file.write_bytes(Path(second.shards[0]).read_bytes())  # whole, but of another snapshot
    assert SnapshotFolder(str(tmp_path)).latest() == third  # equal contents are no damage
    write(str(third_file), {0: "another"})
    assert SnapshotFolder(str(tmp_path)).latest() == second
    third_file.write_bytes(b"")
    assert SnapshotFolder(str(tmp_path)).latest() == second
    manifest = Path(second.folder) / MANIFEST
    manifest.write_text(manifest.read_text().replace('"number": 1', '"number": 7'))
    assert folder.latest() is None
    manifest.unlink()
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
