"""One run in each tracker over three kills and a resume elsewhere; trackers that are out of order."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.training.tracking import wandb_files
from ebbflow.infra.training.tracking.record import FILE, entry_of
from ebbflow.tasks.training.report import EventReport, PointReport, TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training
from ebbflow.tasks.training.tracking import following
from ebbflow.tasks.training.tracking.following import Tracking
from tests.mlflow_server import hanging, serving

pytestmark = pytest.mark.processes

SCRIPT = """
import os, sys, time
from pathlib import Path

import torch
from ebbflow import ElasticRun

data = torch.arange(64.0).view(-1, 1) / 64
Path(sys.argv[1]).write_text(os.environ.get("MLFLOW_RUN_ID", ""))
with ElasticRun.start(seed=1) as run:
    model, _ = run.prepare(torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1), batch_size=8)
    for _ in run.epochs(12):
        for inputs, wanted in run.batches((data, 2 * data)):
            late = run.progress.step >= 60 and not Path(sys.argv[2]).exists()
            time.sleep(0.5 if late else 0.05)  # slow until the file of this name is there
            run.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
            run.step()
        run.report(slope=float(next(model.parameters()).detach()))
"""

LAUNCH = """
import sys
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training
from ebbflow.tasks.training.tracking import following

following.AWAIT_ID = 120.0
script, runs, *rest = sys.argv[1:]
run_training(
    TrainingRequest(
        script, tuple(rest), run_id="r", runs_dir=runs, track=("mlflow:trk#fits", "wandb:fits"), preflight="never",
        price=3.0, retry_backoff=0.1, checkpoint_interval=0.5,
        fault=("1s:kill:node-1", "1s:add:1", "2s:kill:node-2", "2s:add:1"),
    )
)
"""


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Return the values of a run's record, as written so far."""
    if not (folder / FILE).exists():
        return []
    found = [entry_of(line) or {} for line in (folder / FILE).read_bytes().splitlines(keepends=True)]
    return [one for one in found if one.get("kind") == "values"]


def await_that(is_so: Callable[[], object], seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come to be in time"
        time.sleep(0.05)


def test_one_run_over_three_kills_and_a_resume_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    here, there, folder = tmp_path / "here", tmp_path / "there", tmp_path / "runs" / "r"
    here.mkdir()
    there.mkdir()
    script, seen, go = tmp_path / "train.py", tmp_path / "id", tmp_path / "go"
    script.write_text(SCRIPT)
    command = [sys.executable, "-P", "-c", LAUNCH, str(script), str(tmp_path / "runs"), str(seen), str(go)]
    launcher = subprocess.Popen([*command, "--api-token", "s3cret"], cwd=here)
    try:
        await_that(lambda: any(e["values"].get("ebbflow/lost_nodes", 0) >= 2 for e in recorded(folder)))
        await_that(lambda: recorded(folder)[-1]["step"] >= 60)
        launcher.send_signal(signal.SIGKILL)
    finally:
        launcher.kill()
        launcher.wait()
    go.touch()
    monkeypatch.chdir(there)
    report = run_training(TrainingRequest.load(str(tmp_path / "runs"), "r"), resume=True)
    assert (report.state, report.steps) == ("finished", 96), report.reason
    assert not [event for event in report.events if event.kind == "tracking"]

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{here}/trk/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'fits'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_id == seen.read_text(), "the script knows where its own values go"
    truth: dict[str, list[tuple[int, float]]] = {}
    for entry in recorded(folder):
        for key, value in entry["values"].items():
            truth.setdefault(key, []).append((entry["step"], value))
    for key, values in truth.items():
        found = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, key)]
        steps = [step for step, _ in found]
        assert steps == sorted(set(steps)), f"{key} increases, and nothing is twice"
        assert sorted(found) == values, f"{key} is whole"
    assert [step for step, _ in truth["slope"]] == list(range(8, 97, 8)), "no epoch is missing"

    rows: dict[str, list[tuple[int, float]]] = {}
    logs = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(logs) == 2, "one for each launcher"
    assert len({path.name for path in logs}) == 1, "of one run"
    steps = []
    for path in logs:
        for step, said in wandb_files.rows(path):
            steps.append(step)
            for key, value in said.items():
                rows.setdefault(key, []).append((step, value))
    assert steps == sorted(set(steps))
    assert {key: dict(values).keys() for key, values in rows.items()} == {
        key: dict(values).keys() for key, values in truth.items()
    }
    for key, values in truth.items():
        assert [value for _, value in rows[key]] == pytest.approx([value for _, value in values])

    params, tags = run.data.params, run.data.tags
    assert params["ebbflow/nodes"] == "local:1x1"
    assert params["arguments/api-token"] == "..."
    assert tags["ebbflow.model.step"] == "96"
    manifest = Path(tags["ebbflow.model.uri"].removeprefix("file://")) / "manifest.json"
    assert json.loads(manifest.read_text())["sha256"] == tags["ebbflow.model.sha256"]
    assert tags["ebbflow.state"] == "finished"
    assert int(tags["ebbflow.lost_nodes"]) >= 2
    assert int(tags["ebbflow.restarts"]) >= 2, "one may have been lost before it began"
    assert float(tags["ebbflow.seconds_lost"]) > 1.0
    assert float(tags["ebbflow.dollars"]) > report.dollars > 0, "what earlier launchers have paid counts"
    config = {
        item.key or ".".join(item.nested_key): item.value_json
        for record in wandb_files.records(logs[-1])
        if record.WhichOneof("record_type") == "config"
        for item in record.config.update
    }
    assert json.loads(config["ebbflow.model.sha256"]) == tags["ebbflow.model.sha256"]
    for path in [here / "trk" / "mlflow.db", *folder.rglob("tracking*"), *folder.rglob("*.wandb")]:
        assert b"s3cret" not in path.read_bytes(), path

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{here}/trk/mlflow.db")
    monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
    import mlflow

    mlflow.log_metric("mine", 1.0, step=96)  # as a script may
    mlflow.end_run()
    assert client.get_run(run.info.run_id).data.metrics["mine"] == 1.0


