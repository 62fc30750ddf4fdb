"""Clusters as Terraform leaves them, for tests: made by the calls that ``terraform apply`` makes."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ebbflow.infra.aws.naming import (
    DOCUMENTS,
    DRAIN_HOOK,
    MANAGED_BY_LOOP,
    MANAGED_BY_TERRAFORM,
    NODE_LEAVING,
    RULES,
    STORE_PREFIX,
    Document,
    Names,
    Role,
    Rule,
)
from ebbflow.infra.aws.settings import Settings

_ROLES: Mapping[str, Role] = {"spark": "spark-worker", "gpu": "gpu-trainer", "cpu": "aggregator"}
REGION = "us-east-1"
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")
PRICES = 'source = "made up"\nregion = "us-east-1"\n[on_demand]\n"g5.xlarge" = 1.006\n"m5.large" = 0.096\n'
"""Prices of a pipeline's nodes."""


class Account(Protocol):
    """What is needed of an account."""

    id: str
    subnets: list[str]  # empty until the first cluster

    def client(self, service: str) -> Any: ...

    def alive(self, names: Names | None = None) -> list[dict[str, Any]]: ...


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


@dataclass(frozen=True)
class Cluster:
    """A cluster as Terraform leaves it."""

    account: Any  # AccountAt
    names: Names
    settings: Settings
    outputs: Mapping[str, Any]  # as terraform output -json writes them

    def write(self, path: Path) -> Path:
        """Write ``ebbflow.json``."""
        path.write_text(json.dumps(self.outputs))
        return path

    def section(self, ledger: Path) -> dict[str, Any]:
        """Return what a pipeline's file says of it, beside ``ebbflow.json`` and ``prices.toml`` (``PRICES``)."""
        return {
            "terraform_output": "ebbflow.json",
            "prices": "prices.toml",
            "pools": ["gpu"],
            "directory": self.settings.store,
            "ledger": str(ledger),
            "name": "lab",
            "loop": True,
        }

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


class Builder:
    """Names and tags come from ``Names``, as a test of Terraform's own output holds them together."""

    def __init__(self, account: Account, names: Names, pools: Sequence[PoolShape]) -> None:
        self._account = account
        self._names = names
        self._pools = pools

    def build(self, pools_only: bool = False) -> Cluster:
        names, client = self._names, self._account.client
        queue = dead = {"url": "http://nowhere", "arn": "arn:aws:sqs:::nowhere"}
        documents = {}
        if not pools_only:
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
        if not pools_only:
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
            "node": {
                "source": [{"prefix": self._names.event_source_prefix}],
                "detail-type": [NODE_LEAVING],
            },
        }
        return patterns[rule]

    def _document(self, document: Document) -> str:
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
        name = self._names.document(document)
        self._account.client("ssm").create_document(
            Name=name, DocumentType="Command", DocumentFormat="JSON", Content=json.dumps(content)
        )
        return name

    def _subnets(self) -> list[str]:
        if not self._account.subnets:
            ec2 = self._account.client("ec2")
            vpc = ec2.create_vpc(CidrBlock="10.64.0.0/16")["Vpc"]["VpcId"]
            self._account.subnets = [
                ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.64.{16 * i}.0/20", AvailabilityZone=zone)[
                    "Subnet"
                ]["SubnetId"]
                for i, zone in enumerate(ZONES)
            ]
        return self._account.subnets

    def _pool(self, pool: PoolShape, subnets: Sequence[str]) -> dict[str, Any]:
        names, name = self._names, self._names.group(pool.name)
        role = _ROLES[pool.kind]
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
