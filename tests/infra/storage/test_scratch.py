"""Directories of one process: they go with it, however it ends."""

import errno
import fcntl
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ebbflow.infra.errors import StorageFullError
from ebbflow.infra.storage.scratch import ScratchFolder

_HOLDS_ONE = """
import sys
from ebbflow.infra.storage.scratch import ScratchFolder
one = ScratchFolder("test")
(one.path / "spilled").write_text("much")
print(one.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def _holder() -> tuple["subprocess.Popen[str]", Path]:
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDS_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def test_what_a_killed_process_left_goes_and_what_another_uses_stays(tmp_path: Path) -> None:
    killed, left = _holder()
    running, used = _holder()
    killed.kill()
    killed.communicate(timeout=150)
    assert (left / "spilled").exists()
    foreign = tmp_path / "ebbflow-test-of-another-kind"  # without a lock: none of ours
    foreign.mkdir()
    mine = ScratchFolder("test")
    assert not left.exists()
    assert (used / "spilled").exists()
    assert foreign.exists()
    assert mine.path.stat().st_mode & 0o777 == 0o700
    running.communicate(timeout=150)  # it ends by itself
    assert not used.exists()
    mine.close()
    mine.close()
    assert not mine.path.exists()


def test_where_there_are_no_locks_it_is_made_and_no_sweep_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", none_here)
        one = ScratchFolder("test")
    ScratchFolder("test").close()
    assert one.path.exists()
    one.close()
    assert not one.path.exists()


def test_what_cannot_be_removed_keeps_its_lock_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ScratchFolder("test")
    (one.path / "spills").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as where another process keeps writing
        one.close()
    assert sorted(path.name for path in one.path.iterdir()) == [".lock", "spills"]
    ScratchFolder("test").close()
    assert not one.path.exists()


def test_a_full_disk_is_told_in_our_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(StorageFullError, match="cannot make a temporary directory: no space left"):
        ScratchFolder("test")


def test_of_another_machine_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    killed, left = _holder()
    killed.kill()
    killed.communicate(timeout=150)
    with monkeypatch.context() as patch:
        patch.setattr(platform, "node", lambda: "elsewhere")
        ScratchFolder("test").close()
    assert left.exists()


def test_one_that_is_collected_goes() -> None:
    one = ScratchFolder("test")
    path = one.path
    del one
    assert not path.exists()


def test_other_kinds_stay() -> None:
    killed, left = _holder()
    killed.kill()
    killed.communicate(timeout=150)
    ScratchFolder("tes").close()
    assert left.exists()
