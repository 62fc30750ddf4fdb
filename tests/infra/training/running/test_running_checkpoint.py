"""The running checkpoint: what it holds after any sequence of saves, losses, damage and failed writes."""

import os
import shutil
import subprocess
import sys
from math import log, log1p
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.infra.errors import OtherModelError, StorageError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from ebbflow.infra.training.running.blocks import BlockSpec, block_distances
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.infra.training.running.folder import RunningFolder, read_running
from ebbflow.infra.training.running.store import BlockStore
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.saving.partial import Strategy
from tests.infra.training.running import Walk, durable, running, tensors
from tests.infra.training.worlds import run_module

pytestmark = pytest.mark.usefixtures("no_sync")  # processes that are killed wait in earnest

# --- what a running checkpoint holds ----------------------------------------------------------------------


@settings(max_examples=6, deadline=None)
@given(
    strategy=st.sampled_from(["priority", "round", "random"]),
    fraction=st.sampled_from([1.0, 0.5, 0.25, 0.125]),
    asynchronous=st.booleans(),
    seed=st.integers(0, 100),
)
def test_each_block_is_that_of_some_past_iteration_which_never_decreases(
    tmp_path_factory: pytest.TempPathFactory,
    strategy: Strategy,
    fraction: float,
    asynchronous: bool,
    seed: int,
) -> None:
    place = tmp_path_factory.mktemp("walk")
    walk = Walk(seed)
    made = running(place, walk.now, fraction=fraction, strategy=strategy, asynchronous=asynchronous)
    count = len(made.blocks)
    last = dict.fromkeys(range(count), 0)
    saved_blocks = []
    for _ in range(16):
        iteration = walk.move()
        saved_blocks += made.step(iteration, {"iteration": iteration})
        if asynchronous:
            made.wait()
        for number, found in durable(place, count).items():
            block = made.blocks[number]
            then = block.of(walk.past[found.iteration][block.tensor])
            assert torch.equal(dict(found.parts)["param"], then)
            assert found.iteration >= last[number]
            assert found.iteration == made.durable[number] == made.cached[number]
            last[number] = found.iteration
    # 16 iterations are two periods: the volume of everything is written twice, whatever the fraction
    assert abs(made.sizes[saved_blocks].sum() - 2 * made.sizes.sum()) <= made.sizes.max()
    if strategy == "round":
        assert sorted(saved_blocks[:count]) == list(range(count))
    if fraction == 1.0:
        assert set(last.values()) == {16}
    shutil.rmtree(place)


def test_priority_saves_what_moved_most_and_nothing_else(tmp_path: Path) -> None:
    now = tensors()
    made = running(tmp_path, now, period=8, fraction=0.25)  # 16 blocks, 4 in each save
    now["a"][6:8] += 10
    now["a"][0:2] += 5
    now["b"][14:16] += 7
    now["b"][2:4] += 0.5
    now["a"][12:14] += 0.1
    assert made.step(1) == []
    assert made.step(2) == [3, 0, 15, 9]
    assert made.stalled > 0
    made.wait()
    assert made.durable[[3, 0, 15, 9]].tolist() == [2] * 4
    assert made.durable.sum() == 8


def test_a_block_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    now = tensors()
    made = running(tmp_path, now, fraction=1.0, period=1, shard_rows=4)
    before = now["a"][4:8].clone()
    now["a"][5] = float("nan")
    now["a"][0] += 1
    saved = made.step(1)
    made.wait()
    assert saved
    assert 1 not in saved
    made.recover([1])
    assert torch.equal(now["a"][4:8], before)


# --- recovery ---------------------------------------------------------------------------------------------


def trainee(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Generator]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.05), torch.Generator().manual_seed(seed)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    optimizer.zero_grad()
    model(torch.randn(10, 6, generator=generator)).square().mean().backward()
    optimizer.step()


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {k: v.clone() for k, v in model.state_dict().items()}
    for i, state in optimizer.state_dict()["state"].items():
        found |= {f"{i}.{k}": v.clone() for k, v in state.items()}
    return found


