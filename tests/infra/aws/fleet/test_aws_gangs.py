"""Gangs against an emulated AWS over HTTP."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from botocore.stub import ANY, Stubber

from ebbflow.infra.aws.clients import Clients
from ebbflow.infra.aws.fleet import gangs as module
from ebbflow.infra.aws.fleet.fleet import SpotFleet
from ebbflow.infra.aws.fleet.gangs import call, shortage
from ebbflow.infra.aws.fleet.state import FleetState, FolderStore
from ebbflow.infra.aws.naming import MANAGED_BY_LOOP, TAG_GANG, TAG_GANG_SIZE, Names
from ebbflow.infra.aws.settings import Pool
from ebbflow.infra.errors import (
    AwsError,
    AwsUnavailableError,
    CredentialsError,
    InsufficientCapacityError,
    SpotPriceTooHighError,
    StorageError,
)
from ebbflow.infra.protocols import Gang
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.guard_gang import check_gang
from ebbflow.planners.fleet.limits import Limits
from ebbflow.planners.model.fleet import Target
from ebbflow.planners.model.gangs import GangRequest, GangTarget
from tests.aws.emulator import Cluster, PoolShape
from tests.aws.faults import Faults

RUN = GangRequest("run-1", "gpu", 4)


@pytest.fixture
def lab(aws_account) -> Cluster:
    return aws_account.groups("lab", PoolShape("gpu", kind="gpu", size=1))


@pytest.fixture
def open_fleet(lab, tmp_path) -> Callable[..., SpotFleet]:
    def start(**options: object) -> SpotFleet:
        clients = Clients(lab.settings.region, lab.account.emulator.url, **options)
        return SpotFleet(lab.settings, clients, FolderStore(tmp_path / "fleet", "lab"))

    return start


def let(control: SpotFleet, request: GangRequest = RUN, **limits: object) -> GangTarget:
    """Return the request as the guard lets it through."""
    fleet = control.observe()
    target = check_gang(request, fleet, Limits(**limits), held=control.gangs.held(request)).target  # type: ignore[arg-type]
    assert target is not None
    return target


def start(control: SpotFleet, request: GangRequest = RUN, **options: bool) -> Gang:
    return control.gangs.start(let(control, request), **options)


def of_gang(lab: Cluster, name: str = "run-1") -> list[str]:
    return sorted(n["id"] for n in lab.account.alive(lab.names) if n["tags"].get(TAG_GANG) == name)


def test_a_gang_is_whole_tagged_and_shown_as_a_pool_of_its_own(open_fleet, lab):
    control = open_fleet()
    gang = start(control)
    assert list(gang.nodes) == of_gang(lab)
    assert len(gang.nodes) == 4
    for node in lab.account.alive(lab.names):
        if node["id"] in gang.nodes:
            assert node["market"] == "spot"
            assert node["tags"]["ebbflow:pool"] == "gpu"
            assert node["tags"]["ebbflow:role"] == "gpu-trainer"
            assert node["tags"][TAG_GANG_SIZE] == "4"
    pools = {pool.name: pool for pool in control.observe().pools}
    assert [node.id for node in pools["gpu/run-1"].nodes] == list(gang.nodes)
    assert len(pools["gpu"].nodes) == 1
    assert pools["gpu"].requested == 1


def test_the_same_request_again_is_the_same_gang_also_after_a_restart(open_fleet, lab):
    first = start(open_fleet())
    again = start(open_fleet())
    assert (again.nodes, again.ask) == (first.nodes, None)
    assert len(of_gang(lab)) == 4
    with pytest.raises(OptionError, match="end it first"):
        start(open_fleet(), replace(RUN, size=5))


def test_a_gang_is_on_demand_where_that_is_wanted(open_fleet, lab):
    gang = start(open_fleet(), replace(RUN, market="on-demand"))
    assert {n["market"] for n in lab.account.alive(lab.names) if n["id"] in gang.nodes} == {"on-demand"}


def test_a_dry_run_says_exactly_what_would_be_asked(open_fleet, lab):
    control = open_fleet()
    dry = start(control, dry_run=True)
    assert dry.nodes == ()
    assert of_gang(lab) == []
    assert lab.account.calls("CreateFleet") == []
    real = start(control)
    without = [{k: v for k, v in ask.parameters.items() if k != "ClientToken"} for ask in (dry.ask, real.ask)]
    assert without[0] == without[1]
    ends = control.gangs.end("run-1", dry_run=True)
    assert len(of_gang(lab)) == 4
    assert control.gangs.end("run-1") == ends
    assert of_gang(lab) == []


def test_a_part_of_a_gang_is_returned(open_fleet, lab):
    control = open_fleet()
    answer = {
        "FleetId": "fleet-00000000-0000-0000-0000-000000000001",
        "Instances": [{"InstanceIds": ["i-0", "i-1"], "InstanceType": "m5.large", "Lifecycle": "spot"}],
        "Errors": [
            {"ErrorCode": "InsufficientInstanceCapacity", "ErrorMessage": "no more", "Lifecycle": "spot"}
        ],
    }
    passed = let(control)
    with Stubber(control._clients.client("ec2")) as stub:
        stub.add_response("create_fleet", answer)
        stub.add_response("delete_fleets", {}, {"FleetIds": [answer["FleetId"]], "TerminateInstances": True})
        stub.add_response(
            "describe_instances", {"Reservations": [{"Instances": [_there("i-0"), _there("i-1")]}]}
        )
        stub.add_response("terminate_instances", {}, {"InstanceIds": ["i-0", "i-1"]})
        with pytest.raises(InsufficientCapacityError, match=r"2 of 4 nodes .* no more"):
            control.gangs.start(passed)
        stub.assert_no_pending_responses()
    assert control._store.read().gangs == {}


def _there(name: str) -> dict[str, object]:
    tags = Names("lab").tags(MANAGED_BY_LOOP, pool="gpu")
    return {
        "InstanceId": name,
        "InstanceType": "m5.large",
        "State": {"Name": "pending"},
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
    }


def test_a_part_that_cannot_be_returned_at_once_is_returned_by_repair(open_fleet, lab, monkeypatch):
    lab.account.configure(most={"spot": 3})  # one of them runs in the group
    control = open_fleet(attempts=1)
    with monkeypatch.context() as patch:
        # an emulated AWS that keeps its word starts nothing below the minimum: let it be asked without one
        patch.setattr(module, "call", _without_minimum)
        patch.setattr(module.Gangs, "_terminate", _fails)
        with pytest.raises(InsufficientCapacityError, match="2 of 4"):
            start(control)
    anew = open_fleet()
    assert anew._store.read().gangs["run-1"].phase == "ending"
    with pytest.raises(OptionError, match="being terminated"):
        start(anew)
    anew.repair()
    assert of_gang(lab) == []
    assert anew._store.read().gangs == {}
    assert len(lab.account.alive(lab.names)) == 1


def _without_minimum(*args: object) -> object:
    ask = call(*args)  # type: ignore[arg-type]
    options = {k: v for k, v in ask.parameters["SpotOptions"].items() if k != "MinTargetCapacity"}  # type: ignore[attr-defined]
    return replace(ask, parameters={**ask.parameters, "SpotOptions": options})


def _fails(*_: object) -> None:
    raise AwsUnavailableError("cannot end nodes of a gang: no usable answer from AWS")


def test_no_capacity_starts_nothing_and_leaves_no_record(open_fleet, lab):
    lab.account.configure(most={"spot": 3})
    control = open_fleet()
    with pytest.raises(InsufficientCapacityError, match="0 of 4"):
        start(control)
    assert of_gang(lab) == []
    assert control._store.read().gangs == {}
    lab.account.configure(most={"spot": None})
    assert len(start(control).nodes) == 4


class Crash(BaseException):
    """The process is gone."""


def test_a_crash_between_the_request_and_its_record_is_repaired_by_tags(open_fleet, lab, monkeypatch):
    control = open_fleet()
    with monkeypatch.context() as patch:
        patch.setattr(module.Gangs, "_keep", _crash)
        with pytest.raises(Crash):
            start(control)
    assert len(of_gang(lab)) == 4
    anew = open_fleet()
    assert anew._store.read().gangs["run-1"].phase == "asked"
    repaired = anew.repair()
    assert [ask for ask in repaired.asked if ask.kind == "end"] == []
    assert list(start(anew).nodes) == of_gang(lab)
    assert len(of_gang(lab)) == 4


def _crash(*_: object) -> None:
    raise Crash


def test_a_crash_is_also_repaired_by_the_same_request(open_fleet, lab, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module.Gangs, "_keep", _crash)
        with pytest.raises(Crash):
            start(open_fleet())
    assert list(start(open_fleet()).nodes) == of_gang(lab)
    assert len(of_gang(lab)) == 4


def test_nothing_is_asked_before_it_is_recorded(open_fleet, lab, monkeypatch):
    control = open_fleet()
    passed = let(control)

    def full(_: object) -> FleetState:
        raise StorageError("the disk is full")

    monkeypatch.setattr(control._store, "change", full)
    with pytest.raises(StorageError):
        control.gangs.start(passed)
    assert lab.account.calls("CreateFleet") == []


def test_an_answer_that_is_lost_leaves_a_record_that_repair_settles(open_fleet, lab):
    control = open_fleet(attempts=1)
    passed = let(control)
    lab.account.faults(Faults(dropped_after=1.0))
    with pytest.raises(AwsUnavailableError):
        control.gangs.start(passed)
    lab.account.faults(Faults())
    assert len(of_gang(lab)) == 4
    anew = open_fleet()
    anew.repair()
    assert list(anew._store.read().gangs["run-1"].nodes) == of_gang(lab)


def test_a_request_that_may_still_turn_up_is_not_forgotten_too_soon(open_fleet, lab, monkeypatch):
    control = open_fleet(attempts=1)
    passed = let(control)
    lab.account.faults(Faults(dropped_before=1.0))
    with pytest.raises(AwsUnavailableError):
        control.gangs.start(passed)
    lab.account.faults(Faults())
    assert [refusal.of for refusal in control.repair().refused] == ["run-1"]
    control.gangs.end("run-1")
    assert control._store.read().gangs["run-1"].phase == "ending"
    monkeypatch.setattr(module, "SETTLING", 0.0)
    control.repair()
    assert control._store.read().gangs == {}


def test_without_a_loop_that_repairs_a_gang_is_returned_by_its_name(open_fleet, lab, monkeypatch):
    control = open_fleet(attempts=1)
    passed = let(control)
    lab.account.faults(Faults(dropped_before=1.0))
    with pytest.raises(AwsUnavailableError):
        control.gangs.start(passed)
    lab.account.faults(Faults())
    control.gangs.end("run-1")
    with pytest.raises(OptionError, match=r"being terminated.* ebbflow fleet end run-1"):
        control.gangs.held(RUN)
    assert "gpu/run-1" in {pool.name for pool in control.observe().pools}
    monkeypatch.setattr(module, "SETTLING", 0.0)
    control.gangs.end("run-1")
    assert "gpu/run-1" not in {pool.name for pool in control.observe().pools}
    assert not control.gangs.held(RUN)


def test_a_request_that_is_repeated_late_may_again_turn_up_late(open_fleet, lab, monkeypatch):
    control = open_fleet(attempts=1)
    for moment in (1000.0, 5000.0):
        monkeypatch.setattr(control.gangs, "_now", lambda moment=moment: moment)
        passed = let(control)
        lab.account.faults(Faults(dropped_before=1.0))
        with pytest.raises(AwsUnavailableError):
            control.gangs.start(passed)
        lab.account.faults(Faults())
        assert control._store.read().gangs["run-1"].since == moment
    assert [refusal.of for refusal in control.repair().refused] == ["run-1"]


def test_orphans_whose_record_is_lost_are_adopted_when_whole_and_ended_when_not(
    open_fleet, lab, tmp_path, monkeypatch
):
    control = open_fleet()
    whole = start(control).nodes
    part = start(control, replace(RUN, name="run-2")).nodes
    lab.account.take(part[:1])
    (tmp_path / "fleet" / "lab.json").unlink()
    others = lab.account.groups("prod", PoolShape("gpu", kind="gpu", size=2))
    anew = open_fleet()
    assert {refusal.of for refusal in anew.repair().refused} == {
        "run-2"
    }  # its nodes are too young to be judged
    monkeypatch.setattr(module, "SETTLING", 0.0)
    dry = anew.repair(dry_run=True)
    assert len(of_gang(lab, "run-2")) == 3
    done = anew.repair()
    assert done.asked == dry.asked
    assert [ask.parameters["InstanceIds"] for ask in done.asked] == [sorted(part[1:])]
    assert anew._store.read().gangs["run-1"].nodes == whole
    assert of_gang(lab, "run-2") == []
    assert len(others.nodes("gpu")) == 2


def test_nodes_that_a_repeated_request_started_twice_are_ended(open_fleet, lab):
    control = open_fleet()
    gang = start(control)
    tags = dict(lab.names.tags(MANAGED_BY_LOOP, pool="gpu")) | {TAG_GANG: "run-1", TAG_GANG_SIZE: "4"}
    extra = lab.account.strangers(2, tags)
    repaired = control.repair()
    assert [ask.parameters["InstanceIds"] for ask in repaired.asked if ask.kind == "end"] == [sorted(extra)]
    assert of_gang(lab) == list(gang.nodes)


def test_a_gang_whose_nodes_were_all_taken_is_forgotten(open_fleet, lab, monkeypatch):
    control = open_fleet()
    gang = start(control)
    lab.account.take(gang.nodes[:3])
    control.repair()
    assert list(control._store.read().gangs) == ["run-1"]
    lab.account.take(gang.nodes[3:])
    monkeypatch.setattr(module, "SETTLING", 0.0)
    control.repair()
    assert control._store.read().gangs == {}


def test_a_single_node_of_a_gang_can_be_ended(open_fleet, lab):
    control = open_fleet()
    gang = start(control)
    applied = control.terminate(gang.nodes[:1])
    assert [ask.call for ask in applied.asked] == ["ec2:TerminateInstances"]
    assert of_gang(lab) == list(gang.nodes[1:])
    control.gangs.end("run-1")
    assert len(lab.account.alive(lab.names)) == 1


def test_an_unknown_gang_asks_for_nothing(open_fleet, lab):
    assert open_fleet().gangs.end("nobody") == ()


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (["InsufficientInstanceCapacity"], InsufficientCapacityError),
        (["SpotMaxPriceTooLow"], SpotPriceTooHighError),
        (["SpotMaxPriceTooLow", "InsufficientInstanceCapacity"], InsufficientCapacityError),
        (["InsufficientInstanceCapacity", "UnauthorizedOperation"], CredentialsError),
        (["InvalidParameter"], AwsError),
        ([], InsufficientCapacityError),
    ],
)
def test_what_too_few_nodes_mean(codes, kind):
    error = shortage("start it", 4, 1, [{"ErrorCode": code, "ErrorMessage": "so"} for code in codes])
    assert type(error) is kind
    assert "1 " in str(error)


def test_aws_refuses_the_price(open_fleet):
    control = open_fleet()
    passed = let(control, replace(RUN, max_price=0.01))
    with Stubber(control._clients.client("ec2")) as stub:
        stub.add_client_error("create_fleet", "SpotMaxPriceTooLow", "too low", expected_params=None)
        with pytest.raises(SpotPriceTooHighError):
            control.gangs.start(passed)
    assert control._store.read().gangs == {}


def test_the_request_is_all_or_nothing_in_one_zone_of_one_type_and_tags_everything(open_fleet):
    pool = Pool("gpu", "gpu", "ebbflow-lab-gpu", "lt-1", ("g5.xlarge", "g6.xlarge"), ("s-a", "s-b"), 0, 0, 9)
    request = GangRequest("run-1", "gpu", 8, max_price=0.5)
    asked = call(request, pool, Names("lab"), "token").parameters
    assert asked["SpotOptions"] == {
        "AllocationStrategy": "price-capacity-optimized",
        "SingleInstanceType": True,
        "SingleAvailabilityZone": True,
        "MinTargetCapacity": 8,
    }
    (config,) = asked["LaunchTemplateConfigs"]  # type: ignore[misc]
    assert config["Overrides"] == [
        {"InstanceType": kind, "SubnetId": subnet, "MaxPrice": "0.5000"}
        for kind in ("g5.xlarge", "g6.xlarge")
        for subnet in ("s-a", "s-b")
    ]
    tags = {t["ResourceType"]: {p["Key"]: p["Value"] for p in t["Tags"]} for t in asked["TagSpecifications"]}  # type: ignore[attr-defined]
    assert set(tags) == {"fleet", "instance", "volume", "network-interface"}
    assert all(Names("lab").owns(each) and each[TAG_GANG] == "run-1" for each in tags.values())
    with Stubber(open_fleet()._clients.client("ec2")) as stub:  # what is asked fits the service's model
        stub.add_response("create_fleet", {"FleetId": "f"}, {**asked, "ClientToken": ANY})
        stub.client.create_fleet(**asked)


def test_a_gang_of_an_unknown_pool(open_fleet):
    with pytest.raises(OptionError, match="pool must be one of gpu"):
        open_fleet().gangs.start(GangTarget(replace(RUN, pool="nowhere"), 1, ""))


# --- the guard --------------------------------------------------------------------------------------------------


def test_a_gang_that_was_decided_for_an_old_revision_is_not_started(open_fleet, lab):
    control = open_fleet()
    passed, other = let(control), let(control, replace(RUN, name="run-2"))
    first = control.gangs.start(passed)
    assert len(first.nodes) == 4
    # it was decided without knowing of the first, although no node had come yet
    refused = control.gangs.start(other)
    assert (refused.nodes, refused.ask) == ((), None)
    assert "decided for revision" in refused.refused
    assert control.gangs.start(other, dry_run=True).refused == refused.refused
    assert control.gangs.start(passed).nodes == first.nodes  # held: nothing is asked
    stale = control.apply(Target("gpu", 2, other.revision, "decided beside it"))
    assert stale.asked == ()
    assert "revision" in stale.refused[0].why
    assert len(lab.account.calls("CreateFleet")) == 1


def test_a_gang_is_not_started_beside_a_pool_that_was_let_grow_since(open_fleet, lab):
    control = open_fleet()
    passed = let(control)
    control.apply(Target("gpu", 3, control.observe().revision, "more"))
    assert "gpu may have more nodes than when it was decided" in control.gangs.start(passed).refused
    assert lab.account.calls("CreateFleet") == []
    assert len(start(control).nodes) == 4


def test_a_gang_is_counted_from_its_request_on_and_while_it_starts(open_fleet, lab):
    lab.account.configure(launch_seconds=3600.0)
    control = open_fleet()
    start(control)
    (gang,) = (pool for pool in control.observe().pools if pool.name == "gpu/run-1")
    assert (gang.planned, len(gang.nodes)) == (4, 0)
    lost = open_fleet(attempts=1)
    passed = let(lost, replace(RUN, name="run-2", size=3, market="on-demand"))
    lab.account.faults(Faults(dropped_before=1.0))
    with pytest.raises(AwsUnavailableError):
        lost.gangs.start(passed)
    lab.account.faults(Faults())
    pools = {pool.name: pool for pool in control.observe().pools}
    assert (pools["gpu/run-2"].planned, pools["gpu/run-2"].on_demand) == (3, 3)
    refused = check_gang(replace(RUN, name="run-3", size=1), control.observe(), Limits(nodes=8))
    assert "all pools may have 8, the others have 8" in refused.reasons[0]


def test_a_price_limit_is_never_rounded_up():
    pool = Pool("gpu", "gpu", "ebbflow-lab-gpu", "lt-1", ("g5.xlarge",), ("s-a",), 0, 0, 9)
    request = GangRequest("run-1", "gpu", 8, max_price=0.12349)
    (config,) = call(request, pool, Names("lab"), "t").parameters["LaunchTemplateConfigs"]  # type: ignore[misc]
    assert [one["MaxPrice"] for one in config["Overrides"]] == ["0.1234"]