def end_of(request: TrainingRequest, steps: int) -> TrainingReport:
    return TrainingReport(
        request.run_id,
        request.script,
        request.run_directory,
        0.0,
        1.0,
        "finished",
        "the script finished",
        steps=steps,
    )


def test_a_server_that_never_answers_holds_nothing_up_and_gets_all_later(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "AWAIT_ID", 0.1)
    monkeypatch.setattr(following, "SETTLE", 200.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret")
    notes: list[str] = []
    with hanging() as (port, asked):
        request = TrainingRequest(
            script, run_id="r", runs_dir=str(tmp_path), track=(f"mlflow:http://127.0.0.1:{port}",)
        )
        tracking = Tracking(request, SystemClock(), {"query": "abc"})
        tracking._notify = notes.append
        assert tracking.variables() == {}
        for step in range(1, 2001):
            tracking.point(PointReport(at=step / 10, step=step, loss=1.0 / step))
            if step == 1000:
                tracking.event(EventReport(0.0, "node-lost", "node-1 was lost", "node-1"))
        assert asked.wait(200)
        await_that(lambda: tracking.tick() or notes)
        assert "does not take the run's values, which are kept" in notes[0]
        assert "s3cret" not in "".join(notes)
    with serving(port, tmp_path / "mlflow.db") as store:
        tracking.finish(end_of(request, 2000))
        (run,) = store.search_runs([store.get_experiment_by_name("ebbflow").experiment_id])
        assert run.info.status == "FINISHED"
        history = store.get_metric_history(run.info.run_id, "loss")
        assert [(one.step, one.value) for one in history] == [(n, 1.0 / n) for n in range(1, 2001)]
        assert run.data.tags["ebbflow.query"] == "abc"
        assert run.data.tags["ebbflow.lost_nodes"] == "1"
    assert any("is reached again" in note for note in notes)


def test_what_a_tracker_lacks_at_the_end_is_told_and_reaches_it_with_the_next_launcher(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "SETTLE", 0.1)
    monkeypatch.setattr(following, "AWAIT_ID", 200.0)
    notes: list[str] = []
    with hanging() as (port, _):
        pass  # nobody listens there
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://ann:s3cret@127.0.0.1:{port}")
    request = TrainingRequest(script, run_id="r", runs_dir=str(tmp_path), track=("mlflow",))
    tracking = Tracking(request, SystemClock(), {})
    tracking._notify = notes.append
    assert tracking.variables() == {}, "it waits no longer than until the server is known to be down"
    tracking.point(PointReport(at=1.0, step=1, loss=1.0))
    tracking.finish(end_of(request, 1))
    assert "mlflow lacks the run's last values, which the run's directory keeps" in notes[-1]
    said = (tmp_path / "r" / "tracking-mlflow.log").read_text()
    assert "Traceback" in said
    assert "s3cret" not in said + "".join(notes)
    monkeypatch.setattr(following, "SETTLE", 200.0)
    with serving(port, tmp_path / "mlflow.db") as store:
        again = Tracking(request, SystemClock(), {})
        again.point(PointReport(at=1.0, step=1, loss=7.0))
        again.point(PointReport(at=2.0, step=2, loss=0.5))
        assert again.variables()["MLFLOW_RUN_ID"]
        again.finish(end_of(request, 2))
        (run,) = store.search_runs([store.get_experiment_by_name("ebbflow").experiment_id])
        history = store.get_metric_history(run.info.run_id, "loss")
        assert [(one.step, one.value) for one in history] == [(1, 1.0), (2, 0.5)]


def test_without_its_package_a_run_does_not_begin(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbflow.infra.errors import EngineUnavailableError
    from ebbflow.infra.training.tracking import targets

    monkeypatch.setattr(targets, "_MODULES", {"mlflow": "no_such_mlflow", "wandb": "no_such_wandb"})
    request = TrainingRequest(script, run_id="r", runs_dir=str(tmp_path / "runs"), track=("wandb:p",))
    with pytest.raises(EngineUnavailableError, match=r"prefect-ebbflow\[wandb\]"):
        run_training(request)
    assert not (tmp_path / "runs").exists()
    assert os.environ.get("WANDB_RUN_ID") is None
