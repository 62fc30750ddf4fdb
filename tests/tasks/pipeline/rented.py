"""A cluster on emulated AWS whose instances are this machine, and a pipeline that runs on it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pipelines import pairs_script, write_pairs

from ebbflow.tasks.pipeline.run import NullWatcher
from ebbflow.tasks.pipeline.view import ClusterView

if TYPE_CHECKING:
    from tests.aws.cluster import Cluster
    from tests.aws.emulator import AccountAt, PoolShape

LONG = 150.0  # s: a bound for a busy machine
RULES = (
    "[intervals]\npoll_interval = 0.05\ncapacity_poll_interval = 0.2\nfleet_poll_interval = 0.5\n"
    "batch_delay = 0.02\nleader_lease = 5\n"
)


class Everybody(set[str]):
    """The nodes that Systems Manager knows: all there are."""

    def __contains__(self, node: object) -> bool:
        return True

    def __ge__(self, others: object) -> bool:
        return True


def cluster_with(
    account: "AccountAt", folder: Path, monkeypatch: pytest.MonkeyPatch, *pools: "PoolShape"
) -> "Cluster":
    """Return a cluster whose instances have addresses of this machine; its files are in ``folder``."""
    from tests.aws.cluster import PRICES

    monkeypatch.setenv("EBBFLOW_HOME", str(folder / "home"))
    monkeypatch.setenv("EBBFLOW_CONFIG", str(folder / "fleet.toml"))
    ec2 = account.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="127.64.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="127.64.16.0/20", AvailabilityZone="us-east-1a")
    account.subnets = [subnet["Subnet"]["SubnetId"]]
    account.configure(drain_seconds=3)  # as nodes with an agent do that finds them idle
    (folder / "fleet.toml").write_text(RULES)
    made = account.cluster("lab", *pools)
    made.write(folder / "ebbflow.json")
    (folder / "prices.toml").write_text(PRICES)
    return made


def until(reached: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + LONG
    while not (found := reached()):
        assert time.monotonic() < end, f"no {what} within {LONG:g} s"
        time.sleep(0.05)
    return found


def shop(folder: Path, lab: "Cluster") -> dict[str, Any]:
    """Return a pipeline of a query and a training, as plain values; its files are made in ``folder``."""
    write_pairs(folder / "tables")
    (folder / "fit.py").write_text(pairs_script(4, 0.1))
    aws = lab.section(folder / "ledger.db")
    scaling = {
        "provision_time": "5s",
        "scale_out_after": "500ms",
        "scale_in_idle": "60s",
        "cooldown": "500ms",
    }
    return {
        "name": "shop",
        "cluster": {"aws": aws},
        "budget": 50,
        "queries": {"pairs": {"sql": "SELECT x, twice AS y FROM pairs WHERE x < 1", "tables": "tables"}},
        "trainings": {
            "fit": {
                "script": "fit.py",
                "arguments": ["--data", "${queries.pairs.file}"],
                "checkpoint_interval": "1s",
                "termination_grace": "5s",
                "preflight": "never",
            }
        },
        "loop": {
            "lease_duration": "20s",
            "auction_interval": "2s",
            "termination_grace": "5s",
            "drain_lead": "4s",
            "scaling": scaling,
        },
        "quotas": {"dollars_per_hour": 10},
    }


class Interrupting(NullWatcher):
    """Has the node taken away on which the training has begun."""

    def __init__(self, lab: "Cluster") -> None:
        self._lab = lab
        self._view: ClusterView | None = None
        self.taken = ""
        self.lines: list[str] = []

    def watch(self, view: ClusterView, steps: Any) -> None:
        self._view = view

    def note(self, text: str) -> None:
        self.lines.append(text)

    def tick(self) -> None:
        assert self._view is not None
        report = self._view.ledger.reports(["one.fit"]).get("one.fit")
        if not self.taken and report is not None and report.step > 10:
            (lease,) = self._view.ledger.state().held("one.fit")
            self.taken = lease.node
            self._lab.account.interrupt([self.taken], 60.0)
