"""``ebbflow local`` on real processes."""

import json

import pytest
from typer.testing import CliRunner

from ebbflow.flows.nodes import cli as local_cli
from ebbflow.flows.nodes import status as status_module
from ebbflow.flows.nodes.cli import app
from ebbflow.flows.nodes.masters import resolve_master
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet import LocalFleet
from ebbflow.planners.errors import OptionError

runner = CliRunner()


def invoke(*arguments):
    """Return what a command did; its errors are raised."""
    return runner.invoke(app, list(arguments), env={"COLUMNS": "160"}, catch_exceptions=False)


def call(*arguments):
    """Return what a command writes, to both streams."""
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return done.output


def document(*arguments):
    """Return the JSON document that a command prints."""
    return json.loads(invoke(*arguments, "--json").stdout)


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.processes
@pytest.mark.usefixtures("home")
def test_a_fleet_comes_up_is_looked_at_changed_and_taken_down(monkeypatch):
    assert document("list") == []
    said = call("up", "--gpu", "1", "--slots", "3", "--price", "0.4", "--max-nodes", "2", "--name", "lab")
    try:
        assert "to stop: ebbflow local down --name lab" in said
        assert document("list") == [{"name": "lab", "nodes": {"gpu": 1}, "owner_pid": None}]
        assert "1 gpu" in call("list")
        assert "gpu-1" in said
        assert "$0.4/h" in said
        assert "alive" in said
        assert "slots are CPU cores" in said
        fleet = LocalFleet.attach("lab")
        assert "gpu-1 is paused" in call("pause", "gpu-1", "--name", "lab")
        assert "paused" in call("status", "--name", "lab")
        assert "gpu-1 is resumed" in call("resume", "gpu-1", "--name", "lab")
        assert "0 processes of digits" in call("evict", "digits", "gpu-1", "--name", "lab")
        assert "may terminate in 60 s" in call(
            "notice", "gpu-1", "--lead-time", "1m", "--recommend", "--name", "lab"
        )
        assert "terminates in 300 s" in call("notice", "gpu-1", "--lead-time", "5m", "--name", "lab")
        assert "interruption pending" in call("status", "--name", "lab")
        assert "desired capacity 2 nodes" in call("add", "gpu", "--name", "lab")
        fleet.wait(lambda book: {"gpu-2", "gpu-3"} <= {n.id for n in book.nodes if n.visible}, 150)
        assert "gpu-1 is terminated" in call("kill", "gpu-1", "--name", "lab")
        seen = document("status", "--name", "lab")
        assert [(one["id"], one["state"], one["apps"]) for one in seen["nodes"]] == [
            ("gpu-2", "alive", []),
            ("gpu-3", "alive", []),
        ]
        assert (seen["name"], seen["spark"], seen["pools"][0]["desired"]) == ("lab", None, 2)
        injected = call("inject", "0s:remove:gpu", "0.1s:kill:gpu", "--name", "lab")
        assert "scripted: remove 1 node from gpu" in injected
        assert "scripted: gpu-2 is killed without notice" in injected
        assert fleet.lost("gpu-3") == "terminated on request"
        monkeypatch.setattr(status_module, "running_apps", lambda fleet: ["digits"])
        asked = invoke("down", "--name", "lab")
        assert asked.exit_code == 1
        assert "add --yes" in asked.output
        assert [one["name"] for one in document("list")] == ["lab"]
        with pytest.raises(ClusterError, match="has no Spark workers; start a fleet with some"):
            resolve_master("local-fleet:lab")
    finally:
        assert "is down" in call("down", "--yes", "--name", "lab")
    assert document("list") == []


@pytest.mark.usefixtures("home")
def test_up_wants_nodes():
    with pytest.raises(OptionError, match="at least one of --spark and --gpu"):
        call("up")


@pytest.mark.usefixtures("home")
def test_an_empty_list_is_a_header():
    assert call("list").split() == ["fleet", "nodes", "ends", "with", "process"]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("master", ["local[2]", "spark://127.0.0.1:7077", "yarn"])
def test_other_masters_are_as_they_are(master):
    assert resolve_master(master) == master
    with pytest.raises(ClusterError, match="there is no local fleet 'local'"):
        resolve_master(local_cli.DEFAULT + "-fleet")
