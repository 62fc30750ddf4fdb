"""``ebbflow elastic``."""

import json
import sys
from pathlib import Path

import pytest

from ebbflow.flows import cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ebbflow", "elastic", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_small_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    small = ("--classes", "3", "--executors", "4", "--iterations", "4", "--workers", "1")
    assert run(monkeypatch, "mlr", *small, "--report", str(report)) == 0
    shown, events = capsys.readouterr()
    assert "finished" in events
    found = json.loads(report.read_text())
    assert f"objective {found['objective']:.6g} after" in shown
    assert len(found["history"]) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("svm",), "app must be one of mlr, kmeans, lda, or FILE.py:CLASS of the user's own; got 'svm'"),
        (("mlr", "--fault", "soon"), "a fault of an elastic job is TIME:VERB"),
        (("mlr", "--resume"), "resume needs the directory"),
        (("mlr", "--restart"), "restart goes with resume"),
    ],
)
def test_wrong_input(
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())
