"""``ebbflow nodes`` on real processes."""

import pytest
from typer.testing import CliRunner

from ebbflow.flows.nodes.cli import app
from ebbflow.infra.local_fleet import LocalFleet
from ebbflow.planners.errors import OptionError

runner = CliRunner()


def call(*arguments):
    """Return what a command writes; its errors are raised."""
    done = runner.invoke(app, list(arguments), env={"COLUMNS": "160"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.processes
@pytest.mark.usefixtures("home")
def test_a_fleet_comes_up_is_looked_at_changed_and_taken_down():
    assert "none; start one" in call("list")
    said = call("up", "--gpu", "1", "--slots", "3", "--price", "0.4", "--most", "2", "--name", "lab")
    try:
        assert "stop them: ebbflow nodes down --name lab" in said
        assert "lab: 1 gpu" in call("list")
        assert "gpu-1" in said
        assert "$0.4/h" in said
        assert "alive" in said
        assert "slots are CPU cores" in said
        fleet = LocalFleet.attach("lab")
        assert "gpu-1 is paused" in call("pause", "gpu-1", "--name", "lab")
        assert "paused" in call("status", "--name", "lab")
        assert "gpu-1 resumed" in call("resume", "gpu-1", "--name", "lab")
        assert "no processes ran there" in call("evict", "digits", "gpu-1", "--name", "lab")
        assert "may terminate in 60 s" in call(
            "notice", "gpu-1", "--seconds", "60", "--advice", "--name", "lab"
        )
        assert "terminates in 300 s" in call("notice", "gpu-1", "--seconds", "300", "--name", "lab")
        assert "noticed" in call("status", "--name", "lab")
        assert "2 nodes are planned in gpu" in call("add", "gpu", "--name", "lab")
        fleet.wait(lambda book: {"gpu-2", "gpu-3"} <= {n.id for n in book.nodes if n.visible}, 60)
        assert "gpu-1 is terminated" in call("kill", "gpu-1", "--name", "lab")
        played = call("play", "0s:kill:gpu", "--name", "lab")
        assert "scripted: gpu-2 is killed without notice" in played
    finally:
        assert "is down" in call("down", "--name", "lab")
    assert "none; start one" in call("list")


def test_up_wants_nodes():
    with pytest.raises(OptionError, match="at least one of --spark and --gpu"):
        call("up")
