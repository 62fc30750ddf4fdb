"""What becomes of a run's last step when its folder cannot take it: tried again, spilled, taken over; not dropped."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from ebbflow.infra.errors import StorageError, StorageFullError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training import ElasticRun, RunStopped, retrying, saver, spill
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from ebbflow.infra.training.process.generation import Generation
from ebbflow.infra.training.process.link import Link
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.resuming import PatientReader, choose
from ebbflow.infra.training.running.folder import RunningFolder
from ebbflow.infra.training.running.store import BlockStore
from ebbflow.infra.training.running_saves import RunningSaves
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.checkpoint_cases import names

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.1
FULL = StorageFullError("no space left on device")
AT_ONCE = RunSettings(final_save_timeout=0.0)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the one place on "this machine" for what a run's folder cannot take."""
    for name in list(os.environ):
        if name.startswith("EBBFLOW_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(retrying, "FIRST_PAUSE", 0.01)
    there = tmp_path / "scratch"
    there.mkdir()
    monkeypatch.setattr(spill, "spill_places", lambda chosen="": [chosen or str(there)])
    return there


def train(run: ElasticRun, epochs: int = 1, before_end: Any = lambda: None) -> tuple[int, torch.Tensor]:
    """Train a linear model; return the steps that were done and its weights."""
    torch.manual_seed(0)
    model, _ = run.prepare(nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.05), batch_size=10)
    steps = 0
    for _ in run.epochs(epochs):
        for x, y in run.batches((X, Y)):
            run.backward(nn.functional.mse_loss(model(x), y))
            steps += run.step()
    before_end()
    return steps, model.weight.detach().clone()  # type: ignore[union-attr]


def trained(folder: Path, settings: RunSettings | None = None, **options: Any) -> tuple[int, torch.Tensor]:
    with ElasticRun.start(directory=folder, run_id="one", settings=settings) as run:
        return train(run, **options)


def failing(
    monkeypatch: pytest.MonkeyPatch, where: Path, times: int, error: StorageError = FULL
) -> list[str]:
    """Let saves into ``where`` fail; return the folders that were tried."""
    tried: list[str] = []
    save = CheckpointFolder.save

    def some(self: CheckpointFolder, *args: Any, **options: Any) -> Any:
        tried.append(self.uri)
        if self.uri.startswith(where.as_uri()) and len(tried) <= times:
            raise error
        return save(self, *args, **options)

    monkeypatch.setattr(CheckpointFolder, "save", some)
    return tried


def refusing(monkeypatch: pytest.MonkeyPatch, what: str, error: StorageError, times: int) -> list[str]:
    """Let a method of ``CheckpointFolder`` fail at first; return the folders that were tried."""
    tried: list[str] = []
    does = getattr(CheckpointFolder, what)

    def some(self: CheckpointFolder, *args: Any, **options: Any) -> Any:
        tried.append(self.uri)
        if len(tried) <= times:
            raise error
        return does(self, *args, **options)

    monkeypatch.setattr(CheckpointFolder, what, some)
    return tried


def spilled(place: Path) -> list[Path]:
    return sorted(place.glob("ebbflow-spill-*/step-*"))


def test_a_save_that_fails_for_a_moment_is_tried_again(tmp_path: Path, monkeypatch: Any, place: Path) -> None:
    tried = failing(monkeypatch, tmp_path / "one", 3)
    assert trained(tmp_path)[0] == 5
    assert len(tried) == 4
    found = CheckpointFolder(StorageLocation(tmp_path / "one" / "checkpoints")).latest()
    assert found is not None
    assert found.step == 5
    assert not spilled(place)


@pytest.mark.parametrize("what", ["latest", "load"])
def test_a_store_that_is_away_for_a_moment_when_a_run_begins_is_waited_for(
    tmp_path: Path, monkeypatch: Any, caplog: Any, what: str
) -> None:
    trained(tmp_path)
    posted: list[dict[str, Any]] = []
    monkeypatch.setattr(
        Link, "post", lambda self, kind, step, content: posted.append({"kind": kind, **content})
    )
    tried = refusing(monkeypatch, what, StorageError("the network is down"), 3)
    assert trained(tmp_path, epochs=2)[0] == 5, "of the second epoch alone"
    assert len(tried) == 4
    said = [one for one in posted if one["kind"] == "saving" and one.get("reading")]
    assert [one["error"] for one in said] == ["the network is down"] * 3
    assert said[0]["again_in"] < said[1]["again_in"] < said[2]["again_in"]
    assert caplog.text.count("the run's checkpoints cannot be read, retrying") == 3


