"""Instances of one cluster, as nodes."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.aws.clients import Clients, calling
from ebbflow.infra.aws.naming import MANAGED_BY_LOOP, TAG_CLUSTER, TAG_GANG, TAG_MANAGED, TAG_POOL, Names
from ebbflow.infra.errors import AwsError
from ebbflow.planners.model.capacity import Node

_BILLED = ("pending", "running", "stopping", "stopped", "shutting-down")
GROUP_TAG = "aws:autoscaling:groupName"
"""Set by Auto Scaling on every instance of a group."""
_FILTER_VALUES = 200  # of one filter
_TYPES_A_CALL = 100
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance."""

    id: str
    state: str
    instance_type: str
    zone: str
    spot: bool
    host: str  # private address
    tags: Mapping[str, str]
    launched: float = 0.0  # Unix time, s
    reason: str = ""  # code of its last change of state, such as Server.SpotInstanceTermination

    @property
    def pool(self) -> str:
        return self.tags.get(TAG_POOL, "")

    @property
    def gang(self) -> str:
        return self.tags.get(TAG_GANG, "")

    @property
    def group(self) -> str:
        return self.tags.get(GROUP_TAG, "")

    @property
    def gone(self) -> bool:
        """Tell whether it has ended or is ending."""
        return self.state in ("shutting-down", "terminated")


@dataclass(frozen=True, slots=True)
class _Shape:
    cores: int
    memory: float  # GiB
    gpus: int


class Instances:
    """Looks instances up. Safe for several threads."""

    def __init__(self, clients: Clients, names: Names) -> None:
        self._clients = clients
        self._names = names
        self._shapes: dict[str, _Shape] = {}
        self._lock = threading.Lock()

    def ours(self) -> list[Instance]:
        """Return the cluster's instances that are not terminated, sorted by id. Raises ``AwsError``."""
        return self._matching(
            [
                {"Name": f"tag:{TAG_CLUSTER}", "Values": [self._names.cluster]},
                {"Name": f"tag:{TAG_MANAGED}", "Values": [MANAGED_BY_LOOP]},
                {"Name": "instance-state-name", "Values": list(_BILLED)},
            ]
        )

    def named(self, ids: Sequence[str]) -> dict[str, Instance]:
        """Return those of ``ids`` that AWS still knows, whoever owns them. Raises ``AwsError``."""
        found: dict[str, Instance] = {}
        for start in range(0, len(ids), _FILTER_VALUES):
            some = list(ids[start : start + _FILTER_VALUES])
            # a filter leaves out unknown ids, where naming them would be an error
            for instance in self._matching([{"Name": "instance-id", "Values": some}]):
                found[instance.id] = instance
        return found

    def nodes(self, instances: Iterable[Instance]) -> list[Node]:
        """Return ``instances`` as nodes, sorted by id, with prices of 0. Raises ``AwsError``."""
        chosen = sorted(instances, key=lambda instance: instance.id)
        self._learn({instance.instance_type for instance in chosen})
        return [self._node(instance) for instance in chosen]

    def _node(self, instance: Instance) -> Node:
        shape = self._shapes[instance.instance_type]
        return Node(
            id=instance.id,
            cores=shape.cores,
            memory=shape.memory,
            host=instance.host,
            instance_type=instance.instance_type,
            market="spot" if instance.spot else "on-demand",
            zone=instance.zone,
            gpus=shape.gpus,
        )

    def _matching(self, filters: list[dict[str, Any]]) -> list[Instance]:
        pages = self._clients.client("ec2").get_paginator("describe_instances")
        with calling("describe the cluster's instances"):
            found = [
                _instance(one)
                for page in pages.paginate(Filters=filters, PaginationConfig={"PageSize": _PAGE})
                for reservation in page["Reservations"]
                for one in reservation["Instances"]
            ]
        return sorted(found, key=lambda instance: instance.id)

    def _learn(self, types: set[str]) -> None:
        with self._lock:
            unknown = sorted(types - set(self._shapes))
            pages = self._clients.client("ec2").get_paginator("describe_instance_types")
            for start in range(0, len(unknown), _TYPES_A_CALL):
                with calling("describe instance types"):
                    for page in pages.paginate(InstanceTypes=unknown[start : start + _TYPES_A_CALL]):
                        for one in page["InstanceTypes"]:
                            self._shapes[one["InstanceType"]] = _shape(one)
            if missing := [name for name in unknown if name not in self._shapes]:
                raise AwsError(f"AWS does not describe the instance types {', '.join(missing)}")


def _instance(one: Mapping[str, Any]) -> Instance:
    return Instance(
        id=one["InstanceId"],
        state=one["State"]["Name"],
        instance_type=one["InstanceType"],
        zone=one.get("Placement", {}).get("AvailabilityZone", ""),
        spot=one.get("InstanceLifecycle") == "spot",
        host=one.get("PrivateIpAddress", ""),
        tags={tag["Key"]: tag["Value"] for tag in one.get("Tags", ())},
        launched=one["LaunchTime"].timestamp() if "LaunchTime" in one else 0.0,
        reason=one.get("StateReason", {}).get("Code", ""),
    )


def _shape(one: Mapping[str, Any]) -> _Shape:
    total = one["MemoryInfo"]["SizeInMiB"]
    kept = max(1024, total // 8)  # MiB that ebbflow-spark leaves to the system
    return _Shape(
        cores=one["VCpuInfo"]["DefaultVCpus"],
        memory=(total - kept) / 1024,
        gpus=sum(int(gpu.get("Count", 0)) for gpu in one.get("GpuInfo", {}).get("Gpus", ())),
    )
