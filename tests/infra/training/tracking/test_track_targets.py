"""Which trackers a text names, and which it must not."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.training.tracking import targets
from ebbflow.infra.training.tracking.targets import TrackTarget, checked
from ebbflow.planners.errors import OptionError


@pytest.mark.parametrize(
    ("text", "place", "experiment"),
    [
        ("mlflow", "", "ebbflow"),
        ("mlflow:#fits", "", "fits"),
        ("mlflow:http://localhost:5000", "http://localhost:5000", "ebbflow"),
        ("mlflow:https://track.example/mlflow#My fits", "https://track.example/mlflow", "My fits"),
        ("mlflow:sqlite:////data/m.db#a", "sqlite:////data/m.db", "a"),
        ("mlflow:/data/tracking", "sqlite:////data/tracking/mlflow.db", "ebbflow"),
        ("mlflow:databricks#a", "databricks", "a"),
    ],
)
def test_a_place_of_mlflow(text: str, place: str, experiment: str) -> None:
    target = TrackTarget.parse(text)
    assert (target.place, target.experiment) == (place, experiment)
    assert TrackTarget.parse(str(target)) == target


def test_a_directory_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (recorded,) = checked(("mlflow:here#e",))
    monkeypatch.chdir("/")
    assert TrackTarget.parse(recorded).place == f"sqlite:///{tmp_path}/here/mlflow.db"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "mlflow:URI_OR_DIR"),
        ("comet:mine", "mlflow:URI_OR_DIR"),
        ("mlflow:ftp://host/x", "begin with one of"),
        ("mlflow:http://", "name a host"),
        ("mlflow:http://host:port", "address"),
        ("mlflow:http://ann:s3cret@host/x", "MLFLOW_TRACKING_PASSWORD"),
        ("mlflow:postgresql://ann:s3cret@host/x", "MLFLOW_TRACKING_URI"),
        ("mlflow:https://host/x?token=s3cret", "MLFLOW_TRACKING_TOKEN"),
        ("mlflow:http://host#", "experiment"),
        ("mlflow:http://host#a/b", "experiment"),
        ("wandb", "wandb:PROJECT"),
        ("wandb:", "wandb:PROJECT"),
        ("wandb:a/b/c", "wandb:PROJECT"),
        ("wandb:with space", "wandb:PROJECT"),
    ],
)
def test_what_names_no_tracker_is_refused_and_no_secret_is_told(text: str, rule: str) -> None:
    with pytest.raises(OptionError) as raised:
        TrackTarget.parse(text)
    assert rule in str(raised.value)
    assert "s3cret" not in str(raised.value)


def test_a_tracker_is_named_once() -> None:
    with pytest.raises(OptionError, match="names wandb:a twice"):
        checked(("wandb:a", "wandb:b", "wandb:a"))


@given(st.text(max_size=60))
def test_any_text_is_a_tracker_that_reads_as_itself_or_an_error(text: str) -> None:
    for kind in ("mlflow:", "wandb:", ""):
        try:
            target = TrackTarget.parse(kind + text)
        except OptionError:
            continue
        assert TrackTarget.parse(str(target)) == target


def test_a_missing_package_is_told_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_MODULES", {"mlflow": "no_such_mlflow", "wandb": "no_such_wandb"})
    for text, extra in (("mlflow:http://h", "mlflow"), ("wandb:p", "wandb")):
        with pytest.raises(EngineUnavailableError, match=rf"pip install 'prefect-ebbflow\[{extra}\]'"):
            TrackTarget.parse(text).check_ready()


def test_mlflow_without_a_place_takes_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(OptionError, match="MLFLOW_TRACKING_URI"):
        TrackTarget.parse("mlflow").check_ready()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:s3cret@host")
    TrackTarget.parse("mlflow").check_ready()
