"""Full checkpoints: what flipped bits, torn files, a full disk and SIGKILL leave."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.infra.errors import StorageError, StorageFullError
from ebbflow.infra.storage.filesystems import resolve
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.files import ABANDONED_AFTER, CheckpointFiles
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from ebbflow.infra.training.checkpoints.names import MANIFEST
from tests.infra.training.checkpoint_cases import names, state

# --- damage -----------------------------------------------------------------------------------------------


def damage(uri: str, kind: str) -> None:
    fs, path = resolve(uri)
    target = f"{path}/{MANIFEST}" if kind.endswith("manifest") else f"{path}/model.pt"
    with fs.open_input_file(target) as file:
        data = bytearray(file.read())
    if kind.startswith("flip"):
        data[len(data) // 2] ^= 1
    elif kind.startswith("cut"):
        data = data[: len(data) // 2]
    if kind == "missing":
        fs.delete_file(target)
        return
    with fs.open_output_stream(target) as out:
        out.write(bytes(data))


def test_a_checkpoint_that_is_being_deleted_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(StorageLocation(str(tmp_path)))
    folder.save(state(1), 1)
    manifest = CheckpointFiles.manifest

    def then_deleted(files: CheckpointFiles, name: str) -> Any:
        found = manifest(files, name)
        for file in (MANIFEST, "model.pt"):  # as ``discard`` begins
            (tmp_path / name / file).unlink()
        return found

    monkeypatch.setattr(CheckpointFiles, "manifest", then_deleted)
    assert folder.latest() is None
    assert names(folder, "corrupt-") == []


@pytest.mark.parametrize("kind", ["flip", "cut", "missing", "flip manifest", "cut manifest"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_found(place: str, kind: str) -> None:
    folder = CheckpointFolder(StorageLocation(place))
    folder.save(state(1), 1)
    newer = folder.save(state(2), 2)
    damage(newer.uri, kind)

    found = folder.latest()

    assert found is not None
    assert found.step == 1
    assert folder.load(found)["run"]["step"] == 1
    assert len(found.passed_over) == 1
    assert newer.uri in found.passed_over[0]
    assert "set aside" in found.passed_over[0]
    assert folder.problems() == list(found.passed_over)
    assert names(folder, "corrupt-") == [f"corrupt-{newer.uri.rsplit('/', 1)[1]}"]
    assert [int(name[5:17]) for name in names(folder)] == [1]
    folder.save(state(2), 2)
    again = folder.latest()
    assert again is not None
    assert again.step == 2


@settings(max_examples=25, deadline=None)
@given(
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    file=st.sampled_from(["model.pt", MANIFEST]),
)
def test_no_flipped_bit_goes_unseen(
    no_sync: None, tmp_path_factory: pytest.TempPathFactory, where: float, bit: int, file: str
) -> None:
    place = tmp_path_factory.mktemp("bits")
    folder = CheckpointFolder(StorageLocation(place))
    folder.save(state(1), 1)
    (path,) = place.glob(f"step-*/{file}")
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    path.write_bytes(data)
    assert folder.latest() is None
    shutil.rmtree(place)


def test_a_checkpoint_that_was_never_finished_does_not_exist_and_goes_when_it_is_old(
    place: str, clock: Any
) -> None:
    folder = CheckpointFolder(StorageLocation(place), clock=clock)
    folder.save(state(1), 1)
    torn = folder.save(state(2), 2)
    fs, path = resolve(torn.uri)
    fs.delete_file(f"{path}/{MANIFEST}")
    found = folder.latest()
    assert found is not None
    assert found.step == 1
    assert "never finished" in found.passed_over[0]
    folder.save(state(3), 3)
    assert len(names(folder)) == 3  # somebody may still be writing it
    clock.time += ABANDONED_AFTER + 60
    folder.save(state(4), 4)
    assert [int(name[5:17]) for name in names(folder)] == [3, 4]


def test_retention_counts_only_what_is_whole(tmp_path: Path) -> None:
    folder = CheckpointFolder(StorageLocation(tmp_path), keep=1)
    folder.save(state(1), 1)
    for step in (2, 3):
        folder.save(state(step), step)
        (tmp_path / names(folder)[-1] / "model.pt").write_bytes(b"cut")
    assert CheckpointFolder(StorageLocation(tmp_path)).latest() is None
    folder.save(state(4), 4)
    (tmp_path / names(folder)[-1] / "model.pt").write_bytes(b"cut")
    folder.save(state(3), 3)  # an older one, written after the newer was damaged
    found = folder.latest()
    assert found is not None
    assert found.step == 3


def test_only_a_few_set_aside_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(StorageLocation(tmp_path))
    for step in range(1, 6):
        folder.save(state(step), step)
        (tmp_path / names(folder)[-1] / "model.pt").write_bytes(b"cut")
        folder.latest()
    folder.save(state(9), 9)
    assert len(names(folder, "corrupt-")) == 2


# --- no space ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_leaves_the_old_checkpoint_and_no_half_one(small_disk: Path) -> None:
    folder = CheckpointFolder(StorageLocation(small_disk), keep=1)
    folder.save(state(1, 20_000), 1)
    for size in (400_000, 240_000):
        with pytest.raises(StorageFullError, match="no space left"):
            folder.save(state(2, size), 2)
        assert folder.save_async(state(2, size), 2)
        with pytest.raises(StorageFullError, match="no space left"):
            folder.wait()
    assert folder.failures == 4
    assert len(names(folder)) == 1
    found = folder.latest()
    assert found is not None
    assert found.step == 1
    assert folder.load(found)["model"]["w"][0] == 1.0
    assert folder.save(state(3, 20_000), 3).step == 3  # there is room again for what fits


def test_a_file_size_limit_leaves_the_old_checkpoint_and_no_half_one(tmp_path: Path) -> None:
    folder = CheckpointFolder(StorageLocation(tmp_path))
    folder.save(state(1), 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            folder.save(state(2, 100_000), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(names(folder)) == 1
    found = folder.latest()
    assert found is not None
    assert found.step == 1


# --- SIGKILL ----------------------------------------------------------------------------------------------

KILLED = """
import os, random, signal, sys, time
import torch
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder

place, rounds = sys.argv[1], int(sys.argv[2])
rng = random.Random(7)
step = torn = 0
for round in range(rounds):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        folder = CheckpointFolder(StorageLocation(place), keep=2)
        while True:
            step += 1
            if step % 2:
                folder.save({"model": {"w": torch.full((300_000,), float(step))}, "run": {"step": step}}, step)
            else:
                folder.save_async({"model": {"w": torch.full((300_000,), float(step))}, "run": {"step": step}}, step)
                folder.wait()
            os.write(write, b"%d " % step)
    os.close(write)
    first = os.read(read, 100)  # at least one is durable
    time.sleep(rng.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said = first
    while piece := os.read(read, 1 << 16):
        said += piece
    os.close(read)
    durable = int(said.split()[-1])
    folder = CheckpointFolder(StorageLocation(place))
    found = folder.latest()
    assert found is not None and found.step in (durable, durable + 1), (found, durable)
    loaded = folder.load(found)
    assert loaded["run"]["step"] == found.step
    assert set(loaded["model"]["w"].tolist()) == {float(found.step)}
    torn += bool(found.passed_over)
    step = found.step
print(torn)
"""


def test_sigkill_at_any_moment_leaves_the_last_committed_one_readable(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, str(tmp_path), "14"],
        capture_output=True, text=True, timeout=200, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "no kill hit a save"
