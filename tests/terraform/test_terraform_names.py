"""What Terraform creates is named and tagged as the Python code looks for it."""

import json
from ipaddress import ip_network

import pytest

from ebbflow.infra.aws.naming import (
    DOCUMENTS,
    DRAIN_HOOK,
    IAM_ROLES,
    MANAGED_BY_LOOP,
    MANAGED_BY_TERRAFORM,
    NODE_LEAVING,
    RULES,
    SPARK_EVENTS_PREFIX,
    STORE_PREFIX,
    TAG_CLUSTER,
    Names,
)
from ebbflow.planners.errors import OptionError

ACCOUNT, REGION = "123456789012", "us-east-1"
PROD = Names("prod")
POOLS = {"etl": "spark-worker", "trainers": "gpu-trainer", "sums": "aggregator"}
NODES = ("prefect-server", "prefect-worker")


def _named(applied, kind):
    return sorted(values["name"] for values in applied.of(kind).values())


def test_everything_with_a_fixed_name_has_the_one_of_naming(complete):
    assert [v["bucket"] for v in complete.of("aws_s3_bucket").values()] == [PROD.bucket(ACCOUNT, REGION)]
    assert _named(complete, "aws_kms_alias") == [PROD.key_alias]
    assert _named(complete, "aws_sqs_queue") == [PROD.notice_queue, PROD.dead_letter_queue]
    assert _named(complete, "aws_cloudwatch_event_rule") == sorted(PROD.rule(rule) for rule in RULES)
    assert _named(complete, "aws_ssm_document") == sorted(PROD.document(d) for d in DOCUMENTS)
    assert _named(complete, "aws_ssm_parameter") == [PROD.settings_parameter]
    assert _named(complete, "aws_cloudwatch_log_group") == [PROD.log_group]
    assert set(_named(complete, "aws_iam_role")) == {PROD.role(r) for r in IAM_ROLES} | {
        "ebbflow-prod-flow-logs"
    }
    assert set(_named(complete, "aws_iam_instance_profile")) == {
        PROD.role(r) for r in IAM_ROLES if r != "capacity"
    }
    groups = sorted([*(PROD.group(pool) for pool in POOLS), *(f"{PROD.prefix}-{node}" for node in NODES)])
    assert _named(complete, "aws_autoscaling_group") == groups
    assert _named(complete, "aws_launch_template") == groups
    assert {v["name"] for v in complete.of("aws_autoscaling_lifecycle_hook").values()} == {DRAIN_HOOK}


def test_nodes_of_pools_carry_the_tags_that_the_loop_asks_for(complete):
    for pool, role in POOLS.items():
        wanted = {**PROD.tags(MANAGED_BY_LOOP, role=role, pool=pool), "CostCentre": "data"}
        (group,) = (v for v in complete.of("aws_autoscaling_group").values() if v["name"] == PROD.group(pool))
        assert {tag["key"]: tag["value"] for tag in group["tag"]} == wanted
        (template,) = (
            v for v in complete.of("aws_launch_template").values() if v["name"] == PROD.group(pool)
        )
        assert template["tags"] == wanted
        for specification in template["tag_specifications"]:
            assert specification["tags"] == wanted
            assert PROD.owns(specification["tags"])
            assert not Names("other").owns(specification["tags"])


def test_whatever_can_be_tagged_names_its_cluster_and_only_pools_are_the_loops(complete, minimal):
    pools = set(map(PROD.group, POOLS)) | {Names("lab").group("workers")}
    for applied, names in ((complete, PROD), (minimal, Names("lab"))):
        tagged = [r for r in applied.resources if "tags" in r["values"]]
        assert len(tagged) > 20
        for resource in tagged:
            tags = resource["values"]["tags"]
            assert tags is not None, resource["address"]
            assert tags[TAG_CLUSTER] == names.cluster, resource["address"]
            assert names.owns(tags) == (resource["values"].get("name") in pools), resource["address"]


def test_aggregators_and_prefects_workers_alone_have_the_group_that_reaches_the_ledger(complete):
    (ledger,) = (
        v["id"] for v in complete.of("aws_security_group").values() if v["name"] == f"{PROD.prefix}-ledger"
    )
    groups = {
        v["name"].removeprefix(f"{PROD.prefix}-"): v["network_interfaces"][0]["security_groups"]
        for v in complete.of("aws_launch_template").values()
    }
    assert {name for name, own in groups.items() if ledger in own} == {"sums", "prefect-worker"}
    (policy,) = (
        v["policy"] for v in complete.of("aws_iam_role_policy").values() if v["role"] == PROD.role("capacity")
    )
    assert f":security-group/{ledger}" in policy, "the capacity loop may start nodes with it"


def test_nodes_that_terraform_manages_are_tagged_so(complete):
    (master,) = complete.of("aws_instance").values()
    assert master["tags"] == {**PROD.tags(MANAGED_BY_TERRAFORM, role="spark-master"), "CostCentre": "data"}
    for node in NODES:
        (template,) = (
            v for v in complete.of("aws_launch_template").values() if v["name"] == f"{PROD.prefix}-{node}"
        )
        assert template["tags"] == {**PROD.tags(MANAGED_BY_TERRAFORM, role=node), "CostCentre": "data"}


