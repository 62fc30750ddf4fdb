"""What an agent tells on a node that systemd runs, and its group and the capacity loop on AWS."""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from ebbflow.infra.aws.node_agent import NodeDeparture, SystemdNode, drain_now

DEADLINE = 1795255320.0


def test_a_bus_that_is_away_is_tried_again(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    node = SystemdNode(
        region="us-east-1",
        arn="arn:aws:ec2:us-east-1:123456789012:instance/i-1",
        draining=tmp_path,
        cluster="lab",
        endpoint_url="http://127.0.0.1:9",
    )
    assert not node.report(NodeDeparture(DEADLINE, "spot interruption"))


class Signed:
    """A service that takes every call, and remembers with which key it was signed."""

    def __init__(self):
        self.keys = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                outer.keys.append(self.headers["Authorization"].partition("Credential=")[2].partition("/")[0])
                json_answer = b'{"FailedEntryCount": 0, "Entries": []}'
                xml_answer = b"<R><CompleteLifecycleActionResult/></R>"
                text = json_answer if "X-Amz-Target" in self.headers else xml_answer
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


def test_the_agent_uses_the_credentials_of_the_moment_whatever_boto3_found_first(monkeypatch, tmp_path):
    """The session that boto3 shares keeps the first credentials it found, and other code may have used it before."""
    import boto3

    service = Signed()
    try:
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
        monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        monkeypatch.setenv("AWS_ENDPOINT_URL", service.url)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAFIRST")
        boto3.client("events", region_name="us-east-1")  # finds the first ones, and keeps them
        node = SystemdNode(
            "ebbflow-lab-etl",
            "us-east-1",
            "arn:aws:ec2:us-east-1:123456789012:instance/i-1",
            tmp_path / "draining",
            cluster="lab",
        )
        for key in ("AKIASECOND", "AKIATHIRD"):
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            assert node.report(NodeDeparture(DEADLINE, "spot interruption"))
            node.notify_group()
        assert service.keys == ["AKIASECOND", "AKIASECOND", "AKIATHIRD", "AKIATHIRD"]
    finally:
        service.server.shutdown()
        service.server.server_close()


LISTENER = """
import os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
def heard(number, frame):
    notice = out.parent / "scratch" / "notice"
    out.write_text(signal.Signals(number).name + " " + (notice.read_text() if notice.exists() else ""))
for number in (signal.SIGTERM, signal.SIGPWR):
    signal.signal(number, heard)
(out.parent / (out.name + ".ready")).touch()
while True:
    time.sleep(0.02)
"""


@pytest.fixture
def running(tmp_path, monkeypatch):
    """Start a process for the Spark worker and one for a training, and a systemctl that knows them."""
    (tmp_path / "scratch").mkdir()
    entry = json.dumps({"folder": str(tmp_path / "scratch")})
    processes = {}
    for name in ("spark", "torch", "memory", "aggregator"):
        processes[name] = subprocess.Popen(
            [sys.executable, "-c", LISTENER, str(tmp_path / name)],
            env=os.environ | {"EBBFLOW_NODE_ENTRY": entry},
        )
    for name in processes:
        _wait(tmp_path / f"{name}.ready")
    (tmp_path / "systemctl").write_text(
        f"""#!/bin/sh
case "$*" in
  list-units*torch-node@*) echo "ebbflow-torch-node@run-1.service loaded active running Node process" ;;
  *ebbflow-torch-node@run-1.service) echo {processes["torch"].pid} ;;
  *ebbflow-memory.service) echo {processes["memory"].pid} ;;
  *ebbflow-aggregator.service) echo {processes["aggregator"].pid} ;;
  *ebbflow-spark-worker.service) echo {processes["spark"].pid} ;;
  *) exit 1 ;;
esac
"""
    )
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    yield processes
    for process in processes.values():
        process.kill()
        process.wait(150)


def _wait(path):
    for _ in range(7500):
        if path.exists() and (path.suffix == ".ready" or path.read_text()):
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} did not appear")


def test_spark_is_decommissioned_what_is_lent_drained_and_trainings_are_told_their_deadline(
    running, tmp_path
):
    node = SystemdNode(draining=tmp_path / "run" / "draining")
    node.drain(NodeDeparture(DEADLINE, "spot interruption"))
    _wait(tmp_path / "spark")
    _wait(tmp_path / "torch")
    assert (tmp_path / "spark").read_text().split()[0] == "SIGPWR"
    for name in ("memory", "aggregator"):
        _wait(tmp_path / name)
        assert (tmp_path / name).read_text().split()[0] == "SIGTERM"
    assert (tmp_path / "torch").read_text() == f"SIGTERM {DEADLINE!r}"
    assert float((tmp_path / "run" / "draining").read_text()) == DEADLINE
    assert not node.idle()  # the training has not left yet


def test_spark_is_decommissioned_once(running, tmp_path):
    node = SystemdNode(draining=tmp_path / "run" / "draining")
    node.drain(NodeDeparture(DEADLINE, "rebalance recommendation"))
    for name in ("spark", "torch"):
        _wait(tmp_path / name)
        (tmp_path / name).unlink()
    node.drain(NodeDeparture(DEADLINE - 60, "spot interruption"))
    _wait(tmp_path / "torch")
    assert (tmp_path / "torch").read_text() == f"SIGTERM {DEADLINE - 60!r}"
    assert not (tmp_path / "spark").exists()


def test_work_is_told_although_the_deadline_cannot_be_written_down(running, tmp_path, caplog):
    (tmp_path / "full").touch()
    SystemdNode(draining=tmp_path / "full" / "draining").drain(NodeDeparture(DEADLINE, "spot interruption"))
    for name in ("spark", "torch"):
        _wait(tmp_path / name)
    assert "cannot be written" in caplog.text


def test_a_node_without_work_is_idle(tmp_path, monkeypatch):
    (tmp_path / "systemctl").write_text("#!/bin/sh\n[ $1 != show ] || echo 0\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert SystemdNode(draining=tmp_path / "draining").idle()


def test_asked_to_drain_again_a_node_only_says_whether_it_is_idle(running, tmp_path, capsys):
    node = SystemdNode(draining=tmp_path / "run" / "draining")
    drain_now(node, DEADLINE)
    for name in ("spark", "torch"):
        _wait(tmp_path / name)
        (tmp_path / name).unlink()
    drain_now(node, DEADLINE + 2)
    drain_now(node, DEADLINE + 600)
    assert capsys.readouterr().out == "busy\n" * 3
    assert not (tmp_path / "torch").exists()
    drain_now(node, DEADLINE - 60)  # sooner: all must hear of it
    _wait(tmp_path / "torch")
