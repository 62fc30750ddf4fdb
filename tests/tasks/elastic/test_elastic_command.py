"""Elastic jobs as the command line runs them."""

from pathlib import Path

import numpy as np
import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.tasks.elastic.request import ElasticRequest
from ebbflow.tasks.elastic.run import generate_data, parse_fault, run_elastic
from ebbflow.tasks.faults import Fault

pytestmark = pytest.mark.processes


def test_changes() -> None:
    assert parse_fault("10s:resize:4") == Fault(10.0, "resize", count=4)
    assert parse_fault("2.5s:kill:n1") == Fault(2.5, "kill", "n1")
    assert parse_fault("3s:leave:n12") == Fault(3.0, "leave", "n12")
    with pytest.raises(OptionError, match=r"a fault of an elastic job is TIME:VERB.*; got '10:4'"):
        parse_fault("10:4")
    with pytest.raises(OptionError, match=r"workers are called n1, n2, \.\.\.; got 'gpu-1'"):
        parse_fault("1s:kill:gpu-1")


@pytest.mark.parametrize("app", ["mlr", "kmeans", "lda"])
def test_a_run_whose_workers_change(app: str, tmp_path: Path) -> None:
    said: list[str] = []
    faults = (Fault(0.0, "resize", count=2), Fault(1.0, "kill", "n1"))
    request = ElasticRequest(app, classes=4, executors=4, iterations=3, workers=1, faults=faults)
    report = run_elastic(request, tmp_path, said.append)
    assert len(report["history"]) == 3
    assert np.isfinite(report["objective"])
    assert [event["kind"] for event in report["events"]][-1] == "finished"
    assert len(said) == len(report["events"])


def test_without_a_snapshot_a_run_starts_again(tmp_path: Path) -> None:
    generate_data("mlr", 3, tmp_path / "data.npz")
    request = ElasticRequest(
        "mlr", str(tmp_path / "data.npz"), 3, 4, 5, workers=1, state_dir=str(tmp_path / "job")
    )
    first = run_elastic(request, tmp_path, lambda _: None)
    again = ElasticRequest(
        "mlr", str(tmp_path / "data.npz"), 3, 4, 5, workers=1, state_dir=str(tmp_path / "job"), resume=True
    )
    assert run_elastic(again, tmp_path, lambda _: None)["objective"] == first["objective"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"app": "svm"},
            "app must be one of mlr, kmeans, lda, or FILE.py:CLASS of the user's own; got 'svm'",
        ),
        ({"app": "mlr", "executors": 0}, "executors must be >= 1; got 0"),
        ({"app": "lda", "iterations": 1, "partial_recovery": True}, "Lda does not allow"),
    ],
)
def test_requests_that_cannot_run(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        run_elastic(ElasticRequest(**arguments), tmp_path, lambda _: None)  # type: ignore[arg-type]


def test_data_that_does_not_fit(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", z=np.zeros(3))
    for data, words in (
        (tmp_path / "other.npz", "it lacks the arrays x, y"),
        (tmp_path / "none.npz", "No such file"),
    ):
        with pytest.raises(OptionError, match=words):
            run_elastic(ElasticRequest("mlr", str(data)), tmp_path, lambda _: None)
