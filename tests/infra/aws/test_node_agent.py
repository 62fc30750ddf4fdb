"""The agent sees notices as the metadata service gives them, and tells of each once."""

import json
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from ebbflow.infra.aws import node_agent
from ebbflow.infra.aws.agent_metrics import AgentMetrics
from ebbflow.infra.aws.node_agent import Agent, Metadata, NodeDeparture, instance_arn, look

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


def test_the_names_of_the_training_launcher_are_the_same():
    launcher = Path(__file__).parents[3] / "infra/training/launcher"  # importing it takes torch, and seconds
    assert f'ENTRY = "{node_agent._ENTRY}"' in (launcher.with_name("channel") / "wire.py").read_text()
    assert 'NOTICE = "notice"' in (launcher / "node.py").read_text()
