"""``ebbflow fleet``: help, configuration, what is shown, and notices."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from ebbflow.flows.fleet import cli as fleet_cli
from ebbflow.flows.fleet import notices as fleet_notices
from tests.flows.fleet.cases import Fleet, changes, observed
from tests.flows.flowcases import COMMAND, TIMEOUT, eventually

if TYPE_CHECKING:
    from tests.aws.emulator import Cluster

COMMANDS = [
    [],
    *([str(c.callback.__name__)] for c in fleet_cli.app.registered_commands if c.callback),
    ["notices"],
    *(["notices", str(c.callback.__name__)] for c in fleet_notices.app.registered_commands if c.callback),
]

# --- help ---------------------------------------------------------------------------------------------------


def test_every_help_text_teaches_and_all_examples_exist() -> None:
    shown = {}
    for command in COMMANDS:
        done = CliRunner().invoke(fleet_cli.app, [*command, "--help"], env={"COLUMNS": "160"})
        assert done.exit_code == 0
        shown[" ".join(command)] = done.output
    examples = []
    for page in shown.values():
        found = re.findall(r"^ +ebbflow fleet (.*)", page.split("Usage:")[1].partition("\n")[2], re.M)
        assert found, page
        examples += found
    guide = (Path(__file__).parents[3] / "docs/fleet.md").read_text()
    told = re.findall(r"`?ebbflow fleet ([^`|\n]+)", guide)
    assert len(told) > 10
    for example in examples + told:
        words = re.split(r"  +|\s[>&]", example)[0].split()
        name = " ".join(words[: 2 if words[0] == "notices" else 1])
        assert {w for w in words if w.startswith("--")} <= set(re.findall(r"--[a-z-]+", shown[name])), example


# --- configuration and rights -------------------------------------------------------------------------------


def test_without_a_configuration_a_command_teaches_how_to_get_one(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EBBFLOW_TERRAFORM_OUTPUT", raising=False)
    (tmp_path / "ebbflow.json").write_text("{}")  # whoever put it there: it was not asked for
    done = fleet("status")
    assert done.code == 2
    assert "no file of Terraform's output is named" in done.line
    assert "terraform output -json > ebbflow.json" in done.line
    assert fleet("status", "--terraform-output", "none.json").code == 2


def test_a_configuration_is_found_by_option_and_environment(
    fleet: Fleet, quiet: "Cluster", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ebbflow.json").rename(tmp_path / "prod.json")
    assert fleet("status").code == 2
    monkeypatch.setenv("EBBFLOW_TERRAFORM_OUTPUT", str(tmp_path / "prod.json"))
    assert fleet("status").code == 0


def test_an_emulator_is_named_by_option_too_and_an_aws_that_is_away_is_status_one(
    fleet: Fleet, quiet: "Cluster", monkeypatch: pytest.MonkeyPatch
) -> None:
    url = quiet.account.emulator.url
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert fleet("status", "--endpoint-url", url, "--terraform-output", "ebbflow.json").code == 0
    from botocore.retries.standard import RetryPolicy

    monkeypatch.setattr(RetryPolicy, "compute_retry_delay", lambda *_: 0.0)
    away = fleet("status", "--own-credentials", "--endpoint-url", "http://127.0.0.1:9")
    assert away.code == 1
    assert "no usable answer from AWS" in away.line


def test_it_acts_in_the_role_of_the_capacity_loop_unless_told_otherwise(
    fleet: Fleet, quiet: "Cluster", monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbflow.tasks.fleet import steps as module

    roles, clients = [], module.Clients

    def noted(*arguments: Any, **more: Any) -> Any:
        roles.append(more["role_arn"])
        return clients(*arguments, **more)

    monkeypatch.setattr(module, "Clients", noted)
    # the emulator gives the role's keys, and takes the calls they sign for the same account
    assert fleet("status").code == 0
    assert fleet("status", "--own-credentials").code == 0
    assert roles == [quiet.settings.capacity_role_arn, None]
    missing = fleet("status", "--profile", "nobody")
    assert missing.code == 1
    assert "nobody" in missing.line
    assert "emulated" not in missing.line


# --- looking ------------------------------------------------------------------------------------------------


def test_a_status_shows_pools_nodes_and_notices_with_the_time_left(fleet: Fleet, cluster: "Cluster") -> None:
    spot = [n["id"] for n in cluster.nodes("etl") if n["market"] == "spot"]
    cluster.account.interrupt(spot[:1], end=False)
    waiting = fleet("status")
    assert "waiting, and nothing on this machine reads them" in waiting.line
    assert fleet("notices", "read").code == 0
    shown = fleet("status")
    assert shown.code == 0
    assert re.search(rf"^{spot[0]} +etl .*! interruption pending, [\d.]+ (s|min .*) left", shown.out, re.M)
    assert re.search(r"^etl +3 +3 +3 +2 +1 of 1 +1 interruption pending, [\d.]+ s", shown.out, re.M)
    content = fleet("status", "--json").json
    assert [row["name"] for row in content["pools"]] == ["etl", "gpu"]
    (told,) = (node for node in content["nodes"] if node["id"] == spot[0])
    assert told["state"] == "leaving"
    assert 0 <= told["seconds_left"] <= 120
    (base,) = (node for node in content["nodes"] if node["market"] == "on-demand")
    assert base["dollars_per_hour"] in (0.096, 0.086, 0.0864)
    assert content["dollars_per_hour"] == pytest.approx(sum(n["dollars_per_hour"] for n in content["nodes"]))
    assert not changes(cluster)


def test_a_pool_that_is_short_says_since_when_and_why(fleet: Fleet, cluster: "Cluster") -> None:
    cluster.account.configure(most={"spot": 2})
    assert fleet("grow", "etl", "2", "--yes").code == 0
    row = eventually(lambda: (found := observed(fleet))["short_why"] and found)
    assert (row["planned"], row["observed"]) == (5, 3)
    assert row["short_since"] > time.time() - 300
    assert "etl: insufficient Spot capacity" in fleet("status").line


def test_a_watch_goes_on_until_it_is_interrupted(quiet: "Cluster", tmp_path: Path) -> None:
    watching = subprocess.Popen(
        [*COMMAND, "fleet", "status", "--watch", "1", "--json", "--on-demand-prices", "agreed.toml"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watching.stdout is not None
        looks = [json.loads(watching.stdout.readline()) for _ in range(2)]
        assert [look["cluster"] for look in looks] == ["lab", "lab"]
        assert looks[1]["at"] - looks[0]["at"] >= 1
        watching.send_signal(signal.SIGINT)
        assert watching.wait(TIMEOUT) == 0
    finally:
        watching.kill()
        watching.wait()


def test_prices_mark_the_cheapest_offer_of_each_pool_without_colour(fleet: Fleet, quiet: "Cluster") -> None:
    shown = fleet("prices")
    assert shown.code == 0
    assert len(re.findall(r"^► +(etl|gpu) ", shown.out, re.M)) == 2
    content = fleet("prices", "etl", "--json").json
    offers = content["offers"]
    assert {row["pool"] for row in offers} == {"etl"}
    assert {row["market"] for row in offers} == {"spot", "on-demand"}
    assert [row["cheapest"] for row in offers].count(True) == 1
    assert offers[0]["useful"] == min(row["useful"] for row in offers)
    assert all(0 < row["saving"] < 1 for row in offers if row["market"] == "spot")
    unknown = fleet("prices", "tpu")
    assert unknown.code == 2
    assert "pool must be one of the cluster's (etl, gpu); got 'tpu'" in unknown.line


def test_costs_are_counted_from_the_first_node_on(fleet: Fleet, cluster: "Cluster") -> None:
    content = fleet("cost", "--json", "--horizon", "10h").json
    (etl,) = content["pools"]
    assert (etl["pool"], etl["nodes"]) == ("etl", 3)
    assert 0 < etl["dollars"] < etl["on_demand_dollars"]
    assert etl["node_hours"] == pytest.approx(3 * 60 / 3600, rel=0.5)  # a minute each at least
    assert etl["ahead"]["hours"] == 10
    assert 0.8 < etl["ahead"]["dollars"] < 1.0  # the on-demand node; spot is next to nothing here
    assert content["since"] <= time.time()
    gone = next(n["id"] for n in cluster.nodes("etl") if n["market"] == "spot")
    cluster.account.take([gone])
    again = fleet("cost", "--json").json
    assert again["total"]["nodes"] == 4  # the ended one is not forgotten
    assert again["total"]["free_hours"] > 0
    shown = fleet("cost")
    assert re.search(r"^etl +4 ", shown.out, re.M)
    assert "cluster lab, since" in shown.out


# --- notices ------------------------------------------------------------------------------------------------


def test_dead_letters_are_shown_and_what_can_be_read_is_tried_again(fleet: Fleet, cluster: "Cluster") -> None:
    spot = next(n["id"] for n in cluster.nodes("etl") if n["market"] == "spot")
    good = {
        "source": "aws.ec2",
        "detail-type": "EC2 Spot Instance Interruption Warning",
        "time": time.time(),
        "detail": {"instance-id": spot, "instance-action": "terminate"},
    }
    sqs = cluster.account.client("sqs")
    for body in (json.dumps(good), "torn {"):
        sqs.send_message(QueueUrl=cluster.settings.dead_letter_queue_url, MessageBody=body)
    shown = fleet("notices", "show")
    assert "a notice must be JSON" in shown.line
    assert "readable: redrive it" in shown.line
    assert "2 notices could not be handled" in fleet("status").line
    assert "1 notice would be redriven" in fleet("notices", "redrive", "--dry-run").line
    done = fleet("notices", "redrive")
    assert done.code == 1  # one is left
    assert "1 redriven, 1 left" in done.out
    (row,) = (n for n in fleet("status", "--json").json["nodes"] if n["id"] == spot)
    assert row["state"] == "leaving"
    assert len(fleet("notices", "show", "--json").json["dead_letters"]) == 1
