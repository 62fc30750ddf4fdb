"""What a run's trackers cost it: no import, no rented second, no report; and what is said to them, in which order."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.training.tracking.record import TrackingRecord
from ebbflow.infra.training.tracking.targets import TrackTarget
from ebbflow.infra.training.tracking.trackers import TrackedRun
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training
from ebbflow.tasks.training.tracking import following
from ebbflow.tasks.training.tracking.describing import model_tags, without_secrets
from ebbflow.tasks.training.tracking.following import Tracking
from tests.training_fakes import Act, FakeSite, ScriptedClock

ONE, TWO = "mlflow:http://127.0.0.1:1#one", "mlflow:http://127.0.0.1:1#two"


class HangingSender:
    """A sender whose tracker never answers: seconds pass as long as it is waited for."""

    clock: ScriptedClock
    said: list[str]
    fails: str | None
    end_raises: BaseException | None

    def __init__(
        self, target: TrackTarget, run: TrackedRun, record: TrackingRecord, notify: Callable[[str], None]
    ) -> None:
        if target.experiment == self.fails:
            raise EngineUnavailableError("tracking cannot be started: too many processes")
        self.target = target
        self.tell("begun")

    def tell(self, what: str) -> None:
        self.said.append(f"{self.target.experiment} {what}")

    def await_id(self, seconds: float) -> str:
        self.clock.time += seconds
        return ""

    def end(self, state: str) -> None:
        self.tell(state)

    def await_end(self, seconds: float) -> str:
        self.tell("awaited")
        self.clock.time += seconds
        if self.end_raises is not None:
            raise self.end_raises
        return "no answer"

    def kill(self) -> None:
        self.tell("killed")


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> type[HangingSender]:
    class Hanging(HangingSender):
        clock, said, fails, end_raises = ScriptedClock(), [], None, None

    monkeypatch.setattr(following, "Sender", Hanging)
    return Hanging


def asked(script: str, *track: str, **options: Any) -> TrainingRequest:
    runs = str(Path(script).parent / "runs")
    return TrainingRequest(script, run_id="r", runs_dir=runs, track=track or (ONE, TWO), **options)


def run(script: str, hanging: type[HangingSender]) -> TrainingReport:
    request = asked(script, nodes="local:3x2", preflight="never", price=3.6)
    return run_training(request, site=FakeSite(Act(), clock=hanging.clock), clock=hanging.clock)  # type: ignore[arg-type]


def test_waiting_for_trackers_costs_no_rented_second(script: str, hanging: type[HangingSender]) -> None:
    report = run(script, hanging)
    waited = hanging.clock.time - report.started - report.seconds
    assert waited >= following.SETTLE, "the end was waited for"
    assert report.seconds == pytest.approx(following.AWAIT_ID + 2.0)
    assert report.rented_gpu_seconds == pytest.approx(12.0)
    assert report.dollars == pytest.approx(12 / 3600 * 3.6)
    lacking = [event.text for event in report.events if event.kind == "tracking"]
    assert len(lacking) == 2
    assert "lacks the run's last values" in lacking[0]
    kept = TrainingReport.from_json((Path(report.directory) / "report.json").read_text())
    assert kept == report


def test_a_report_is_kept_whatever_ends_the_wait_for_trackers(
    script: str, hanging: type[HangingSender]
) -> None:
    hanging.end_raises = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(script, hanging)
    kept = TrainingReport.from_json((Path(script).parent / "runs" / "r" / "report.json").read_text())
    assert (kept.state, kept.steps) == ("finished", 10)
    assert hanging.said[-2:] == ["one killed", "two killed"]


def test_several_trackers_share_the_time_and_hear_of_the_end_before_any_is_waited_for(
    script: str, hanging: type[HangingSender]
) -> None:
    tracking = Tracking(asked(script), hanging.clock, {})
    begun = hanging.clock.time
    assert tracking.variables() == {}
    assert hanging.clock.time - begun == pytest.approx(following.AWAIT_ID)
    tracking.finish(ended(asked(script)))
    assert hanging.said[2:6] == ["one finished", "two finished", "one awaited", "two awaited"]
    assert hanging.clock.time - begun == pytest.approx(following.AWAIT_ID + following.SETTLE + 1.0)


def test_where_one_tracker_cannot_begin_the_others_end(script: str, hanging: type[HangingSender]) -> None:
    hanging.fails = "two"
    with pytest.raises(EngineUnavailableError, match="too many processes"):
        Tracking(asked(script), hanging.clock, {})
    assert hanging.said == ["one begun", "one killed"]


def test_the_key_is_kept_before_any_tracker_hears_it(
    script: str, hanging: type[HangingSender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrackingRecord, "ship", lambda _: hanging.said.append("shipped"))
    Tracking(asked(script), hanging.clock, {}).close()
    assert hanging.said[:2] == ["shipped", "one begun"]


def test_a_record_that_cannot_be_shipped_is_told_of(
    script: str, hanging: type[HangingSender], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = Tracking(asked(script), hanging.clock, {})

    def full(_: TrackingRecord) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrackingRecord, "ship", full)
    tracking._stop.set()
    tracking._ship()
    assert "No space left" in tracking._notes[0]


def ended(request: TrainingRequest, saved: int | None = None) -> TrainingReport:
    return TrainingReport(
        "r", request.script, request.run_directory, 0.0, 1.0, "finished", "", saved_step=saved
    )


def test_the_step_of_the_model_is_that_of_the_checkpoint_named(script: str) -> None:
    request = asked(script)
    for step, said in ((7, {"sha256": "ab"}), (9, None)):
        folder = Path(request.run_directory) / "checkpoints" / f"step-{step:012d}-1700000000000-0123abcd"
        folder.mkdir(parents=True)
        if said:
            (folder / "manifest.json").write_text(json.dumps(said))
    tags = model_tags(request, ended(request, 9))
    assert (tags["ebbflow.model.step"], tags["ebbflow.model.sha256"]) == ("7", "ab")


def test_a_damaged_manifest_is_told_of_and_ends_nothing(script: str, hanging: type[HangingSender]) -> None:
    request, told = asked(script), list[str]()
    folder = Path(request.run_directory) / "checkpoints" / "step-000000000007-1700000000000-0123abcd"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("[]")
    tracking = Tracking(request, hanging.clock, {})
    tracking._notify = told.append
    tracking.finish(ended(request, 7))
    assert "do not hear of the model" in told[0]
    assert "one finished" in hanging.said


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--api-token", "s3cret", "--lr", "0.1"], ["--api-token", "...", "--lr", "0.1"]),
        (["--api-token=s3cret"], ["--api-token=..."]),
        (["db.password=s3cret", "lr=0.1"], ["db.password=...", "lr=0.1"]),
        (["--password", "-s3cret"], ["--password", "..."]),
        (["--password", "--lr", "0.1"], ["--password", "--lr", "0.1"]),
        (["--data", "postgresql://ann:s3cret@host/x"], ["--data", "postgresql://...@host/x"]),
        (["--data=https://ann:s3cret@host/x"], ["--data=https://...@host/x"]),
    ],
)
def test_secrets_among_the_arguments_are_not_shown(arguments: list[str], shown: list[str]) -> None:
    assert without_secrets(arguments) == shown


@pytest.mark.processes
def test_a_launcher_without_trackers_imports_nothing_for_them() -> None:
    heavy = "[name for name in ('torch', 'ebbflow.tasks.training.tracking.following') if name in sys.modules]"
    command = [sys.executable, "-c", f"import sys, ebbflow.tasks.training.run; print({heavy})"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout == "[]\n"