def test_a_store_that_is_away_while_a_partial_checkpoint_is_read_is_waited_for(
    tmp_path: Path, monkeypatch: Any
) -> None:
    settings = RunSettings(partial_checkpoint_interval=1, partial_checkpoint_fraction=1.0)
    for epochs in (1, 2):
        trained(tmp_path, settings, epochs=epochs)
    shutil.rmtree(next((tmp_path / "one" / "checkpoints").glob("step-000000000010-*")))
    tried, newest = list[str](), RunningFolder.newest

    def some(self: RunningFolder, start: str, blocks: Any) -> Any:
        wanted = list(blocks)
        tried.extend([start] if len(wanted) > 1 else [])
        if len(wanted) > 1 and len(tried) <= 3:
            raise StorageError("the network is down")
        return newest(self, start, wanted)

    monkeypatch.setattr(RunningFolder, "newest", some)
    assert trained(tmp_path, settings, epochs=2)[0] < 5, "not from the full one of step 5"
    assert len(tried) == 4


def test_a_directory_that_is_another_one_while_a_mount_is_away_is_waited_for(
    tmp_path: Path, monkeypatch: Any
) -> None:
    trained(tmp_path)
    run, away, said = tmp_path / "one", tmp_path / "away", list[str]()
    run.rename(away)

    def post(self: Link, kind: str, step: int, content: dict[str, Any]) -> None:
        if not content.get("reading"):
            return
        said.append(content["error"])
        if len(said) == 2:
            assert [one.name for one in run.rglob("*")] == ["lock"], "nothing of a new run is begun there"
            shutil.rmtree(run)
            away.rename(run)

    monkeypatch.setattr(Link, "post", post)
    known = RunSettings(saved_step=5)
    assert trained(tmp_path, known, epochs=2)[0] == 5, "of the second epoch alone"
    assert len(said) == 2
    assert all("step 5 of the run was saved" in one and "is it mounted?" in one for one in said)
    (run / "mark").unlink()  # as of a copy of its checkpoints alone
    assert trained(tmp_path, known, epochs=2)[0] == 0
    assert (run / "mark").exists()


def test_what_is_saved_while_a_mount_is_away_does_not_count(tmp_path: Path, monkeypatch: Any) -> None:
    run, away, said = tmp_path / "one", tmp_path / "away", list[str]()

    def leave() -> None:
        run.rename(away)
        run.mkdir()

    def post(self: Link, kind: str, step: int, content: dict[str, Any]) -> None:
        if kind != "saving" or "error" not in content:
            return
        said.append(content["error"])
        if len(said) == 2:
            assert not list(run.iterdir())
            run.rmdir()
            away.rename(run)

    monkeypatch.setattr(Link, "post", post)
    assert trained(tmp_path, before_end=leave)[0] == 5
    assert len(said) == 2
    assert all("is not the run's directory; is it mounted?" in one for one in said)
    found = CheckpointFolder(StorageLocation(run / "checkpoints")).latest()
    assert found is not None
    assert found.step == 5


def test_damage_that_was_found_before_storage_went_away_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    for epochs in (1, 2):
        trained(tmp_path, epochs=epochs)
    (file,) = (tmp_path / "one" / "checkpoints").glob("step-000000000010-*/model.pt")
    file.write_bytes(file.read_bytes()[:-1])
    posted: list[dict[str, Any]] = []
    monkeypatch.setattr(
        Link, "post", lambda self, kind, step, content: posted.append({"kind": kind, **content})
    )
    newest, tried = spill.Spill.newest, list[int]()

    def once(self: spill.Spill, above: int) -> Any:
        tried.append(above)
        if len(tried) == 1:
            raise StorageError("the network is down")
        return newest(self, above)

    monkeypatch.setattr(spill.Spill, "newest", once)
    assert trained(tmp_path, epochs=2)[0] == 5
    (damaged,) = [one["checkpoints"] for one in posted if one["kind"] == "damaged"]
    assert ["step-000000000010-" in one and "set aside" in one for one in damaged] == [True]


@pytest.mark.parametrize("denied", [False, True])
def test_a_store_that_stays_away_ends_a_run_with_what_to_do_and_changes_nothing(
    tmp_path: Path, monkeypatch: Any, denied: bool
) -> None:
    trained(tmp_path)
    there = sorted(tmp_path.rglob("*"))
    error = StorageError("the directory is away")
    error.__cause__ = PermissionError() if denied else NotADirectoryError()
    settings = RunSettings(final_save_timeout=0.0 if not denied else 120.0)
    with monkeypatch.context() as patch:
        tried = refusing(patch, "latest", error, 100)
        said = (
            "the directory is away"
            if denied
            else r"cannot be read .*is away; nothing was changed.*--resume ID"
        )
        with pytest.raises(StorageError, match=said):
            trained(tmp_path, settings, epochs=2)
    assert len(tried) == 1, "what does not pass by itself is not waited for"
    assert sorted(tmp_path.rglob("*")) == there
    assert trained(tmp_path, epochs=2)[0] == 5


