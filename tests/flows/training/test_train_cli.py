"""``ebbflow train`` with real processes that are really killed, and what it refuses."""

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbflow.flows import cli
from ebbflow.flows.training import cli as train_cli
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from tests.flows.flowcases import open_to_others, run_cli

SCRIPT = str(Path(__file__).parents[1] / "digits.py")


@pytest.mark.processes  # where its nodes are forks
def test_a_killed_node_costs_no_more_than_the_step_in_flight_and_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_cli(
        "train", SCRIPT, "--nodes", "local:2x1", "--no-preflight", "--fault", "1s:kill:node-2", "--price", "3.6",
        "--runs-dir", tmp_path, "--run-id", "digits", "--report", tmp_path / "r.json",
        "--report", tmp_path / "r.html", "--runner", "plain", "--", "--epochs", "6", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = TrainingReport.from_json((tmp_path / "r.json").read_text())
    assert report.state == "finished"
    assert report.steps == 96  # 6 epochs of 512 / 32, none lost, none twice
    assert report.lost_steps <= 1
    assert report.recovery is not None
    assert (report.recovery.way, report.recovery.reason) == ("in-place", "each process has the whole model")
    assert report.generations[-1].gpus == 1
    # a machine so busy that it was killed before the end of the first step begins a new generation
    assert report.recovery.changes == (1 if len(report.generations) == 1 else 0)
    accuracy = report.final_metrics["accuracy"]
    assert accuracy is not None
    assert accuracy > 0.8
    assert report.dollars > 0
    assert report.series
    assert "node-2 is killed" in done.stderr
    assert "<svg" in (tmp_path / "r.html").read_text()
    assert json.loads((tmp_path / "digits" / "request.json").read_text())["arguments"] == ["--epochs", "6"]
    assert open_to_others(tmp_path / "digits") == []
    monkeypatch.setattr(sys, "argv", ["ebbflow", "train", "--resume", "digits", "--runs-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert "run digits is finished" in capsys.readouterr().err


def test_a_run_that_lives_is_not_gone_on_with_and_stays_as_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TrainingRequest(SCRIPT, run_id="digits", runs_dir=str(tmp_path), max_gpus=2).save()
    asked = (tmp_path / "digits" / "request.json").read_text()
    given = [
        "train",
        "--resume",
        "digits",
        "--runs-dir",
        str(tmp_path),
        "--max-gpus",
        "1",
        "--runner",
        "prefect",
    ]
    monkeypatch.setattr(sys, "argv", ["ebbflow", *given])
    with RunLock(StorageLocation(tmp_path / "digits"), "digits"), pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"run 'digits' is being run by process {os.getpid()} of" in said
    assert (tmp_path / "digits" / "request.json").read_text() == asked


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name the script"),
        (["gone.py"], "there is none at 'gone.py'"),
        ([SCRIPT, "--nodes", "cloud"], "local:NODESxSLOTS"),
        ([SCRIPT, "--fault", "soon:kill:node-1"], "20s:kill:node-2"),
        (["--resume", "nothing"], "there is no run 'nothing'"),
        ([SCRIPT, "--resume", "nothing"], "leave them out"),
        ([SCRIPT, "--failure-rules", "none.toml"], "none.toml"),
        ([SCRIPT, "--restart"], "--restart goes with --resume"),
        ([SCRIPT, "--final-save-timeout", "-1"], "--final-save-timeout must be a duration"),
        ([SCRIPT, "--spill-dir", "ftp://x/y"], "use a plain path, file:// or s3://"),
    ],
)
def test_wrong_input(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ebbflow", "train", *arguments, "--runner", "plain"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == (1 if words.startswith("there is no ") else 2)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("saved", "status"), [(12, 130), (10, 1), (None, 1)])
def test_an_interrupted_run_says_saved_only_where_it_is(
    saved: int | None, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stopped = TrainingReport(
        "r", SCRIPT, str(tmp_path), 0.0, 1.0, "stopped", "why", steps=12, saved_step=saved
    )
    monkeypatch.setattr(train_cli, "_run", lambda *_, **__: stopped)
    shown = CliRunner().invoke(cli.app, ["train", SCRIPT, "--runs-dir", str(tmp_path)])
    assert shown.exit_code == status
    assert ("not saved: " in shown.output) == (status == 1)


def test_options_of_the_script_go_after_two_dashes() -> None:
    shown = CliRunner().invoke(cli.app, ["train", SCRIPT, "--lr", "0.1"])
    assert shown.exit_code == 2
    assert "--lr" in shown.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name the script and the space"),
        ([SCRIPT, "--space", "gone.yaml"], "gone.yaml"),
        (["--resume", "nothing"], "there is no tuning run 'nothing'"),
    ],
)
def test_wrong_searches(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ebbflow", "tune", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == (1 if words.startswith("there is no ") else 2)
    assert words in capsys.readouterr().err
