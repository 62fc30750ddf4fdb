"""``ebbflow train`` as real processes whose clocks jump, or whose launcher stands still."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from flowcases import COMMAND, TIMEOUT, eventually

from ebbflow.tasks.training.report import TrainingReport
from tests.chaos.faketime import FakeTime

pytestmark = pytest.mark.processes
SCRIPT = str(Path(__file__).with_name("digits.py"))


def _begin(folder: Path, **variables: str) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [*COMMAND, "train", SCRIPT, "--nodes", "local:2x1", "--no-preflight", "--runs-dir", str(folder),
         "--run-id", "digits", "--report", str(folder / "r.json"), "--runner", "plain", "--", "--epochs", "6"],
        env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    events = folder / "digits" / "events.jsonl"
    eventually(lambda: (events.exists() and '"started"' in events.read_text()) or child.poll() is not None)
    return child


def _end(child: "subprocess.Popen[str]", folder: Path) -> TrainingReport:
    try:
        said, _ = child.communicate(timeout=TIMEOUT)
    finally:
        child.kill()
    assert child.returncode == 0, said
    return TrainingReport.from_json((folder / "r.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_clock_that_jumps_by_an_hour_costs_a_training_no_step(tmp_path: Path, seconds: float) -> None:
    """The launcher's clock and that of all nodes."""
    clock = FakeTime(tmp_path / "clock", seconds)
    child = _begin(tmp_path, **clock.environment)
    clock.jump(-seconds)
    report = _end(child, tmp_path)
    assert (report.state, report.steps, report.lost_steps) == ("finished", 96, 0)
    assert len(report.generations) == 1


@pytest.mark.slow
def test_a_launcher_that_stands_still_for_a_while_costs_a_training_no_step(tmp_path: Path) -> None:
    child = _begin(tmp_path)
    child.send_signal(signal.SIGSTOP)
    try:
        # its nodes train on: the files that they write grow while it stands still
        run = tmp_path / "digits"
        before = _written(run)
        eventually(lambda: _written(run) > before)
    finally:
        child.send_signal(signal.SIGCONT)
    report = _end(child, tmp_path)
    assert (report.state, report.steps, report.lost_steps) == ("finished", 96, 0)


def _written(run: Path) -> int:
    return sum(path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file())