def test_the_end_of_a_run_that_cannot_be_stored_is_an_error_and_is_taken_over_later(
    tmp_path: Path, monkeypatch: Any, place: Path
) -> None:
    plain = trained(tmp_path / "plain")[1]
    with monkeypatch.context() as patch:
        failing(patch, tmp_path / "one", 100)
        with pytest.raises(
            StorageFullError, match="step 5 of the run is not saved in its directory"
        ) as raised:
            trained(tmp_path, AT_ONCE)
    (there,) = spilled(place)
    assert str(there) in str(raised.value), "the message says where it is instead"
    assert (there.parent.stat().st_mode & 0o777) == 0o700
    steps, weights = trained(tmp_path)
    assert steps == 0, "nothing is trained again"
    assert torch.equal(weights, plain)
    found = CheckpointFolder(StorageLocation(tmp_path / "one" / "checkpoints")).latest()
    assert found is not None
    assert found.step == 5
    assert not list(place.iterdir()), "what the run's directory has again is not kept twice"


def test_where_no_place_takes_it_the_last_durable_checkpoint_is_named_and_gone_on_from(
    tmp_path: Path, monkeypatch: Any, place: Path
) -> None:
    trained(tmp_path)
    place.rmdir()
    place.write_text("no folder")
    with monkeypatch.context() as patch:
        failing(patch, tmp_path / "one", 100)
        with pytest.raises(
            StorageFullError, match=r"nor could it be saved in another place.*; step 5 is saved"
        ):
            trained(tmp_path, AT_ONCE, epochs=2)
    assert trained(tmp_path, epochs=2)[0] == 5


def test_a_spilled_checkpoint_that_was_damaged_is_not_used(
    tmp_path: Path, monkeypatch: Any, place: Path, caplog: Any
) -> None:
    trained(tmp_path)
    with monkeypatch.context() as patch:
        failing(patch, tmp_path / "one", 100)
        with pytest.raises(StorageFullError):
            trained(tmp_path, AT_ONCE, epochs=2)
    file = spilled(place)[0] / "model.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert trained(tmp_path, epochs=2)[0] == 5, "the older one in the run's directory is used"
    assert "its checksum differs" in caplog.text


@pytest.mark.parametrize("chosen", [False, True])
def test_a_place_for_spilled_checkpoints_that_cannot_be_read_is_said_and_one_that_was_chosen_is_waited_for(
    tmp_path: Path, monkeypatch: Any, place: Path, caplog: Any, chosen: bool
) -> None:
    trained(tmp_path)
    where = str(place) if chosen else ""
    with monkeypatch.context() as patch:
        failing(patch, tmp_path / "one", 100)
        with pytest.raises(StorageFullError):
            trained(tmp_path, replace(AT_ONCE, spill_dir=where), epochs=2)
    settings = replace(AT_ONCE, spill_dir=where)
    with monkeypatch.context() as patch:
        latest = CheckpointFolder.latest

        def unreachable(self: CheckpointFolder) -> Any:
            if "ebbflow-spill" in self.uri:
                raise StorageError("the network is down")
            return latest(self)

        patch.setattr(CheckpointFolder, "latest", unreachable)
        if chosen:  # what is there may be all that there is of the last steps
            with pytest.raises(
                StorageError, match=r"last steps may be in .*ebbflow-spill.*the network is down"
            ):
                trained(tmp_path, settings, epochs=2)
        else:
            assert trained(tmp_path, settings, epochs=2)[0] == 5
            assert "cannot be read: the network is down" in caplog.text
    if chosen:
        assert trained(tmp_path, settings, epochs=2)[0] == 0, "all steps of the second time were spilled"


def test_a_new_run_takes_nothing_over_from_one_that_had_its_folder_before(
    tmp_path: Path, monkeypatch: Any, place: Path
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, tmp_path / "one", 100)
        with pytest.raises(StorageFullError):
            trained(tmp_path, AT_ONCE)
    shutil.rmtree(tmp_path / "one")
    assert trained(tmp_path)[0] == 5
    assert len(spilled(place)) == 1


def test_a_process_that_joins_a_run_spills_where_the_others_would(tmp_path: Path) -> None:
    place = StorageLocation(tmp_path / "run")
    mark = spill.Spill(place).take_mark()
    joins, unused, reader = (
        spill.Spill(place),
        cast(RunningSaves, None),
        PatientReader(Generation.join(None, None, None, False)),
    )
    assert choose(World(), None, joins, unused, reader).found is None
    assert joins.mark == mark


