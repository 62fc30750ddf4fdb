"""``ebbflow fleet gang`` and ``end``: all nodes at once or none, within the limits."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.flows.fleet.cases import Fleet, changes, observed

if TYPE_CHECKING:
    from tests.aws.emulator import Cluster
    from tests.infra.aws.systems_manager import SystemsManager

GANG = ("gang", "run-1", "--pool", "etl", "--size", "3")


def of_gang(cluster: "Cluster") -> list[str]:
    return [n["id"] for n in cluster.nodes("etl") if n["tags"].get("ebbflow:gang") == "run-1"]


def test_a_gang_starts_whole_counts_from_then_on_and_is_returned(
    fleet: Fleet, cluster: "Cluster", ssm: "SystemsManager", limited: Callable[[str], None]
) -> None:
    limited("[quotas]\nnodes = 6\n")
    dry = fleet(*GANG, "--dry-run")
    assert (dry.code, changes(cluster)) == (0, [])
    assert "3 spot nodes of etl, all-or-nothing, one zone and one type" in dry.line
    assert "ec2:CreateFleet" in dry.line
    assert "dry run: nothing was done" in dry.out
    asked = fleet(*GANG)
    assert asked.code == 1
    assert "no terminal for the confirmation prompt; add --yes" in asked.line
    assert changes(cluster) == []
    done = fleet(*GANG, "--yes")
    assert done.code == 0, done.line
    gang = of_gang(cluster)
    assert len(gang) == 3
    assert all(name in done.line for name in gang)
    assert "ebbflow fleet end run-1" in done.line
    again = fleet(*GANG, "--yes")
    assert again.code == 0
    assert "run-1 is running already" in again.line
    assert changes(cluster) == ["CreateFleet"]
    assert observed(fleet, "etl/run-1")["planned"] == 3
    # there is room for 6 nodes, of which the gang has 3
    refused = fleet("grow", "etl", "1", "--yes")
    assert refused.code == 1
    assert "all pools may have 6, the others have 3" in refused.line
    ssm.online |= set(gang)
    look = fleet("end", "run-1", "--dry-run")
    assert (look.code, of_gang(cluster)) == (0, gang)
    ended = fleet("end", "run-1", "--yes", "--termination-grace", "30")
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
            "[quotas.pools.etl]\nmax_nodes = 5",
            (),
            "the pool's limit is 5, of which the pool and its other gangs have 3",
        ),
        ("dollars_per_hour = 0.3", ("--market", "on-demand"), "the limit is $0.3/h"),
        (
            "dollars_per_run = 1",
            ("--market", "on-demand", "--expected-duration", "6h"),
            "the run may cost $1",
        ),
    ],
)
def test_a_gang_beyond_a_limit_is_refused_and_nothing_is_asked_of_aws(
    limits: str,
    more: tuple[str, ...],
    said: str,
    fleet: Fleet,
    quiet: "Cluster",
    limited: Callable[[str], None],
) -> None:
    limited(f"[quotas]\n{limits}\n")
    refused = fleet(*GANG, *more, "--yes")
    assert refused.code == 1
    assert said in refused.line
    assert "nothing was done" in refused.line


def test_a_limit_of_a_run_needs_to_know_for_how_long(
    fleet: Fleet, quiet: "Cluster", limited: Callable[[str], None]
) -> None:
    limited("[quotas]\ndollars_per_run = 1\n")
    done = fleet(*GANG, "--market", "on-demand", "--dry-run")
    assert done.code == 0
    assert "--expected-duration is not given: the quota of $1 per run is not checked" in done.line


def test_a_gang_that_cannot_be_had_says_what_to_do(fleet: Fleet, cluster: "Cluster") -> None:
    cluster.account.configure(most={"spot": 3})
    done = fleet(*GANG, "--yes")
    assert done.code == 1
    assert "were launched and are terminated" in done.line
    assert "Retry later, or request fewer nodes, or --market on-demand" in done.line
    assert of_gang(cluster) == []
