"""A Prefect as users have it: a server, a process worker, flow runs in processes of their own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from flowcases import eventually

from tests.free_ports import free_port
from tests.prefect_database import with_database

LONG = 180.0  # s: a bound for a busy machine, not an expectation
POOL = "ebbflow"
HEAVY = "SELECT count(*) AS n FROM big a JOIN big b ON a.id * b.id % 1000003 < b.k + 3 AND a.k <> b.k"
"""A query on the table ``big`` of ``deployed_home`` that takes longer than any test."""

_ROOT = Path(__file__).parents[2]
_PIPELINE = """
name: digits
cluster:
  local:
    pools:
      gpu: {kind: gpu, nodes: 1, min_nodes: 0, max_nodes: 1}
trainings:
  fit: {script: SCRIPT, arguments: [--epochs, "2000"]}
loop: {lease_duration: 20s, auction_interval: 5s}
"""
_LIMITS = """
[loop]
heartbeat_timeout = 6
lease_duration = 30
auction_interval = 5
[scaling]
enabled = false
"""
_PREFECT = str(Path(sys.executable).with_name("prefect"))


class Home:
    """A server that runs, and whatever else a test starts."""

    def __init__(self, folder: Path, url: str, environment: Mapping[str, str]) -> None:
        self.folder, self.url = folder, url
        self.environment = {**os.environ, **environment}
        self._worker: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def start_server(self) -> None:
        """Start the server, and wait until it answers; it has the database that it had before."""
        port = str(httpx.URL(self.url).port)
        with (self.folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [_PREFECT, "server", "start", "--host", "127.0.0.1", "--port", port],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        def answers() -> bool:
            with suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
            return False

        eventually(answers, LONG)

    def kill_server(self) -> None:
        """Kill the server; flow runs and workers go on without."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)  # it has a process of its own to answer
            self._server.wait(LONG)
            self._server = None

    def prefect(self, *arguments: str | Path) -> str:
        """Run a command of Prefect's and return what it said."""
        done = subprocess.run(
            [_PREFECT, "--no-prompt", *map(str, arguments)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start_worker(self) -> None:
        """Start a process worker."""
        with (self.folder / "worker.log").open("ab") as log:
            self._worker = subprocess.Popen(
                [_PREFECT, "worker", "start", "--pool", POOL, "--type", "process"],
                cwd=self.folder,
                env={**self.environment, "PREFECT_WORKER_QUERY_SECONDS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill_worker(self) -> None:
        """Kill the worker; the flow runs that it has started go on."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait(LONG)
            self._worker = None

    def run(self, deployment: str, **parameters: Any) -> str:
        """Begin a run of a deployment and return its id."""
        found = self.get("get", f"/deployments/name/{deployment}")
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return str(self.get("post", f"/deployments/{found['id']}/create_flow_run", json=body)["id"])

    def state(self, run: str) -> str:
        """Return the type of a run's state."""
        return str(self.get("get", f"/flow_runs/{run}")["state_type"])

    def ended(self, run: str) -> str:
        """Wait until a run has ended and return the type of its state."""
        over = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        return eventually(lambda: state if (state := self.state(run)) in over else "", LONG)

    def task_runs(self, run: str) -> list[dict[str, Any]]:
        """Return the task runs of a flow run."""
        body = {"flow_runs": {"id": {"any_": [run]}}}
        found: list[dict[str, Any]] = self.get("post", "/task_runs/filter", json=body)
        return found

    def artifacts(self, run: str) -> list[dict[str, Any]]:
        """Return the artifacts of a flow run, every version of each."""
        body = {"flow_runs": {"id": {"any_": [run]}}}
        found: list[dict[str, Any]] = self.get("post", "/artifacts/filter", json=body)
        return found

    def cancel(self, run: str) -> None:
        """Do what the button in the user interface does."""
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.get("post", f"/flow_runs/{run}/set_state", json={"state": state})

    def get(self, method: str, path: str, **options: Any) -> Any:
        """Ask the API; as Prefect's own client does, again where its database is busy."""
        deadline = time.monotonic() + LONG
        while True:
            answer = httpx.request(method, f"{self.url}{path}", timeout=60.0, **options)
            if answer.status_code != 503 or time.monotonic() > deadline:
                answer.raise_for_status()
                return answer.json() if answer.content else None
            time.sleep(1.0)

    def end_all(self) -> None:
        """End all runs that have not ended, by force."""
        going = {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING", "SCHEDULED"]}}
        for run in self.get("post", "/flow_runs/filter", json={"flow_runs": {"state": going}}):
            body = {"state": {"type": "CANCELLED", "name": "Cancelled"}, "force": True}
            self.get("post", f"/flow_runs/{run['id']}/set_state", json=body)
            for process in processes(run["id"]):
                with suppress(psutil.Error):
                    process.kill()

    def log(self, since: int = 0) -> str:
        """Return what the worker and its flow runs have said, without the first ``since`` characters."""
        path = self.folder / "worker.log"
        return path.read_text(errors="replace")[since:] if path.exists() else ""


def processes(run: str) -> list[psutil.Process]:
    """Return the processes of a flow run: they hand its id down to what they start, nodes and trainings included."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            mine = process.environ().get("PREFECT__FLOW_RUN_ID") == run
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def seconds_until(reached: Callable[[], Any], patience: float = LONG) -> float:
    """Wait until something is so, and return how long that took."""
    began = time.monotonic()
    eventually(reached, patience)
    return time.monotonic() - began


@contextmanager
def prefect_home(folder: Path, **environment: str) -> Iterator[Home]:
    """Start a server with a database of its own; at the end nothing of it is left."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    given = {
        "PREFECT_HOME": str(with_database(folder / "prefect")),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "EBBFLOW_HOME": str(folder / "home"),
        **environment,
    }
    home = Home(folder, url, given)
    try:
        home.start_server()
        yield home
    finally:
        home.kill_worker()
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get("PREFECT_API_URL") == url and process.pid != os.getpid():
                    process.send_signal(signal.SIGKILL)
        home.kill_server()


@contextmanager
def deployed_home(folder: Path) -> Iterator[Home]:
    """Start a server with the repository's deployments and a worker.

    In the folder is what runs are told of: ``digits.py``, ``pipeline.yaml``, ``fleet.toml`` and ``tables``.
    The deployment of the capacity loop leads the cluster ``spare`` of ``spare.db``.
    """
    ours = yaml.safe_load((_ROOT / "prefect.yaml").read_text())
    loop = next(one for one in ours["deployments"] if one["name"] == "capacity")
    # what a trigger begins has the deployment's parameters
    loop["parameters"] = {"source": "local:spare", "ledger": str(folder / "spare.db"), "cluster": "spare"}
    (folder / "prefect.yaml").write_text(yaml.safe_dump(ours))
    shutil.copy(Path(__file__).with_name("digits.py"), folder / "digits.py")
    (folder / "pipeline.yaml").write_text(_PIPELINE.replace("SCRIPT", str(folder / "digits.py")))
    (folder / "fleet.toml").write_text(_LIMITS)
    _big(folder / "tables")
    with prefect_home(folder) as home:
        home.prefect("work-pool", "create", POOL, "--type", "process")
        home.prefect("deploy", "--all")
        home.start_worker()
        yield home


def _big(folder: Path) -> None:
    import duckdb

    folder.mkdir()
    duckdb.sql(
        f"COPY (SELECT range AS id, range % 7 AS k FROM range(400000)) TO '{folder}/big.parquet' (FORMAT parquet)"
    )
