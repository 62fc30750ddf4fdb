"""Full checkpoints: what comes back, what is refused, saving in the background, and sharded states."""

import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow import load_checkpoint
from ebbflow.infra.errors import OtherModelError, StorageError, TrainingError, UnusableCheckpointError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints import sharded_files
from ebbflow.infra.training.checkpoints.files import CheckpointFiles
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from ebbflow.infra.training.checkpoints.manifest import Manifest
from ebbflow.infra.training.checkpoints.sharded_files import DamagedPartError
from ebbflow.infra.training.checkpoints.shards import Division, Piece
from ebbflow.infra.training.checkpoints.states import check_model, differences, read_state, signature
from ebbflow.infra.training.running.folder import read_running
from ebbflow.infra.training.spill import Spill
from ebbflow.planners.errors import OptionError
from tests.infra.training.checkpoint_cases import names, state
from tests.infra.training.worlds import run_module


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


# --- what comes back --------------------------------------------------------------------------------------


def test_a_model_its_optimizer_and_random_states_come_back_exactly(place: str) -> None:
    model, optimizer = trained()
    generator = np.random.default_rng(3)
    own = random.Random(5)  # the module's own is drawn from by other threads of this process
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "run": {
            "torch": torch.get_rng_state(),
            "python": own.getstate(),
            "numpy": generator.bit_generator.state,
            "array": np.arange(6, dtype=np.int16).reshape(2, 3),
            "rate": np.float64(0.25),
            "seen": [1, 2.5, None, (True, "x", b"y")],
        },
    }
    folder = CheckpointFolder(StorageLocation(place))
    done = folder.save(saved, 7, {"why": "notice"})

    other = CheckpointFolder(StorageLocation(place))
    found = other.latest()
    assert found is not None
    assert (found.step, found.uri, found.bytes, found.note) == (7, done.uri, done.bytes, {"why": "notice"})
    assert found.passed_over == ()
    found.check_model(model)
    loaded = other.load(found)
    fresh, again = trained()
    fresh.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    for (name, was), (_, now) in zip(model.state_dict().items(), fresh.state_dict().items(), strict=True):
        assert torch.equal(was, now), name
    assert str(again.state_dict()) == str(optimizer.state_dict())
    run = loaded["run"]
    again_own = random.Random(6)
    again_own.setstate(run["python"])
    assert again_own.random() == own.random()
    assert run["numpy"] == generator.bit_generator.state
    assert run["array"].dtype == np.int16
    assert run["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (run["rate"], run["seen"]) == (0.25, [1, 2.5, None, (True, "x", b"y")])
    assert set(other.load(found, only={"run"})) == {"run"}


def test_an_empty_or_missing_folder_has_no_checkpoint(place: str) -> None:
    assert CheckpointFolder(StorageLocation(place)).latest() is None


def test_torch_load_alone_reads_the_files(tmp_path: Path) -> None:
    CheckpointFolder(StorageLocation(tmp_path)).save(state(3), 3)
    (file,) = tmp_path.glob("step-*/model.pt")
    assert torch.load(file, weights_only=True)["w"][0] == 3.0


def test_the_newest_by_step_is_found_and_only_some_are_kept(place: str) -> None:
    folder = CheckpointFolder(StorageLocation(place), keep=2)
    for step in (1, 5, 9, 7):
        folder.save(state(step), step)
    found = folder.latest()
    assert found is not None
    assert found.step == 9
    assert [int(name[5:17]) for name in names(folder)] == [7, 9]


def test_a_view_of_a_large_tensor_is_saved_alone_and_tied_weights_once(tmp_path: Path) -> None:
    large = torch.arange(1_000_000.0)
    tied = torch.arange(10_000.0)
    saved = CheckpointFolder(StorageLocation(tmp_path)).save(
        {"model": {"v": large[:10], "a": tied, "b": tied}}, 1
    )
    assert saved.bytes < 60_000
    folder = CheckpointFolder(StorageLocation(tmp_path))
    found = folder.latest()
    assert found is not None
    loaded = folder.load(found)["model"]
    assert loaded["v"].tolist() == list(range(10))
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_what_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    folder = CheckpointFolder(StorageLocation(tmp_path))
    with pytest.raises(OptionError, match=r"run\.hooks\.0 is a function"):
        folder.save({"run": {"hooks": [lambda: 1]}}, 1)
    with pytest.raises(OptionError, match="array of object"):
        folder.save({"run": {"x": np.array([None])}}, 1)
    with pytest.raises(OptionError, match="keys of the state"):
        folder.save({"../up": {}}, 1)
    with pytest.raises(OptionError, match="note must be JSON"):
        folder.save(state(1), 1, note={1.0})
    with pytest.raises(OptionError, match="step must be"):
        folder.save(state(1), -1)
    with pytest.raises(OptionError, match="keep must be at least 1 checkpoint; got 0"):
        CheckpointFolder(StorageLocation(tmp_path), keep=0)
    assert names(folder) == []


def test_no_code_in_a_file_is_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(target),)

    torch.save({"x": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(UnusableCheckpointError, match="cannot read"):
        read_state(tmp_path / "trap.pt")
    assert not target.exists()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=25, deadline=None)
@given(value=VALUES, shape=st.lists(st.integers(0, 4), max_size=3), step=st.integers(0, 10**12 - 1))
def test_any_plain_value_and_tensor_comes_back(
    no_sync: None, tmp_path_factory: pytest.TempPathFactory, value: Any, shape: list[int], step: int
) -> None:
    place = tmp_path_factory.mktemp("values")
    tensor = torch.randn(shape).to(random.choice([torch.float32, torch.bfloat16, torch.int64]))
    folder = CheckpointFolder(StorageLocation(place))
    folder.save({"model": {"t": tensor}, "run": {"v": value}}, step)
    found = folder.latest()
    assert found is not None
    loaded = folder.load(found)
    assert found.step == step
    assert loaded["run"]["v"] == value
    assert loaded["model"]["t"].dtype == tensor.dtype
    assert torch.equal(loaded["model"]["t"], tensor)
    shutil.rmtree(place)


# --- another model ----------------------------------------------------------------------------------------


def test_the_parameters_that_differ_are_named(tmp_path: Path) -> None:
    small = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    large = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2, bias=False))
    assert differences(signature(small), large) == [
        "0.bias is float32[3] in the checkpoint, float32[5] in the model",
        "0.weight is float32[3, 4] in the checkpoint, float32[5, 4] in the model",
        "1.bias float32[2] is only in the checkpoint",
        "1.weight is float32[2, 3] in the checkpoint, float32[2, 5] in the model",
    ]
    assert differences(signature(small), small.double())[0].endswith("float64[3] in the model")
    folder = CheckpointFolder(StorageLocation(tmp_path))
    folder.save({"model": large.state_dict()}, 1)
    found = folder.latest()
    assert found is not None
    found.check_model(large)
    with pytest.raises(OtherModelError, match=r"checkpoint of another model.*0\.bias.*Use the model"):
        found.check_model(small)


