"""Runs that had checkpoints: what is damaged is named and kept, and nothing begins again without the user's word."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ebbflow.infra.errors import CheckpointsLostError, StorageError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training import ElasticRun
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from ebbflow.infra.training.running.folder import read_running
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.checkpoint_cases import names

SEED = 20261124
FLIPS = 120
X = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.1
RUNNING = RunSettings(partial_checkpoint_interval=2, partial_checkpoint_fraction=0.5)


@pytest.fixture(autouse=True)
def _plain_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("EBBFLOW_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def trained(
    folder: Path, epochs: int, settings: RunSettings | None = None, restart: bool = False
) -> tuple[int, torch.Tensor]:
    """Train to the end of ``epochs``; return the step that it went on from, -1 for none, and all weights."""
    with ElasticRun.start(directory=folder, run_id="one", settings=settings, restart=restart) as run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        called, _ = run.prepare(model, lambda p: torch.optim.AdamW(p, lr=0.05), batch_size=10)
        began = run.progress.step
        for _ in run.epochs(epochs):
            for x, y in run.batches((X, Y)):
                run.backward(nn.functional.mse_loss(called(x), y))
                run.step()
    return began, torch.cat([p.detach().flatten() for p in model.parameters()])


def damage(path: Path, where: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1 << 3
    path.write_bytes(data)


def test_with_all_checkpoints_damaged_nothing_begins_again_without_the_users_word(tmp_path: Path) -> None:
    for epochs in (1, 2):
        trained(tmp_path, epochs)
    checkpoints = tmp_path / "one" / "checkpoints"
    for step, name in ((5, "model.pt"), (10, "manifest.json")):
        damage(next(checkpoints.glob(f"step-{step:012d}-*/{name}")))
    before = sorted(p.stat().st_size for p in checkpoints.rglob("*.pt"))
    for _ in range(2):  # neither at once nor when it is tried again
        with pytest.raises(CheckpointsLostError, match="none of the run's checkpoints is usable") as lost:
            trained(tmp_path, 3)
        for step, why in ((5, "its checksum differs"), (10, "manifest")):
            assert f"step-{step:012d}" in str(lost.value)
            assert why in str(lost.value)
        assert "--restart" in str(lost.value)
    assert sorted(p.stat().st_size for p in checkpoints.rglob("*.pt")) == before, "nothing was deleted"
    assert trained(tmp_path, 1, restart=True)[0] == 0
    folder = CheckpointFolder(StorageLocation(checkpoints))
    assert [int(name[5:17]) for name in names(folder)] == [5]
    assert len(names(folder, "corrupt-")) == 2
    assert trained(tmp_path, 2)[0] == 5, "from the new one, without another word"


def test_what_was_set_aside_stays_until_a_whole_one_has_got_as_far(tmp_path: Path) -> None:
    folder = CheckpointFolder(StorageLocation(tmp_path), keep=4)
    for step in (10, 20, 30, 40):
        folder.save({"model": {"w": torch.zeros(3)}}, step)
    for path in tmp_path.glob("step-*/model.pt"):
        damage(path)
    assert folder.latest() is None
    folder.save({"model": {"w": torch.zeros(3)}}, 5)
    assert len(names(folder, "corrupt-")) == 4
    folder.save({"model": {"w": torch.zeros(3)}}, 25)
    assert [int(name[13:25]) for name in names(folder, "corrupt-")] == [30, 40]


def test_a_run_killed_in_its_first_save_begins_again_by_itself(tmp_path: Path) -> None:
    half = tmp_path / "one" / "checkpoints" / "step-000000000003-1700000000000-0123abcd"
    half.mkdir(parents=True)
    (half / "model.pt").write_bytes(b"torn")
    assert trained(tmp_path, 1)[0] == 0


def test_checkpoints_that_a_launcher_knows_of_and_that_are_gone_are_not_passed_over(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    shutil.rmtree(tmp_path / "one" / "checkpoints")
    with pytest.raises(CheckpointsLostError, match="step 5 was saved, but there is no complete checkpoint"):
        trained(tmp_path, 2, RunSettings(saved_step=5))


def test_a_damaged_running_checkpoint_is_set_aside_and_the_full_one_is_used(
    tmp_path: Path, caplog: Any
) -> None:
    trained(tmp_path, 1, RUNNING)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "one", kept)
    trained(tmp_path, 2, RUNNING)
    for path in (tmp_path / "one" / "checkpoints").iterdir():
        shutil.rmtree(path)
    shutil.copytree(kept / "checkpoints", tmp_path / "one" / "checkpoints", dirs_exist_ok=True)
    running = tmp_path / "one" / "running"
    for path in running.rglob("*.seg"):
        data = bytes(byte ^ 1 for byte in path.read_bytes())
        path.write_bytes(data)
    assert trained(tmp_path, 2, RUNNING)[0] == 5
    assert len(list(running.glob("corrupt-*"))) == 1


# --- flips ----------------------------------------------------------------------------------------------------


def test_no_flipped_byte_anywhere_in_a_run_loads_a_wrong_model(
    no_sync: None, tmp_path: Path, caplog: Any
) -> None:
    """Each flip is of one byte of one file of a run that had come to step 10: the next process goes on from step 10,
    5 or the running checkpoint's, with the very weights that were saved then, or says what is damaged."""
    whole = tmp_path / "whole"
    right = {5: trained(whole, 1, RUNNING)[1]}
    first = whole / "first"
    shutil.copytree(whole / "one" / "checkpoints", first)
    right[10] = trained(whole, 2, RUNNING)[1]
    for path in first.iterdir():
        target = whole / "one" / "checkpoints" / path.name
        if not target.exists():
            shutil.copytree(path, target)
    files = sorted(p for p in (whole / "one").rglob("*") if p.is_file() and p.name not in ("lock", "mark"))
    mixed, newest = read_running(whole / "one" / "running")
    assert newest > 5
    several = torch.cat([value.flatten() for value in mixed["model"].values()])
    rng = random.Random(SEED)
    outcomes: dict[str, int] = {}
    for number in range(FLIPS):
        place = tmp_path / "flipped"
        shutil.copytree(whole / "one", place / "one")
        path = files[number % len(files)]  # every file of it, and every region of each
        share = (number // len(files) + rng.random()) / -(-FLIPS // len(files))
        here = place / "one" / path.relative_to(whole / "one")
        data = bytearray(here.read_bytes())
        data[min(int(share * len(data)), len(data) - 1)] ^= 1 << rng.randrange(8)
        here.write_bytes(data)
        if "running" in path.parts:  # it is read where it is newer than the full ones
            shutil.rmtree(next((place / "one" / "checkpoints").glob("step-000000000010-*")))
        caplog.clear()
        try:
            with ElasticRun.start(directory=place, run_id="one", settings=RUNNING) as run:
                model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
                run.prepare(model, lambda p: torch.optim.AdamW(p, lr=0.05), batch_size=10)
                step = run.progress.step
                weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        except StorageError as exc:
            outcome = f"error: {exc}"
        else:
            outcome = f"step {step}"
            running = "are taken from" in caplog.text
            assert torch.equal(weights, several if running else right[step]), (path, number)
            outcome += " of the running checkpoint" if running else ""
            dead = running and "running" in path.parts  # a record that a later one has replaced is never read
            if outcome != "step 10" and not dead:
                assert "set aside" in caplog.text, (path, caplog.text)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        shutil.rmtree(place)
    assert not [outcome for outcome in outcomes if outcome.startswith("error")], (
        "there was always an older one"
    )
    assert outcomes[f"step {newest} of the running checkpoint"] > FLIPS // 10, (
        "flips in the newest must have hit it"
    )
    assert outcomes["step 5"] > FLIPS // 20, "and those in the running one that one"
