"""``ebbflow capacity``: what people type, and what they read."""

import json
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbflow.flows.capacity import cli as capacity_cli
from ebbflow.flows.cli import app
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppReport,
    AppSpec,
    CapacityChanged,
    Decided,
    Granted,
    Lease,
)
from ebbflow.planners.scheduling.placement_cost import ClusterLinks
from ebbflow.tasks.apps.loop_report import LOOP, STOP, LoopStatusRecord, stop_request
from ebbflow.tasks.capacity.loop import CapacityLoop
from ebbflow.tasks.capacity.node_sources import Nodes
from ebbflow.tasks.capacity.request import CapacityRequest, LoopRules

runner = CliRunner()


def invoke(*words: str) -> Any:
    return runner.invoke(app, ["capacity", *words])


@pytest.fixture
def ledger(home: Path) -> Any:
    with Ledger.open() as made:
        yield made


def fill(ledger: Ledger) -> None:
    """Write a small cluster as a loop would."""
    now = ledger.clock.now()
    lead = ledger.lead("host:1:abc", 60.0)
    lead.write(
        [
            CapacityChanged(
                1, (Node("gpu-1", 8, 32.0, gpus=2, price=1.5), Node("cpu-1", 4, 16.0)), (), (), 0.0, "two"
            ),
            AppEntered(AppSpec("digits[x]", "training", team="vision", gpus=2)),
            Granted((Lease(1, "digits[x]", "gpu-1", 0, now, now + 300, 1, 0.75),)),
            Decided(
                "auction",
                "digits gets 1 GPU [bold]",
                "digits[x]",
                1,
                0.01,
                inputs={"apps": {"digits[x]": {"rho": 1.25}}},
            ),
        ]
    )
    ledger.report("digits[x]", AppReport(now, (1,), progress=0.4, seconds_left=90.0))
    row = LoopStatusRecord(
        1, "host:1:abc", "rho-bounded", now - 60, cycles=7, capacity_age=0.4, problems=("a price is old",)
    )
    ledger.report(LOOP, row.report(now))


def test_status_shows_nodes_leases_apps_and_decisions(ledger: Ledger) -> None:
    fill(ledger)
    shown = invoke("status")
    assert shown.exit_code == 0, shown.output
    for word in (
        "gpu-1",
        "digits[x]",
        "vision",
        "1.25",
        "40%",
        "auction",
        "[bold]",
        "host:1:abc",
        "a price is old",
    ):
        assert word in shown.output
    assert "1 of 2 GPUs leased" in shown.output


def test_status_for_programs(ledger: Ledger) -> None:
    fill(ledger)
    found = json.loads(invoke("status", "--json").stdout)
    assert found["leads"] is True
    assert found["apps"][0]["rho"] == 1.25
    assert found["leases"][0]["node"] == "gpu-1"
    assert found["loop"]["cycles"] == 7
    assert [node["id"] for node in found["nodes"]] == ["cpu-1", "gpu-1"]


def test_status_without_a_loop_says_what_to_do(ledger: Ledger) -> None:
    ledger.write([AppEntered(AppSpec("a", "training"))])
    shown = invoke("status")
    assert shown.exit_code == 1
    assert "ebbflow capacity start" in shown.output


def test_a_ledger_that_is_not_there_is_an_error_and_not_made(home: Path) -> None:
    shown = invoke("status")
    assert shown.exit_code == 1
    assert "error" in shown.output
    assert not (home / "ledger.db").exists()


def test_stop_without_a_loop_says_so(ledger: Ledger) -> None:
    shown = invoke("stop")
    assert (shown.exit_code, "no leader" in shown.output) == (0, True)


def test_stop_that_nobody_hears_fails(ledger: Ledger) -> None:
    fill(ledger)
    shown = invoke("stop", "--timeout", "0.3", "--yes")
    assert shown.exit_code == 1
    assert "has not ended" in shown.output


class OneNode:
    """A source of one node."""

    def capacity(self) -> Capacity:
        return Capacity(1, (Node("n0", 4, 16.0, gpus=2),))


