"""``ebbflow fleet plan, grow, shrink and drain``: what they do, ask and refuse."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from ebbflow.flows.fleet import change as fleet_change
from tests.flows.fleet.cases import Fleet, changes, observed
from tests.flows.flowcases import JOINED, eventually

if TYPE_CHECKING:
    from tests.aws.emulator import Cluster
    from tests.infra.aws.systems_manager import SystemsManager


def test_a_plan_tells_what_would_be_done_and_does_nothing(
    fleet: Fleet, quiet: "Cluster", limited: Callable[[str], None]
) -> None:
    present = fleet("plan")
    assert present.code == 0
    assert "as planned: no other size is requested" in present.line
    assert "passes unchanged" in present.line
    limited("[quotas]\nnodes = 5\n")
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
    assert "completes in" in easy["wanted"]["reason"]
    assert easy["wanted"]["nodes"] == 1
    assert "no number of nodes from 0 to 8 suffices" in hard["wanted"]["reason"]
    assert fleet("plan", "etl", "--query", JOINED).code == 2


def test_growing_asks_for_nodes_and_they_arrive(fleet: Fleet, cluster: "Cluster") -> None:
    dry = fleet("grow", "etl", "2", "--dry-run")
    assert (dry.code, changes(cluster)) == (0, [])
    assert "dry run: nothing was done" in dry.out
    assert "autoscaling:SetDesiredCapacity" in dry.line
    assert "no quota is set" in dry.line
    assert fleet("grow", "etl", "2", "--yes").code == 0
    assert cluster.group("etl")["DesiredCapacity"] == 5
    eventually(lambda: observed(fleet)["observed"] == 5)
    assert fleet("grow", "etl", "1", "--on-demand", "--yes").code == 0
    eventually(lambda: observed(fleet)["on_demand"] == 2)


def test_without_a_terminal_and_without_yes_nothing_is_done(fleet: Fleet, quiet: "Cluster") -> None:
    for command in (("grow", "etl", "1"), ("shrink", "etl", "1"), ("drain", quiet.nodes("etl")[0]["id"])):
        done = fleet(*command)
        assert done.code == 1
        assert "no terminal for the confirmation prompt; add --yes" in done.line
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


def test_the_budget_holds(fleet: Fleet, cluster: "Cluster", limited: Callable[[str], None]) -> None:
    limited("[quotas]\ndollars_per_hour = 0.1\n")
    refused = fleet("grow", "etl", "1", "--on-demand", "--yes")
    assert refused.code == 1
    assert "the limit is $0.1/h" in refused.line
    assert "no quota is set" not in refused.line
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
    done = fleet("shrink", "etl", "--nodes", spot[1], "--yes", "--termination-grace", "60")
    assert done.code == 0, done.line
    assert told == [spot[1]] * 2
    assert "1 of 1 idle" in done.out
    assert f"end {spot[1]}" in done.out
    eventually(lambda: {n["id"] for n in cluster.nodes("etl")} == {n["id"] for n in nodes} - {spot[1]})
    assert cluster.group("etl")["DesiredCapacity"] == 2
    assert observed(fleet)["planned"] == 2


def test_shrinking_by_a_number_keeps_the_on_demand_base_and_ends_nodes_that_cannot_be_told(
    fleet: Fleet, cluster: "Cluster", ssm: "SystemsManager"
) -> None:
    done = fleet("shrink", "etl", "2", "--yes", "--termination-grace", "0")
    assert done.code == 0, done.line
    assert "was not drained" in done.out
    eventually(lambda: [n["market"] for n in cluster.nodes("etl")] == ["on-demand"])
    more = fleet("shrink", "etl", "9", "--yes")
    assert more.code == 2
    assert "only 1 node planned" in more.line


def test_a_drained_node_stays_until_it_is_ended_and_is_then_replaced(
    fleet: Fleet, cluster: "Cluster", ssm: "SystemsManager"
) -> None:
    nodes = {n["id"] for n in cluster.nodes("etl")}
    ssm.online |= nodes
    spot = next(n["id"] for n in cluster.nodes("etl") if n["market"] == "spot")
    done = fleet("drain", spot, "--yes", "--termination-grace", "30")
    assert done.code == 0, done.line
    assert "not terminated; they incur costs until terminated" in done.line
    assert {n["id"] for n in cluster.nodes("etl")} == nodes
    (row,) = (n for n in fleet("status", "--json").json["nodes"] if n["id"] == spot)
    assert row["state"] == "draining"
    assert fleet("drain", spot, "--end", "--yes", "--termination-grace", "30").code == 0
    eventually(lambda: len(now := {n["id"] for n in cluster.nodes("etl")}) == 3 and spot not in now)


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
        (("grow", "etl/run-1", "1"), "the size of a gang is fixed"),
        (("shrink", "etl"), "name a number of nodes or --nodes ID, one of both"),
        (("shrink", "etl", "1", "--nodes", "i-1"), "name a number of nodes or --nodes ID, one of both"),
        (("gang", "run-1", "--pool", "tpu", "--size", "2"), "--pool must be one of the cluster's (etl, gpu)"),
        (
            ("gang", "Run_1", "--pool", "gpu", "--size", "2"),
            "a gang's name must be 1 to 40 lower-case letters",
        ),
        (("end", "run-1"), "there is no gang 'run-1' in this cluster; there are none"),
        (("drain", "i-0123456789abcdef0"), "is no running node of this cluster"),
        (("status", "--config", "none.toml"), "none.toml cannot be read: No such file"),
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