def test_policies_are_within_what_a_role_takes(complete, minimal):
    for applied in (complete, minimal):
        sizes: dict[str, int] = {}
        for values in applied.of("aws_iam_role_policy").values():
            sizes[values["role"]] = sizes.get(values["role"], 0) + len(values["policy"])
        assert PROD.role("capacity") in sizes or Names("lab").role("capacity") in sizes
        assert max(sizes.values()) <= 10240  # all inline policies of a role together


def test_a_node_may_speak_in_the_name_of_its_own_instance_only(complete):
    (policy,) = (
        json.loads(v["policy"])
        for v in complete.of("aws_iam_role_policy").values()
        if v["role"] == PROD.role("node") and v["name"] != "spark-secret"
    )
    (statement,) = (s for s in policy["Statement"] if "events:PutEvents" in s["Action"])
    allowed = statement["Condition"]["ForAllValues:StringEquals"]["events:source"]
    assert allowed == [PROD.event_source("${ec2:SourceInstanceARN}")]


def test_nodes_read_the_tables_that_the_minimal_example_is_given(minimal):
    lab = Names("lab")
    policies = {
        v["role"]: json.loads(v["policy"])
        for v in minimal.of("aws_iam_role_policy").values()
        if v["name"] == "ebbflow"
    }
    readers = {
        role
        for role, policy in policies.items()
        for statement in policy["Statement"]
        if "arn:aws:s3:::my-tables/*" in statement["Resource"]
    }
    assert lab.role("node") in readers
    assert not any(
        "arn:aws:s3:::my-tables/*" in statement["Resource"] and "s3:PutObject" in statement["Action"]
        for policy in policies.values()
        for statement in policy["Statement"]
    )


def test_the_rules_watch_the_groups_of_all_pools(complete):
    patterns = {
        v["name"]: json.loads(v["event_pattern"]) for v in complete.of("aws_cloudwatch_event_rule").values()
    }
    assert patterns[PROD.rule("interruption")]["detail-type"] == ["EC2 Spot Instance Interruption Warning"]
    assert patterns[PROD.rule("rebalance")]["detail-type"] == ["EC2 Instance Rebalance Recommendation"]
    assert patterns[PROD.rule("state")]["detail-type"] == ["EC2 Instance State-change Notification"]
    assert patterns[PROD.rule("node")] == {
        "source": [{"prefix": PROD.event_source_prefix}],
        "detail-type": [NODE_LEAVING],
    }
    for rule in ("lifecycle", "launch-failed"):
        watched = patterns[PROD.rule(rule)]["detail"]["AutoScalingGroupName"]
        assert sorted(watched) == sorted(map(PROD.group, POOLS))


def test_nothing_has_a_public_address_or_version_one_of_the_metadata_service(complete, minimal):
    for applied in (complete, minimal):
        for values in (*applied.of("aws_launch_template").values(), *applied.of("aws_instance").values()):
            assert values["metadata_options"][0]["http_tokens"] == "required"
        for values in applied.of("aws_launch_template").values():
            assert values["network_interfaces"][0]["associate_public_ip_address"] in ("false", False)
        for values in applied.of("aws_vpc_security_group_ingress_rule").values():
            # a private subnet may reach the endpoints of AWS services
            assert values["cidr_ipv4"] is None or ip_network(values["cidr_ipv4"]).is_private
        assert all(v["internal"] for v in applied.of("aws_lb").values())


def test_folders_of_the_bucket_are_those_of_naming(complete):
    bucket = PROD.bucket(ACCOUNT, REGION)
    assert complete.outputs["store"]["value"] == f"s3://{bucket}/{STORE_PREFIX}"
    (lifecycle,) = complete.of("aws_s3_bucket_lifecycle_configuration").values()
    (events,) = (rule for rule in lifecycle["rule"] if rule["id"] == "spark-events")
    assert events["filter"][0]["prefix"] == f"{SPARK_EVENTS_PREFIX}/"


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("lab", True),
        ("a-b-c9", True),
        ("a" * 20, True),
        ("a" * 21, False),
        ("ab", False),
        ("Lab", False),
        ("9ab", False),
        ("lab-", False),
        ("a--b", False),
        ("a_b", False),
    ],
)
def test_both_sides_take_the_same_names_of_clusters(terraform, name, good):
    if good:
        assert Names(name).prefix == f"ebbflow-{name}"
    else:
        with pytest.raises(OptionError, match="cluster must be"):
            Names(name)
    done = terraform.run("plan", "-input=false", f"-var=cluster={name}", folder="modules/naming")
    assert (done.returncode == 0) == good


def test_a_pool_must_not_be_called_like_a_role():
    assert Names("lab").group("gpu") == "ebbflow-lab-gpu"
    with pytest.raises(OptionError, match="not the name of a role; got 'prefect-worker'"):
        Names("lab").group("prefect-worker")