def test_the_name_that_data_parallel_training_puts_before_all_does_not_count() -> None:
    model = torch.nn.Linear(2, 2)
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    assert differences(signature(wrapped), model) == []
    check_model(signature(wrapped), model, "it")


# --- in the background ------------------------------------------------------------------------------------


def test_training_may_change_the_state_while_it_is_written(place: str) -> None:
    folder = CheckpointFolder(StorageLocation(place))
    values = torch.zeros(200_000)
    for step in range(1, 4):
        values.fill_(step)
        assert folder.save_async({"model": {"w": values}}, step)
        values.fill_(-1.0)
        saved = folder.wait()
        assert saved is not None
        assert saved.step == step
        assert 0 <= saved.stalled <= saved.seconds
        found = folder.latest()
        assert found is not None
        assert set(folder.load(found)["model"]["w"].tolist()) == {float(step)}
    assert folder.wait() is None
    assert folder.last == saved


def test_one_save_at_a_time_a_second_is_not_taken_and_a_slow_one_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, began = threading.Event(), threading.Event()
    real = torch.save

    def slow(*args: Any) -> None:
        began.set()
        gate.wait(150)
        real(*args)

    monkeypatch.setattr(torch, "save", slow)
    folder = CheckpointFolder(StorageLocation(tmp_path), timeout=20)
    assert folder.save_async(state(1), 1)
    began.wait(150)
    assert folder.busy
    assert not folder.save_async(state(2), 2)
    with pytest.raises(StorageError, match=r"did not finish within 0\.05 s"):
        folder.wait(0.05)
    with pytest.raises(StorageError, match="did not finish within"):
        folder.save(state(2), 2, timeout=0.05)
    assert folder.latest() is None
    gate.set()
    assert folder.save(state(3), 3).step == 3
    assert [int(name[5:17]) for name in names(folder)] == [1, 3]


def test_an_error_in_the_background_is_raised_once_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(StorageLocation(tmp_path))
    with monkeypatch.context() as broken:
        broken.setattr(torch, "save", lambda *a: (_ for _ in ()).throw(PermissionError("no")))
        assert folder.save_async(state(1), 1)
        with pytest.raises(StorageError, match="permission denied"):
            folder.wait()
        assert folder.wait() is None
        assert folder.save_async(state(1), 1)
        while folder.busy:
            time.sleep(0.01)
    with pytest.raises(StorageError, match="permission denied"):
        folder.save_async(state(2), 2)
    assert folder.failures == 2
    assert folder.save_async(state(2), 2)
    assert folder.wait() is not None
    assert len(names(folder)) == 1