def test_run_leads_until_it_is_asked_to_stop(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def nodes(*_: Any) -> Any:
        yield Nodes(OneNode())

    monkeypatch.setattr("ebbflow.tasks.capacity.node_sources.opened_nodes", nodes)
    monkeypatch.setattr("ebbflow.tasks.capacity.node_sources.check_source", lambda *_: None)
    monkeypatch.setattr(capacity_cli, "_until", lambda stop, work: work())  # signals are the main thread's

    def ask() -> None:
        for _ in range(600):
            if ledger.state().nodes:
                break
            ledger.clock.sleep(0.1)
        leader = ledger.leader()
        assert leader is not None
        ledger.report(STOP, stop_request(leader.token, ledger.clock.now()))

    asking = threading.Thread(target=ask)
    asking.start()
    ran = invoke("start", "--runner", "plain", "--policy", "themis", "--policy-option", "knob=0.5")
    asking.join(150)
    assert ran.exit_code == 0, ran.output
    assert "the loop ended: stop requested" in ran.output
    assert "arrived: n0" in ran.output
    assert set(ledger.state().nodes) == {"n0"}


def test_stop_ends_a_loop_wherever_it_runs(ledger: Ledger) -> None:
    loop = CapacityLoop(ledger, None, OneNode())
    thread = threading.Thread(target=loop.run, args=(threading.Event(),))
    thread.start()
    for _ in range(600):
        if ledger.state().nodes:
            break
        ledger.clock.sleep(0.1)
    leader = ledger.leader()
    assert leader is not None
    refused = invoke("stop")
    assert (refused.exit_code, "add --yes" in refused.output) == (1, True)
    stopped = invoke("stop", "--yes", "--json")
    thread.join(150)
    assert stopped.exit_code == 0, stopped.output
    assert json.loads(stopped.stdout)["stopped"] == leader.holder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--source", "moon"], "source must be one of"),
        (["--policy", "thamis"], "themis"),
        (["--policy", "no_such_module:Policy"], "cannot be imported"),
        (["--policy", "json:dumps"], "is no policy and was not called"),
        (["--policy", "mine:"], "must be MODULE:NAME"),
        (["--allow-policy", "mine"], "must be MODULE:NAME"),
        (["--policy-option", "rho"], "NAME=VALUE"),
        (["--policy-option", "rhoo=2"], "rhoo"),
        (["--config", "nowhere.toml"], "cannot be read"),
    ],
)
def test_wrong_input_names_the_value_and_the_rule(words: list[str], said: str, home: Path) -> None:
    shown = invoke("start", *words)
    assert isinstance(shown.exception, OptionError)
    assert said in str(shown.exception)


LIMITS = """
[quotas]
nodes = 60
[quotas.teams.vision]
gpus = 48
[teams.vision]
weight = 2
[scaling]
scale_in_idle = "30s"
pools = { etl = "cores" }
[loop]
lease_duration = "2m"
[policy]
name = "rho-bounded"
options = { rho = 1.5 }
[links]
intra_rack = "25gbit"
[intervals]
capacity_poll_interval = 2.0
"""


def test_a_file_of_limits_says_how_the_loop_decides(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(LIMITS)
    rules = LoopRules.read(path)
    made = CapacityRequest(config=str(path), auction_interval=30.0).settings(rules)
    assert made.limits.nodes == 60
    assert (made.teams["vision"].weight, made.teams["vision"].gpus) == (2, 48)
    assert made.scaling is not None
    assert (made.scaling.scale_in_idle_s, dict(made.scaling.pools)) == (30, {"etl": "cores"})
    assert (made.lease_s, made.interval_s) == (120, 30)
    assert made.links == ClusterLinks(intra_rack=3.125e9)
    assert made.policy.rho == 1.5  # type: ignore[attr-defined]
    assert rules.intervals.capacity_poll_interval == 2.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"loop": {"lease_s": 1}}, "did you mean lease_duration"),
        ({"scaling": {"idle_s": 1}}, "did you mean scale_in_idle"),
        ({"loop": {"lease_duration": "5 parsecs"}}, "loop.lease_duration must be a duration"),
        ({"limits": {}}, "limits is not known; known are quotas"),
        ({"teams": {"vision": {"gpus": 2}}}, "gpus is not known; known are weight"),
        ({"scaling": {"enabled": 1}}, "enabled"),
        ({"teams": {"vision": {"weight": "two"}}}, "teams.vision.weight"),
        ({"scaling": {"pools": {"etl": "disks"}}}, "etl"),
        ({"policy": {"nam": "x"}}, "name"),
        ({"intervals": {"poll_interval": 0}}, "poll_interval"),
        ({"links": {"intra_rak": "25gbit"}}, "did you mean intra_rack"),
        ({"links": {"intra_rack": 25}}, "links.intra_rack must be a rate such as 200mbit or 25gbit; got 25"),
        ({"links": {"cross_rack": "0gbit"}}, "links.cross_rack must be a rate"),
    ],
)
def test_a_wrong_file_of_limits_is_refused(content: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        LoopRules.parse(content, "limits.toml")


def test_scaling_can_be_left_alone() -> None:
    assert LoopRules.parse({"scaling": {"enabled": False}}, "x").scaling is None


def test_every_command_teaches() -> None:
    for command in ("start", "status", "stop"):
        shown = invoke(command, "--help")
        assert shown.exit_code == 0
        assert f"ebbflow capacity {command}" in shown.output
