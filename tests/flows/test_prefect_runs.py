"""Flow runs in processes of their own, cancelled by the API or killed: nothing is left, and what was lost goes on."""

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from flowcases import eventually, run_cli
from prefect_home import HEAVY, LONG, Home, processes, seconds_until

from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import LocalFleet
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.tasks.apps.loop_report import STOP, stop_request

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

_ROOT = Path(__file__).parents[2]
FEEDBACK = "resource-feedback"


def soon() -> float:
    """Return the seconds in which nothing of a cancelled run is left: a few, and more where others wait for cores."""
    return 20.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.fixture
def home(prefect: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The tests' own processes and the flow runs share one folder, as on one machine."""
    monkeypatch.setenv("EBBFLOW_HOME", prefect.environment["EBBFLOW_HOME"])
    yield Path(prefect.environment["EBBFLOW_HOME"])
    prefect.end_all()


def cancelled(prefect: Home, run: str) -> float:
    """Cancel a run; return after how many seconds no process of it was left."""
    prefect.cancel(run)
    took = seconds_until(lambda: not processes(run))
    assert prefect.ended(run) == "CANCELLED", prefect.log()
    return took


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("home")
class TestCancelling:
    @pytest.mark.parametrize("engine", ["duckdb", pytest.param("spark", marks=pytest.mark.spark)])
    def test_a_query_that_is_an_app(self, prefect: Home, tmp_path: Path, engine: str) -> None:
        file = str(tmp_path / "ledger.db")
        with Ledger.open(file, cluster="lab") as ledger:
            run = prefect.run(
                "run-query/query",
                sql=HEAVY,
                tables=str(prefect.folder / "tables"),
                engine=engine,
                store=str(tmp_path / "store"),
                ledger=file,
                cluster="lab",
                app="heavy",
            )
            eventually(lambda: _phase(ledger, "heavy") == "running", LONG)
            eventually(lambda: [one for one in prefect.task_runs(run) if one["name"] != FEEDBACK], LONG)
            assert cancelled(prefect, run) < soon()
            assert _phase(ledger, "heavy") == "stopped"

    def test_an_app_that_the_command_cancels(self, prefect: Home, tmp_path: Path) -> None:
        file = str(tmp_path / "ledger.db")
        where = {"ledger": file, "cluster": "lab"}
        with Ledger.open(file, cluster="lab") as ledger:
            given = {"sql": HEAVY, "tables": str(prefect.folder / "tables"), "engine": "duckdb"}
            run = prefect.run("run-query/query", store=str(tmp_path / "store"), app="told", **given, **where)
            eventually(lambda: _phase(ledger, "told") == "running", LONG)
            words = ["apps", "cancel", "told", "--yes", "--ledger", file, "--cluster", "lab"]
            done = run_cli(*words, PREFECT_API_URL=prefect.url)
            assert done.returncode == 0, done.stderr
            assert f"flow run {run} is Cancelling" in done.stderr
            assert prefect.ended(run) == "CANCELLED"
            assert _phase(ledger, "told") == "stopped"

    def test_a_training_is_saved(self, prefect: Home, tmp_path: Path) -> None:
        since = len(prefect.log())
        run = prefect.run(
            "train/train",
            script=str(prefect.folder / "digits.py"),
            arguments=["--epochs", "5000"],
            nodes="local:2x1",
            run_id="cancelled",
            runs_dir=str(tmp_path),
        )
        eventually(lambda: len(processes(run)) >= 3, LONG)  # its own, and two of the training
        eventually(lambda: "epoch 1, step" in prefect.log(since), LONG)  # the metrics of an epoch
        assert cancelled(prefect, run) < soon()
        report = json.loads((tmp_path / "cancelled" / "report.json").read_text())
        assert report["state"] == "stopped"
        assert report["steps"] > 0
        assert {task["state_type"] for task in prefect.task_runs(run)} == {"COMPLETED"}

    def test_a_search(self, prefect: Home, tmp_path: Path) -> None:
        run = prefect.run(
            "tune/tune",
            script=str(prefect.folder / "digits.py"),
            space={"pause": {"float": [0.01, 0.02]}},
            arguments=["--epochs", "5000"],
            nodes="local:1x1",
            trials=3,
            run_id="searched",
            runs_dir=str(tmp_path),
        )
        eventually(lambda: len(processes(run)) >= 2, LONG)
        assert cancelled(prefect, run) < 2 * soon()
        assert json.loads((tmp_path / "searched" / "report.json").read_text())["state"] == "stopped"

    def test_a_pipeline_with_its_nodes(self, prefect: Home, tmp_path: Path) -> None:
        run = prefect.run(
            "run-pipeline/pipeline",
            file=str(prefect.folder / "pipeline.yaml"),
            id="cut",
            folder=str(tmp_path),
        )
        record = tmp_path / "cut" / "run.json"
        eventually(
            lambda: record.exists() and json.loads(record.read_text())["steps"]["fit"]["state"] == "running",
            LONG,
        )
        assert cancelled(prefect, run) < 2 * soon()
        with Ledger.open(str(tmp_path / "cut" / "ledger.db"), cluster="cut") as ledger:
            assert not ledger.state().leases
        assert json.loads(record.read_text())["steps"]["fit"]["state"] == "stopped"


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("home")
def test_a_training_on_leases_is_cancelled_killed_and_gone_on_with(prefect: Home, tmp_path: Path) -> None:
    file = str(tmp_path / "ledger.db")
    where = {"ledger": file, "cluster": "lab"}
    fleet = LocalFleet.start([LocalPool("gpu", "gpu", min_nodes=2, max_nodes=2)], "lab")
    try:
        with Ledger.open(file, cluster="lab") as ledger:
            loop = prefect.run(
                "capacity-loop/capacity",
                source="local:lab",
                config=str(prefect.folder / "fleet.toml"),
                **where,
            )
            eventually(lambda: len(ledger.state().nodes) == 2, LONG)
            given = {
                "script": str(prefect.folder / "digits.py"),
                "nodes": "local:2x1",
                "runs_dir": str(tmp_path / "runs"),
                "fleet": "local:lab",
                **where,
            }
            # cancelled: its leases are free again
            first = prefect.run("train/train", run_id="first", arguments=["--epochs", "5000"], **given)
            eventually(lambda: _phase(ledger, "first") == "running", LONG)
            assert cancelled(prefect, first) < soon()
            assert seconds_until(lambda: not ledger.state().held("first")) < soon()
            assert _phase(ledger, "first") == "stopped"

            # killed with its worker: only the ledger can tell
            second = prefect.run("train/train", run_id="second", arguments=["--epochs", "60"], **given)
            eventually(lambda: _phase(ledger, "second") == "running", LONG)
            resumed = _killed_and_gone_on_with(prefect, ledger, second, "second", "second")
            assert resumed["parameters"]["resume"] is True
            _end_loop(prefect, ledger, loop)
    finally:
        fleet.down()


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("home")
def test_a_pipeline_on_a_cluster_that_is_there_is_killed_and_gone_on_with(
    prefect: Home, tmp_path: Path
) -> None:
    ledger_file, script = str(tmp_path / "ledger.db"), str(prefect.folder / "digits.py")
    file = tmp_path / "pair.yaml"
    content = {
        "name": "pair",
        "cluster": {"existing": {"ledger": ledger_file, "name": "lab", "fleet": "lab"}},
        "trainings": {
            "first": {"script": script, "arguments": ["--epochs", "1"]},
            "second": {"script": script, "arguments": ["--epochs", "60"], "after": "first"},
        },
    }
    file.write_text(yaml.safe_dump(content))
    where = {"ledger": ledger_file, "cluster": "lab"}
    fleet = LocalFleet.start([LocalPool("gpu", "gpu", min_nodes=1, max_nodes=1)], "lab")
    try:
        with Ledger.open(ledger_file, cluster="lab") as ledger:
            loop = prefect.run(
                "capacity-loop/capacity",
                source="local:lab",
                config=str(prefect.folder / "fleet.toml"),
                **where,
            )
            eventually(lambda: ledger.state().nodes, LONG)
            run = prefect.run("run-pipeline/pipeline", file=str(file), run_id="two", runs_dir=str(tmp_path))
            eventually(lambda: _phase(ledger, "two.second") == "running", LONG)
            resumed = _killed_and_gone_on_with(prefect, ledger, run, "two", "two.second")
            given = resumed["parameters"]
            assert (given["resume"], given["folder"], given["file"]) == ("two", str(tmp_path), None)
            steps = json.loads((tmp_path / "two" / "run.json").read_text())["steps"]
            assert {name: (one["state"], one["attempts"]) for name, one in steps.items()} == {
                "first": ("finished", 1),
                "second": ("finished", 2),
            }
            _end_loop(prefect, ledger, loop)
    finally:
        fleet.down()


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("home")
def test_a_training_outlives_its_worker(prefect: Home, tmp_path: Path) -> None:
    """The worker alone is killed: nobody reads what the run prints, and the run says itself how it ended."""
    since = len(prefect.log())
    run = prefect.run(
        "train/train",
        script=str(prefect.folder / "digits.py"),
        arguments=["--epochs", "20"],
        nodes="local:1x1",
        preflight="never",
        run_id="outlives",
        runs_dir=str(tmp_path),
    )
    eventually(lambda: "epoch 1, step" in prefect.log(since), LONG)
    prefect.kill_worker()
    try:
        assert prefect.ended(run) == "COMPLETED"
    finally:
        prefect.start_worker()
    report = json.loads((tmp_path / "outlives" / "report.json").read_text())
    assert (report["state"], report["steps"], len(report["generations"])) == ("finished", 320, 1)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("home")
def test_a_training_goes_on_while_the_server_is_away(prefect: Home, tmp_path: Path) -> None:
    since = len(prefect.log())
    run = prefect.run(
        "train/train",
        script=str(prefect.folder / "digits.py"),
        arguments=["--epochs", "200"],
        nodes="local:1x1",
        run_id="alone",
        runs_dir=str(tmp_path),
    )
    eventually(lambda: "epoch 1, step" in prefect.log(since), LONG)
    prefect.kill_server()
    eventually(lambda: "the artifact ebbflow-training was not published" in prefect.log(since), LONG)
    prefect.start_server()
    assert prefect.ended(run) == "COMPLETED", prefect.log(since)
    assert json.loads((tmp_path / "alone" / "report.json").read_text())["state"] == "finished"
    assert "ebbflow-generations" in {one["key"] for one in prefect.artifacts(run)}


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("home")
def test_a_loop_that_is_cancelled_stays_away_and_one_that_crashes_is_begun_again(prefect: Home) -> None:
    fleet = LocalFleet.start([LocalPool("gpu", "gpu", min_nodes=1, max_nodes=1)], "spare")
    try:
        with Ledger.open(str(prefect.folder / "spare.db"), cluster="spare") as ledger:

            def led() -> bool:
                leader = ledger.leader()
                return leader is not None and leader.alive(ledger.clock.now())

            first = prefect.run("capacity-loop/capacity")
            eventually(lambda: ledger.state().nodes, LONG)
            other = prefect.run("capacity-loop/capacity")
            assert prefect.ended(other) == "CANCELLED"  # there is one
            assert prefect.state(first) == "RUNNING"
            assert cancelled(prefect, first) < soon()
            assert not led()

            second = prefect.run("capacity-loop/capacity")
            eventually(lambda: ledger.state().token == 2, LONG)
            for process in processes(second):
                process.kill()
            assert prefect.ended(second) == "CRASHED"
            eventually(lambda: ledger.state().token == 3, LONG)  # begun by the deployment's trigger
            body = {
                "flow_runs": {
                    "state": {"type": {"any_": ["RUNNING"]}},
                    "name": {"any_": ["capacity of spare"]},
                }
            }
            (third,) = prefect.get("post", "/flow_runs/filter", json=body)
            assert third["id"] not in (first, second)
            assert cancelled(prefect, third["id"]) < soon()
    finally:
        fleet.down()


@pytest.fixture(scope="module")
def _automations(prefect: Home) -> None:
    prefect.prefect("automation", "create", "--from-file", _ROOT / "examples" / "automations.yaml")


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("home", "_automations")
def test_a_loop_whose_machine_is_gone_is_marked_and_begun_again(prefect: Home) -> None:
    """Nobody is left to say that the run has crashed: its heartbeats stop, the automation marks it."""
    fleet = LocalFleet.start([LocalPool("gpu", "gpu", min_nodes=1, max_nodes=1)], "spare")
    try:
        with Ledger.open(str(prefect.folder / "spare.db"), cluster="spare") as ledger:
            before = ledger.state().token
            gone = prefect.run("capacity-loop/capacity")
            eventually(lambda: ledger.state().token > before, LONG)
            beats = {
                "event": {"name": ["prefect.flow-run.heartbeat"]},
                "resource": {"id": [f"prefect.flow-run.{gone}"]},
            }
            eventually(lambda: prefect.get("post", "/events/filter", json={"filter": beats})["total"], LONG)
            prefect.kill_worker()
            for process in processes(gone):
                process.kill()
            assert prefect.state(gone) == "RUNNING"
            prefect.start_worker()
            token = ledger.state().token
            eventually(lambda: prefect.state(gone) == "CRASHED", 2 * LONG)
            eventually(lambda: ledger.state().token > token, 2 * LONG)
            leader = ledger.leader()
            assert leader is not None
            assert cancelled(prefect, leader.holder.rpartition(" ")[2]) < soon()
    finally:
        fleet.down()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_automations")
def test_an_automation_acts_once_for_many_events(prefect: Home) -> None:
    """Three failures of a training's deployment within the hour pause it; two do not."""
    assert {one["name"] for one in prefect.get("post", "/automations/filter", json={})} >= {
        "ebbflow-failing-training",
        "ebbflow-silent-loop",
        "ebbflow-silent-runs",
    }
    deployment = prefect.get("get", "/deployments/name/train/train")["id"]

    def paused() -> bool:
        return bool(prefect.get("get", f"/deployments/{deployment}")["paused"])

    def fail() -> None:
        event = {
            "id": str(uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": "ebbflow.training.failed",
            "resource": {"prefect.resource.id": "ebbflow.training.fit"},
            "related": [
                {
                    "prefect.resource.id": f"prefect.deployment.{deployment}",
                    "prefect.resource.role": "deployment",
                }
            ],
        }
        prefect.get("post", "/events", json=[event])

    def recorded() -> int:
        wanted = {"filter": {"event": {"name": ["ebbflow.training.failed"]}}}
        return int(prefect.get("post", "/events/filter", json=wanted)["total"])

    fail()
    fail()
    eventually(lambda: recorded() == 2, LONG)
    assert not paused()
    fail()
    eventually(paused, LONG)
    prefect.get("post", f"/deployments/{deployment}/resume_deployment")


def _phase(ledger: Ledger, app: str) -> str:
    record = ledger.state().apps.get(app)
    return record.phase if record is not None else ""


def _tagged(prefect: Home, tag: str) -> list[dict[str, Any]]:
    body = {"flow_runs": {"tags": {"all_": [tag]}}}
    found: list[dict[str, Any]] = prefect.get("post", "/flow_runs/filter", json=body)
    return found


def _killed_and_gone_on_with(prefect: Home, ledger: Ledger, run: str, name: str, app: str) -> dict[str, Any]:
    """Kill a run with its worker, so that only the ledger can tell, and return the run that has gone on with it."""
    prefect.kill_worker()
    for process in processes(run):
        if "prefect" in " ".join(process.cmdline()):
            process.kill()
    assert prefect.state(run) == "RUNNING"
    assert prefect.ended(run) == "CRASHED"
    tag = f"ebbflow-resumes:lab:{name}"
    eventually(lambda: _tagged(prefect, tag), LONG)
    prefect.start_worker()
    eventually(lambda: _phase(ledger, app) == "finished", 2 * LONG)
    (resumed,) = _tagged(prefect, tag)
    assert prefect.ended(resumed["id"]) == "COMPLETED", prefect.log()
    eventually(lambda: not ledger.state().leases, LONG)
    assert not ledger.verify()
    return resumed


def _end_loop(prefect: Home, ledger: Ledger, loop: str) -> None:
    """End a loop that was started by a worker that is gone: it is asked to."""
    leader = ledger.leader()
    assert leader is not None
    ledger.report(STOP, stop_request(leader.token, ledger.clock.now()))
    assert prefect.ended(loop) == "COMPLETED"
