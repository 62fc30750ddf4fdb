"""What the tests of ``ebbflow fleet`` share: a cluster's making, a command's end, and what a cluster was asked."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.aws.emulator import AccountAt, Cluster

Fleet = Callable[..., "Done"]


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
