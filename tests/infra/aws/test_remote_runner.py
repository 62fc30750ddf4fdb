"""Commands reach the cluster's own nodes, once each, and say what became of them."""

import base64
import threading

import pytest

from ebbflow.infra.aws.remote import Outcome, RemoteRunner
from ebbflow.infra.errors import AwsError, AwsUnavailableError, CredentialsError, NotOursError
from ebbflow.planners.errors import OptionError
from tests.aws.emulator import ENVIRONMENT, PoolShape
from tests.infra.aws.systems_manager import Split, SystemsManager


class QuickClock:
    """Time passes as it is slept, and in the wall's time hardly at all."""

    def __init__(self):
        self.time = 1_795_255_200.0
        self.asleep = lambda: None

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += max(0.0, seconds)
        self.asleep()

    def wait(self, event, timeout):
        self.sleep(timeout)
        return event.is_set()


@pytest.fixture
def ssm():
    service = SystemsManager()
    yield service
    service.close()
    assert service.problems == []


@pytest.fixture(scope="module")
def lab(aws_emulator):
    account = aws_emulator.account()
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        for name, value in account.environment.items():
            patch.setenv(name, value)
        yield account.cluster("lab", PoolShape("etl", most=60))


@pytest.fixture
def nodes(lab, ssm):
    lab.account.client("autoscaling").set_desired_capacity(
        AutoScalingGroupName=lab.names.group("etl"), DesiredCapacity=4
    )
    ids = sorted(node["id"] for node in lab.nodes("etl"))
    assert len(ids) == 4
    ssm.online = set(ids)
    return ids


@pytest.fixture
def clock():
    return QuickClock()


@pytest.fixture
def runner(lab, ssm, clock):
    return make(lab, ssm, clock)


def make(lab, ssm, clock):
    clients = Split(lab.settings.region, lab.account.emulator.url, ssm.url)
    return RemoteRunner(clients, lab.names, lab.settings.documents, clock=clock)


def once(code, operation, when):
    """Return a spoiler of the first such request."""
    codes = [code]

    def spoil(asked, at):
        return codes.pop() if (asked, at) == (operation, when) and codes else ""

    return spoil


def test_a_document_of_the_cluster_runs_on_each_node_and_says_how_it_ended(runner, ssm, nodes):
    ssm.script = lambda node, _: (0, "active\n") if node != nodes[1] else (3, "a" * 3000 + "\nno such unit")
    found = runner.start_spark(nodes)
    assert list(found) == nodes
    assert found[nodes[0]] == Outcome(nodes[0], "done", "", 0, "active\n", found[nodes[0]].command)
    assert (found[nodes[1]].status, found[nodes[1]].code, found[nodes[1]].ok) == ("failed", 3, False)
    assert len(found[nodes[1]].output) == 2000
    (sent,) = ssm.sent
    assert sent["DocumentName"] == "ebbflow-lab-spark-worker"
    assert sent["Parameters"] == {"action": ["start"]}
    assert sent["InstanceIds"] == nodes
    assert str(found[nodes[0]]) == f"{nodes[0]}: done: active"


def test_each_method_runs_its_document_with_the_parameters_it_takes(runner, ssm, nodes):
    node = nodes[0]
    ssm.script = lambda _, parameters: (0, "active" if parameters.get("action") == ["status"] else "")
    assert runner.spark_status([node])[node].output == "active"
    runner.stop_spark([node])
    runner.drain([node], 90.9)
    assert runner.start_torch(node, "run-1", '{"run": "é"}').ok
    runner.stop_torch(node, "run-1")
    assert runner.torch_status(node, "run-1").output == "active"
    sent = [(one["DocumentName"], one["Parameters"]) for one in ssm.sent]
    entry = base64.b64encode('{"run": "é"}'.encode()).decode()
    assert sent == [
        ("ebbflow-lab-spark-worker", {"action": ["status"]}),
        ("ebbflow-lab-spark-worker", {"action": ["stop"]}),
        ("ebbflow-lab-drain", {"seconds": ["90"]}),
        ("ebbflow-lab-torch-node", {"action": ["start"], "name": ["run-1"], "entry": [entry]}),
        ("ebbflow-lab-torch-node", {"action": ["stop"], "name": ["run-1"]}),
        ("ebbflow-lab-torch-node", {"action": ["status"], "name": ["run-1"]}),
    ]


