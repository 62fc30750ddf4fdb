"""Whoever wants what another process holds hears at once, or while it waits, who that is."""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ebbflow.flows import cli
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage import files
from ebbflow.tasks.tuning.request import TuningRequest, read_space

_HOLD = """
import sys
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.storage.files import locked
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.storage.places import StorageLocation
kind, path = sys.argv[1:]
with RunLock(StorageLocation(path), "mine") if kind == "run" else locked(path, SystemClock()):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator["Hold"]:
    """Hold runs and files in other processes until the test ends."""
    found = Hold()
    yield found
    found.end()


class Hold:
    """Processes that hold something."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def __call__(self, kind: str, path: Path) -> int:
        """Hold the run in, or the lock file at, ``path``; return the process's id."""
        process = subprocess.Popen(
            [sys.executable, "-c", _HOLD, kind, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._all.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process.pid

    def end(self) -> None:
        for process in self._all:
            process.communicate(timeout=150)


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["ebbflow", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    return " ".join(capsys.readouterr().err.split())


def test_a_search_that_lives_names_its_process(
    tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, space = tmp_path / "fit.py", tmp_path / "space.yaml"
    script.write_text("")
    space.write_text("lr: {log: [0.1, 1]}\n")
    request = TuningRequest(
        str(script), read_space(space), "accuracy", run_id="mine", runs_dir=str(tmp_path / "runs")
    )
    request.save()
    pid = hold("run", tmp_path / "runs" / "mine")
    said = refused(["tune", "--resume", "mine", "--runs-dir", str(tmp_path / "runs")], monkeypatch, capsys)
    assert f"is being run by process {pid} of" in said
    assert f"on {socket.gethostname()}, since 20" in said


def test_a_pipeline_that_lives_names_its_process(
    tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ebbflow.tasks.pipeline.file.read import read_pipeline
    from ebbflow.tasks.pipeline.record import RunFolder

    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    (tmp_path / "fit.py").write_text("")
    file = tmp_path / "shop.yaml"
    file.write_text(
        "name: shop\ncluster: {local: {pools: {gpu: {kind: gpu, nodes: 1}}}}\ntrainings: {fit: {script: fit.py}}\n"
    )
    RunFolder(tmp_path / "runs", "mine").begin(read_pipeline(file), {}, 0.0)
    pid = hold("run", tmp_path / "runs" / "mine")
    arguments = ["run", "--resume", "mine", "--runs-dir", str(tmp_path / "runs"), "--runner", "plain"]
    assert f"is being run by process {pid} of" in refused(arguments, monkeypatch, capsys)


def test_an_elastic_job_that_lives_names_its_process(
    tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = tmp_path / "data.npz", tmp_path / "job"
    np.savez(data, x=np.ones((8, 2)), y=np.arange(8) % 2)
    pid = hold("run", folder)
    arguments = ["elastic", "mlr", "--input", str(data), "--classes", "2", "--state-dir", str(folder)]
    assert f"is being run by process {pid} of" in refused([*arguments, "--resume"], monkeypatch, capsys)
    assert f"is being run by process {pid} of" in refused(arguments, monkeypatch, capsys)
    assert sorted(path.name for path in folder.iterdir()) == ["lock"]


def test_who_holds_a_lock_of_a_store_is_logged_while_others_wait_and_named_when_they_give_up(
    tmp_path: Path, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / ".lock"
    pid = hold("file", path)
    named = f"process {pid} on {socket.gethostname()} (since 20"
    with (
        caplog.at_level(logging.WARNING, "ebbflow.infra.storage.files"),
        pytest.raises(StorageError, match="cannot lock") as error,
        files.locked(str(path), SystemClock(), timeout=1.5),
    ):
        pytest.fail("the lock was given twice")
    assert named in str(error.value)
    assert [named in one.getMessage() for one in caplog.records] == [True]
    hold.end()
    with files.locked(str(path), SystemClock()):
        assert str(os.getpid()) in path.read_text()
    assert json.dumps(path.read_text()).count("process") == 1
