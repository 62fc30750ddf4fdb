"""What is passed on to trackers: names that they take, values that they lack, no secrets; processes that die."""

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.tracking import sender
from ebbflow.infra.training.tracking.deliver import PublicFormatter
from ebbflow.infra.training.tracking.record import TrackingRecord
from ebbflow.infra.training.tracking.sender import Sender
from ebbflow.infra.training.tracking.targets import TrackTarget
from ebbflow.infra.training.tracking.trackers import Reached, Row, TrackedRun, common_name

SAID = st.text(st.sampled_from("ab./: é\n\\"), max_size=12) | st.text(max_size=300)


@given(SAID)
def test_any_name_becomes_one_that_mlflow_takes(text: str) -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    name = common_name(text)
    _validate_metric_name(name)
    _validate_param_name(name)
    assert common_name(name) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [("val/", "val"), ("/loss", "loss"), ("a//b", "a/b"), ("..", "_"), ("..a", "_.a"), ("a@b/é", "a_b/é")],
)
def test_a_name_changes_only_where_it_must(text: str, name: str) -> None:
    assert common_name(text) == name


def test_params_whose_names_become_one_are_one_param() -> None:
    from ebbflow.infra.training.tracking.mlflow_runs import MlflowTracker

    found: list[Any] = []
    tracker = MlflowTracker(TrackTarget.parse("mlflow:http://127.0.0.1:1"))
    tracker._client = SimpleNamespace(log_batch=lambda _, params, tags: found.extend(params))  # type: ignore[assignment]
    tracker.describe({"a/b": "1", "a//b": "1", "c": "2"}, {})
    assert [(one.key, one.value) for one in found] == [("a/b", "1"), ("c", "2")]


def test_a_recorded_run_that_a_server_has_not_is_looked_for_anew() -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, RESOURCE_DOES_NOT_EXIST

    from ebbflow.infra.training.tracking.mlflow_runs import MlflowTracker

    def get_run(id: str) -> Any:
        if id in ("here", "gone"):
            return SimpleNamespace(
                info=SimpleNamespace(lifecycle_stage="active" if id == "here" else "deleted")
            )
        raise MlflowException("no", RESOURCE_DOES_NOT_EXIST if id == "elsewhere" else INTERNAL_ERROR)

    tracker = MlflowTracker(TrackTarget.parse("mlflow:http://127.0.0.1:1"))
    tracker._client = SimpleNamespace(get_run=get_run)  # type: ignore[assignment]
    assert [tracker._known(id) for id in ("here", "gone", "elsewhere", "")] == ["here", "", "", ""]
    with pytest.raises(MlflowException):
        tracker._known("unreachable")


def test_a_tracker_that_is_whole_lacks_nothing_up_to_its_last_row() -> None:
    online = Reached(rows=5, whole=True)
    assert online.missing(Row(5, 0.0, {"loss": 1.0})) == {}
    assert online.missing(Row(6, 0.0, {"loss": 1.0})) == {"loss": 1.0}
    assert Reached(rows=5).missing(Row(5, 0.0, {"loss": 1.0})) == {"loss": 1.0}, "offline: it came late"


def test_wandb_online_says_itself_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbflow.infra.training.tracking import wandb_files, wandb_runs

    begun: list[dict[str, Any]] = []

    class Run(SimpleNamespace):
        def finish(self, exit_code: int) -> None:
            raise OSError("it hangs up")

    def init(**options: Any) -> Run:
        begun.append(options)
        return Run(resumed=len(begun) > 1, starting_step=6 if len(begun) > 1 else 0, summary={})

    monkeypatch.setattr(wandb_runs.wandb, "init", init)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb_files, "rows", lambda _: [(90, {"loss": 1.0})])
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    run = TrackedRun("r", "r", "0123456789abcdef", place=str(tmp_path))
    tracker = wandb_runs.WandbTracker(TrackTarget.parse("wandb:a"))
    id, reached = tracker.open(run)
    (tmp_path / "wandb" / "run-1" / f"run-{id}.wandb").touch()  # logged, and never uploaded
    assert reached == Reached(rows=-1, whole=True)
    again, reached = wandb_runs.WandbTracker(TrackTarget.parse("wandb:a")).open(run)
    assert again == id
    assert reached == Reached(rows=5, whole=True)
    other, _ = wandb_runs.WandbTracker(TrackTarget.parse("wandb:b")).open(run)
    assert other != id, "another project has a run of its own"
    with pytest.raises(OSError, match="hangs up"):
        tracker.close("finished")
    tracker.close("finished")


def test_no_secret_is_logged_not_even_in_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "http://ann:s3/cr%40et@host:5000/x"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:s3cr%40et@host:5000/x")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    try:
        try:
            raise ValueError(f"request to {address} failed, token t0ken")
        except ValueError:
            raise RuntimeError("password s3cr@et or s3cr%40et") from None
    except RuntimeError as error:
        found = (RuntimeError, error, error.__traceback__)
        error.__suppress_context__ = False
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "at %s", (address,), found)
    text = PublicFormatter("%(message)s").format(record)
    assert "Traceback" in text
    assert not [one for one in ("ann", "cr%40et", "s3cr@et", "t0ken") if one in text], text


@pytest.mark.processes
def test_a_process_that_dies_is_told_of_and_replaced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_MODULE", "no_such_module_of_ebbflow")
    record = TrackingRecord(StorageLocation(str(tmp_path)), "r")
    notes: list[str] = []
    begun = time.monotonic()
    one = Sender(
        TrackTarget.parse("mlflow:http://127.0.0.1:1"), TrackedRun("r", "r", "k"), record, notes.append
    )
    try:
        assert one.await_id(600.0) == ""
        one.end("finished")
        assert "ended with status 1" in one.await_end(600.0)
        assert time.monotonic() - begun < 250.0, "nobody is waited for who is gone"
    finally:
        one.kill()
    assert ["another begins" in note for note in notes] == [True, False]
