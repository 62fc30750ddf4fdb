from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.aws.fleet.groups import Group, Member, check_ours, shortage_code, steps, why_short
from ebbflow.infra.aws.fleet.state import Plan
from ebbflow.infra.aws.naming import MANAGED_BY_LOOP, MANAGED_BY_TERRAFORM, Names
from ebbflow.infra.errors import NotOursError

POLICY = {
    "LaunchTemplate": {
        "LaunchTemplateSpecification": {
            "LaunchTemplateId": "lt-1",
            "LaunchTemplateName": "ebbflow-lab-etl",
            "Version": "3",
        },
        "Overrides": [{"InstanceType": "m5.large"}, {"InstanceType": "m6i.large"}],
    },
    "InstancesDistribution": {
        "OnDemandBaseCapacity": 0,
        "OnDemandPercentageAboveBaseCapacity": 0,
        "SpotAllocationStrategy": "price-capacity-optimized",
    },
}


def group(*states: str, desired: int = 0, least: int = 0, most: int = 20, base: int = 0) -> Group:
    members = tuple(Member(f"i-{n}", state, True) for n, state in enumerate(states))
    tags = Names("lab").tags(MANAGED_BY_LOOP, role="spark-worker", pool="etl")
    return Group("etl", "ebbflow-lab-etl", least, most, desired, base, members, tags, True, POLICY)


def sizes(found: Group, plan: Plan) -> list[int]:
    return [ask.value for ask in steps(found, plan) if ask.kind == "size"]


def test_growth_is_asked_for_at_once_and_without_cooldown():
    (ask,) = steps(group("InService", desired=1), Plan(5))
    assert ask.call == "autoscaling:SetDesiredCapacity"
    assert ask.parameters == {
        "AutoScalingGroupName": "ebbflow-lab-etl",
        "DesiredCapacity": 5,
        "HonorCooldown": False,
    }


def test_what_is_as_planned_is_left_alone():
    assert steps(group("InService", "InService", desired=2), Plan(2)) == ()


@pytest.mark.parametrize(
    ("states", "desired", "plan", "expected"),
    [
        (["InService"] * 3, 5, 1, [3]),  # two have not come and are cancelled, two must be named
        (["InService"] * 3, 5, 4, [4]),
        (["InService", "Pending", "Terminating:Wait"], 5, 1, [2]),  # one that starts fills its place
        (["InService"] * 3, 3, 1, []),
        ([], 5, 0, [0]),
    ],
)
def test_shrinking_takes_only_empty_places(states, desired, plan, expected):
    assert sizes(group(*states, desired=desired), Plan(plan)) == expected


def test_a_size_outside_the_groups_bounds_is_never_asked_for():
    assert sizes(group(desired=2, least=2, most=6), Plan(9)) == [6]
    assert sizes(group(desired=4, least=2, most=6), Plan(0)) == [2]


def test_nodes_and_the_group_are_protected_before_anything_else():
    bare = replace(group("InService", "Pending", desired=2), protects=False)
    bare = replace(bare, members=tuple(replace(m, protected=False) for m in bare.members))
    kinds = [(ask.kind, ask.call.split(":")[1]) for ask in steps(bare, Plan(3, 1))]
    assert kinds == [
        ("protect", "SetInstanceProtection"),
        ("protect", "UpdateAutoScalingGroup"),
        ("on-demand", "UpdateAutoScalingGroup"),
        ("size", "SetDesiredCapacity"),
    ]
    (first, *_) = steps(bare, Plan(3, 1))
    assert first.parameters["InstanceIds"] == ["i-0"]  # one that starts cannot be protected yet


def test_protection_is_asked_for_fifty_at_a_time():
    many = group(*["InService"] * 120, desired=120, most=200)
    many = replace(many, members=tuple(replace(m, protected=False) for m in many.members))
    assert [ask.value for ask in steps(many, Plan(120))] == [50, 50, 20]


def test_the_on_demand_base_changes_and_nothing_else_of_the_policy():
    (ask,) = steps(group(*["InService"] * 4, desired=4), Plan(4, 2))
    policy = ask.parameters["MixedInstancesPolicy"]
    assert policy["InstancesDistribution"] == POLICY["InstancesDistribution"] | {"OnDemandBaseCapacity": 2}
    assert policy["LaunchTemplate"]["Overrides"] == POLICY["LaunchTemplate"]["Overrides"]
    # a request may name the template once only
    assert policy["LaunchTemplate"]["LaunchTemplateSpecification"] == {
        "LaunchTemplateId": "lt-1",
        "Version": "3",
    }
    assert POLICY["InstancesDistribution"]["OnDemandBaseCapacity"] == 0


