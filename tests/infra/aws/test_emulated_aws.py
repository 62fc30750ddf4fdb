"""The emulated AWS does what the tests on it take for granted."""

import json
import os
import signal
import subprocess
import sys
import time

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError, EndpointConnectionError

from tests.aws.emulator import PoolShape
from tests.aws.faults import Faults


def _client(account, service, attempts=1):
    retries = {"mode": "standard", "total_max_attempts": attempts}
    session = boto3.session.Session()  # the default one would keep another test's keys
    return session.client(service, endpoint_url=account.emulator.url, config=Config(retries=retries))


def _until(true, seconds=150.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def lab(aws_account):
    return aws_account.cluster("lab", PoolShape("etl", on_demand_base=1))


def _size(cluster, nodes):
    cluster.account.client("autoscaling").set_desired_capacity(
        AutoScalingGroupName=cluster.names.group("etl"), DesiredCapacity=nodes
    )


def _messages(cluster):
    """Take what the queue holds and return the events by their kind."""
    sqs, found = cluster.account.client("sqs"), {}
    while True:
        answer = sqs.receive_message(
            QueueUrl=cluster.settings.notice_queue_url, MaxNumberOfMessages=10, WaitTimeSeconds=1
        )
        if not answer.get("Messages"):
            return found
        for message in answer["Messages"]:
            sqs.delete_message(
                QueueUrl=cluster.settings.notice_queue_url, ReceiptHandle=message["ReceiptHandle"]
            )
            body = json.loads(message["Body"])
            found.setdefault(body["detail-type"], []).append(body)


def test_the_accounts_of_two_tests_share_nothing(aws_emulator, aws_account):
    other = aws_emulator.account()
    aws_account.strangers(2)
    assert (len(aws_account.alive()), len(other.alive())) == (2, 0)
    assert boto3.session.Session().client("sts").get_caller_identity()["Account"] == aws_account.id


def test_a_group_has_spot_nodes_of_several_types_and_zones_with_its_tags_and_an_on_demand_base(lab):
    _size(lab, 12)
    nodes = lab.nodes("etl")
    assert len(nodes) == 12
    assert sorted(n["market"] for n in nodes) == ["on-demand"] + ["spot"] * 11
    assert len({n["type"] for n in nodes}) > 1
    assert len({n["zone"] for n in nodes}) > 1
    assert all(lab.names.owns(n["tags"]) for n in nodes)
    described = lab.account.client("ec2").describe_instances()
    found = [i for r in described["Reservations"] for i in r["Instances"]]
    assert sum(i.get("InstanceLifecycle") == "spot" for i in found) == 11


def test_a_size_beyond_the_groups_bounds_is_refused(lab):
    with pytest.raises(ClientError, match="above max value 40"):
        _size(lab, 41)


def test_a_group_is_short_until_there_is_capacity_and_says_why(lab):
    lab.account.configure(most={"spot": 3})
    _size(lab, 8)
    assert len(lab.nodes("etl")) == 4
    activities = lab.account.client("autoscaling").describe_scaling_activities()["Activities"]
    assert activities[0]["StatusCode"] == "Failed"
    assert "UnfulfillableCapacity" in activities[0]["StatusMessage"]
    lab.account.configure(most={"spot": None})
    _until(lambda: len(lab.nodes("etl")) == 8)


def test_a_named_node_leaves_and_is_replaced_only_where_the_size_stays(lab):
    _size(lab, 4)
    groups = lab.account.client("autoscaling")
    first, second = (n["id"] for n in lab.nodes("etl")[:2])
    groups.terminate_instance_in_auto_scaling_group(InstanceId=first, ShouldDecrementDesiredCapacity=True)
    assert (len(lab.nodes("etl")), lab.group("etl")["DesiredCapacity"]) == (3, 3)
    groups.terminate_instance_in_auto_scaling_group(InstanceId=second, ShouldDecrementDesiredCapacity=False)
    assert len(lab.nodes("etl")) == 3
    assert not {first, second} & {n["id"] for n in lab.nodes("etl")}
    with pytest.raises(ClientError, match="Instance Id not found"):
        groups.terminate_instance_in_auto_scaling_group(InstanceId=first, ShouldDecrementDesiredCapacity=True)


def test_a_node_that_its_group_ends_waits_in_the_hook_and_is_billed(lab):
    lab.account.configure(drain_seconds=60)
    _size(lab, 2)
    _size(lab, 1)
    states = sorted(i["LifecycleState"] for i in lab.group("etl")["Instances"])
    assert states == ["InService", "Terminating:Wait"]
    assert len(lab.nodes("etl")) == 2
    (waiting,) = (i for i in lab.group("etl")["Instances"] if i["LifecycleState"] != "InService")
    lab.account.client("autoscaling").complete_lifecycle_action(
        AutoScalingGroupName=lab.names.group("etl"),
        LifecycleHookName="drain",
        InstanceId=waiting["InstanceId"],
        LifecycleActionResult="CONTINUE",
    )
    assert len(lab.nodes("etl")) == 1


def test_an_interruption_is_announced_through_the_rules_and_carried_out(lab):
    _size(lab, 2)
    taken = next(n["id"] for n in lab.nodes("etl") if n["market"] == "spot")
    lab.account.interrupt([taken], seconds=0.5)
    _until(lambda: taken not in {n["id"] for n in lab.nodes("etl")})
    _until(lambda: len(lab.nodes("etl")) == 2)  # the group replaces it
    events = _messages(lab)
    (warning,) = events["EC2 Spot Instance Interruption Warning"]
    assert warning["detail"] == {"instance-id": taken, "instance-action": "terminate"}
    assert warning["account"] == lab.account.id
    states = [event["detail"] for event in events["EC2 Instance State-change Notification"]]
    assert {"instance-id": taken, "state": "terminated"} in states


def test_events_come_twice_and_messages_again(lab):
    lab.account.faults(Faults(twice=1.0, again=1.0))
    lab.account.rebalance(["i-0"])
    sqs, url = lab.account.client("sqs"), lab.settings.notice_queue_url
    seen = []
    _until(lambda: seen.extend(_received(sqs, url)) or len(seen) >= 6)
    assert len(set(seen)) == 2  # two messages, each of them several times


def _received(sqs, url):
    answer = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=1)
    return [message["MessageId"] for message in answer.get("Messages", [])]


