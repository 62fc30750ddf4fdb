"""A training takes the instances that are free, waits until they are enough, and uses those that come later."""

import time
from types import SimpleNamespace

import pytest

from ebbflow.infra.aws.remote import Outcome
from ebbflow.infra.errors import ClusterError, StorageError
from ebbflow.infra.protocols import TrainingJob
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.fleet import Fleet, PoolState
from ebbflow.tasks.training.aws import AwsSite, shipped
from ebbflow.tasks.training.node_names import slots_of
from ebbflow.tasks.training.request import TrainingRequest
from tests.infra.aws.test_train_nodes import FakeRunner, entry


class Control:
    """A fleet whose instances a test sets."""

    def __init__(self, *names):
        self.names = names

    def observe(self):
        nodes = tuple(Node(name, 8, 60.0, host="127.0.0.1", gpus=2) for name in sorted(self.names))
        gang = PoolState("gpu/run-1", 1, 1, (Node("i-gang", 8, 60.0, host="127.0.0.1", gpus=2),))
        return Fleet(1, 0.0, (PoolState("gpu", 3, 3, nodes), gang))

    def take_notices(self, notices):
        return 1


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text("print('trained')\n")
    return str(tmp_path / "train.py")


@pytest.fixture
def request_of(script):
    return lambda **options: TrainingRequest(
        **({"script": script, "nodes": "aws:gpu:3x2", "runs_dir": "s3://bucket/runs"} | options)
    )


def site(request, control, runner=None):
    settings = SimpleNamespace(pools={"gpu": None}, region="us-east-1")
    cluster = SimpleNamespace(settings=settings, control=control, runner=lambda _register: runner)
    return AwsSite(request, cluster)


def until(true, seconds=150.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def test_nodes_of_a_fleet_are_named_by_pool_number_and_slots(request_of):
    request = request_of()
    assert (request.pool, request.gpus) == ("gpu", 6)
    assert request.placement == {"node-1": 2, "node-2": 2, "node-3": 2}
    assert request_of(nodes="local:2x1").pool == ""
    with pytest.raises(OptionError, match=r"such as local:3x2; got 'aws:gpu:3x2'"):
        slots_of("aws:gpu:3x2")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"nodes": "aws:GPU:1x1"}, "or aws:POOL:NODESxSLOTS; got 'aws:GPU:1x1'"),
        ({"runs_dir": "/here"}, "runs_dir must be on S3, which all nodes of aws:gpu:3x2 reach; got /here"),
        (
            {"fault": ("5s:add:1",)},
            "fault and cpus_per_slot are for nodes of this machine; got nodes aws:gpu:3x2",
        ),
        ({"cpus_per_slot": 1.0}, "fault and cpus_per_slot are for nodes of this machine"),
    ],
)
def test_what_nodes_of_a_fleet_cannot_do_is_refused(request_of, options, problem):
    with pytest.raises(OptionError, match=problem):
        request_of(**options)


def test_a_run_begins_on_what_is_free_and_grows_into_what_comes(request_of, monkeypatch):
    monkeypatch.setattr("ebbflow.tasks.training.aws._POLL", 0.05)
    control = Control("i-1")
    with site(request_of(), control) as nodes:
        taken = nodes.take(5.0)
        assert taken.there() == {"node-1": 2}
        nodes._nodes._nodes["node-1"] = SimpleNamespace(instance="i-1", ended="", failed=False, job=None)
        control.names = ("i-1", "i-2", "i-3", "i-4")
        nodes._capacity.look()
        until(lambda: len(taken.there()) == 3)
        time.sleep(0.5)
        assert sorted(taken.there()) == ["node-1", "node-2", "node-3"]  # as many as were asked for
        nodes._nodes._nodes["node-1"].ended = "its instance i-1 is terminated"


@pytest.mark.parametrize(
    "options",
    [
        {"sync": "service", "aggregators": 3, "mirrors": 1},
        {"sync": "service", "aggregation_cluster": "shop"},
        {"sync": "auto"},
    ],
)
def test_nodes_of_a_fleet_may_train_over_aggregators(request_of, options):
    request = request_of(**options)
    plan = request.plan(request.placement, resumes=False)
    assert plan.sync == options["sync"]
    settings = plan.settings
    assert settings.sync == ("allreduce" if options["sync"] == "auto" else "service")
    assert settings.aggregation_cluster == options.get("aggregation_cluster", "")
    assert not settings.in_place
    with pytest.raises(OptionError, match=r"nodes of the fleet cannot be used with recovery=in-place"):
        request_of(recovery="in-place")


