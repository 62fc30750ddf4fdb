"""``ebbflow fleet`` against an emulated AWS over HTTP, with groups as Terraform makes them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flowcases import COMMAND, JOINED, PATIENCE, eventually
from typer.testing import CliRunner

from ebbflow.flows import cli, fleet_change, fleet_cli, fleet_gangs, fleet_notices

if TYPE_CHECKING:
    from tests.aws.emulator import AccountAt, Cluster, Emulator
    from tests.infra.aws.systems_manager import SystemsManager

COMMANDS = [
    [],
    *([str(c.callback.__name__)] for c in fleet_cli.app.registered_commands if c.callback),
    ["notices"],
    *(["notices", str(c.callback.__name__)] for c in fleet_notices.app.registered_commands if c.callback),
]

PRICES = """
source = "made up for a test"
region = "us-east-1"
[on_demand]
"m5.large" = 0.096
"m5a.large" = 0.086
"m6i.large" = 0.096
"m6a.large" = 0.0864
"g5.xlarge" = 1.006
"""

Fleet = Callable[..., "Done"]
_CLIENTS: dict[str, Any] = {}


class Done:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict:
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """Both texts with single spaces."""
        return " ".join(f"{self.out} {self.err}".split())


def made(account: "AccountAt") -> "Cluster":
    """Make a cluster with three nodes of ``etl``, one of them on-demand."""
    from tests.aws.emulator import PoolShape

    return account.cluster(
        "lab",
        PoolShape("etl", size=3, on_demand_base=1, most=8),
        PoolShape("gpu", "gpu", types=("g5.xlarge",)),
    )


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the present folder, with on-demand prices: the emulator has no price list."""
    monkeypatch.chdir(tmp_path)
    for name in ("EBBFLOW_CONFIG", "EBBFLOW_LIMITS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "agreed.toml").write_text(PRICES)
    return tmp_path


@pytest.fixture
def cluster(aws_account: "AccountAt", files: Path) -> "Cluster":
    """Return a cluster of the test's own; the present folder has its configuration."""
    found = made(aws_account)
    found.write(files / "ebbflow.json")
    return found


@pytest.fixture(scope="module")
def lab(aws_emulator: "Emulator") -> "Cluster":
    """Return a cluster that several tests look at."""
    return made(aws_emulator.account())


@pytest.fixture
def quiet(lab: "Cluster", files: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[Cluster]":
    """Return a cluster that the test must leave as it is."""
    from tests.aws.emulator import ENVIRONMENT

    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in lab.account.environment.items():
        monkeypatch.setenv(name, value)
    lab.write(files / "ebbflow.json")
    yield lab
    assert changes(lab) == []


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fleet:
    """Run ``ebbflow fleet ...`` in this process, as the console script does."""
    from ebbflow.infra.aws.clients import Clients
    from ebbflow.tasks import fleet as module

    monkeypatch.setenv("COLUMNS", "160")
    # a console keeps the width that it was made with
    for command in (fleet_cli, fleet_change, fleet_gangs, fleet_notices):
        monkeypatch.setattr(command.console, "width", 160)

    def clients(*arguments: object, **more: object) -> Clients:
        """Return the clients of an earlier command: reading AWS's models anew takes longer than a command."""
        variables = [
            os.environ.get(n) for n in ("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SSM")
        ]
        given = repr((arguments, more, variables))
        if given not in _CLIENTS:
            _CLIENTS[given] = Clients(*arguments, **more)  # type: ignore[arg-type]
            _CLIENTS[given].close = lambda: None  # type: ignore[method-assign]
        return _CLIENTS[given]

    monkeypatch.setattr(module, "Clients", clients)

    def run(*arguments: str) -> Done:
        if Path("agreed.toml").exists() and "--on-demand-prices" not in arguments:
            arguments = (*arguments, "--on-demand-prices", "agreed.toml")
        monkeypatch.setattr(sys, "argv", ["ebbflow", "fleet", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


@pytest.fixture
def ssm(monkeypatch: pytest.MonkeyPatch) -> "Iterator[SystemsManager]":
    """Stand in for Systems Manager, which the emulator lacks."""
    from tests.infra.aws.systems_manager import SystemsManager

    service = SystemsManager()
    service.script = lambda node, parameters: (0, "idle\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSM", service.url)
    monkeypatch.setattr("ebbflow.tasks.fleet_leaving.LOOK", 0.1)
    yield service
    service.close()
    assert service.problems == []


def observed(fleet: Fleet, pool: str = "etl") -> dict:
    (row,) = (row for row in fleet("status", "--json").json["pools"] if row["name"] == pool)
    return row


CHANGING = {
    "CreateFleet",
    "RunInstances",
    "SendCommand",
    "SetDesiredCapacity",
    "SetInstanceProtection",
    "TerminateInstanceInAutoScalingGroup",
    "TerminateInstances",
    "UpdateAutoScalingGroup",
}


def changes(cluster: "Cluster") -> list[str]:
    """Return the calls that changed something about nodes."""
    return [entry["call"] for entry in cluster.account.calls() if entry["call"] in CHANGING]


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
    guide = (Path(__file__).parents[2] / "docs/fleet.md").read_text()
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
    monkeypatch.delenv("EBBFLOW_CONFIG", raising=False)
    done = fleet("status")
    assert done.code == 2
    assert "terraform output -json > ebbflow.json" in done.line
    assert fleet("status", "--config", "none.json").code == 2


def test_a_configuration_is_found_by_option_and_environment(
    fleet: Fleet, quiet: "Cluster", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ebbflow.json").rename(tmp_path / "prod.json")
    assert fleet("status").code == 2
    monkeypatch.setenv("EBBFLOW_CONFIG", str(tmp_path / "prod.json"))
    assert fleet("status").code == 0


def test_an_emulator_is_named_by_option_too_and_an_aws_that_is_away_is_status_one(
    fleet: Fleet, quiet: "Cluster", monkeypatch: pytest.MonkeyPatch
) -> None:
    url = quiet.account.emulator.url
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert fleet("status", "--endpoint-url", url, "--config", "ebbflow.json").code == 0
    from botocore.retries.standard import RetryPolicy

    monkeypatch.setattr(RetryPolicy, "compute_retry_delay", lambda *_: 0.0)
    away = fleet("status", "--own-credentials", "--endpoint-url", "http://127.0.0.1:9")
    assert away.code == 1
    assert "no usable answer from AWS" in away.line


def test_it_acts_in_the_role_of_the_capacity_loop_unless_told_otherwise(
    fleet: Fleet, quiet: "Cluster", monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbflow.tasks import fleet as module

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
    assert re.search(rf"^{spot[0]} +etl .*! leaving, [\d.]+ (s|min .*) left", shown.out, re.M)
    assert re.search(r"^etl +3 +3 +3 +2 +1 of 1 +1 noticed, [\d.]+ s", shown.out, re.M)
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
    row = eventually(lambda: (found := observed(fleet))["short_why"] and found, 20)
    assert (row["planned"], row["observed"]) == (5, 3)
    assert row["short_since"] > time.time() - 60
    assert "etl is short" in fleet("status").line


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
        assert watching.wait(PATIENCE) == 0
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
    content = fleet("cost", "--json", "--hours", "10").json
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


# --- planning and changing ----------------------------------------------------------------------------------


def test_a_plan_tells_what_would_be_done_and_does_nothing(fleet: Fleet, quiet: "Cluster") -> None:
    present = fleet("plan")
    assert present.code == 0
    assert "as planned: nothing asks for another size" in present.line
    assert "passes unchanged" in present.line
    Path("fleet.toml").write_text("[limits]\nnodes = 5\n")
    content = fleet("plan", "etl", "--nodes", "7", "--json").json
    (pool,) = content["pools"]
    assert (pool["planned"], pool["target"]["nodes"], pool["guard"]["target"]["nodes"]) == (3, 7, 5)
    assert "5 nodes instead of 7" in " ".join(pool["guard"]["reasons"])
    assert [ask["value"] for ask in pool["would"]["asked"] if ask["kind"] == "size"] == [5]
    assert any("spot" in line for line in pool["market"])
    assert observed(fleet)["planned"] == 3
    assert fleet("plan", "--nodes", "2").code == 2


def test_a_plan_for_a_query_takes_the_fewest_nodes_that_end_in_time(
    fleet: Fleet, quiet: "Cluster", tables: str
) -> None:
    given = ("plan", "etl", "--query", JOINED, "--tables", tables, "--json")
    easy = fleet(*given, "--within", "100000").json["pools"][0]
    hard = fleet(*given, "--within", "0.001").json["pools"][0]
    assert "ends in" in easy["wanted"]["reason"]
    assert easy["wanted"]["nodes"] == 1
    assert "no number of nodes from 0 to 8 suffices" in hard["wanted"]["reason"]
    assert fleet("plan", "etl", "--query", JOINED).code == 2


def test_growing_asks_for_nodes_and_they_arrive(fleet: Fleet, cluster: "Cluster") -> None:
    dry = fleet("grow", "etl", "2", "--dry-run")
    assert (dry.code, changes(cluster)) == (0, [])
    assert "dry run: nothing was done" in dry.out
    assert "autoscaling:SetDesiredCapacity" in dry.line
    assert "no budget is set" in dry.line
    assert fleet("grow", "etl", "2", "--yes").code == 0
    assert cluster.group("etl")["DesiredCapacity"] == 5
    eventually(lambda: observed(fleet)["observed"] == 5, 20)
    assert fleet("grow", "etl", "1", "--on-demand", "--yes").code == 0
    eventually(lambda: observed(fleet)["on_demand"] == 2, 20)


def test_without_a_terminal_and_without_yes_nothing_is_done(fleet: Fleet, quiet: "Cluster") -> None:
    for command in (("grow", "etl", "1"), ("shrink", "etl", "1"), ("drain", quiet.nodes("etl")[0]["id"])):
        done = fleet(*command)
        assert done.code == 1
        assert "this is no terminal to ask on; add --yes" in done.line
    assert quiet.group("etl")["DesiredCapacity"] == 3


@pytest.mark.parametrize(("answer", "size"), [("n", 3), ("y", 4)])
def test_on_a_terminal_it_asks(
    answer: str, size: int, fleet: Fleet, cluster: "Cluster", monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer

    asked = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda question: asked.append(question) or answer == "y")
    done = fleet("grow", "etl", "1")
    assert asked == ["Grow etl?"]
    assert done.code == (0 if answer == "y" else 1)
    assert cluster.group("etl")["DesiredCapacity"] == size


def test_a_fleet_that_changes_while_somebody_thinks_is_left_alone(
    fleet: Fleet, cluster: "Cluster", monkeypatch: pytest.MonkeyPatch
) -> None:
    spot = next(n["id"] for n in cluster.nodes("etl") if n["market"] == "spot")

    def think(question: str, yes: bool) -> None:
        cluster.account.take([spot])
        cluster.account.configure(most={"spot": 1})

    monkeypatch.setattr(fleet_change, "confirm", think)
    done = fleet("shrink", "etl", "--nodes", spot)
    assert done.code in (1, 2)
    assert cluster.group("etl")["DesiredCapacity"] == 3


def test_the_budget_holds(fleet: Fleet, cluster: "Cluster") -> None:
    Path("fleet.toml").write_text("[limits]\ndollars_per_hour = 0.1\n")
    refused = fleet("grow", "etl", "1", "--on-demand", "--yes")
    assert refused.code == 1
    assert "the limit is $0.1/h" in refused.line
    assert "no budget is set" not in refused.line
    assert changes(cluster) == []
    assert fleet("grow", "etl", "2", "--yes").code == 0  # spot is next to nothing here
    assert "allowed" in fleet("status").line


def test_shrinking_drains_first_and_ends_exactly_the_nodes_that_were_named(
    fleet: Fleet, cluster: "Cluster", ssm: "SystemsManager"
) -> None:
    nodes = cluster.nodes("etl")
    spot = [n["id"] for n in nodes if n["market"] == "spot"]
    ssm.online |= {n["id"] for n in nodes}
    told: list[str] = []

    def script(node: str, parameters: dict[str, list[str]]) -> tuple[int, str]:
        told.append(node)
        assert {n["id"] for n in cluster.nodes("etl")} >= {node}  # it is there while it drains
        return 0, "busy\n" if told.count(node) < 2 else "idle\n"

    ssm.script = script
    dry = fleet("shrink", "etl", "--nodes", spot[1], "--dry-run")
    assert (dry.code, told, changes(cluster)) == (0, [], [])
    done = fleet("shrink", "etl", "--nodes", spot[1], "--yes", "--wait", "60")
    assert done.code == 0, done.line
    assert told == [spot[1]] * 2
    assert "1 of 1 idle" in done.out
    assert f"end {spot[1]}" in done.out
    eventually(lambda: {n["id"] for n in cluster.nodes("etl")} == {n["id"] for n in nodes} - {spot[1]}, 20)
    assert cluster.group("etl")["DesiredCapacity"] == 2
    assert observed(fleet)["planned"] == 2


def test_shrinking_by_a_number_keeps_the_on_demand_base_and_ends_nodes_that_cannot_be_told(
    fleet: Fleet, cluster: "Cluster", ssm: "SystemsManager"
) -> None:
    done = fleet("shrink", "etl", "2", "--yes", "--wait", "0")
    assert done.code == 0, done.line
    assert "was not told" in done.out
    eventually(lambda: [n["market"] for n in cluster.nodes("etl")] == ["on-demand"], 20)
    more = fleet("shrink", "etl", "9", "--yes")
    assert more.code == 2
    assert "only 1 node planned" in more.line


def test_a_drained_node_stays_until_it_is_ended_and_is_then_replaced(
    fleet: Fleet, cluster: "Cluster", ssm: "SystemsManager"
) -> None:
    nodes = {n["id"] for n in cluster.nodes("etl")}
    ssm.online |= nodes
    spot = next(n["id"] for n in cluster.nodes("etl") if n["market"] == "spot")
    done = fleet("drain", spot, "--yes", "--wait", "30")
    assert done.code == 0, done.line
    assert "not ended; they cost until then" in done.line
    assert {n["id"] for n in cluster.nodes("etl")} == nodes
    (row,) = (n for n in fleet("status", "--json").json["nodes"] if n["id"] == spot)
    assert row["state"] == "draining"
    assert fleet("drain", spot, "--end", "--yes", "--wait", "30").code == 0
    eventually(lambda: len(now := {n["id"] for n in cluster.nodes("etl")}) == 3 and spot not in now, 20)


def test_nodes_of_others_are_never_touched(fleet: Fleet, cluster: "Cluster", ssm: "SystemsManager") -> None:
    from tests.aws.emulator import PoolShape

    other = cluster.account.cluster("prod", PoolShape("etl", size=2))
    theirs = [n["id"] for n in other.nodes("etl")] + cluster.account.strangers(1)
    ssm.online |= set(theirs)
    commands = (("drain", "--end", theirs[0]), ("shrink", "etl", "--nodes", theirs[1]), ("drain", theirs[2]))
    for name, command in zip(theirs, commands, strict=True):
        done = fleet(*command, "--yes")
        assert done.code == 2
        assert f"{name} is no running node of this cluster" in done.line
    assert ssm.sent == []
    assert set(changes(cluster)) == {"RunInstances"}  # the strangers' own
    assert {n["id"] for n in cluster.account.alive()} >= set(theirs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("grow", "tpu", "1"), "POOL must be one of the cluster's (etl, gpu); got 'tpu'"),
        (("grow", "etl/run-1", "1"), "a gang has the size it was asked for with"),
        (("shrink", "etl"), "name a number of nodes or --nodes ID, one of both"),
        (("shrink", "etl", "1", "--nodes", "i-1"), "name a number of nodes or --nodes ID, one of both"),
        (("gang", "run-1", "--pool", "tpu", "--size", "2"), "--pool must be one of the cluster's (etl, gpu)"),
        (
            ("gang", "Run_1", "--pool", "gpu", "--size", "2"),
            "a gang's name must be 1 to 40 lower-case letters",
        ),
        (("end", "run-1"), "there is no gang 'run-1' in this cluster; there are none"),
        (("drain", "i-0123456789abcdef0"), "is no running node of this cluster"),
        (("status", "--limits", "none.toml"), "none.toml cannot be read: No such file"),
        (("status", "--on-demand-prices", "none.toml"), "none.toml cannot be read"),
    ],
)
def test_wrong_input_is_explained(
    arguments: tuple[str, ...], message: str, fleet: Fleet, quiet: "Cluster"
) -> None:
    done = fleet(*arguments)
    assert done.code == 2
    assert message in done.line


def test_the_pools_most_is_a_refusal(fleet: Fleet, cluster: "Cluster") -> None:
    assert fleet("grow", "etl", "5", "--yes").code == 0
    done = fleet("grow", "etl", "1", "--yes")
    assert done.code == 1
    assert "8 nodes instead of 9" in done.line


# --- gangs --------------------------------------------------------------------------------------------------

GANG = ("gang", "run-1", "--pool", "etl", "--size", "3")


def of_gang(cluster: "Cluster") -> list[str]:
    return [n["id"] for n in cluster.nodes("etl") if n["tags"].get("ebbflow:gang") == "run-1"]


def test_a_gang_starts_whole_counts_from_then_on_and_is_returned(
    fleet: Fleet, cluster: "Cluster", ssm: "SystemsManager"
) -> None:
    Path("fleet.toml").write_text("[limits]\nnodes = 6\n")
    dry = fleet(*GANG, "--dry-run")
    assert (dry.code, changes(cluster)) == (0, [])
    assert "3 spot nodes of etl, all at once or none, one zone and one type" in dry.line
    assert "ec2:CreateFleet" in dry.line
    assert "dry run: nothing was done" in dry.out
    asked = fleet(*GANG)
    assert asked.code == 1
    assert "this is no terminal to ask on; add --yes" in asked.line
    assert changes(cluster) == []
    done = fleet(*GANG, "--yes")
    assert done.code == 0, done.line
    gang = of_gang(cluster)
    assert len(gang) == 3
    assert all(name in done.line for name in gang)
    assert "ebbflow fleet end run-1" in done.line
    again = fleet(*GANG, "--yes")
    assert again.code == 0
    assert "run-1 is held already" in again.line
    assert changes(cluster) == ["CreateFleet"]
    assert observed(fleet, "etl/run-1")["planned"] == 3
    # there is room for 6 nodes, of which the gang has 3
    refused = fleet("grow", "etl", "1", "--yes")
    assert refused.code == 1
    assert "all pools may have 6, the others have 3" in refused.line
    ssm.online |= set(gang)
    look = fleet("end", "run-1", "--dry-run")
    assert (look.code, of_gang(cluster)) == (0, gang)
    ended = fleet("end", "run-1", "--yes", "--wait", "30")
    assert ended.code == 0, ended.line
    assert "3 of 3 idle" in ended.out
    assert of_gang(cluster) == []
    assert len(cluster.nodes("etl")) == 3
    assert fleet("grow", "etl", "1", "--yes").code == 0


@pytest.mark.parametrize(
    ("limits", "more", "said"),
    [
        ("nodes = 5", (), "2 nodes instead of 3: all pools may have 5, the others have 3"),
        (
            "[limits.pools.etl]\nmost = 5",
            (),
            "the pool's limit is 5, of which the pool and its other gangs have 3",
        ),
        ("dollars_per_hour = 0.3", ("--market", "on-demand"), "the limit is $0.3/h"),
        ("dollars_per_run = 1", ("--market", "on-demand", "--hours", "6"), "the run may cost $1"),
    ],
)
def test_a_gang_beyond_a_limit_is_refused_and_nothing_is_asked_of_aws(
    limits: str, more: tuple[str, ...], said: str, fleet: Fleet, quiet: "Cluster"
) -> None:
    Path("fleet.toml").write_text(f"[limits]\n{limits}\n")
    refused = fleet(*GANG, *more, "--yes")
    assert refused.code == 1
    assert said in refused.line
    assert "nothing was done" in refused.line


def test_a_limit_of_a_run_needs_to_know_for_how_long(fleet: Fleet, quiet: "Cluster") -> None:
    Path("fleet.toml").write_text("[limits]\ndollars_per_run = 1\n")
    done = fleet(*GANG, "--market", "on-demand", "--dry-run")
    assert done.code == 0
    assert "--hours is not given: the limit of $1 a run is not checked" in done.line


def test_a_gang_that_cannot_be_had_says_what_to_do(fleet: Fleet, cluster: "Cluster") -> None:
    cluster.account.configure(most={"spot": 3})
    done = fleet(*GANG, "--yes")
    assert done.code == 1
    assert "could be had, and are returned" in done.line
    assert "Ask again later, or for fewer, or --market on-demand" in done.line
    assert of_gang(cluster) == []


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
    assert "can be read today: redrive it" in shown.line
    assert "2 notices could not be handled" in fleet("status").line
    assert "1 notice would be taken in" in fleet("notices", "redrive", "--dry-run").line
    done = fleet("notices", "redrive")
    assert done.code == 1  # one is left
    assert "1 taken in, 1 left" in done.out
    (row,) = (n for n in fleet("status", "--json").json["nodes"] if n["id"] == spot)
    assert row["state"] == "leaving"
    assert len(fleet("notices", "show", "--json").json["dead_letters"]) == 1