def test_nodes_of_others_get_no_command_and_keep_ours_from_getting_one(runner, ssm, lab, nodes):
    untagged = lab.account.strangers(1)
    other = lab.account.strangers(1, {"ebbflow:cluster": "other", "ebbflow:managed": "loop"})
    terraforms = lab.account.strangers(1, {"ebbflow:cluster": "lab", "ebbflow:managed": "terraform"})
    for stranger in (*untagged, *other, *terraforms):
        ssm.online.add(stranger)
        with pytest.raises(
            NotOursError, match=f"no command is sent: {stranger} lacks the tags of the cluster lab"
        ):
            runner.start_spark([*nodes, stranger])
    assert ssm.sent == []
    assert "SendCommand" not in ssm.asked


def test_nodes_that_are_gone_are_said_and_the_others_served(runner, ssm, lab, nodes):
    lab.account.take([nodes[0]])
    found = runner.start_spark([nodes[0], nodes[1], "i-00000000000000000"])
    assert found[nodes[0]].status == "gone"
    assert found[nodes[0]].detail == "it is terminated"
    assert found["i-00000000000000000"].detail == "there is no such instance"
    assert found[nodes[1]].ok


def test_a_node_that_is_starting_is_waited_for_and_keeps_nobody_waiting(runner, ssm, clock, nodes):
    late = nodes[0]
    ssm.online.discard(late)
    begun = clock.now()

    def arrive():
        if clock.now() > begun + 60:
            ssm.online.add(late)

    clock.asleep = arrive
    found = runner.start_spark(nodes)
    assert all(outcome.ok for outcome in found.values())
    assert [one["InstanceIds"] for one in ssm.sent] == [nodes[1:], [late]]
    assert 60 < clock.now() - begun < 80


def test_a_node_that_never_registers_is_given_up_within_a_bound(runner, ssm, clock, nodes):
    ssm.online.discard(nodes[0])
    begun = clock.now()
    found = runner.start_spark(nodes)
    assert found[nodes[0]].status == "absent"
    assert found[nodes[0]].detail == "not known to Systems Manager within 300 s"
    assert found[nodes[1]].ok
    assert 300 <= clock.now() - begun < 310


def test_a_command_that_does_not_end_is_late_after_a_bound(runner, ssm, clock, nodes):
    ssm.script = lambda node, _: None if node == nodes[0] else (0, "")
    begun = clock.now()
    found = runner.run("drain", nodes, {"seconds": "60"}, timeout=40)
    assert (found[nodes[0]].status, found[nodes[0]].detail) == ("late", "InProgress")
    assert found[nodes[1]].ok
    assert 40 <= clock.now() - begun < 46


@pytest.mark.parametrize("code", ["InternalServerError", "ThrottlingException"])
def test_a_command_whose_answer_was_lost_is_found_again_and_not_sent_twice(runner, ssm, nodes, code):
    ssm.spoil = once(code, "SendCommand", "after")
    found = runner.start_spark(nodes)
    assert all(outcome.ok and not outcome.earlier for outcome in found.values())
    assert len(ssm.sent) == 1


def test_a_command_that_was_not_taken_is_sent_again(runner, ssm, nodes):
    ssm.spoil = once("InternalServerError", "SendCommand", "before")
    assert all(outcome.ok for outcome in runner.start_spark(nodes).values())
    assert len(ssm.sent) == 1
    assert ssm.asked.count("SendCommand") == 2


def test_sending_is_given_up_after_some_attempts(runner, ssm, nodes):
    ssm.spoil = lambda operation, when: "InternalServerError" if operation == "SendCommand" else ""
    with pytest.raises(AwsUnavailableError, match="send ebbflow-lab-spark-worker to 4 nodes"):
        runner.start_spark(nodes)
    assert ssm.asked.count("SendCommand") == 4


