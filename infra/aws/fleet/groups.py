"""Auto Scaling groups: what they are now, what must be asked of them for a plan, why they are short of nodes."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ebbflow.infra.aws.clients import CAPACITY_CODES, PRICE_CODES, Clients, calling, scrubbed
from ebbflow.infra.aws.fleet.state import Plan
from ebbflow.infra.aws.naming import Names
from ebbflow.infra.errors import AwsError, NotOursError
from ebbflow.infra.protocols import AskKind, ProviderCall

_NAMES_A_CALL = 50
_PROTECTED_A_CALL = 50
_ACTIVITIES = 20  # the newest ones that are looked at
_COMING = ("Pending", "Pending:Wait", "Pending:Proceed")
_SERVING = "InService"

# "Could not launch Spot Instances. SpotMaxPriceTooLow - Your Spot request price of ..."
_CODE = re.compile(r"\b([A-Z][A-Za-z]+) - ")
_SHORTAGE = re.compile(r"do(?:es)? not have sufficient .*capacity|no Spot capacity", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Member:
    """One instance of a group."""

    id: str
    state: str  # of the life cycle
    protected: bool

    @property
    def counts(self) -> bool:
        """Tell whether it fills a place of the desired capacity."""
        return self.state == _SERVING or self.state in _COMING

    @property
    def leaving(self) -> bool:
        return self.state.startswith("Terminating")


@dataclass(frozen=True, slots=True)
class Group:
    """One pool's group as AWS describes it."""

    pool: str
    name: str
    min_nodes: int
    max_nodes: int
    desired: int
    on_demand_base: int
    members: tuple[Member, ...]
    tags: Mapping[str, str]
    protects: bool  # new instances from being chosen at a scale-in
    policy: Mapping[str, Any]  # for mixed instances, as it was described

    @property
    def arrived(self) -> int:
        """Count the instances that fill places of the desired capacity."""
        return sum(member.counts for member in self.members)

    def member(self, instance: str) -> Member | None:
        """Return the member with this id."""
        return next((member for member in self.members if member.id == instance), None)


def describe(clients: Clients, names: Names, pools: Iterable[str]) -> dict[str, Group]:
    """Return the groups of ``pools``. Raises ``AwsError``, also for one that does not exist."""
    wanted = {names.group(pool): pool for pool in pools}
    found: dict[str, Group] = {}
    client = clients.client("autoscaling")
    pages = client.get_paginator("describe_auto_scaling_groups")
    ordered = sorted(wanted)
    with calling("describe the Auto Scaling groups"):
        for start in range(0, len(ordered), _NAMES_A_CALL):
            for page in pages.paginate(AutoScalingGroupNames=ordered[start : start + _NAMES_A_CALL]):
                for one in page["AutoScalingGroups"]:
                    pool = wanted[one["AutoScalingGroupName"]]
                    found[pool] = _group(pool, one)
    if missing := [name for name, pool in wanted.items() if pool not in found]:
        raise AwsError(
            f"there is no Auto Scaling group {', '.join(missing)} in {clients.region}; run terraform apply, or name "
            "the region and account that it was run for"
        )
    return found


def check_ours(names: Names, group: Group) -> None:
    """Raise ``NotOursError`` unless the group carries the cluster's tags."""
    if not names.owns(group.tags):
        raise NotOursError(
            f"the Auto Scaling group {group.name} does not carry the tags of the cluster {names.cluster!r}; "
            "nothing was done. Terraform's module spot-pool sets them"
        )


def steps(group: Group, plan: Plan) -> tuple[ProviderCall, ...]:
    """Return what must be asked so that the group follows ``plan``, in this order. Pure.

    Scale-in protection comes first: from then on only nodes that are named can leave. A size below the present one is
    asked for only as far as places are empty, because the group would choose whom to end.
    """
    asks: list[ProviderCall] = []
    bare = [member.id for member in group.members if member.state == _SERVING and not member.protected]
    for start in range(0, len(bare), _PROTECTED_A_CALL):
        some = bare[start : start + _PROTECTED_A_CALL]
        asks.append(
            _ask(
                group,
                "protect",
                len(some),
                "SetInstanceProtection",
                InstanceIds=some,
                ProtectedFromScaleIn=True,
            )
        )
    if not group.protects:
        asks.append(
            _ask(group, "protect", 0, "UpdateAutoScalingGroup", NewInstancesProtectedFromScaleIn=True)
        )
    nodes = min(max(plan.nodes, group.min_nodes), group.max_nodes)
    base = min(plan.on_demand, nodes)
    if group.policy and base != group.on_demand_base:
        asks.append(
            _ask(
                group,
                "on-demand",
                base,
                "UpdateAutoScalingGroup",
                MixedInstancesPolicy=_with_base(group.policy, base),
            )
        )
    size = nodes if nodes >= group.desired else max(nodes, min(group.arrived, group.desired))
    if size != group.desired:
        asks.append(
            _ask(group, "size", size, "SetDesiredCapacity", DesiredCapacity=size, HonorCooldown=False)
        )
    return tuple(asks)


