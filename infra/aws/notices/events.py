"""Messages of EventBridge about nodes, as values. Nothing is asked here and no clock is read.

Sources of the forms: the event references of EC2 (spot interruptions, rebalance recommendations, state changes), of
EC2 Auto Scaling and of AWS Health; the last kind is our own, sent by the agent of a node (``infra.aws.node_agent``).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, get_args

from ebbflow.infra.aws.naming import NODE_LEAVING
from ebbflow.infra.errors import NoticeError

WARNING = 120.0
"""Seconds between an interruption warning and the interruption."""

State = Literal["pending", "running", "stopping", "stopped", "shutting-down", "terminated"]
_STATES: tuple[State, ...] = get_args(State)
_AT_ONCE = ("hibernate",)  # begins with the warning


@dataclass(frozen=True, slots=True)
class Interruption:
    """AWS takes a spot instance away at ``deadline``. All times are in seconds since the Unix epoch."""

    instance: str
    at: float
    deadline: float
    action: str  # terminate, stop or hibernate


@dataclass(frozen=True, slots=True)
class Rebalance:
    """A spot instance is likelier than usual to be interrupted. AWS states no time."""

    instance: str
    at: float


@dataclass(frozen=True, slots=True)
class StateChange:
    """An instance has entered ``state``."""

    instance: str
    at: float
    state: State

    @property
    def ended(self) -> bool:
        """Tell whether the instance is gone for good: no state follows these two but each other."""
        return self.state in ("shutting-down", "terminated")


@dataclass(frozen=True, slots=True)
class GroupEnds:
    """An Auto Scaling group ends an instance, which waits in the group's hook until it is drained."""

    instance: str
    at: float
    group: str


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """A node says of itself that it drains and will be gone at ``deadline``."""

    instance: str
    at: float
    deadline: float
    reason: str


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """An Auto Scaling group could not start an instance."""

    group: str
    at: float
    reason: str  # as AWS says it
    zone: str = ""  # empty where AWS does not say


@dataclass(frozen=True, slots=True)
class Health:
    """AWS has planned something for instances, or has trouble with them."""

    id: str  # the same in all messages about it
    at: float
    instances: tuple[str, ...]
    code: str  # such as AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED
    planned: bool  # False: trouble that is there already
    starts: float  # when it begins
    over: bool = False  # done or called off


@dataclass(frozen=True, slots=True)
class Other:
    """An event of a kind that we know and that means nothing to capacity."""

    at: float
    what: str


Event = Interruption | Rebalance | StateChange | GroupEnds | NodeLeaving | LaunchFailed | Health | Other


