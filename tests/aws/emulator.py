"""AWS for tests: a server of one's own over HTTP, accounts in it, and clusters as Terraform creates them.

with Emulator.start(folder) as emulator:
    account = emulator.account()
    cluster = account.cluster("lab", PoolShape("etl", most=30))
    clients = Clients(cluster.settings.region, emulator.url)   # with account.environment in os.environ
"""

import base64
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ebbflow.infra.aws.naming import (
    DOCUMENTS,
    DRAIN_HOOK,
    MANAGED_BY_LOOP,
    MANAGED_BY_TERRAFORM,
    NODE_LEAVING,
    RULES,
    STORE_PREFIX,
    Names,
    Role,
    Rule,
)
from ebbflow.infra.aws.settings import Settings
from tests.aws.clock import ScaledClock
from tests.aws.faults import Faults

ROOT = Path(__file__).parents[2]
REGION = "us-east-1"
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")
STARTS_WITHIN = 60.0  # seconds
ENVIRONMENT = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_DEFAULT_REGION",
)
"""Variables that would lead calls elsewhere."""


@dataclass(frozen=True)
class PoolShape:
    """What a pool is made with; see ``terraform/modules/spot-pool``."""

    name: str
    kind: str = "spark"
    types: Sequence[str] = ("m5.large", "m5a.large", "m6i.large", "m6a.large")
    on_demand_base: int = 0
    least: int = 0
    most: int = 40
    size: int = 0


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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
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
            server.wait(timeout=20)

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
    _made: dict[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs in its environment to act in this account."""
        return {
            "AWS_ENDPOINT_URL": self.emulator.url,
            "AWS_ACCESS_KEY_ID": f"AKIA{self.id}EBBF",
            "AWS_SECRET_ACCESS_KEY": "emulated",
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, service: str) -> Any:
        """Return a client for the test's own use."""
        import boto3

        if "session" not in self._made:
            self._made["session"] = boto3.session.Session(
                aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
                aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
                region_name=REGION,
            )
        if service not in self._made:
            self._made[service] = self._made["session"].client(service, endpoint_url=self.emulator.url)
        return self._made[service]

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

    def kill(self, pid: int, after: int, *, executed: bool) -> None:
        """SIGKILL ``pid`` at the account's ``after``-th next call; ``executed`` tells whether AWS still does it."""
        self.emulator.ask("kill", account=self.id, pid=pid, after=after, executed=executed)

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

    def cluster(self, name: str, *pools: PoolShape) -> "Cluster":
        """Create what ``terraform apply`` creates, and return how it is found again."""
        return _Builder(self, Names(name), pools or (PoolShape("etl"),)).build()


@dataclass(frozen=True)
class Cluster:
    """A cluster as Terraform leaves it."""

    account: AccountAt
    names: Names
    settings: Settings
    outputs: Mapping[str, Any]  # as terraform output -json writes them

    def write(self, path: Path) -> Path:
        """Write ``ebbflow.json``."""
        path.write_text(json.dumps(self.outputs))
        return path

    def group(self, pool: str) -> dict[str, Any]:
        """Return what AWS says of a pool's group."""
        asked = self.account.client("autoscaling").describe_auto_scaling_groups(
            AutoScalingGroupNames=[self.names.group(pool)]
        )
        found: dict[str, Any] = asked["AutoScalingGroups"][0]
        return found

    def nodes(self, pool: str) -> list[dict[str, Any]]:
        """Return the live instances of a pool."""
        return [i for i in self.account.alive(self.names) if i["tags"].get("ebbflow:pool") == pool]


class _Builder:
    """Names and tags come from ``Names``, as a test of Terraform's own output holds them together."""

    def __init__(self, account: AccountAt, names: Names, pools: Sequence[PoolShape]) -> None:
        self._account = account
        self._names = names
        self._pools = pools

    def build(self) -> Cluster:
        names, client = self._names, self._account.client
        client("s3").create_bucket(Bucket=names.bucket(self._account.id, REGION))
        queue, dead = self._queues()
        self._rules(queue["arn"])
        documents = {document: self._document(document) for document in DOCUMENTS}
        subnets = self._subnets()
        values = {
            "cluster": names.cluster,
            "region": REGION,
            "account_id": self._account.id,
            "bucket": names.bucket(self._account.id, REGION),
            "store": f"s3://{names.bucket(self._account.id, REGION)}/{STORE_PREFIX}",
            "kms_key_arn": f"arn:aws:kms:{REGION}:{self._account.id}:key/00000000-0000-0000-0000-000000000000",
            "notice_queue_url": queue["url"],
            "dead_letter_queue_url": dead["url"],
            "capacity_role_arn": f"arn:aws:iam::{self._account.id}:role/{names.role('capacity')}",
            "settings_parameter": names.settings_parameter,
            "documents": documents,
            "pools": {pool.name: self._pool(pool, subnets) for pool in self._pools},
        }
        outputs = {name: {"sensitive": False, "value": value} for name, value in values.items()}
        text = json.dumps(outputs)
        client("ssm").put_parameter(
            Name=names.settings_parameter, Value=text, Type="SecureString", Overwrite=True
        )
        return Cluster(self._account, names, Settings.from_json(text, "emulated"), outputs)

    def _queues(self) -> tuple[dict[str, str], dict[str, str]]:
        sqs = self._account.client("sqs")

        def made(name: str, **attributes: str) -> dict[str, str]:
            url = sqs.create_queue(
                QueueName=name,
                Attributes=attributes,
                tags=dict(self._names.tags(MANAGED_BY_TERRAFORM)) | {"Name": name},
            )["QueueUrl"]
            arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"][
                "QueueArn"
            ]
            return {"url": url, "arn": arn}

        dead = made(self._names.dead_letter_queue, MessageRetentionPeriod="1209600")
        redrive = json.dumps({"deadLetterTargetArn": dead["arn"], "maxReceiveCount": 5})
        queue = made(
            self._names.notice_queue,
            ReceiveMessageWaitTimeSeconds="20",
            VisibilityTimeout="30",
            MessageRetentionPeriod="3600",
            RedrivePolicy=redrive,
        )
        return queue, dead

    def _rules(self, queue_arn: str) -> None:
        events = self._account.client("events")
        groups = [self._names.group(pool.name) for pool in self._pools]
        for rule in RULES:
            name = self._names.rule(rule)
            events.put_rule(Name=name, EventPattern=json.dumps(self._pattern(rule, groups)), State="ENABLED")
            events.put_targets(Rule=name, Targets=[{"Id": "notices", "Arn": queue_arn}])

    def _pattern(self, rule: Rule, groups: Sequence[str]) -> Mapping[str, Any]:
        of_groups = {"source": ["aws.autoscaling"], "detail": {"AutoScalingGroupName": list(groups)}}
        patterns: dict[Rule, Mapping[str, Any]] = {
            "interruption": {
                "source": ["aws.ec2"],
                "detail-type": ["EC2 Spot Instance Interruption Warning"],
            },
            "rebalance": {"source": ["aws.ec2"], "detail-type": ["EC2 Instance Rebalance Recommendation"]},
            "state": {
                "source": ["aws.ec2"],
                "detail-type": ["EC2 Instance State-change Notification"],
                "detail": {"state": ["running", "stopping", "stopped", "shutting-down", "terminated"]},
            },
            "lifecycle": of_groups | {"detail-type": ["EC2 Instance-terminate Lifecycle Action"]},
            "launch-failed": of_groups | {"detail-type": ["EC2 Instance Launch Unsuccessful"]},
            "health": {
                "source": ["aws.health"],
                "detail-type": ["AWS Health Event"],
                "detail": {"service": ["EC2"], "eventTypeCategory": ["scheduledChange", "issue"]},
            },
            "node": {"source": [self._names.event_source], "detail-type": [NODE_LEAVING]},
        }
        return patterns[rule]

    def _document(self, document: str) -> str:
        parameters = {
            "spark-worker": {"action": "status"},
            "torch-node": {"action": "status", "name": "node", "entry": ""},
            "drain": {"seconds": "120"},
        }[document]
        content = {
            "schemaVersion": "2.2",
            "description": document,
            "parameters": {name: {"type": "String", "default": value} for name, value in parameters.items()},
            "mainSteps": [
                {
                    "name": "run",
                    "action": "aws:runShellScript",
                    "inputs": {"runCommand": [f"exec {document}"]},
                }
            ],
        }
        name = self._names.document(document)  # type: ignore[arg-type]
        self._account.client("ssm").create_document(
            Name=name, DocumentType="Command", DocumentFormat="JSON", Content=json.dumps(content)
        )
        return name

    def _subnets(self) -> list[str]:
        if "subnets" not in self._account._made:
            ec2 = self._account.client("ec2")
            vpc = ec2.create_vpc(CidrBlock="10.64.0.0/16")["Vpc"]["VpcId"]
            self._account._made["subnets"] = [
                ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.64.{16 * i}.0/20", AvailabilityZone=zone)[
                    "Subnet"
                ]["SubnetId"]
                for i, zone in enumerate(ZONES)
            ]
        found: list[str] = self._account._made["subnets"]
        return found

    def _pool(self, pool: PoolShape, subnets: Sequence[str]) -> dict[str, Any]:
        names, name = self._names, self._names.group(pool.name)
        role: Role = "spark-worker" if pool.kind == "spark" else "gpu-trainer"
        tags = names.tags(MANAGED_BY_LOOP, role=role, pool=pool.name)
        of_nodes = [{"Key": key, "Value": value} for key, value in tags.items()]
        template = self._account.client("ec2").create_launch_template(
            LaunchTemplateName=name,
            LaunchTemplateData={
                "ImageId": "ami-00000000",
                "InstanceType": pool.types[0],
                "UserData": base64.b64encode(b"#cloud-config\n").decode(),
                "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
                "TagSpecifications": [
                    {"ResourceType": kind, "Tags": of_nodes} for kind in ("instance", "volume")
                ],
            },
            TagSpecifications=[{"ResourceType": "launch-template", "Tags": of_nodes}],
        )["LaunchTemplate"]["LaunchTemplateId"]
        groups = self._account.client("autoscaling")
        groups.create_auto_scaling_group(
            AutoScalingGroupName=name,
            MinSize=pool.least,
            MaxSize=pool.most,
            DesiredCapacity=pool.size,
            VPCZoneIdentifier=",".join(subnets),
            CapacityRebalance=True,
            MixedInstancesPolicy={
                "LaunchTemplate": {
                    "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": "1"},
                    "Overrides": [{"InstanceType": kind} for kind in pool.types],
                },
                "InstancesDistribution": {
                    "OnDemandBaseCapacity": pool.on_demand_base,
                    "OnDemandPercentageAboveBaseCapacity": 0,
                    "OnDemandAllocationStrategy": "lowest-price",
                    "SpotAllocationStrategy": "price-capacity-optimized",
                },
            },
            Tags=[
                {
                    "ResourceId": name,
                    "ResourceType": "auto-scaling-group",
                    "PropagateAtLaunch": True,
                    **tag,
                }
                for tag in of_nodes
            ],
        )
        groups.suspend_processes(AutoScalingGroupName=name, ScalingProcesses=["AZRebalance"])
        groups.put_lifecycle_hook(
            LifecycleHookName=DRAIN_HOOK,
            AutoScalingGroupName=name,
            LifecycleTransition="autoscaling:EC2_INSTANCE_TERMINATING",
            HeartbeatTimeout=150,
            DefaultResult="CONTINUE",
        )
        return {
            "kind": pool.kind,
            "group": name,
            "launch_template": template,
            "instance_types": list(pool.types),
            "subnet_ids": list(subnets),
            "on_demand_base": pool.on_demand_base,
            "min_size": pool.least,
            "max_size": pool.most,
        }


def _tagged(kind: str, tags: Mapping[str, str] | None) -> dict[str, Any]:
    if not tags:
        return {}
    return {
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}
        ]
    }