def end(group: Group, instance: str, *, replaced: bool) -> ProviderCall:
    """Return the request that ends one member; without ``replaced`` the group shrinks by it."""
    call = "autoscaling:TerminateInstanceInAutoScalingGroup"
    parameters = {"InstanceId": instance, "ShouldDecrementDesiredCapacity": not replaced}
    return ProviderCall("end", instance, int(replaced), call, parameters)


def perform(clients: Clients, ask: ProviderCall) -> None:
    """Carry one request out. Raises ``AwsError``."""
    service, _, operation = ask.call.partition(":")
    from botocore import xform_name

    with calling(f"do this: {ask}"):
        getattr(clients.client(service), xform_name(operation))(**ask.parameters)


def shortage(clients: Clients, group: Group, since: float) -> str:
    """Return why the group could not start nodes since ``since`` (Unix time, s), newest reason, or ``""``.

    Raises ``AwsError``.
    """
    with calling(f"look at the scaling activities of {group.name}"):
        answer = clients.client("autoscaling").describe_scaling_activities(
            AutoScalingGroupName=group.name, MaxRecords=_ACTIVITIES
        )
    return why_short(answer["Activities"], since)


def why_short(activities: Sequence[Mapping[str, Any]], since: float) -> str:
    """Return the newest failure's code and words, of activities newest first; ``""`` for none since ``since``."""
    for activity in activities:
        started = activity.get("StartTime")
        if isinstance(started, datetime) and started.timestamp() < since:
            break
        if activity.get("StatusCode") != "Failed":
            continue
        said = str(activity.get("StatusMessage", ""))
        return f"{shortage_code(said) or 'launch failed'}: {scrubbed(said)}"
    return ""


def shortage_code(message: str) -> str:
    """Return the code that a scaling activity's message holds, such as ``InsufficientInstanceCapacity``, or ``""``.

    >>> shortage_code("Could not launch Spot Instances. SpotMaxPriceTooLow - Your Spot request price of 0.001 ...")
    'SpotMaxPriceTooLow'
    """
    codes: list[str] = _CODE.findall(message)
    known = [code for code in codes if code in CAPACITY_CODES or code in PRICE_CODES]
    if known or codes:
        return (known or codes)[0]
    return "InsufficientInstanceCapacity" if _SHORTAGE.search(message) else ""


def _ask(group: Group, kind: AskKind, value: int, operation: str, **parameters: Any) -> ProviderCall:
    return ProviderCall(
        kind, group.pool, value, f"autoscaling:{operation}", {"AutoScalingGroupName": group.name} | parameters
    )


def _with_base(policy: Mapping[str, Any], base: int) -> dict[str, Any]:
    """Return the policy with another on-demand base, in the form that requests have."""
    template = _request(policy["LaunchTemplate"])
    if "Overrides" in template:
        template["Overrides"] = [_request(override) for override in template["Overrides"]]
    distribution = {**policy.get("InstancesDistribution", {}), "OnDemandBaseCapacity": base}
    if distribution.get("SpotAllocationStrategy") != "lowest-price":
        distribution.pop("SpotInstancePools", None)  # requests may hold it with that strategy only
    return {"LaunchTemplate": template, "InstancesDistribution": distribution}


def _request(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that names its launch template once: answers hold id and name, requests may hold one."""
    found = {**described}
    if "LaunchTemplateId" in (specification := {**found.get("LaunchTemplateSpecification", {})}):
        specification.pop("LaunchTemplateName", None)
        found["LaunchTemplateSpecification"] = specification
    return found


def _group(pool: str, one: Mapping[str, Any]) -> Group:
    policy = one.get("MixedInstancesPolicy") or {}
    return Group(
        pool=pool,
        name=one["AutoScalingGroupName"],
        min_nodes=one["MinSize"],
        max_nodes=one["MaxSize"],
        desired=one["DesiredCapacity"],
        on_demand_base=int(policy.get("InstancesDistribution", {}).get("OnDemandBaseCapacity") or 0),
        members=tuple(
            Member(m["InstanceId"], m["LifecycleState"], bool(m.get("ProtectedFromScaleIn")))
            for m in sorted(one.get("Instances", ()), key=lambda m: str(m["InstanceId"]))
        ),
        tags={tag["Key"]: tag["Value"] for tag in one.get("Tags", ())},
        protects=bool(one.get("NewInstancesProtectedFromScaleIn")),
        policy=policy,
    )
