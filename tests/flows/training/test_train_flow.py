"""``train`` under a Prefect server, on a launcher without processes: artifacts, events, states."""

from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import TrainingError
from tests.training_fakes import Act, FakeSite, ScriptedClock, failed

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def acted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the flow; its generations go as the test says."""
    script = tmp_path / "train.py"
    script.write_text("")

    def run(*acts: Act, **options: Any) -> Any:
        from ebbflow.flows.training.flow import train

        clock = ScriptedClock()
        monkeypatch.setattr(
            "ebbflow.tasks.training.sites.LocalSite", lambda request: FakeSite(*acts, clock=clock)
        )
        monkeypatch.setattr("ebbflow.tasks.training.run.SystemClock", lambda: clock)
        return train(str(script), runs_dir=str(tmp_path), nodes="local:2x1", preflight="never", **options)

    return run


def published() -> tuple[Any, dict[str, list[Any]]]:
    """Return the newest flow run, and its artifacts by key."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        run = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)[0]
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        found: dict[str, list[Any]] = {}
        for artifact in client.read_artifacts(artifact_filter=wanted):
            found.setdefault(str(artifact.key), []).append(artifact)
    return run, found


def test_a_run_is_on_record_with_live_figures(acted: Any) -> None:
    report = acted(
        Act("lost", gone=("node-2",), seconds=30.0),
        Act(seconds=30.0, metrics={"accuracy": 0.9}),
        run_id="flow-1",
        price=2.0,
    )
    assert report.state == "finished"
    assert [g.gpus for g in report.generations] == [2, 1]
    run, artifacts = published()
    assert run.name == "train flow-1"
    assert run.state is not None
    assert run.state.is_completed()
    assert set(artifacts) == {"ebbflow-training", "ebbflow-generations", "ebbflow-training-speed"}
    versions = artifacts["ebbflow-training"]
    assert len(versions) >= 2  # a live one at least, and the totals
    said = " ".join(str(version.data) for version in versions)
    for word in (
        "goodput",
        "throughput",
        "batch",
        "noise scale",
        "GPUs",
        "lost steps",
        "dollars",
        "$ so far",
        "accuracy",
    ):
        assert word in said
    assert "node-lost" in str(artifacts["ebbflow-generations"][0].data)


def test_a_failed_run_is_a_failed_flow(acted: Any) -> None:
    with pytest.raises(TrainingError, match="semantic-error"):
        acted(failed("TypeError: no"), run_id="flow-2")
    run, artifacts = published()
    assert run.state is not None
    assert run.state.is_failed()
    assert "semantic-error" in str(artifacts["ebbflow-generations"][0].data)