def read(body: str) -> Event:
    """Return what a message says.

    Raises ``NoticeError`` for one that is no event, of an unknown kind, or that lacks what its kind must have.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoticeError(f"a notice must be JSON; {error}") from error
    if not isinstance(message, dict):
        raise NoticeError(f"a notice must be a JSON object; got {type(message).__name__}")
    event = _Message(message)
    source, kind = event.text("source"), event.text("detail-type")
    reader = _READERS.get(kind)
    if reader is None or not (source in _SOURCES or (source.startswith("ebbflow.") and kind == NODE_LEAVING)):
        raise NoticeError(f"a notice of an unknown kind: {kind!r} from {source!r}")
    return reader(event, _seconds("time", message.get("time")))


class _Message:
    """Takes fields out of a message and says which one is wrong."""

    def __init__(self, fields: Mapping[str, Any], where: str = "") -> None:
        self._fields, self._where = fields, where

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str) or not value:
            raise NoticeError(f"a notice needs the text {self._where}{name}; got {value!r:.80}")
        return value

    def optional(self, name: str) -> str:
        value = self._fields.get(name)
        return value if isinstance(value, str) else ""

    def inner(self, name: str) -> "_Message":
        value = self._fields.get(name)
        if not isinstance(value, dict):
            raise NoticeError(f"a notice needs the object {self._where}{name}; got {value!r:.80}")
        return _Message(value, f"{self._where}{name}.")

    def items(self, name: str) -> list[Any]:
        value = self._fields.get(name)
        return value if isinstance(value, list) else []

    def raw(self, name: str) -> object:
        return self._fields.get(name)


def _interruption(event: _Message, at: float) -> Event:
    detail = event.inner("detail")
    action = detail.optional("instance-action") or "terminate"
    return Interruption(detail.text("instance-id"), at, at if action in _AT_ONCE else at + WARNING, action)


def _rebalance(event: _Message, at: float) -> Event:
    return Rebalance(event.inner("detail").text("instance-id"), at)


def _state(event: _Message, at: float) -> Event:
    detail = event.inner("detail")
    instance, state = detail.text("instance-id"), detail.text("state")
    for known in _STATES:
        if state == known:
            return StateChange(instance, at, known)
    raise NoticeError(f"detail.state must be one of {', '.join(_STATES)}; got {state!r}")


def _group_ends(event: _Message, at: float) -> Event:
    detail = event.inner("detail")
    return GroupEnds(detail.text("EC2InstanceId"), at, detail.text("AutoScalingGroupName"))


def _node_leaving(event: _Message, at: float) -> Event:
    detail = event.inner("detail")
    instance, source = detail.text("instance-id"), event.text("source")
    # the role of nodes lets each write its own instance there, which nobody else can
    if not re.fullmatch(
        rf"ebbflow\.[a-z0-9-]+\.arn:[^:]+:ec2:[^:]+:[0-9]+:instance/{re.escape(instance)}", source
    ):
        raise NoticeError(f"a node may only say of itself that it leaves; {source!r} says so of {instance!r}")
    deadline = _seconds("detail.deadline", detail.raw("deadline"))
    return NodeLeaving(instance, at, deadline, detail.optional("reason"))


def _launch_failed(event: _Message, at: float) -> Event:
    detail = event.inner("detail")
    zone = ""
    if isinstance(detail.raw("Details"), dict):
        zone = detail.inner("Details").optional("Availability Zone")
    reason = detail.optional("StatusMessage") or detail.optional("Cause")
    return LaunchFailed(detail.text("AutoScalingGroupName"), at, reason, zone)


def _health(event: _Message, at: float) -> Event:
    detail = event.inner("detail")
    if detail.text("service") != "EC2":
        return Other(at, f"AWS Health on {detail.text('service')}")
    named = (e.get("entityValue") for e in detail.items("affectedEntities") if isinstance(e, dict))
    starts = detail.optional("startTime")
    return Health(
        detail.optional("eventArn") or event.text("id"),
        at,
        tuple(sorted({name for name in named if isinstance(name, str) and name.startswith("i-")})),
        detail.text("eventTypeCode"),
        detail.text("eventTypeCategory") == "scheduledChange",
        _seconds("detail.startTime", starts) if starts else at,
        detail.optional("statusCode") == "closed",
    )


_SOURCES = ("aws.ec2", "aws.autoscaling", "aws.health")
_READERS = {
    "EC2 Spot Instance Interruption Warning": _interruption,
    "EC2 Instance Rebalance Recommendation": _rebalance,
    "EC2 Instance State-change Notification": _state,
    "EC2 Instance-terminate Lifecycle Action": _group_ends,
    "EC2 Instance Launch Unsuccessful": _launch_failed,
    "AWS Health Event": _health,
    NODE_LEAVING: _node_leaving,
}


def _seconds(name: str, value: object) -> float:
    """Return a time in seconds since the Unix epoch: EventBridge writes ISO 8601, AWS Health RFC 1123."""
    # a number is what an emulator writes
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if isinstance(value, str):
        for form in (datetime.fromisoformat, parsedate_to_datetime):
            try:
                found = form(value)
                return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
            except (ValueError, TypeError, IndexError, OverflowError):
                continue
    raise NoticeError(f"{name} of a notice must be a time; got {value!r:.80}")