def test_survivors_keep_every_bit_and_lost_blocks_are_the_last_durable_ones_with_their_moments(
    tmp_path: Path,
) -> None:
    model, optimizer, data = trainee()
    made = running(tmp_path, model, optimizer, period=4, fraction=0.5)
    past = [everything(model, optimizer)]
    for iteration in range(1, 12):
        train(model, optimizer, data)
        past.append(everything(model, optimizer))
        made.step(iteration)
        made.wait()
    at = made.durable.copy()
    lost = [0, 2, 5]
    names = [name for name, _ in model.named_parameters()]

    found = made.recover(lost, contraction=0.9, error=2.0)

    after, before = everything(model, optimizer), past[-1]
    for number, block in enumerate(made.blocks):
        index = names.index(block.tensor)
        for key in (block.tensor, f"{index}.exp_avg", f"{index}.exp_avg_sq"):
            expected = past[at[number]] if number in lost else before
            found_here = after[key][block.start : block.stop]
            # before the first step Adam has no moments, which is as good as zeros
            wanted = (
                expected[key][block.start : block.stop] if key in expected else torch.zeros_like(found_here)
            )
            assert torch.equal(found_here, wanted)
    assert after["0.step"] == before["0.step"]
    assert (found.blocks, found.iteration, found.oldest) == (3, at[lost].max(), at[lost].min())
    assert found.bytes == made.sizes[lost].sum()
    assert found.perturbation is not None
    assert found.rework == pytest.approx(log1p(found.perturbation / 2.0) / -log(0.9))


def test_the_perturbation_is_how_far_the_blocks_had_moved_at_the_last_save(tmp_path: Path) -> None:
    now = tensors()
    made = running(tmp_path, now, period=8, fraction=0.25)
    now["a"][6:8] += 10
    now["a"][0:2] += 5
    now["b"][14:16] += 7
    now["b"][2:4] += 3
    now["b"][6] += 0.5
    now["a"][12] += torch.tensor([0.0, 0.4, 0.3])
    made.step(2)
    kept = {name: tensor.clone() for name, tensor in now.items()}
    found = made.recover([6, 11, 3])
    change = torch.cat([(now[name] - kept[name]).reshape(-1) for name in now])
    assert found.perturbation == pytest.approx(float(change.norm()), rel=1e-5)
    assert found.perturbation == pytest.approx(np.sqrt(0.5**2 + 0.5**2), rel=1e-5)
    assert found.rework is None


def test_moments_that_were_never_saved_start_from_zero(tmp_path: Path) -> None:
    model, optimizer, data = trainee()
    made = running(tmp_path, model, optimizer)
    first = everything(model, optimizer)
    for _ in range(3):
        train(model, optimizer, data)
    made.recover([1])
    state = optimizer.state[model[0].weight]  # type: ignore[index]
    assert torch.equal(model[0].weight[2:4], first["0.weight"][2:4])  # type: ignore[index]
    assert state["exp_avg"][2:4].abs().sum() == 0
    assert state["exp_avg"][4:6].abs().sum() > 0


@pytest.mark.parametrize("strategy", ["priority", "round"])
def test_everything_comes_back_into_a_fresh_process(place: str, strategy: Strategy) -> None:
    model, optimizer, data = trainee()
    made = running(place, model, optimizer, period=8, fraction=0.25, strategy=strategy)
    for iteration in range(1, 7):
        train(model, optimizer, data)
        made.step(iteration, {"iteration": iteration, "data": data.get_state()})
        made.wait()
    buffers = {k: v.clone() for k, v in model.state_dict().items() if "running" in k}

    other, again, _ = trainee(seed=9)
    back = RunningCheckpoint(
        StorageLocation(place), other, again, period=8, fraction=0.25, strategy=strategy, shard_rows=2
    )
    found = back.recover_all()

    assert found.iteration == 6
    assert found.state["iteration"] == 6
    assert torch.equal(found.state["data"], data.get_state())
    assert back.cached.tolist() == made.durable.tolist()
    for name, value in buffers.items():
        assert torch.equal(other.state_dict()[name], value)
    for number, record_ in durable(place, len(made.blocks)).items():
        block = made.blocks[number]
        there = block.of(dict(other.named_parameters())[block.tensor].detach())
        assert torch.equal(there, dict(record_.parts)["param"])
    state, iteration = read_running(place)
    assert iteration == 6
    for name, value in state["model"].items():
        assert torch.equal(value, other.state_dict()[name]), name
    for index, kept in again.state_dict()["state"].items():
        assert set(kept) == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in kept.items():
            assert torch.equal(value, state["optimizer"]["state"][index][key])
    fresh = torch.Generator()
    fresh.set_state(found.state["data"])
    train(other, again, fresh)
    assert back.step(8, {"iteration": 8})
    back.wait()
    assert read_running(place)[1] == 8