def test_the_same_token_sends_once_however_many_processes_use_it(lab, ssm, clock, runner, nodes):
    first = runner.start_spark(nodes, token="start 7")
    second = make(lab, ssm, clock).start_spark(nodes, token="start 7")
    assert len(ssm.sent) == 1
    assert all(outcome.ok and outcome.earlier for outcome in second.values())
    assert {n: o.command for n, o in first.items()} == {n: o.command for n, o in second.items()}
    runner.start_spark(nodes, token="start 8")
    assert len(ssm.sent) == 2


def test_a_command_of_the_same_token_under_way_is_waited_for(lab, ssm, clock, runner, nodes):
    ssm.script = lambda *_: None
    assert runner.run("drain", nodes[:1], {"seconds": "9"}, token="t", timeout=1)[nodes[0]].status == "late"
    clock.asleep = lambda: [one.update(came=(0, "drained")) for one in ssm._invocations]
    found = runner.run("drain", nodes[:1], {"seconds": "9"}, token="t")[nodes[0]]
    assert (found.status, found.output, found.earlier) == ("done", "drained", True)
    assert len(ssm.sent) == 1


def test_only_what_failed_is_sent_again_under_the_same_token(ssm, runner, nodes):
    ssm.script = lambda node, _: (1, "") if node == nodes[2] else (0, "")
    assert not runner.start_spark(nodes, token="t")[nodes[2]].ok
    ssm.script = lambda *_: (0, "")
    assert all(outcome.ok for outcome in runner.start_spark(nodes, token="t").values())
    assert [one["InstanceIds"] for one in ssm.sent] == [nodes, [nodes[2]]]


def test_two_threads_with_a_token_do_not_run_a_command_that_is_done_again(ssm, runner, nodes):
    runner.start_spark(nodes, token="t")
    threads = [
        threading.Thread(target=runner.start_spark, args=(nodes,), kwargs={"token": "t"}) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert len(ssm.sent) == 1


def test_a_node_that_leaves_at_the_last_moment_hinders_nobody(runner, ssm, nodes):
    def leave(operation, when):
        if operation == "SendCommand" and when == "before":
            ssm.online.discard(nodes[3])
        return ""

    ssm.spoil = leave
    found = runner.start_spark(nodes)
    assert found[nodes[3]].status == "absent"
    assert all(found[node].ok for node in nodes[:3])


def test_a_large_fleet_is_told_in_several_commands(lab, ssm, runner):
    lab.account.client("autoscaling").set_desired_capacity(
        AutoScalingGroupName=lab.names.group("etl"), DesiredCapacity=60
    )
    nodes = sorted(node["id"] for node in lab.nodes("etl"))
    ssm.online = set(nodes)
    assert sum(outcome.ok for outcome in runner.start_spark(nodes).values()) == 60
    assert [len(one["InstanceIds"]) for one in ssm.sent] == [50, 10]


@pytest.mark.parametrize(
    ("code", "kind"), [("AccessDeniedException", CredentialsError), ("InvalidDocument", AwsError)]
)
def test_what_aws_refuses_is_an_error(runner, ssm, nodes, code, kind):
    ssm.spoil = once(code, "SendCommand", "before")
    with pytest.raises(kind):
        runner.start_spark(nodes)
    assert ssm.sent == []


def test_looks_that_fail_are_repeated_until_the_end(runner, ssm, nodes):
    ssm.lasts = 0.0
    left = ["InternalServerError"] * 6

    def spoil(operation, when):
        return left.pop() if operation == "ListCommandInvocations" and when == "before" and left else ""

    ssm.spoil = spoil
    assert all(outcome.ok for outcome in runner.start_spark(nodes).values())


def test_what_breaks_a_rule_is_refused(runner, ssm):
    with pytest.raises(OptionError, match="seconds must be >= 0 and below 100,000; got -1"):
        runner.drain(["i-1"], -1)
    with pytest.raises(OptionError, match="token must have 80 characters at most; got 81"):
        runner.start_spark(["i-1"], token="t" * 81)
    assert runner.start_spark([]) == {}
    assert ssm.asked == []
