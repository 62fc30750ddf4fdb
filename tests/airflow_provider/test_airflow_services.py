"""All of Airflow running: scheduler, triggerer, API server. The triggerer carries the wait, the API ends a task."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ebbflow.infra.ledger import Ledger
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import CapacityChanged
from tests.airflow_provider.conftest import Airflow
from tests.airflow_provider.test_airflow_provider import eventually, left_over
from tests.free_ports import free_port


@dataclass(frozen=True)
class Services:
    """A running Airflow, by its API."""

    airflow: Airflow
    url: str
    client: httpx.Client

    def call(self, method: str, path: str, **more: Any) -> Any:
        """Call the API and return its answer."""
        answer = self.client.request(method, f"{self.url}/api/v2/{path}", **more)
        assert answer.is_success, answer.text
        return answer.json()

    def start(self, dag: str) -> str:
        """Start a DAG and return the id of its run."""
        path = f"{self.url}/api/v2/dags/{dag}"
        eventually(lambda: self.client.get(path).is_success, f"{dag} is known")
        self.call("PATCH", f"dags/{dag}", json={"is_paused": False})
        run = self.call("POST", f"dags/{dag}/dagRuns", json={"logical_date": None})
        return str(run["dag_run_id"])

    def state(self, dag: str, run: str, task: str) -> str | None:
        """Return a task's state."""
        found: str | None = self.call("GET", f"dags/{dag}/dagRuns/{run}/taskInstances/{task}")["state"]
        return found


@pytest.fixture
def services(airflow: Airflow, tmp_path: Path) -> Iterator[Services]:
    """Start all of Airflow."""
    port = free_port()
    environment = airflow.environment | {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__CORE__PARALLELISM": "2",
        "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
        "AIRFLOW__TASK_EXECUTION__MIN_HEARTBEAT_INTERVAL": "1",
        "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
    }
    log = (tmp_path / "airflow.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "airflow", "standalone"],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    client = httpx.Client(timeout=30.0, trust_env=False)

    def token() -> str | None:
        assert process.poll() is None, (tmp_path / "airflow.log").read_text()[-4000:]
        try:
            answer = client.get(f"{url}/auth/token")
        except httpx.HTTPError:
            return None
        return str(answer.json()["access_token"]) if answer.is_success else None

    try:
        client.headers["Authorization"] = f"Bearer {eventually(token, 'the API server answers')}"
        yield Services(airflow, url, client)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(150)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        client.close()
        log.close()


def test_a_wait_is_carried_by_the_triggerer_and_an_ended_training_goes_on(services: Services) -> None:
    airflow = services.airflow
    Ledger.open(str(airflow.ledger), cluster="test").close()
    run = services.start("whole")
    eventually(lambda: services.state("whole", run, "wait") == "deferred", "the wait is deferred")
    with Ledger.open(str(airflow.ledger), cluster="test") as ledger:
        ledger.lead("test").write([CapacityChanged(1, (Node("n1", 4, 8.0, gpus=2),))])
    eventually(lambda: services.state("whole", run, "train") == "success", "the DAG has run")
    answer = services.call("GET", f"dags/whole/dagRuns/{run}/taskInstances/query/xcomEntries/return_value")
    value = answer["value"] if isinstance(answer["value"], dict) else json.loads(answer["value"])
    assert value["rows"] == 6

    run = services.start("stopped_training_long")
    events = airflow.out / "runs" / "stopped-long" / "events.jsonl"
    eventually(lambda: events.is_file() and '"started"' in events.read_text(), "the training has begun")
    assert len(left_over(airflow)) >= 2
    path = f"dags/stopped_training_long/dagRuns/{run}"
    services.call("PATCH", f"{path}/taskInstances/train", json={"new_state": "failed"})
    eventually(lambda: not left_over(airflow), "its processes have ended")
    checkpoints = list((airflow.out / "runs" / "stopped-long" / "checkpoints").iterdir())
    assert checkpoints
    services.call(
        "POST",
        "dags/stopped_training_long/clearTaskInstances",
        json={"dry_run": False, "dag_run_id": run, "task_ids": ["train"], "only_failed": True},
    )
    eventually(lambda: services.state("stopped_training_long", run, "train") == "success", "it has gone on")
    report = json.loads((airflow.out / "runs" / "stopped-long" / "report.json").read_text())
    assert (report["steps"], report["resumed_from"] is not None) == (200, True)