def test_with_everything_saved_and_everything_lost_it_is_the_ordinary_checkpoint(tmp_path: Path) -> None:
    model, optimizer, data = trainee()
    made = running(tmp_path, model, optimizer, period=4, fraction=1.0)
    for iteration in range(1, 11):
        train(model, optimizer, data)
        made.step(iteration, {"data": data.get_state()})
        made.wait()
        if iteration == 8:
            expected = everything(model, optimizer)
    other, again, fresh = trainee(seed=3)
    back = RunningCheckpoint(StorageLocation(tmp_path), other, again, period=4, fraction=1.0, shard_rows=2)
    found = back.recover_all()
    assert found.iteration == found.oldest == 8
    restored = everything(other, again)
    assert restored.keys() == expected.keys()
    assert all(torch.equal(restored[key], expected[key]) for key in expected)
    fresh.set_state(found.state["data"])
    for _ in range(2):
        train(other, again, fresh)
    final, same = everything(other, again), everything(model, optimizer)
    assert all(torch.equal(final[key], same[key]) for key in same)


def test_it_can_be_exported_to_an_ordinary_checkpoint(tmp_path: Path) -> None:
    model, optimizer, data = trainee()
    made = running(tmp_path / "running", model, optimizer, period=4, fraction=0.5)
    for iteration in range(1, 9):
        train(model, optimizer, data)
        made.step(iteration, {"iteration": iteration})
        made.wait()
    state, iteration = read_running(tmp_path / "running")
    CheckpointFolder(StorageLocation(tmp_path / "full")).save(state, iteration)
    (file,) = (tmp_path / "full").glob("step-*/optimizer.pt")
    other, again, _ = trainee(seed=4)
    other.load_state_dict(torch.load(file.parent / "model.pt", weights_only=True))
    again.load_state_dict(torch.load(file, weights_only=True))
    train(other, again, data)
    folder = CheckpointFolder(StorageLocation(tmp_path / "full"))
    found = folder.latest()
    assert found is not None
    found.check_model(other)
    assert folder.load(found)["run"] == {"iteration": 8}


def test_a_new_start_never_meets_records_of_the_past(tmp_path: Path) -> None:
    walk = Walk()
    made = running(tmp_path, walk.now, period=1, fraction=1.0)
    for _ in range(5):
        made.step(walk.move())
    made.wait()
    made = running(tmp_path, walk.now, period=1, fraction=1.0)
    assert {found.iteration for found in durable(tmp_path, len(made.blocks)).values()} == {0}
    assert len(RunningFolder(StorageLocation(tmp_path)).starts()) == 1


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    model, optimizer, _ = trainee()
    made = RunningCheckpoint(StorageLocation(tmp_path), model, optimizer, period=8, shard_rows=2)
    with pytest.raises(OptionError, match="call initialize"):
        made.step(1)
    with pytest.raises(StorageError, match="never initialized"):
        made.recover([0])
    with pytest.raises(StorageError, match="no running checkpoint"):
        read_running(tmp_path)
    made.initialize()
    with pytest.raises(OtherModelError, match="another model"):
        RunningCheckpoint(
            StorageLocation(tmp_path), torch.nn.Linear(3, 3), period=8, shard_rows=2
        ).recover_all()
    with pytest.raises(OptionError, match="cut differently"):
        RunningCheckpoint(StorageLocation(tmp_path), model, optimizer, period=8, shard_rows=3).recover_all()
    with pytest.raises(OptionError, match="fraction must be"):
        RunningCheckpoint(StorageLocation(tmp_path), model, period=8, fraction=0.0)


# --- when writes fail -------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_write_is_rolled_back_and_its_blocks_are_wanted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    now = tensors()
    made = running(tmp_path, now, period=8, fraction=0.25, asynchronous=asynchronous)
    now["a"][6:8] += 10
    real = BlockStore.commit

    def fail(*_: Any) -> int:
        raise StorageError("the disk is away")

    monkeypatch.setattr(BlockStore, "commit", fail)
    assert 3 in made.step(2)
    if asynchronous:
        with pytest.raises(StorageError, match="disk is away"):
            made.wait()
    assert made.failures == 1
    assert made.cached.tolist() == made.durable.tolist() == [0] * 16
    monkeypatch.setattr(BlockStore, "commit", real)
    assert made.step(4)[0] == 3  # its distance is that from what is durable
    made.wait()
    assert made.durable[3] == 4


def test_a_save_that_comes_due_while_one_is_written_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    walk = Walk()
    made = running(tmp_path, walk.now, period=1, fraction=1.0)
    gate = threading.Event()
    real = BlockStore.commit
    monkeypatch.setattr(BlockStore, "commit", lambda self, records: (gate.wait(150), real(self, records))[1])
    assert made.step(walk.move())
    assert made.step(walk.move()) == []
    assert made.skipped == 1
    with pytest.raises(StorageError, match="did not finish within"):
        made.wait(0.01)
    gate.set()
    made.wait()
    assert set(made.durable.tolist()) == {1}
    assert made.step(walk.move())
    made.wait()
    assert set(made.durable.tolist()) == {3}


