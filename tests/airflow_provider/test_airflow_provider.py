"""The provider in a real Airflow: discovery, a whole DAG, waits that end late, tasks that are ended."""

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.planners.capacity.values import Settings
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import CapacityChanged
from ebbflow.tasks.capacity.loop import CapacityLoop
from tests.airflow_provider.conftest import Airflow

ROOT = Path(__file__).parents[2]
TIMEOUT = 180.0  # seconds
Found = TypeVar("Found")


def eventually(look: Callable[[], Found], said: str, process: subprocess.Popen[bytes] | None = None) -> Found:
    """Return the first true value of ``look``; once a ``process`` that is to bring it about has ended, none comes."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end and (process is None or process.poll() is None):
        if found := look():
            return found
        time.sleep(0.1)
    raise AssertionError(f"never: {said}")


def left_over(airflow: Airflow) -> list[str]:
    """Return the processes of trainings that this test has begun: those with its home in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            ours = process.environ().get("EBBFLOW_HOME") == airflow.environment["EBBFLOW_HOME"]
            if ours and ("ebbflow.infra.training" in line or "trained.py" in line):
                found.append(line)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def test_airflow_finds_the_provider_and_its_kind_of_connection(airflow: Airflow) -> None:
    status, said = airflow.run("airflow", "providers", "get", "prefect-ebbflow", "--full", "--output", "json")
    assert status == 0, said
    assert "SQL queries and trainings" in said
    status, said = airflow.run("airflow", "providers", "hooks", "--output", "json")
    hooks = json.loads(said[said.index("[") :])
    assert [h for h in hooks if h["connection_type"] == "ebbflow" and h["hook_name"] == "Ebbflow ledger"], (
        said
    )


def test_a_dag_waits_for_capacity_runs_a_query_and_trains_on_its_result(airflow: Airflow) -> None:
    def arrive() -> None:
        time.sleep(20)  # of which starting Airflow takes most
        with Ledger.open(str(airflow.ledger), cluster="test") as ledger:
            ledger.lead("test").write([CapacityChanged(1, (Node("n1", 4, 8.0, gpus=2),))])

    Ledger.open(str(airflow.ledger), cluster="test").close()
    arriving = threading.Thread(target=arrive)
    arriving.start()
    found = airflow.dag("whole")
    arriving.join()
    assert {task: one["state"] for task, one in found.items()} == dict.fromkeys(
        ("wait", "query", "train"), "success"
    )
    room = {"nodes": 1, "gpus": 2, "cores": 4, "memory": 8.0, "free_gpus": 2, "free_cores": 4}
    assert found["wait"]["xcom"] == room
    result = found["query"]["xcom"]
    assert isinstance(result, dict)
    assert result["first"] == [{"name": "nation 0", "orders": 100}, {"name": "nation 1", "orders": 100}]
    assert (result["rows"], pq.read_table(result["result"]).num_rows) == (6, 6)
    trained = found["train"]["xcom"]
    assert isinstance(trained, dict)
    assert (trained["state"], trained["steps"], trained["metrics"]) == ("finished", 6, {"files": 1.0})
    assert re.fullmatch(r"whole\.train\.[A-Za-z0-9_.-]+", str(trained["run"]))
    assert left_over(airflow) == []


def test_a_wait_that_ends_too_late_fails_or_skips_as_it_was_asked_to(airflow: Airflow) -> None:
    with Ledger.open(str(airflow.ledger), cluster="test") as ledger:
        ledger.lead("test").write([CapacityChanged(1, (Node("n1", 4, 8.0, gpus=2),))])
    found = airflow.dag("late")
    assert {task: one["state"] for task, one in found.items()} == {"late": "failed", "skipped": "skipped"}


def test_bad_input_fails_for_good_whatever_the_retries(airflow: Airflow) -> None:
    assert airflow.dag("wrong")["query"]["state"] == "failed"


