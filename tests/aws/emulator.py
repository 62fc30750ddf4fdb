"""AWS for tests: a server of one's own over HTTP, accounts in it, and clusters as Terraform creates them.

with Emulator.start(folder) as emulator:
    account = emulator.account()
    cluster = account.cluster("lab", PoolShape("etl", most=30))
    clients = Clients(cluster.settings.region, emulator.url)   # with account.environment in os.environ
"""

import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ebbflow.infra.aws.naming import Names
from tests.aws.clock import ScaledClock
from tests.aws.cluster import REGION, Builder, Cluster, PoolShape
from tests.aws.faults import Faults
from tests.free_ports import free_port

ROOT = Path(__file__).parents[2]
STARTS_WITHIN = 180.0  # seconds
ENVIRONMENT = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_DEFAULT_REGION",
)
"""Variables that would lead calls elsewhere."""


class Emulator:
    """A running server. Made by ``start``; safe for several threads."""

    def __init__(self, url: str, clock: ScaledClock, client: httpx.Client) -> None:
        self.url = url
        self.clock = clock
        self._client = client
        self._accounts = itertools.count(100_000_000_001)

    @classmethod
    @contextmanager
    def start(cls, folder: Path, speed: float = 1.0, seed: int = 0) -> Iterator["Emulator"]:
        """Run a server on a free port until the block ends; its output goes to ``folder``.

        ``speed`` is by how much its clock is faster than the wall. Raises ``RuntimeError`` if it does not start.
        """
        port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"aws-{port}.log"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        with log.open("w") as out:
            server = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.aws.server",
                    f"--port={port}",
                    f"--speed={speed}",
                    f"--seed={seed}",
                ],
                cwd=ROOT,
                env=kept | {"PYTHONPATH": str(ROOT)},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        url = f"http://127.0.0.1:{port}"
        client = httpx.Client(base_url=url, timeout=30, trust_env=False)
        try:
            yield cls(url, ScaledClock(**_ready(client, server, log)), client)
        finally:
            client.close()
            server.kill()
            server.wait(timeout=150)

    def account(self, name: str | None = None) -> "AccountAt":
        """Return an account that nobody has used before, or the one with these twelve digits."""
        return AccountAt(self, name or str(next(self._accounts)))

    def reset(self) -> None:
        """Forget everything in all accounts."""
        self._client.post("/moto-api/reset").raise_for_status()

    def ask(self, what: str, **content: Any) -> Any:
        """Call ``Control`` of the server."""
        return self._client.post(f"/ebbflow-api/{what}", json=content).raise_for_status().json()


def _ready(client: httpx.Client, server: subprocess.Popen[bytes], log: Path) -> dict[str, float]:
    deadline = time.monotonic() + STARTS_WITHIN
    while True:
        try:
            found: dict[str, float] = client.post("/ebbflow-api/clock", json={}).raise_for_status().json()
            return found
        except httpx.HTTPError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the emulator did not start: {log.read_text()[-2000:]}") from None
            time.sleep(0.05)


@dataclass
class AccountAt:
    """One account of an emulator."""

    emulator: Emulator
    id: str
    subnets: list[str] = field(default_factory=list)  # of its network, once there is one
    _clients: dict[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs in its environment to act in this account."""
        return {
            "AWS_ENDPOINT_URL": self.emulator.url,
            "AWS_ACCESS_KEY_ID": f"AKIA{self.id}EBBF",
            "AWS_SECRET_ACCESS_KEY": "emulated",
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, service: str) -> Any:
        """Return a client for the test's own use."""
        if service not in self._clients:
            self._clients[service] = _session().client(
                service,
                endpoint_url=self.emulator.url,
                aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
                aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
                region_name=REGION,
            )
        return self._clients[service]

    def faults(self, faults: Faults) -> None:
        """Let this go wrong from now on; ``Faults()`` ends it."""
        self.emulator.ask("configure", account=self.id, faults=vars(faults))

    def configure(self, **changes: Any) -> None:
        """Set ``most`` (nodes that AWS has, by market), ``launch_seconds`` or ``drain_seconds``."""
        self.emulator.ask("configure", account=self.id, **changes)

    def interrupt(self, ids: Sequence[str], seconds: float = 120.0, *, end: bool = True) -> None:
        """Warn that instances will be taken away in ``seconds``, through EventBridge, and take them away then."""
        self.emulator.ask("warn", account=self.id, region=REGION, ids=list(ids), seconds=seconds, end=end)

    def take(self, ids: Sequence[str]) -> None:
        """Take instances away without a warning."""
        self.emulator.ask("take", account=self.id, region=REGION, ids=list(ids))

    def rebalance(self, ids: Sequence[str]) -> None:
        """Recommend a rebalance of instances."""
        self.emulator.ask("rebalance", account=self.id, region=REGION, ids=list(ids))

    def mark_spot(self, ids: Sequence[str]) -> None:
        """Make instances spot ones, which ``run_instances`` of moto cannot in all ways."""
        self.emulator.ask("mark_spot", account=self.id, region=REGION, ids=list(ids))

    def kill(self, pid: int, after: int, *, executed: bool, action: str = "") -> None:
        """SIGKILL ``pid`` at the account's ``after``-th next call; ``executed`` tells whether AWS still does it.

        ``action`` is a call's name or its beginning; other calls do not count.
        """
        self.emulator.ask("kill", account=self.id, pid=pid, after=after, executed=executed, action=action)

    def spare(self) -> None:
        """Kill nobody any more."""
        self.emulator.ask("spare", account=self.id)

    def state(self) -> dict[str, Any]:
        """Return ``instances`` (dead ones too), ``log``, ``now`` and ``errors`` of the emulator."""
        found: dict[str, Any] = self.emulator.ask("state", account=self.id, region=REGION)
        return found

    def alive(self, names: Names | None = None) -> list[dict[str, Any]]:
        """Return the instances that are billed; with ``names`` only those that their cluster's loop owns."""
        return [
            i for i in self.state()["instances"] if i["alive"] and (names is None or names.owns(i["tags"]))
        ]

    def calls(self, action: str | None = None) -> list[dict[str, Any]]:
        """Return what was called in this account, in order."""
        return [e for e in self.state()["log"] if e["kind"] == "call" and action in (None, e["call"])]

    def forget(self) -> None:
        """Let the account's groups rest, which the emulator would look after for as long as it runs."""
        self.emulator.ask("forget", account=self.id)

    def strangers(self, count: int, tags: Mapping[str, str] | None = None) -> list[str]:
        """Start instances that nobody's loop owns; return their ids."""
        found = self.client("ec2").run_instances(
            ImageId="ami-00000000",
            InstanceType="m5.large",
            MinCount=count,
            MaxCount=count,
            **_tagged("instance", tags),
        )
        return [i["InstanceId"] for i in found["Instances"]]

    def cluster(self, name: str, *pools: PoolShape) -> Cluster:
        """Create what ``terraform apply`` creates, and return how it is found again."""
        return Builder(self, Names(name), pools or (PoolShape("etl"),)).build()

    def groups(self, name: str, *pools: PoolShape) -> Cluster:
        """Create the pools of a cluster and nothing else, in a third of the time."""
        return Builder(self, Names(name), pools or (PoolShape("etl"),)).build(pools_only=True)


@functools.cache
def _session() -> Any:
    """Return one session for all accounts: it reads the descriptions of services once."""
    import boto3

    return boto3.session.Session()


def _tagged(kind: str, tags: Mapping[str, str] | None) -> dict[str, Any]:
    if not tags:
        return {}
    return {
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}
        ]
    }
