"""Names and tags of everything that belongs to one cluster on AWS.

Two installations in one account are told apart by the cluster's name alone, so it is part of every name and tag.
``terraform/modules/naming`` decides the same on Terraform's side; a test holds the two together.

>>> Names("lab").group("etl")
'ebbflow-lab-etl'
>>> Names("lab").tags(MANAGED_BY_LOOP, role="spark-worker", pool="etl")["ebbflow:pool"]
'etl'
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ebbflow.planners.errors import OptionError

TAG_CLUSTER = "ebbflow:cluster"
"""The cluster that owns a resource."""
TAG_MANAGED = "ebbflow:managed"
"""Who starts and ends a resource: ``MANAGED_BY_LOOP`` or ``MANAGED_BY_TERRAFORM``."""
TAG_ROLE = "ebbflow:role"
"""What a node does, one of ``Role``."""
TAG_POOL = "ebbflow:pool"
"""The spot pool that a node, group or launch template belongs to."""
TAG_GANG = "ebbflow:gang"
"""The one-off gang that a node was started for; its pool's group knows nothing of it."""
TAG_GANG_SIZE = "ebbflow:gang-size"
"""How many nodes the gang has when it is whole."""

MANAGED_BY_LOOP = "loop"
"""Nodes that the capacity loop may start, drain and end; nothing else may be touched by it."""
MANAGED_BY_TERRAFORM = "terraform"

Role = Literal[
    "spark-master", "spark-worker", "gpu-trainer", "aggregator", "prefect-server", "prefect-worker"
]
ROLES: tuple[Role, ...] = get_args(Role)

IamRole = Literal["node", "aggregator", "capacity", "prefect-server", "prefect-worker"]
IAM_ROLES: tuple[IamRole, ...] = get_args(IamRole)

Document = Literal["spark-worker", "torch-node", "drain"]
DOCUMENTS: tuple[Document, ...] = get_args(Document)
"""What may be run on a node through Systems Manager; there is no document that takes a free command."""

Rule = Literal["interruption", "rebalance", "state", "lifecycle", "launch-failed", "health", "node"]
RULES: tuple[Rule, ...] = get_args(Rule)
"""EventBridge rules whose events reach the notice queue."""

NODE_LEAVING = "Ebbflow Node Leaving"
"""Kind of the event by which a node says that it drains and when it will be gone."""

DRAIN_HOOK = "drain"
"""Lifecycle hook of every pool: a node that its group ends waits there until it is drained."""
STORE_PREFIX = "store"
"""Folder of the bucket for checkpoints of queries and trainings (``--store``)."""
SPARK_EVENTS_PREFIX = "spark-events"
"""Folder of the bucket for the event logs that the history server shows."""

_FORM = re.compile(r"[a-z](-?[a-z0-9])+")


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one cluster's resources.

    Raises ``OptionError`` for a name of another form than 3 to 20 lower-case letters, digits and single dashes, a
    letter first and no dash last: load balancers take 32 characters, and buckets no other letters.
    """

    cluster: str

    def __post_init__(self) -> None:
        if not (_FORM.fullmatch(self.cluster) and 3 <= len(self.cluster) <= 20):
            raise OptionError(
                "cluster must be 3 to 20 lower-case letters, digits and single dashes, beginning with a letter and "
                f"not ending with a dash; got {self.cluster!r}"
            )

    @property
    def prefix(self) -> str:
        """Begins every name of the cluster that has no form of its own."""
        return f"ebbflow-{self.cluster}"

    def bucket(self, account: str, region: str) -> str:
        """Return the bucket of checkpoints; its name must be unique in the world."""
        return f"{self.prefix}-{account}-{region}"

    @property
    def key_alias(self) -> str:
        """The alias of the KMS key that encrypts everything the cluster keeps."""
        return f"alias/{self.prefix}"

    @property
    def notice_queue(self) -> str:
        """The SQS queue of interruption warnings and other changes."""
        return f"{self.prefix}-notices"

    @property
    def dead_letter_queue(self) -> str:
        """The SQS queue of notices that could not be handled."""
        return f"{self.prefix}-notices-dead"

    def rule(self, rule: Rule) -> str:
        """Return the EventBridge rule of one kind of event."""
        return f"{self.prefix}-{rule}"

    @property
    def event_source_prefix(self) -> str:
        """Begins the source of the events that the cluster's nodes send."""
        return f"ebbflow.{self.cluster}."

    def event_source(self, instance_arn: str) -> str:
        """Return the source of a node's events: its role lets it send none but those of its own instance."""
        return f"{self.event_source_prefix}{instance_arn}"

    def group(self, pool: str) -> str:
        """Return a pool's Auto Scaling group, which is also its launch template's name. Raises ``OptionError``."""
        if not (_FORM.fullmatch(pool) and len(pool) <= 20) or pool in ROLES:
            raise OptionError(
                "a pool's name must be 2 to 20 lower-case letters, digits and single dashes, beginning with a "
                f"letter, not ending with a dash, and not the name of a role; got {pool!r}"
            )
        return f"{self.prefix}-{pool}"

    def role(self, role: IamRole) -> str:
        """Return an IAM role; its instance profile, where it has one, is named alike."""
        return f"{self.prefix}-{role}"

    def document(self, document: Document) -> str:
        """Return a Systems Manager document."""
        return f"{self.prefix}-{document}"

    def parameter(self, name: str) -> str:
        """Return the path of a Systems Manager parameter."""
        return f"/ebbflow/{self.cluster}/{name}"

    @property
    def settings_parameter(self) -> str:
        """The parameter that holds what ``Settings.from_terraform`` reads, for the cluster's own nodes."""
        return self.parameter("settings")

    @property
    def log_group(self) -> str:
        """The CloudWatch log group of the network's flow logs."""
        return f"/ebbflow/{self.cluster}"

    def tags(self, managed: str, *, role: Role | None = None, pool: str | None = None) -> Mapping[str, str]:
        """Return the tags of a resource that ``managed`` (loop or terraform) starts and ends."""
        tags = {"Name": self.prefix, TAG_CLUSTER: self.cluster, TAG_MANAGED: managed}
        if pool is not None:
            tags |= {"Name": self.group(pool), TAG_POOL: pool}
        elif role is not None:
            tags["Name"] = f"{self.prefix}-{role}"
        if role is not None:
            tags[TAG_ROLE] = role
        return tags

    def owns(self, tags: Mapping[str, str]) -> bool:
        """Tell whether the capacity loop of this cluster may act on what carries ``tags``."""
        return tags.get(TAG_CLUSTER) == self.cluster and tags.get(TAG_MANAGED) == MANAGED_BY_LOOP
