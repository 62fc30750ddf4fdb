"""What a process without a launcher joins."""

from pathlib import Path

import pytest

from ebbflow.infra.errors import RunLockedError
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.process.generation import Generation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.trainings import RunSettings


def test_a_process_alone_holds_its_run_until_it_closes(tmp_path: Path) -> None:
    one = Generation.join(tmp_path, "one", RunSettings(keep_checkpoints=3), restart=True)
    assert one.place == StorageLocation(tmp_path / "one")
    assert (one.settings.keep_checkpoints, one.settings.restart, one.world.size, one.is_main, one.trial) == (
        3,
        True,
        1,
        True,
        False,
    )
    with pytest.raises(RunLockedError, match="'one'"):
        Generation.join(tmp_path, "one", None, restart=False)
    one.close(1.0)
    RunLock(StorageLocation(tmp_path / "one"), "one").look()


def test_a_run_is_named_after_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["somewhere/digits.py"])
    monkeypatch.chdir(tmp_path)
    found = Generation.join("runs", None, None, restart=False)
    found.close(1.0)
    assert (str(found.place), found.place and found.place.root) == ("runs/digits", f"{tmp_path}/runs/digits")


def test_without_a_folder_there_is_no_place_and_no_lock() -> None:
    found = Generation.join(None, "one", RunSettings(preflight_steps=3), restart=False)
    assert (found.place, found.lock, found.trial) == (None, None, True)
    found.close(1.0)


def test_a_folder_that_is_none_is_refused_before_anything_is_joined() -> None:
    with pytest.raises(OptionError, match="'ftp://host/runs' has the scheme 'ftp'"):
        Generation.join("ftp://host/runs", "one", None, restart=False)
