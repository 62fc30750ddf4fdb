"""``--json`` of the ``ebbflow fleet`` commands that change something: one object, and errors as JSON."""

import json
import time
from typing import TYPE_CHECKING

import pytest

from tests.flows.fleet.cases import Fleet, changes

if TYPE_CHECKING:
    from tests.aws.emulator import Cluster
    from tests.infra.aws.systems_manager import SystemsManager


def test_growing_tells_what_was_decided_and_done(fleet: Fleet, cluster: "Cluster") -> None:
    dry = fleet("grow", "etl", "2", "--dry-run", "--json").json
    assert (dry["dry_run"], dry["done"], dry["applied"]) == (True, False, None)
    assert dry["plan"]["guard"]["target"]["nodes"] == 5
    assert any("no quota is set" in note for note in dry["notes"])
    assert changes(cluster) == []
    done = fleet("grow", "etl", "2", "--yes", "--json")
    assert done.err == ""
    assert (done.json["dry_run"], done.json["done"]) == (False, True)
    assert done.json["plan"]["would"]["asked"] == done.json["applied"]["asked"]
    assert cluster.group("etl")["DesiredCapacity"] == 5


@pytest.mark.parametrize(
    ("words", "code", "kind", "said"),
    [
        (("grow", "etl", "1"), 1, "Rejected", "--json does not prompt; add --yes"),
        (("shrink", "etl", "1"), 1, "Rejected", "--json does not prompt; add --yes"),
        (
            ("gang", "run-1", "--pool", "etl", "--size", "2"),
            1,
            "Rejected",
            "--json does not prompt; add --yes",
        ),
        (("grow", "tpu", "1", "--yes"), 2, "OptionError", "POOL must be one of the cluster's"),
        (("shrink", "etl", "9", "--yes"), 2, "OptionError", "only 3 nodes planned"),
        (("grow", "etl", "1", "--no-such"), 2, "UsageError", "No such option"),
        (("end", "run-1", "--yes"), 2, "OptionError", "there is no gang 'run-1'"),
    ],
)
def test_an_error_is_an_object_on_standard_error(
    words: tuple[str, ...], code: int, kind: str, said: str, fleet: Fleet, quiet: "Cluster"
) -> None:
    done = fleet(*words, "--json")
    problem = json.loads(done.err)
    assert (done.code, done.out, problem["kind"]) == (code, "", kind)
    assert said in problem["error"]


def test_nodes_that_leave_are_told_of_with_how_far_they_came(
    fleet: Fleet, cluster: "Cluster", ssm: "SystemsManager"
) -> None:
    spot = [n["id"] for n in cluster.nodes("etl") if n["market"] == "spot"]
    ssm.online |= set(spot)
    words = ("--yes", "--termination-grace", "30", "--json")
    drained = fleet("drain", spot[0], *words).json
    assert (drained["drained"]["idle"], drained["terminated"], drained["done"]) == ([spot[0]], None, True)
    gone = fleet("shrink", "etl", "--nodes", spot[1], *words).json
    assert gone["drained"]["idle"] == [spot[1]]
    assert [(ask["kind"], ask["of"]) for ask in gone["terminated"]["asked"]] == [("end", spot[1])]
    ssm.online.clear()
    partly = fleet("drain", spot[0], *words)  # nobody there hears it
    assert partly.code == 1
    assert "could not be drained" in json.loads(partly.err)["error"]


def test_a_gang_is_an_object_from_its_start_to_its_end(
    fleet: Fleet, cluster: "Cluster", ssm: "SystemsManager"
) -> None:
    words = ("gang", "run-1", "--pool", "etl", "--size", "2", "--json")
    dry = fleet(*words, "--dry-run").json
    assert (dry["started"], dry["nodes"], dry["guard"]["passes"]) == (False, [], True)
    assert dry["would"]["asked"][0]["call"] == "ec2:CreateFleet"
    made = fleet(*words, "--yes").json
    assert (made["started"], made["done"], len(made["nodes"])) == (True, True, 2)
    again = fleet(*words, "--yes").json
    assert (again["started"], again["done"], again["nodes"]) == (False, False, made["nodes"])
    ssm.online |= set(made["nodes"])
    ended = fleet("end", "run-1", "--yes", "--termination-grace", "30", "--json").json
    assert sorted(ended["drained"]["idle"]) == sorted(made["nodes"])
    assert ended["terminated"]["asked"]
    assert ended["done"]


def test_notices_that_are_read_again_are_counted(fleet: Fleet, cluster: "Cluster") -> None:
    spot = next(n["id"] for n in cluster.nodes("etl") if n["market"] == "spot")
    notice = {
        "source": "aws.ec2",
        "detail-type": "EC2 Spot Instance Interruption Warning",
        "time": time.time(),
        "detail": {"instance-id": spot, "instance-action": "terminate"},
    }
    sqs = cluster.account.client("sqs")
    sqs.send_message(QueueUrl=cluster.settings.dead_letter_queue_url, MessageBody=json.dumps(notice))
    assert fleet("notices", "redrive", "--dry-run", "--json").json["would_redrive"] == 1
    done = fleet("notices", "redrive", "--json").json
    assert (done["redriven"], done["left"], done["done"]) == (1, 0, True)
    read = fleet("notices", "read", "--json").json  # the launches of the cluster's nodes
    assert (read["messages"] > 0, read["interruption_pending"], read["done"]) == (True, 1, True)
    again = fleet("notices", "read", "--json").json
    assert (again["messages"], again["interruption_pending"], again["done"]) == (0, 1, False)