@pytest.mark.parametrize("told", [False, True])
def test_a_node_that_cannot_be_started_is_replaced_at_once_on_an_instance_that_has_not_failed(
    request_of, monkeypatch, told
):
    monkeypatch.setattr("ebbflow.tasks.training.aws._POLL", 0.05)
    runner = FakeRunner()
    runner.fails = {"i-1": Outcome("i-1", "failed", "Failed", 1, "this node is leaving")}
    with site(request_of(nodes="aws:gpu:1x2"), Control("i-1", "i-2"), runner) as found:
        taken, nodes = found.take(5.0), found._nodes
        nodes.start("node-1", 2, entry("node-1"))
        until(lambda: nodes.failed("node-1"))
        if told:  # the supervisor has heard first
            taken.remove(["node-1"])
        until(lambda: list(taken.there()) == ["node-2"])
        nodes.start("node-2", 2, entry("node-2"))
        until(lambda: runner.running)
        assert list(runner.running) == [("i-2", nodes.uid)]


def test_a_node_that_never_calls_back_is_replaced_on_another_instance(request_of, monkeypatch):
    monkeypatch.setattr("ebbflow.tasks.training.aws._POLL", 0.05)
    runner = FakeRunner()
    with site(request_of(nodes="aws:gpu:1x2"), Control("i-1", "i-2"), runner) as found:
        taken, nodes = found.take(5.0), found._nodes
        nodes.start("node-1", 2, entry("node-1"))
        until(lambda: runner.running)
        nodes.end("node-1")  # by the launcher, which has waited for long enough
        taken.give_up(["node-1"])
        assert taken.there() == {}
        until(lambda: list(taken.there()) == ["node-2"])
        nodes.start("node-2", 2, entry("node-2"))
        assert nodes._nodes["node-2"].instance == "i-2"
        assert list(nodes.placement()) == [], "the first one is left alone for a while"


@pytest.mark.parametrize("told", [False, True])
def test_an_instance_on_which_a_start_failed_is_tried_again_later(request_of, monkeypatch, told):
    monkeypatch.setattr("ebbflow.tasks.training.aws._POLL", 0.05)
    monkeypatch.setattr("ebbflow.infra.aws.train_nodes._AVOID", 1.0)
    runner = FakeRunner()
    runner.fails = {"i-1": Outcome("i-1", "failed", "Failed", 1, "this node is leaving")}
    with site(request_of(nodes="aws:gpu:1x2"), Control("i-1"), runner) as found:
        taken, nodes = found.take(5.0), found._nodes
        begun = time.monotonic()
        nodes.start("node-1", 2, entry("node-1"))
        until(lambda: nodes.failed("node-1"))
        if told:
            taken.remove(["node-1"])
        until(lambda: list(taken.there()) == ["node-2"])
        assert time.monotonic() - begun >= 0.9


def test_too_few_instances_are_waited_for_and_then_said(request_of, monkeypatch):
    monkeypatch.setattr("ebbflow.tasks.training.aws._POLL", 0.05)
    with (
        site(request_of(min_gpus=4), Control("i-1")) as nodes,
        pytest.raises(ClusterError, match=r"has 1 free instances .* ebbflow fleet grow gpu 3"),
    ):
        nodes.take(0.2)


def test_instances_that_are_too_small_do_not_count(request_of):
    with (
        site(request_of(nodes="aws:gpu:1x4"), Control("i-1")) as nodes,
        pytest.raises(ClusterError, match="has 0 free instances with 4 slots"),
    ):
        nodes.take(0.0)


def test_a_pool_must_be_the_clusters(request_of):
    with pytest.raises(OptionError, match="there is no pool 'etl' in this cluster; there are gpu"):
        site(request_of(nodes="aws:etl:1x1"), Control())


def test_scripted_faults_are_refused(request_of):
    with site(request_of(), Control()) as nodes, pytest.raises(ClusterError, match="nodes of this machine"):
        nodes.nodes.kill("node-1")


def test_a_script_is_shipped_into_the_runs_folder(aws_account, script):
    aws_account.client("s3").create_bucket(Bucket="shipped")
    job = shipped(TrainingJob("run", script, folder="s3://shipped/runs/run"), "us-east-1")
    assert job.script == "s3://shipped/runs/run/script/train.py"
    assert job.environment == {"AWS_REGION": "us-east-1"}
    stored = aws_account.client("s3").get_object(Bucket="shipped", Key="runs/run/script/train.py")
    assert stored["Body"].read() == b"print('trained')\n"
    assert shipped(job, "eu-west-1").script == job.script
    with pytest.raises(StorageError, match="put the script into s3://missing"):
        shipped(TrainingJob("run", script, folder="s3://missing/runs/run"), "us-east-1")


def test_a_gang_is_trained_on_by_its_name(request_of):
    request = request_of(nodes="aws:gpu/run-1:1x2")
    assert request.pool == "gpu/run-1"
    with site(request, Control("a", "b", "c")) as found:
        assert found.take(0.0).there() == {"node-1": 2}
        assert list(found._nodes.placement()) == ["i-gang"]
    with (
        site(request_of(nodes="aws:gpu/run-1:2x2", min_gpus=4), Control("a", "b", "c")) as small,
        pytest.raises(ClusterError, match="a gang does not scale out"),
    ):
        small.take(0.0)
