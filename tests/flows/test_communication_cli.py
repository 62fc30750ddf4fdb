"""``ebbflow communication``."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbflow.flows import cli
from ebbflow.planners.communication.recorded import RankProfile, RecordedTraining, merge_profiles
from ebbflow.tasks.communication import plan_training
from tests.planners.communication.test_recorded import MIB, iteration, links, recorded


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


def changed(text: str, **values: object) -> str:
    return json.dumps({**json.loads(text), **values})


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (recorded(3), "the plan does not fit the training: the plan is for 4 ranks, not 3"),
        (
            merge_profiles(RankProfile(rank, 4, 5, iteration(size=2 * MIB)) for rank in range(4)),
            "the plan has all-reduce of 1048576 bytes as bucket/0, the training all-reduce of 2097152 bytes",
        ),
        (
            merge_profiles(RankProfile(rank, 4, 5, iteration(buckets=3)) for rank in range(4)),
            "the plan has all-reduce of 1048576 bytes as bucket/3, the training nothing",
        ),
        (recorded(), ""),
    ],
)
def test_a_plan_is_compared_with_the_training_that_is_to_run_it(
    of: RecordedTraining,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan, training = tmp_path / "plan.json", tmp_path / "training.json"
    plan.write_text(plan_training(recorded(), links(), search_seconds=0.05).plan.to_json())
    training.write_text(of.to_json())
    assert run(monkeypatch, "explain", str(plan), "--training", str(training)) == (2 if words else 0)
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (changed(recorded().to_json(), ranks=8), "fingerprint must be that of its collectives"),
        (
            changed(recorded().to_json(), comm=[["bucket/0", "all-reduce", 1.0, False]]),
            "a dependency names 'bucket/1'",
        ),
        (changed(recorded().to_json(), format=7), "the recorded training has format 7; this version reads 1"),
        (changed(recorded().to_json(), seconds="soon"), "not a recorded training"),
        (changed(recorded().to_json(), comm=[["bucket/0", "telepathy", 1.0, False]]), "got 'telepathy'"),
    ],
)
def test_a_training_that_is_not_what_was_recorded_is_refused(
    content: str,
    words: str,
    files: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path(files[0]).write_text(content)
    for command in ("plan", "compare"):
        assert run(monkeypatch, command, files[0], "--links", files[1]) == 2
        shown = " ".join(capsys.readouterr().err.split())
        assert words in shown
        assert "training.json" in shown


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [["all-reduce", 4, "shout/1@0", [[1, 1]]]],
            "must be one of whole, ring, tree, hierarchical, spline; got 'shout/1@0'",
        ),
        (
            [["all-to-all", 4, "whole/1@0", [[1, 1]]]],
            "no choice can carry out bucket/0 (all-reduce among 4 ranks)",
        ),
        (
            [["all-reduce", 2, "whole/1@0", [[1, 1]]]],
            "no choice can carry out bucket/0 (all-reduce among 4 ranks)",
        ),
        ([], "must have a measurement; got none"),
    ],
)
def test_links_that_lack_what_the_training_needs_are_refused(
    rows: list[list[object]],
    words: str,
    files: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path(files[1]).write_text(changed(links().to_json(), rows=rows))
    assert run(monkeypatch, "plan", files[0], "--links", files[1]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "--system", "Oracle"), "Oracle"),
        (("plan", "--search-time", "0s"), "search-time"),
        (("plan", "--picture", "plan.pdf"), "--picture must end with .svg; got 'plan.pdf'"),
        (("compare", "--hand-order", "bucket/9"), "must name collectives of the training; got 'bucket/9'"),
        (("plan", "--ranks", "4"), "--ranks"),
    ],
)
def test_options_that_are_none_are_refused(
    words: tuple[str, ...],
    said: str,
    files: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, *rest = words
    assert run(monkeypatch, command, files[0], "--links", files[1], *rest) == 2
    assert said in " ".join(capsys.readouterr().err.split())


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
