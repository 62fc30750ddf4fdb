"""A tracking server of MLflow for tests: its REST interface before its own SQLite store, or out of order."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos import service_pb2 as pb
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST
from mlflow.tracking import MlflowClient
from mlflow.utils.proto_json_utils import message_to_json

from tests.free_ports import free_port

API = "/api/2.0/mlflow/"


def _answers(store: MlflowClient) -> dict[str, Callable[[dict[str, Any]], Any]]:
    def experiment(q: dict[str, Any]) -> Any:
        found = store.get_experiment_by_name(q["experiment_name"])
        if found is None:
            raise MlflowException("no such experiment", error_code=RESOURCE_DOES_NOT_EXIST)
        return pb.GetExperimentByName.Response(experiment=found.to_proto())

    def search(q: dict[str, Any]) -> Any:
        found = store.search_runs(q["experiment_ids"], q.get("filter", ""))
        return pb.SearchRuns.Response(runs=[run.to_proto() for run in found])

    def create(q: dict[str, Any]) -> Any:
        tags = {tag["key"]: tag["value"] for tag in q.get("tags", ())}
        run = store.create_run(q["experiment_id"], q.get("start_time"), tags, q.get("run_name"))
        return pb.CreateRun.Response(run=run.to_proto())

    def update(q: dict[str, Any]) -> Any:
        store.update_run(q["run_id"], q.get("status"), q.get("run_name"))
        return pb.UpdateRun.Response(run_info=store.get_run(q["run_id"]).info.to_proto())

    def log(q: dict[str, Any]) -> Any:
        store.log_batch(
            q["run_id"],
            [Metric(m["key"], m["value"], int(m["timestamp"]), int(m["step"])) for m in q.get("metrics", ())],
            [Param(p["key"], p["value"]) for p in q.get("params", ())],
            [RunTag(t["key"], t["value"]) for t in q.get("tags", ())],
        )
        return pb.LogBatch.Response()

    return {
        "experiments/get-by-name": experiment,
        "experiments/create": lambda q: pb.CreateExperiment.Response(
            experiment_id=store.create_experiment(q["name"])
        ),
        "runs/search": search,
        "runs/create": create,
        "runs/get": lambda q: pb.GetRun.Response(run=store.get_run(q["run_id"]).to_proto()),
        "runs/update": update,
        "runs/log-batch": log,
    }


@contextmanager
def serving(port: int, store: Path) -> Iterator[MlflowClient]:
    """Serve the store ``store`` on a port; yield a client of the store itself."""
    client = MlflowClient(tracking_uri=f"sqlite:///{store}")
    answers = _answers(client)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, asked: dict[str, Any]) -> None:
            name = urlsplit(self.path).path.removeprefix(API)
            status, said = 200, ""
            try:
                said = message_to_json(answers[name](asked))
            except MlflowException as error:
                status, said = error.get_http_status_code(), error.serialize_as_json()
            except KeyError:
                status, said = 404, "{}"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(said.encode())

        def do_GET(self) -> None:
            self._answer(dict(parse_qsl(urlsplit(self.path).query)))

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield client
    finally:
        server.shutdown()
        server.server_close()
        thread.join(150)


@contextmanager
def hanging() -> Iterator[tuple[int, threading.Event]]:
    """Accept connections on a port and never answer; yield it, and what is set when somebody has asked."""
    asked = threading.Event()
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", free_port())) as server:

        def accept() -> None:
            while True:
                try:
                    one, _ = server.accept()
                except OSError:
                    return
                kept.append(one)
                asked.set()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1], asked
        server.shutdown(socket.SHUT_RDWR)
        thread.join(150)
    for one in kept:
        one.close()
