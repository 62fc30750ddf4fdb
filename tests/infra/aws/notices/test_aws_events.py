"""Messages of EventBridge, in the forms that AWS documents, as values."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.aws.naming import NODE_LEAVING
from ebbflow.infra.aws.notices import events
from ebbflow.infra.errors import NoticeError

AT = 1795255200.0  # 2026-11-21T10:00:00Z
NODE = "i-0123456789abcdef0"
OWN = f"ebbflow.lab.arn:aws:ec2:us-east-1:123456789012:instance/{NODE}"
GROUP = "ebbflow-lab-etl"


def message(kind, detail, source="aws.ec2", **changes):
    """Return a message as EventBridge puts it into the queue."""
    return json.dumps(
        {
            "version": "0",
            "id": "6a7e8feb-b491-4cf7-a9f1-bf3703467718",
            "detail-type": kind,
            "source": source,
            "account": "123456789012",
            "time": "2026-11-21T10:00:00Z",
            "region": "us-east-1",
            "resources": [f"arn:aws:ec2:us-east-1:123456789012:instance/{NODE}"],
            "detail": detail,
        }
        | changes
    )


def warning(action="terminate", **changes):
    detail = {"instance-id": NODE, "instance-action": action}
    return message("EC2 Spot Instance Interruption Warning", detail, **changes)


@pytest.mark.parametrize(("action", "seconds"), [("terminate", 120), ("stop", 120), ("hibernate", 0)])
def test_an_interruption_comes_two_minutes_after_its_warning_unless_the_node_hibernates(action, seconds):
    assert events.read(warning(action)) == events.Interruption(NODE, AT, AT + seconds, action)


@pytest.mark.parametrize(
    "time", ["2026-11-21T10:00:00Z", "2026-11-21T12:00:00+02:00", "2026-11-21T10:00:00", AT, int(AT)]
)
def test_a_time_may_have_any_form_that_names_it(time):
    assert events.read(warning(time=time)).at == AT


def test_a_rebalance_recommendation_states_no_time():
    body = message("EC2 Instance Rebalance Recommendation", {"instance-id": NODE})
    assert events.read(body) == events.Rebalance(NODE, AT)


@pytest.mark.parametrize(
    "state", ["pending", "running", "stopping", "stopped", "shutting-down", "terminated"]
)
def test_only_two_states_are_the_end(state):
    body = message("EC2 Instance State-change Notification", {"instance-id": NODE, "state": state})
    found = events.read(body)
    assert found == events.StateChange(NODE, AT, state)
    assert found.ended == (state in ("shutting-down", "terminated"))


def test_a_group_says_that_it_ends_a_node():
    detail = {
        "LifecycleActionToken": "87654321-4321-4321-4321-210987654321",
        "AutoScalingGroupName": GROUP,
        "LifecycleHookName": "drain",
        "EC2InstanceId": NODE,
        "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING",
        "Origin": "AutoScalingGroup",
        "Destination": "EC2",
    }
    body = message("EC2 Instance-terminate Lifecycle Action", detail, "aws.autoscaling")
    assert events.read(body) == events.GroupEnds(NODE, AT, GROUP)


def test_a_group_says_why_it_could_not_start_a_node():
    detail = {
        "StatusCode": "Failed",
        "AutoScalingGroupName": GROUP,
        "ActivityId": "9cabb81f-42de-417d-8aa7-ce16bf026590",
        "Details": {"Availability Zone": "us-east-1b", "Subnet ID": "subnet-1"},
        "StatusMessage": "Could not launch Spot Instances. UnfulfillableCapacity - no capacity",
        "EndTime": "2026-11-21T10:00:00.000Z",
        "EC2InstanceId": "",
        "Cause": "an instance was started in response to a difference",
    }
    found = events.read(message("EC2 Instance Launch Unsuccessful", detail, "aws.autoscaling"))
    assert found == events.LaunchFailed(GROUP, AT, detail["StatusMessage"], "us-east-1b")
    del detail["StatusMessage"], detail["Details"]
    found = events.read(message("EC2 Instance Launch Unsuccessful", detail, "aws.autoscaling"))
    assert found == events.LaunchFailed(GROUP, AT, detail["Cause"], "")


def health(**changes):
    detail = {
        "eventArn": "arn:aws:health:us-east-1::event/EC2/AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED/1",
        "service": "EC2",
        "eventTypeCode": "AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED",
        "eventTypeCategory": "scheduledChange",
        "startTime": "Sat, 21 Nov 2026 12:00:00 GMT",
        "statusCode": "upcoming",
        "affectedEntities": [{"entityValue": NODE, "status": "IMPAIRED"}, {"entityValue": "vol-1"}],
    }
    return message("AWS Health Event", detail | changes, "aws.health")


def test_aws_health_plans_and_calls_off():
    found = events.read(health())
    assert (found.instances, found.planned, found.starts, found.over) == ((NODE,), True, AT + 7200, False)
    assert found.code == "AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED"
    assert events.read(health(statusCode="closed")).over
    assert not events.read(health(eventTypeCategory="issue")).planned
    assert events.read(health(affectedEntities=None, startTime=None)).instances == ()
    assert isinstance(events.read(health(service="RDS")), events.Other)


def test_a_node_says_that_it_leaves():
    detail = {"instance-id": NODE, "deadline": AT + 90.5, "reason": "spot interruption"}
    found = events.read(message(NODE_LEAVING, detail, OWN))
    assert found == events.NodeLeaving(NODE, AT, AT + 90.5, "spot interruption")


@pytest.mark.parametrize(
    "source",
    [
        OWN.replace(NODE, "i-0another"),
        OWN.replace(NODE, f"{NODE}0"),
        f"{OWN}:instance/i-0another",
        OWN.replace(":instance/", ":instance/i-0another/"),
        f"ebbflow.lab.{NODE}",
        "ebbflow.lab",
    ],
)
def test_no_node_can_say_that_another_leaves(source):
    """A node's role lets it send events whose source ends in its own ARN, and none but those."""
    with pytest.raises(NoticeError, match="may only say of itself"):
        events.read(message(NODE_LEAVING, {"instance-id": NODE, "deadline": AT}, source))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("", "must be JSON"),
        ("[]", "must be a JSON object; got list"),
        ("[" * 100_000, "must be JSON"),
        ("{}", "needs the text source; got None"),
        (message("EC2 Spot Fleet Error", {}), "unknown kind: 'EC2 Spot Fleet Error' from 'aws.ec2'"),
        (message("EC2 Spot Instance Interruption Warning", {}, "me"), "unknown kind"),
        (message("EC2 Spot Instance Interruption Warning", {}, "ebbflow.lab"), "unknown kind"),
        (message("EC2 Spot Instance Interruption Warning", {}), "needs the text detail.instance-id"),
        (message("EC2 Spot Instance Interruption Warning", None), "needs the object detail; got None"),
        (warning(time="soon"), "time of a notice must be a time; got 'soon'"),
        (warning(time=True), "must be a time; got True"),
        (warning(time=None), "must be a time; got None"),
        (
            message("EC2 Instance State-change Notification", {"instance-id": NODE, "state": "asleep"}),
            "must be one of pending, .*; got 'asleep'",
        ),
        (
            message(NODE_LEAVING, {"instance-id": NODE, "deadline": float("inf")}, OWN),
            "detail.deadline of a notice must be a time; got inf",
        ),
    ],
)
def test_a_message_that_cannot_be_read_says_what_is_wrong(body, problem):
    with pytest.raises(NoticeError, match=problem):
        events.read(body)


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("instance-id", "state", "deadline", "EC2InstanceId", "AutoScalingGroupName", "Details", "service",
          "affectedEntities", "startTime", "eventTypeCode", "eventTypeCategory", "eventArn")  # fmt: skip


@given(
    st.sampled_from(list(events._READERS)),
    st.sampled_from(["aws.ec2", "aws.health", "ebbflow.lab", "other"]),
    st.dictionaries(st.sampled_from(FIELDS), anything | st.just(NODE)) | anything,
    anything | st.just("2026-11-21T10:00:00Z"),
)
def test_any_message_is_read_or_refused(kind, source, detail, time):
    body = json.dumps({"detail-type": kind, "source": source, "detail": detail, "time": time, "id": "1"})
    try:
        found = events.read(body)
    except NoticeError:
        return
    assert isinstance(found, events.Event)