@pytest.mark.parametrize("whose", ["open to all", "somebody else's", "a link"])
def test_a_place_that_another_user_could_have_made_is_neither_written_nor_read(
    tmp_path: Path, monkeypatch: Any, place: Path, whose: str
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, tmp_path / "one", 100)
        with pytest.raises(StorageFullError):
            trained(tmp_path, AT_ONCE)
    (own,) = place.iterdir()
    if whose == "open to all":
        own.chmod(0o777)
    elif whose == "somebody else's":
        if os.geteuid():
            own.chmod(0o701)  # which only root could have done better
        else:
            os.chown(own, 65534, 65534)
    else:
        own.rename(tmp_path / "elsewhere")
        own.symlink_to(tmp_path / "elsewhere")
    with monkeypatch.context() as patch:
        failing(patch, tmp_path / "one", 100)
        with pytest.raises(StorageFullError, match="not a directory of this user alone"):
            trained(tmp_path, AT_ONCE)
    assert trained(tmp_path)[0] == 5, "the model in there is not taken over"


def test_a_stop_with_a_deadline_leaves_time_for_the_other_place(
    tmp_path: Path, monkeypatch: Any, place: Path
) -> None:
    monkeypatch.setattr(
        saver, "SPILL_SHARE", 0.99
    )  # tried again for 0.6 s, then a minute for the other place
    with monkeypatch.context() as patch:
        tried = failing(patch, tmp_path / "one", 100)
        with pytest.raises(StorageFullError, match="step 2 of the run"):
            trained_until(tmp_path, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert 0 < len(tried) < 100
    assert len(spilled(place)) == 1
    assert trained(tmp_path)[0] == 3


def trained_until(folder: Path, step: int, act: Any) -> None:
    with ElasticRun.start(
        directory=folder, run_id="one", settings=RunSettings(termination_grace=60.0)
    ) as run:
        model, _ = run.prepare(nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.05), batch_size=10)
        for _ in run.epochs(1):
            for x, y in run.batches((X, Y)):
                if run.progress.step == step:
                    act()
                run.backward(nn.functional.mse_loss(model(x), y))
                run.step()


def test_a_script_shorter_than_the_trial_is_rehearsed_and_not_taken_for_finished(tmp_path: Path) -> None:
    with (
        pytest.raises(RunStopped, match="preflight"),
        ElasticRun.start(directory=tmp_path, run_id="one", settings=RunSettings(preflight_steps=20)) as run,
    ):
        train(run)
    assert run.progress.step == 5
    assert not (tmp_path / "one" / "checkpoints").exists()


def test_a_running_checkpoint_that_cannot_be_written_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: Any
) -> None:
    posted: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(Link, "post", lambda self, kind, step, content: posted.append((kind, content)))

    def full(self: BlockStore, records: Any) -> int:
        raise FULL

    with ElasticRun.start(
        directory=tmp_path,
        run_id="one",
        settings=RunSettings(partial_checkpoint_interval=1, partial_checkpoint_fraction=1.0),
    ) as run:
        model, _ = run.prepare(nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.05), batch_size=10)
        monkeypatch.setattr(BlockStore, "commit", full)
        for _ in run.epochs(10):
            for x, y in run.batches((X, Y)):
                run.backward(nn.functional.mse_loss(model(x), y))
                run.step()
    said = [content for kind, content in posted if kind == "checkpoint" and "error" in content]
    assert said
    assert said[0] == {"reason": "running checkpoint", "error": str(FULL)}


# --- a real disk --------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def test_neither_a_full_disk_nor_a_read_only_one_costs_the_model(disk: Path, place: Path) -> None:
    checkpoints = str(disk / "one" / "checkpoints")

    def read_only() -> None:
        subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", checkpoints], check=True)

    plain = trained(place / "plain", epochs=3)[1]
    with pytest.raises(StorageFullError, match="no space left"):
        trained(disk, AT_ONCE, before_end=lambda: fill(disk))
    assert not names(CheckpointFolder(StorageLocation(disk / "one" / "checkpoints"))), (
        "no half checkpoint is left"
    )
    with pytest.raises(StorageFullError, match=r"step 5 of the run is in .* and cannot be restored"):
        trained(disk, AT_ONCE, epochs=2)
    (disk / "filler").unlink()
    with pytest.raises(StorageError, match="permission denied"):
        trained(disk, AT_ONCE, epochs=2, before_end=read_only)
    subprocess.run(["umount", "-l", checkpoints], check=True)
    steps, weights = trained(disk, epochs=3)
    assert steps == 5
    assert torch.equal(weights, plain)