def test_what_answers_hold_and_requests_may_not_is_left_out():
    own = POLICY["LaunchTemplate"]["LaunchTemplateSpecification"]
    overrides = [{"InstanceType": "m6g.large", "LaunchTemplateSpecification": own}]
    described = {
        "LaunchTemplate": {"LaunchTemplateSpecification": own, "Overrides": overrides},
        "InstancesDistribution": POLICY["InstancesDistribution"] | {"SpotInstancePools": 2},
    }
    (ask,) = steps(replace(group(desired=0), policy=described, on_demand_base=1), Plan(0))
    policy = ask.parameters["MixedInstancesPolicy"]
    once = {"LaunchTemplateId": "lt-1", "Version": "3"}
    assert policy["LaunchTemplate"]["Overrides"] == [
        {"InstanceType": "m6g.large", "LaunchTemplateSpecification": once}
    ]
    assert "SpotInstancePools" not in policy["InstancesDistribution"]
    pools = {"SpotAllocationStrategy": "lowest-price", "SpotInstancePools": 2}
    described["InstancesDistribution"] = pools
    (ask,) = steps(replace(group(desired=0), policy=described, on_demand_base=1), Plan(0))
    assert ask.parameters["MixedInstancesPolicy"]["InstancesDistribution"] == pools | {
        "OnDemandBaseCapacity": 0
    }


@given(
    st.lists(st.sampled_from(["Pending", "InService", "Terminating:Wait", "Terminating"]), max_size=12),
    st.integers(0, 12),
    st.integers(0, 15),
    st.integers(0, 5),
    st.integers(5, 12),
)
def test_a_size_never_makes_the_group_choose_whom_to_end(states, desired, plan, least, most):
    found = group(*states, desired=min(max(desired, least), most), least=least, most=most)
    for size in sizes(found, Plan(plan)):
        assert least <= size <= most
        assert size >= min(found.desired, found.arrived)
        assert size >= min(plan, most)
        assert size != found.desired


def test_a_group_of_somebody_else_is_refused():
    names = Names("lab")
    check_ours(names, group())
    for tags in ({}, names.tags(MANAGED_BY_TERRAFORM), Names("prod").tags(MANAGED_BY_LOOP)):
        with pytest.raises(NotOursError, match="nothing was done"):
            check_ours(names, replace(group(), tags=tags))


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (
            "Could not launch Spot Instances. UnfulfillableCapacity - Unable to fulfill capacity due to your request "
            "configuration. Please adjust your request and try again. Launching EC2 instance failed.",
            "UnfulfillableCapacity",
        ),
        (
            "Could not launch Spot Instances. SpotMaxPriceTooLow - Your Spot request price of 0.001 is lower than "
            "the minimum required Spot request fulfillment price of 0.0105. Launching EC2 instance failed.",
            "SpotMaxPriceTooLow",
        ),
        (
            "Could not launch Spot Instances. MaxSpotInstanceCountExceeded - Max spot instance count exceeded. "
            "Launching EC2 instance failed.",
            "MaxSpotInstanceCountExceeded",
        ),
        (
            "We currently do not have sufficient p3.2xlarge capacity in the Availability Zone you requested "
            "(us-east-1a). Launching EC2 instance failed.",
            "InsufficientInstanceCapacity",
        ),
        ("The key pair does not exist. Launching EC2 instance failed.", ""),
    ],
)
def test_the_code_is_read_from_an_activitys_message(message, code):
    assert shortage_code(message) == code


def activity(
    at: int, status: str = "Failed", message: str = "No. VcpuLimitExceeded - too many"
) -> dict[str, object]:
    return {"StartTime": datetime.fromtimestamp(at, UTC), "StatusCode": status, "StatusMessage": message}


def test_the_newest_failure_since_the_shortage_began_is_told():
    told = [activity(50, "Successful"), activity(40), activity(30, message="Gone. SpotMaxPriceTooLow - 0.1")]
    assert why_short(told, 20) == "VcpuLimitExceeded: No. VcpuLimitExceeded - too many"
    assert why_short(told[2:], 20).startswith("SpotMaxPriceTooLow")
    assert why_short(told, 45) == ""
    assert why_short([], 0) == ""