def test_a_query_that_gets_a_signal_is_stopped(airflow: Airflow) -> None:
    process = airflow.start("tests.airflow_provider.run_dag", "stopped_query")
    eventually(lambda: list(airflow.out.glob("store/data/*/*")), "a stage has begun")
    process.send_signal(signal.SIGTERM)
    process.wait(TIMEOUT)
    said = airflow.log.read_text()
    result = json.loads(next(x for x in said.splitlines() if x.startswith("RESULT ")).removeprefix("RESULT "))
    assert result["query"]["state"] == "failed", said
    assert "stopped; finished stages are kept" in said


def test_a_query_beyond_its_time_limit_is_stopped(airflow: Airflow) -> None:
    assert airflow.dag("late_query")["query"]["state"] == "failed"


def test_a_training_that_gets_a_signal_saves_and_another_try_goes_on(airflow: Airflow) -> None:
    process = airflow.start("tests.airflow_provider.run_dag", "stopped_training", AIRFLOW_VAR_STEPS="200")
    events = airflow.out / "runs" / "stopped" / "events.jsonl"
    eventually(lambda: events.is_file() and '"started"' in events.read_text(), "the training has begun")
    assert len(left_over(airflow)) >= 2
    process.send_signal(signal.SIGTERM)
    process.wait(TIMEOUT)
    said = airflow.log.read_text()
    assert "was stopped and has saved; another try resumes it" in said
    assert left_over(airflow) == []
    found = airflow.dag("stopped_training", AIRFLOW_VAR_STEPS="200")
    assert found["train"]["state"] == "success"
    trained = found["train"]["xcom"]
    assert isinstance(trained, dict)
    assert trained["steps"] == 200
    assert trained["lost_steps"] == 0
    report = json.loads((airflow.out / "runs" / "stopped" / "report.json").read_text())
    assert report["resumed_from"] is not None


def test_apps_of_a_cluster_run_on_its_leases_and_give_them_back_when_they_are_ended(
    airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBFLOW_HOME", airflow.environment["EBBFLOW_HOME"])  # where fleets are found
    pools = [LocalPool("gpu", "gpu", initial=1, max_nodes=1)]
    with (
        Ledger.open(str(airflow.ledger), cluster="test") as ledger,
        LocalFleet.start(pools, "airflow-test") as fleet,
        led(CapacityLoop(ledger, fleet, fleet, Settings(interval_s=1.0, scaling=None), evictor=fleet)),
    ):
        process = airflow.start("tests.airflow_provider.run_dag", "leased", AIRFLOW_VAR_STEPS="4000")
        eventually(
            lambda: [x for x in ledger.state().leases.values() if x.app == "leased"], "a lease", process
        )
        events = airflow.out / "runs" / "leased" / "events.jsonl"
        eventually(lambda: events.is_file() and '"started"' in events.read_text(), "the training has begun")
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT)
        said = airflow.log.read_text()
        assert "was stopped and has saved" in said
        eventually(lambda: not ledger.state().leases, "the lease has been given back")
        apps = {record.spec.team: record for record in ledger.state().apps.values()}
        assert (apps["models"].phase, apps["data"].phase) == ("stopped", "finished")
        assert apps["models"].checkpoint


@contextmanager
def led(loop: CapacityLoop) -> Iterator[None]:
    """Run a capacity loop in a thread."""
    stop = threading.Event()
    thread = threading.Thread(target=loop.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(150)


def test_the_example_is_a_dag_of_three_tasks(airflow: Airflow) -> None:
    example = str(ROOT / "examples" / "airflow_dag.py")
    (airflow.out / "look.py").write_text(
        f"import runpy\nprint('TASKS', sorted(runpy.run_path({example!r})['nightly'].task_ids))\n"
    )
    _, said = airflow.run("look", PYTHONPATH=f"{airflow.out}:{ROOT}")
    assert "TASKS ['features', 'train', 'wait_for_gpus']" in said, said