# --- sharded ----------------------------------------------------------------------------------------------


def test_sharded_state_is_saved_by_three_and_read_by_two_and_by_one(
    tmp_path: Path, s3: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [str(tmp_path / "place"), f"{s3()}/place"]
    run_module("tests.infra.training.sharded_worker", *places)
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    for place in places:
        folder = CheckpointFolder(StorageLocation(place))
        found = folder.latest()
        assert found is not None
        assert (found.step, found.layout) == (3, "sharded")
        whole = folder.load(found)
        assert torch.equal(whole["model"]["w"], torch.arange(48.0).reshape(12, 4))
        assert whole["run"] == {"step": 3, "name": "x"}
        assert found.signature == {"w": ((12, 4), "float32")}
        assert list(copies.iterdir()) == [], "it is read where it lies"

    expected = torch.load(tmp_path / "place" / "expected.pt", weights_only=True)
    state, iteration = read_running(tmp_path / "place" / "full")
    assert (iteration, state["run"]) == (9, {"iteration": 9})
    joined = dict(state["model"])
    for index, kept in state["optimizer"]["state"].items():
        joined |= {f"{index}.{key}": value for key, value in kept.items()}
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[key], expected[key]) for key in expected)

    for file, message in (
        ("part-0001-of-0003.bin", "bytes that are not those written, in model.w"),
        ("part-0000-of-0003.json", "its checksum differs"),
        ("rest.pt", "its checksum differs"),
    ):
        folder = CheckpointFolder(StorageLocation(places[0]))
        found = folder.latest()
        assert found is not None
        (path,) = tmp_path.glob(f"place/step-*/{file}")
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(DamagedPartError, match=message):
            folder.load(found)
        path.write_bytes(data)
    (tmp_path / "run").mkdir()
    shutil.move(places[0], tmp_path / "run" / "checkpoints")
    (path,) = tmp_path.glob("run/checkpoints/step-*/part-0001-of-0003.bin")
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(
        TrainingError, match=r"no checkpoint that is whole: .*bytes that are not those written"
    ):
        load_checkpoint(str(tmp_path / "run"))


VALUES = torch.arange(60.0).reshape(5, 3, 4)
EDGES = st.lists(st.integers(0, 5), max_size=4).map(lambda cuts: [0, *sorted(cuts), 5])


@given(EDGES, EDGES, st.integers(0, 3), st.integers(0, 3))
def test_pieces_of_any_division_make_any_part(
    tmp_path_factory: pytest.TempPathFactory, written: list[int], read: list[int], first: int, second: int
) -> None:
    place = StorageLocation(tmp_path_factory.mktemp("pieces"))
    last = sorted((first, second))
    spans = list(pairwise(written))
    for part, (start, stop) in enumerate(spans):
        size = (stop - start, 3, 4)
        piece = Piece(("model", "w"), "float32", (5, 3, 4), (start, 0, 0), size)
        division = Division(part, len(spans))
        assert sharded_files.parts_of(place, "x") is None
        sharded_files.write_part(place, "x", division, [(piece, VALUES[start:stop])], {"run": {"step": part}})
    files = sharded_files.parts_of(place, "x")
    assert files is not None
    for start, stop in pairwise(read):
        wanted = (slice(start, stop), slice(0, 3), slice(*last))
        found = sharded_files.read(place, "x", files, cut=lambda path, shape, wanted=wanted: wanted)
        assert torch.equal(found["model"]["w"], VALUES[wanted])
        assert found["run"] == {"step": 0}


def test_whoever_uses_the_model_afterwards_gets_the_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no checkpoint that is whole"):
        load_checkpoint(str(tmp_path))
    folder = CheckpointFolder(StorageLocation(tmp_path / "checkpoints"))
    for step in (1, 2):
        folder.save({"model": {"w": torch.full((2,), float(step))}}, step)
    assert load_checkpoint(str(tmp_path))["model"]["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("another", [False, True])
def test_what_was_committed_stays_unless_its_directory_is_another_one_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    spill, commit = Spill(StorageLocation(tmp_path)), CheckpointFiles.commit
    spill.take_mark()

    def then_away(files: CheckpointFiles, name: str, manifest: Manifest) -> None:
        commit(files, name, manifest)
        (tmp_path / "mark").unlink()
        if not another:
            (tmp_path / "mark").mkdir()  # which cannot be read

    monkeypatch.setattr(CheckpointFiles, "commit", then_away)
    folder = spill.checkpoints(keep=2)
    with pytest.raises(StorageError, match="is it mounted" if another else "cannot read .*mark"):
        folder.save(state(1), 1)
    found = CheckpointFolder(folder.place).latest()
    assert (found is None) is another
