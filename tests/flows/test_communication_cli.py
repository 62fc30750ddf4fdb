"""``ebbflow communication``."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbflow.flows import cli
from tests.planners.communication.test_recorded import links, recorded


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    training, measured = tmp_path / "training.json", tmp_path / "links.json"
    training.write_text(recorded().to_json())
    measured.write_text(links().to_json())
    return str(training), str(measured)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ebbflow", "communication", *arguments])
    monkeypatch.setenv("COLUMNS", "300")
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_plan_is_searched_drawn_and_explained(
    files: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan, picture = str(tmp_path / "plan.json"), str(tmp_path / "plan.svg")
    options = ("--links", files[1], "--search-time", "0.3", "--output", plan, "--picture", picture)
    assert run(monkeypatch, "plan", files[0], *options) == 0
    shown = capsys.readouterr()
    assert "plan for 4 processes, 2 channels" in shown.out
    assert "saved); measured without: 65 ms" in shown.out
    assert Path(picture).read_text().startswith("<svg")
    assert run(monkeypatch, "explain", plan, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said["collectives"]) == {f"bucket/{k}" for k in range(4)}
    assert said["seconds"] < said["plain_seconds"]
    assert run(monkeypatch, "explain", plan) == 0
    assert "bucket/0[0] on channel" in capsys.readouterr().out


def test_schedulers_are_compared(
    files: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture = str(tmp_path / "all.svg")
    words = ("compare", files[0], "--links", files[1], "--search-time", "0.3", "--hand-order", "bucket/3")
    assert run(monkeypatch, *words, "--json", "--picture", picture) == 0
    found: dict[str, Any] = {one["system"]: one for one in json.loads(capsys.readouterr().out)}
    assert list(found) == ["FIFO", "LIFO", "HO", "S-Exec", "S-Sched", "S-Sched+greedy", "Syndicate"]
    assert found["Syndicate"]["seconds"] == min(one["seconds"] for one in found.values())
    assert "S-Exec" in Path(picture).read_text()
    assert run(monkeypatch, *words) == 0
    assert "against LIFO" in capsys.readouterr().out


def test_links_of_another_gang_and_files_of_another_kind_are_refused(
    files: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other.json"
    other.write_text(links(2).to_json())
    assert run(monkeypatch, "plan", files[0], "--links", str(other)) == 2
    assert "the links were measured among 2 ranks, the training has 4" in capsys.readouterr().err
    assert run(monkeypatch, "explain", files[0]) == 2
    assert "not a communication plan" in capsys.readouterr().err


@pytest.mark.processes
def test_links_of_this_machine_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "links.json")
    words = ("--ranks", "2", "--measure-time", "1", "--max-kib", "64", "--steps", "2", "--output", output)
    assert run(monkeypatch, "profile", *words) == 0
    shown = capsys.readouterr().out
    assert "2 processes, 2 channels" in shown
    assert "two channels at once take" in shown
    assert json.loads(Path(output).read_text())["ranks"] == 2