@pytest.mark.parametrize("service", ["ec2", "autoscaling", "sqs", "ssm"])
@pytest.mark.parametrize(
    ("faults", "status"), [(Faults(throttled=1.0), (400, 503)), (Faults(failed=1.0), (500,))]
)
def test_botocore_takes_refusals_for_what_they_are(lab, service, faults, status):
    call = {
        "ec2": lambda c: c.describe_instances(),
        "autoscaling": lambda c: c.describe_auto_scaling_groups(),
        "sqs": lambda c: c.receive_message(QueueUrl=lab.settings.notice_queue_url, WaitTimeSeconds=0),
        "ssm": lambda c: c.get_parameter(Name=lab.settings.settings_parameter),
    }[service]
    lab.account.faults(faults)
    with pytest.raises(ClientError) as caught:
        call(_client(lab.account, service, attempts=2))
    answer = caught.value.response
    assert answer["ResponseMetadata"]["HTTPStatusCode"] in status
    assert answer["ResponseMetadata"]["RetryAttempts"] == 1
    lab.account.faults(Faults())
    call(_client(lab.account, service))


@pytest.mark.parametrize(
    ("faults", "done"), [(Faults(dropped_before=1.0), 0), (Faults(dropped_after=1.0), 3)]
)
def test_a_connection_breaks_before_or_after_the_call_was_executed(lab, faults, done):
    lab.account.faults(faults)
    with pytest.raises((ConnectionClosedError, EndpointConnectionError)):
        _client(lab.account, "autoscaling").set_desired_capacity(
            AutoScalingGroupName=lab.names.group("etl"), DesiredCapacity=3
        )
    assert len(lab.nodes("etl")) == done


def _fleet(cluster, token, count=3, **options):
    return _client(cluster.account, "ec2").create_fleet(
        Type="instant",
        ClientToken=token,
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {
                    "LaunchTemplateId": cluster.settings.pools["etl"].launch_template,
                    "Version": "$Default",
                },
                "Overrides": [{"SubnetId": cluster.settings.pools["etl"].subnet_ids[1]}],
            }
        ],
        TargetCapacitySpecification={"TotalTargetCapacity": count, "DefaultTargetCapacityType": "spot"},
        **options,
    )


def test_a_fleet_with_the_same_token_is_the_same_fleet(lab):
    first = _fleet(lab, "a-token")
    assert sum(len(i["InstanceIds"]) for i in first["Instances"]) == 3
    assert _fleet(lab, "a-token")["FleetId"] == first["FleetId"]
    assert len(lab.nodes("etl")) == 3
    with pytest.raises(ClientError, match="IdempotentParameterMismatch"):
        _fleet(lab, "a-token", 4)
    assert {n["market"] for n in lab.nodes("etl")} == {"spot"}


def test_a_fleet_is_partial_or_nothing_where_there_is_no_capacity(lab):
    lab.account.configure(most={"spot": 2})
    partial = _fleet(lab, "partial")
    assert sum(len(i["InstanceIds"]) for i in partial["Instances"]) == 2
    assert partial["Errors"][0]["ErrorCode"] == "InsufficientInstanceCapacity"
    lab.account.configure(most={"spot": 4})
    nothing = _fleet(
        lab, "nothing", SpotOptions={"MinTargetCapacity": 3, "AllocationStrategy": "lowest-price"}
    )
    assert not nothing.get("Instances")
    assert len(lab.nodes("etl")) == 2


@pytest.mark.parametrize("executed", [False, True])
def test_a_process_is_killed_at_a_call(lab, executed):
    asks = (
        "import boto3; c = boto3.client('autoscaling'); c.describe_auto_scaling_groups(); "
        f"c.set_desired_capacity(AutoScalingGroupName={lab.names.group('etl')!r}, DesiredCapacity=2)"
    )
    process = subprocess.Popen([sys.executable, "-c", asks], env=os.environ)
    try:
        lab.account.kill(process.pid, 2, executed=executed)
        assert process.wait(150) == -signal.SIGKILL
    finally:
        process.kill()
    assert len(lab.nodes("etl")) == (2 if executed else 0)
    assert lab.account.state()["errors"] == []
