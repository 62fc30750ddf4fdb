"""Scripts written for torchrun, unchanged, on nodes that come and go."""

from pathlib import Path

import pytest
import torch

from ebbflow.planners.errors import OptionError
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("torchrun_script.py")


def train(folder: Path, *arguments: object, own: str = "-", **options: object) -> TrainingReport:
    request = TrainingRequest(
        str(SCRIPT), (own, *map(str, arguments)), runs_dir=str(folder / "runs"), run_id="r", own_checkpoints=True,
        termination_grace=20.0, retry_backoff=0.1, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return run_training(request)


def texts(report: TrainingReport, kind: str) -> list[str]:
    return [event.text for event in report.events if event.kind == kind]


def test_a_script_that_restores_continues_through_a_notice_and_a_kill(tmp_path: Path) -> None:
    quiet, moved = tmp_path / "quiet", tmp_path / "moved"
    for folder in (quiet, moved):
        folder.mkdir()
    train(quiet, 70, 0.0, "save", own=str(quiet))
    faults = ("2s:notice:node-2:15s", "3s:add:1", "8s:kill:node-1")
    report = train(moved, 70, 0.2, "save", own=str(moved), nodes="local:2x1", fault=faults)
    assert (report.state, report.steps, report.own_checkpoints) == ("finished", 70, True)
    assert report.generations[0].kind == "stopped", "the notice was passed on as SIGTERM, and the script left"
    assert "lost" in {generation.kind for generation in report.generations}
    assert report.lost_steps <= 11, "every tenth step is saved"
    assert texts(report, "continued")
    assert not any("from scratch" in text for text in texts(report, "continued"))
    ours, theirs = (torch.load(one / "weights.pt", weights_only=True) for one in (moved, quiet))
    assert all(map(torch.equal, ours, theirs))
    restarts, run, _ = (moved / "seen").read_text().split()
    assert (int(restarts), run) == (len(report.generations) - 1, "r")


def test_a_script_that_starts_from_scratch_each_time_is_told_of(tmp_path: Path) -> None:
    report = train(tmp_path, 30, 0.1, "die", fault=("1s:notice:node-1:15s", "3s:add:1"))
    assert report.state == "finished"
    assert report.generations[0].kind == "stopped"
    assert report.lost_steps == report.generations[0].last_step - 1 > 0
    assert "restarted from scratch: its first step is 1 again" in texts(report, "continued")[0]


def test_status_0_after_sigterm_is_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    faults = ("1s:notice:node-1:15s", "3s:add:1")
    report = train(tmp_path, 40, 0.1, "zero", own=str(tmp_path / "own"), fault=faults)
    assert (report.state, report.steps, report.lost_steps) == ("finished", 40, 0)
    assert [generation.kind for generation in report.generations] == ["stopped", "finished"]


def test_who_ignores_sigterm_is_killed_at_the_deadline(tmp_path: Path) -> None:
    report = train(tmp_path, 30, 0.1, "ignore", fault=("0.5s:notice:node-1:1s", "0.5s:add:1"))
    assert report.state == "finished"
    assert report.generations[0].kind in ("stopped", "lost")
    assert report.lost_steps > 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"communication": "planned"}, "communication needs a script that trains inside ElasticRun"),
        ({"preflight": "always"}, "preflight needs"),
        ({"checkpoint_interval": 5.0}, "checkpoint_interval needs"),
        ({"step_pattern": "("}, "step_pattern must be a regular expression; got '\\('"),
        ({"step_pattern": "it"}, "must have a group"),
        ({"own_checkpoints": False, "step_pattern": "it (1)"}, "step_pattern goes with own_checkpoints"),
    ],
)
def test_what_needs_an_elastic_run_is_refused(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        TrainingRequest(str(SCRIPT), **({"own_checkpoints": True} | wrong))  # type: ignore[arg-type]