def test_training_goes_on_while_the_disk_is_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    try:
        walk = Walk(rows=4000)  # 64 kB
        made = running(disk, walk.now, period=1, fraction=1.0, shard_rows=1000)
        (disk / "ballast").write_bytes(b"x" * (420 << 10))
        for _ in range(3):
            made.step(walk.move())
            while made.busy:
                pass
        made.step(walk.move())
        assert made.failures >= 2
        count = len(made.blocks)
        for number, found in durable(disk, count).items():
            block = made.blocks[number]
            assert torch.equal(dict(found.parts)["param"], block.of(walk.past[found.iteration][block.tensor]))
        (disk / "ballast").unlink()
        while made.busy:
            pass
        iteration = walk.move()
        made.step(iteration)
        made.wait()
        assert set(made.durable.tolist()) == {iteration}
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# --- a notice ---------------------------------------------------------------------------------------------


def test_a_notice_saves_what_moved_most_as_far_as_time_and_bandwidth_allow(tmp_path: Path) -> None:
    walk = Walk(rows=64)
    made = running(tmp_path, walk.now, period=64, shard_rows=2)
    iteration = walk.move()
    far = block_distances(walk.now, walk.past[0], made.blocks).numpy()
    made.bandwidth = 20.0  # bytes/s: in 40 s half of the time pays for 400 bytes
    saved = made.save_before(40.0, iteration)
    assert 0 < made.sizes[saved].sum() <= 400 + made.sizes.max() / 2
    order = np.argsort(-far, kind="stable").tolist()
    assert saved == order[: len(saved)]
    assert made.durable[saved].tolist() == [iteration] * len(saved)
    made.bandwidth = 1e9
    rest = made.save_before(60.0, iteration)
    assert set(rest) == {block for block in range(len(far)) if far[block] > 0} - set(saved)
    assert made.save_before(60.0, iteration) == []
    assert (
        RunningCheckpoint(StorageLocation(tmp_path), walk.now, period=64, shard_rows=2)
        .recover_all()
        .iteration
        == iteration
    )


# --- processes that die -----------------------------------------------------------------------------------

KILLED = """
import os, random, signal, sys, time
import torch
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.infra.training.running.folder import read_running

place, rounds = sys.argv[1], int(sys.argv[2])
rng = random.Random(11)
def make():
    now = {"w": torch.zeros(64, 800)}
    return now, RunningCheckpoint(StorageLocation(place), now, period=8, fraction=0.25, shard_rows=4)
now, made = make()
made.initialize({"iteration": 0})
iteration = 0
for round in range(rounds):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        now, made = make()
        iteration = made.recover_all().state["iteration"]
        while True:
            iteration += 1
            now["w"] += torch.rand(64, 1) * 0.001
            now["w"][iteration % 64] = float(iteration)  # the row says when it was written
            made.step(iteration, {"iteration": iteration})
            if iteration % 2 == 0:
                made.wait()
                os.write(write, b"%d " % iteration)
    os.close(write)
    said = os.read(read, 100)
    time.sleep(rng.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while piece := os.read(read, 1 << 16):
        said += piece
    os.close(read)
    committed = int(said.split()[-1])
    state, found = read_running(place)
    assert found in (committed, committed + 2), (found, committed)
    assert state["run"]["iteration"] == found
    rows = state["model"]["w"]
    spread = (rows.max(1).values - rows.min(1).values).max()
    assert spread == 0, "a torn block"
    assert rows.max() <= found + 1
    iteration = found
print(iteration)
"""


def test_sigkill_at_any_moment_leaves_the_last_commit_readable_and_no_block_torn(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, str(tmp_path), "8"],
        capture_output=True, text=True, timeout=200, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 16  # every round committed once at least


def test_survivors_adopt_the_blocks_of_a_killed_process(tmp_path: Path) -> None:
    said = run_module("tests.infra.training.running_worker", str(tmp_path))
    assert said.count("recovered") == 2


def test_a_block_spec_says_which_rows_it_has() -> None:
    kind: Literal["shard", "layer"] = "layer"
    made = RunningCheckpoint(StorageLocation("/nowhere"), tensors(), period=8, partition=kind)
    assert made.blocks == (BlockSpec("a", 0, 16, 192), BlockSpec("b", 0, 16, 64))
