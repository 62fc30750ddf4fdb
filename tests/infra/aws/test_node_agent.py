"""The agent sees notices as the metadata service gives them, and tells everything on its node."""

import json
import os
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from ebbflow.infra.aws import node_agent
from ebbflow.infra.aws.agent_metrics import AgentMetrics
from ebbflow.infra.aws.node_agent import (
    Agent,
    Metadata,
    NodeDeparture,
    SystemdNode,
    drain_now,
    instance_arn,
    look,
)

ACTION = '{"action": "terminate", "time": "2026-11-21T10:02:00Z"}'
DEADLINE = 1795255320.0
NOW = DEADLINE - 120


class Service:
    """A metadata service of version 2 whose answers a test sets."""

    def __init__(self):
        self.answers = {}
        self.tokens = 0
        self.valid = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self):
                outer.tokens += 1
                outer.valid = f"token-{outer.tokens}"
                self._send(
                    200 if "X-aws-ec2-metadata-token-ttl-seconds" in self.headers else 400, outer.valid
                )

            def do_GET(self):
                path = self.path.removeprefix("/latest/meta-data/")
                if self.headers.get("X-aws-ec2-metadata-token") != outer.valid:
                    self._send(401, "")
                elif path in outer.answers:
                    self._send(200, outer.answers[path])
                else:
                    self._send(404, "")

            def _send(self, status, text):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.metadata = Metadata(
            httpx.Client(base_url=f"http://127.0.0.1:{self.server.server_port}", timeout=10, trust_env=False)
        )


@pytest.fixture
def service():
    service = Service()
    yield service
    service.server.shutdown()
    service.server.server_close()


class FakeNode:
    def __init__(self):
        self.drained = []
        self.told = 0
        self.reported = []
        self.bus_works = True
        self.is_idle = False

    def drain(self, leaving):
        self.drained.append(leaving)

    def report(self, leaving):
        self.reported.append(leaving.deadline)
        return self.bus_works

    def idle(self):
        return self.is_idle

    def notify_group(self):
        self.told += 1


class FakeClock:
    def __init__(self):
        self.time = NOW

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


@pytest.fixture
def node():
    return FakeNode()


@pytest.fixture
def clock():
    return FakeClock()


def test_a_quiet_service_means_nothing_and_one_token_does_for_many_looks(service):
    assert look(service.metadata, NOW, "drain", 120) is None
    assert look(service.metadata, NOW, "drain", 120) is None
    assert service.tokens == 1


def test_an_interruption_states_its_time(service):
    service.answers["spot/instance-action"] = ACTION
    assert look(service.metadata, NOW, "note", 120) == NodeDeparture(DEADLINE, "spot interruption")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"time": 3}', '{"time": "soon"}'])
def test_an_interruption_that_cannot_be_read_is_at_once(service, text):
    service.answers["spot/instance-action"] = text
    assert look(service.metadata, NOW, "note", 120) == NodeDeparture(NOW, "spot interruption")


def test_a_token_that_has_run_out_is_replaced(service):
    assert service.metadata.get("spot/instance-action") is None
    service.valid = "another"
    service.answers["spot/instance-action"] = ACTION
    assert service.metadata.get("spot/instance-action") == ACTION
    assert service.tokens == 2


def test_a_service_that_is_away_means_nothing():
    gone = Metadata(httpx.Client(base_url="http://127.0.0.1:9", timeout=1, trust_env=False))
    assert gone.get("instance-id") is None


def test_a_rebalance_recommendation_is_noted_or_followed(service):
    service.answers["events/recommendations/rebalance"] = '{"noticeTime": "2026-11-21T10:02:00Z"}'
    assert look(service.metadata, NOW, "note", 120) is None
    assert look(service.metadata, NOW, "drain", 120) == NodeDeparture(
        DEADLINE + 120, "rebalance recommendation"
    )


def test_an_agent_tells_its_looks_and_its_node_s_end(service, node, clock):
    agent = AgentMetrics(Agent(service.metadata, node, "note", 300, clock), clock)

    def told():
        metrics, why = agent.look()
        return {one.name: [sample.value for sample in one.samples] for one in metrics}, why

    agent.step()
    assert told() == (
        {
            "ebbflow_node_looks": [1.0],
            "ebbflow_node_look_failures": [0.0],
            "ebbflow_node_look_age_seconds": [0.0],
            "ebbflow_node_draining": [0.0],
            "ebbflow_node_seconds_left": [],
        },
        "",
    )
    service.answers["spot/instance-action"] = ACTION
    agent.step()
    clock.sleep(20)
    metrics, why = told()
    assert (metrics["ebbflow_node_draining"], why) == ([1.0], "")
    assert metrics["ebbflow_node_seconds_left"] == [DEADLINE - NOW - 20]
    node.drain = None  # a defect
    service.answers["spot/instance-action"] = ACTION.replace("10:02", "10:01")
    with pytest.raises(TypeError):
        agent.step()
    clock.sleep(20)
    metrics, why = told()
    assert metrics["ebbflow_node_look_failures"] == [1.0]
    assert why == "the agent has not looked for 40 s"


def test_work_is_told_once_and_again_only_for_an_earlier_deadline(service, node, clock):
    agent = Agent(service.metadata, node, "note", 300, clock)
    agent.step()
    assert node.drained == []
    service.answers["autoscaling/target-lifecycle-state"] = "Terminated"
    for _ in range(3):
        agent.step()
        clock.sleep(1)
    assert [leaving.deadline for leaving in node.drained] == [NOW + 300]
    service.answers["spot/instance-action"] = ACTION
    agent.step()
    agent.step()
    assert [leaving.deadline for leaving in node.drained] == [NOW + 300, DEADLINE]
    assert node.drained[1].group_waits


def test_the_group_is_told_once_when_the_node_is_idle(service, node, clock):
    agent = Agent(service.metadata, node, "note", 120, clock)
    service.answers["autoscaling/target-lifecycle-state"] = "Terminated"
    agent.step()
    assert node.told == 0
    node.is_idle = True
    agent.step()
    agent.step()
    assert node.told == 1


def test_the_group_is_told_at_the_deadline_at_the_latest(service, node, clock):
    agent = Agent(service.metadata, node, "note", 120, clock)
    service.answers["autoscaling/target-lifecycle-state"] = "Terminated"
    agent.step()
    clock.sleep(119)
    agent.step()
    assert node.told == 0
    clock.sleep(2)
    agent.step()
    assert node.told == 1


def test_no_group_is_told_of_an_interruption(service, node, clock):
    agent = Agent(service.metadata, node, "note", 120, clock)
    service.answers["spot/instance-action"] = ACTION
    node.is_idle = True
    clock.sleep(600)
    agent.step()
    assert (len(node.drained), node.told) == (1, 0)


def test_the_loop_is_told_until_it_is_heard_and_again_of_an_earlier_deadline(service, node, clock):
    agent = Agent(service.metadata, node, "note", 300, clock)
    node.bus_works = False
    service.answers["autoscaling/target-lifecycle-state"] = "Terminated"
    agent.step()
    agent.step()
    node.bus_works = True
    agent.step()
    agent.step()
    assert node.reported == [NOW + 300] * 3
    service.answers["spot/instance-action"] = ACTION
    agent.step()
    agent.step()
    assert node.reported[3:] == [DEADLINE]


def test_the_loop_is_not_told_of_what_is_past(service, node, clock):
    agent = Agent(service.metadata, node, "note", 300, clock)
    service.answers["spot/instance-action"] = ACTION
    clock.sleep(120)
    agent.step()
    assert (len(node.drained), node.reported) == (1, [])


def test_a_node_finds_out_which_instance_it_speaks_for(service):
    service.answers["instance-id"] = "i-1"
    assert instance_arn(service.metadata, "cn-north-1") == ""  # of no account yet: it says nothing to the bus
    service.answers["iam/info"] = "not JSON"
    assert instance_arn(service.metadata, "cn-north-1") == ""
    service.answers["iam/info"] = json.dumps(
        {"InstanceProfileArn": "arn:aws-cn:iam::123456789012:instance-profile/ebbflow-lab-node"}
    )
    assert (
        instance_arn(service.metadata, "cn-north-1") == "arn:aws-cn:ec2:cn-north-1:123456789012:instance/i-1"
    )


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


def test_the_agent_goes_on_looking_after_a_look_that_failed(monkeypatch, caplog):
    looks = []

    class Ends(BaseException):
        pass

    class Clock(FakeClock):
        def sleep(self, seconds):
            if len(looks) >= 3:
                raise Ends

    def step(_agent):
        looks.append(1)
        raise KeyError("an answer of another form")

    monkeypatch.setattr(node_agent.Agent, "step", step)
    monkeypatch.setattr(node_agent.Metadata, "get", lambda *_: "i-1")
    with pytest.raises(Ends):
        node_agent.main([], Clock())
    assert len(looks) == 3
    assert "an answer of another form" in caplog.text


@pytest.mark.parametrize("metrics", ["taken", "nowhere"])
def test_the_agent_looks_although_its_metrics_cannot_be_served(monkeypatch, caplog, metrics):
    looks = []

    class Ends(BaseException):
        pass

    def step(_agent):
        looks.append(1)
        raise Ends

    monkeypatch.setattr(node_agent.Agent, "step", step)
    monkeypatch.setattr(node_agent.Metadata, "get", lambda *_: "i-1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(Ends):
            node_agent.main(["--metrics", taken if metrics == "taken" else metrics], FakeClock())
    assert looks
    assert "metrics are not served" in caplog.text


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


def test_the_names_of_the_training_launcher_are_the_same():
    launcher = Path(__file__).parents[3] / "infra/training/launcher"  # importing it takes torch, and seconds
    assert f'ENTRY = "{node_agent._ENTRY}"' in (launcher.with_name("channel") / "wire.py").read_text()
    assert 'NOTICE = "notice"' in (launcher / "node.py").read_text()
