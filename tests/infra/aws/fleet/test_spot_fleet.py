"""``SpotFleet`` against an emulated AWS over HTTP; what every ``FleetControl`` must do is in its contract test."""

import time
from collections.abc import Callable

import pytest
from botocore.stub import Stubber

from ebbflow.infra.aws.clients import Clients
from ebbflow.infra.aws.fleet import groups
from ebbflow.infra.aws.fleet.fleet import SpotFleet
from ebbflow.infra.aws.fleet.state import FleetState, FolderStore
from ebbflow.infra.aws.naming import MANAGED_BY_LOOP, Names
from ebbflow.infra.errors import AwsError, AwsUnavailableError, CredentialsError, NotOursError, StorageError
from ebbflow.infra.protocols import ApplyResult, ProviderCall, ReplacingFleetControl
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Fleet, PoolState, Target
from tests.aws.emulator import Cluster, PoolShape
from tests.aws.faults import Faults


@pytest.fixture
def lab(aws_account) -> Cluster:
    return aws_account.groups("lab", PoolShape("etl", most=12, least=1, size=1), PoolShape("gpu", kind="gpu"))


@pytest.fixture
def open_fleet(lab, tmp_path) -> Callable[..., SpotFleet]:
    """Return a function that makes a fleet on the same state, as a process does that starts anew."""

    def start(**options: object) -> SpotFleet:
        clients = Clients(lab.settings.region, lab.account.emulator.url, **options)
        return SpotFleet(lab.settings, clients, FolderStore(tmp_path / "fleet", "lab"))

    return start


def pool(fleet: Fleet, name: str = "etl") -> PoolState:
    return next(pool for pool in fleet.pools if pool.name == name)


def target(control: SpotFleet, nodes: int, **more: object) -> Target:
    return Target("etl", nodes, control.observe().revision, "a test", **more)


def grown(control: SpotFleet, nodes: int) -> list[str]:
    control.apply(target(control, nodes))
    return until(control, lambda state: len(state.nodes) == nodes)


def until(control: SpotFleet, true: Callable[[PoolState], bool]) -> list[str]:
    deadline = time.monotonic() + 150
    while True:
        found = pool(control.observe())
        if true(found):
            return [node.id for node in found.nodes]
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_what_exists_is_adopted_and_shown_with_its_pages_markets_zones_and_shapes(open_fleet, lab):
    fleet = open_fleet().observe()
    assert [p.name for p in fleet.pools] == ["etl", "gpu"]
    etl = pool(fleet)
    assert (etl.planned, etl.requested, len(etl.nodes), etl.min_nodes, etl.max_nodes) == (1, 1, 1, 1, 12)
    (node,) = etl.nodes
    billed = lab.nodes("etl")[0]
    assert (node.id, node.market, node.zone, node.instance_type) == (
        billed["id"],
        billed["market"],
        billed["zone"],
        billed["type"],
    )
    assert (node.cores, node.memory, node.gpus, node.price) == (2, 7.0, 0, 0.0)
    assert node.host.startswith("10.64.")


def test_a_node_has_the_gpus_of_its_type(aws_account, tmp_path):
    shape = PoolShape("gpu", kind="gpu", types=("g4dn.xlarge",), size=1, on_demand_base=1)
    cluster = aws_account.groups("lab", shape)
    clients = Clients(cluster.settings.region, aws_account.emulator.url)
    ((gpu,),) = (
        p.nodes for p in SpotFleet(cluster.settings, clients, FolderStore(tmp_path, "lab")).observe().pools
    )
    assert (gpu.instance_type, gpu.cores, gpu.memory, gpu.gpus) == ("g4dn.xlarge", 4, 14.0, 1)
    assert gpu.market == "on-demand"


def test_many_nodes_come_page_by_page(open_fleet, lab, monkeypatch):
    monkeypatch.setattr("ebbflow.infra.aws.fleet.instances._PAGE", 5)
    control = open_fleet()
    assert len(grown(control, 12)) == 12
    assert len(lab.account.calls("DescribeInstances")) > 3


def test_growth_is_asked_for_at_once_and_every_node_is_protected(open_fleet, lab):
    control = open_fleet()
    applied = control.apply(target(control, 4))
    assert [ask.kind for ask in applied.asked] == ["protect", "protect", "size"]
    assert applied.refused == ()
    assert len(until(control, lambda state: len(state.nodes) == 4)) == 4
    assert all(member["ProtectedFromScaleIn"] for member in lab.group("etl")["Instances"])
    assert control.apply(target(control, 4)).asked == ()


def test_a_dry_run_says_exactly_what_would_be_asked_and_asks_nothing(open_fleet, lab, tmp_path):
    control = open_fleet()
    wish = target(control, 4, on_demand=2)
    before, kept = len(lab.account.calls()), (tmp_path / "fleet" / "lab.json").read_text()
    dry = control.apply(wish, dry_run=True)
    assert dry.dry_run
    new = {call["call"] for call in lab.account.calls()[before:]}
    assert new == {"DescribeAutoScalingGroups"}
    assert (tmp_path / "fleet" / "lab.json").read_text() == kept
    real = control.apply(wish)
    assert real.asked == dry.asked
    assert {ask.kind for ask in real.asked} == {"protect", "on-demand", "size"}


def test_shrinking_ends_nobody_until_named_nodes_are_said_to_be_drained(open_fleet, lab):
    control = open_fleet()
    nodes = grown(control, 5)
    applied = control.apply(target(control, 3, drain=(nodes[4], nodes[1])))
    assert (applied.asked, applied.refused) == ((), ())
    state = pool(control.observe())
    assert (state.planned, state.requested, len(state.nodes)) == (3, 5, 5)
    assert state.draining == (nodes[4], nodes[1])

    dry = control.terminate(state.draining, dry_run=True)
    assert len(lab.nodes("etl")) == 5
    ended = control.terminate(state.draining)
    assert ended.asked == dry.asked
    assert [(ask.kind, ask.of, ask.value) for ask in ended.asked] == [
        ("end", nodes[4], 0),
        ("end", nodes[1], 0),
    ]
    assert until(control, lambda state: len(state.nodes) == 3) == [nodes[0], nodes[2], nodes[3]]
    state = pool(control.observe())
    assert (state.planned, state.requested, state.draining) == (3, 3, ())


def test_nodes_beyond_the_plan_that_nobody_names_stay_and_that_is_told(open_fleet):
    control = open_fleet()
    nodes = grown(control, 4)
    applied = control.apply(target(control, 1, drain=(nodes[0], "i-stranger")))
    assert [refusal.of for refusal in applied.refused] == ["i-stranger", "etl"]
    assert "2 nodes above 1" in applied.refused[1].why


def test_a_pool_never_falls_below_the_groups_least(open_fleet, lab):
    control = open_fleet()
    (node,) = grown(control, 1)
    applied = control.apply(target(control, 0, drain=(node,)))
    assert "1 to 12" in applied.refused[0].why
    ended = control.terminate([node])
    # the plan is one node, so this one is replaced
    assert [ask.value for ask in ended.asked] == [1]
    assert until(control, lambda state: len(state.nodes) == 1 and node not in {n.id for n in state.nodes})
    assert lab.group("etl")["DesiredCapacity"] == 1


def test_a_size_above_the_groups_most_is_moved_to_it(open_fleet, lab):
    control = open_fleet()
    applied = control.apply(target(control, 50))
    assert "12 are planned" in applied.refused[0].why
    assert lab.group("etl")["DesiredCapacity"] == 12


def test_nodes_that_have_not_come_are_cancelled_before_any_leaves(open_fleet, lab):
    lab.account.configure(most={"spot": 3})
    control = open_fleet()
    control.apply(target(control, 8))
    nodes = until(control, lambda state: len(state.nodes) == 3)
    applied = control.apply(target(control, 2, drain=(nodes[0],)))
    assert [(ask.kind, ask.value) for ask in applied.asked] == [("size", 3)]
    lab.account.configure(most={"spot": None})
    control.terminate([nodes[0]])
    time.sleep(0.3)  # the emulator fills groups every 0.1 s
    assert sorted(n["id"] for n in lab.nodes("etl")) == nodes[1:]


def test_a_target_for_an_old_revision_is_dropped(open_fleet, lab):
    control = open_fleet()
    wish = target(control, 5)
    control.take_notices([Notice(lab.nodes("etl")[0]["id"], time.time() + 120)])
    applied = control.apply(wish)
    assert applied.asked == ()
    assert f"revision {wish.revision}" in applied.refused[0].why
    assert lab.group("etl")["DesiredCapacity"] == 1


def test_the_revision_and_the_notices_survive_a_restart(open_fleet, lab):
    control = open_fleet()
    (node,) = grown(control, 1)
    told = control.take_notices([Notice(node, 5e9), Notice("i-elsewhere", 5e9)])
    assert control.take_notices([Notice(node, 5e9)]) == told
    control.close()
    again = open_fleet().observe()
    assert again.revision == told
    assert again.notices == (Notice(node, 5e9),)


def test_a_crash_between_the_plan_and_the_request_is_repaired(open_fleet, lab):
    control = open_fleet()
    wish = target(control, 6, on_demand=2)
    with Stubber(control._clients.client("autoscaling")) as stub:  # the calls that ask never reach AWS
        described = lab.group("etl") | {"SuspendedProcesses": []}  # the emulated ones do not fit the model
        stub.add_response("describe_auto_scaling_groups", {"AutoScalingGroups": [described]})
        stub.add_client_error("set_instance_protection", "InternalFailure", http_status_code=500)
        with pytest.raises(AwsUnavailableError):
            control.apply(wish)
    assert lab.group("etl")["DesiredCapacity"] == 1
    anew = open_fleet()
    state = pool(anew.observe())
    assert (state.planned, state.requested, state.on_demand) == (6, 1, 2)
    dry = anew.repair(dry_run=True)
    done = anew.repair()
    assert dry.asked == done.asked
    assert {ask.kind for ask in done.asked if ask.of == "etl"} == {"protect", "on-demand", "size"}
    until(anew, lambda state: len(state.nodes) == 6)
    assert sum(n["market"] == "on-demand" for n in lab.nodes("etl")) == 2
    anew.repair()  # nodes that have come since are protected
    assert anew.repair().asked == ()


def test_nothing_is_asked_before_it_is_recorded(open_fleet, lab, monkeypatch):
    control = open_fleet()
    wish = target(control, 6)

    def full(_: object) -> FleetState:
        raise StorageError("the disk is full")

    monkeypatch.setattr(control._store, "change", full)
    with pytest.raises(StorageError):
        control.apply(wish)
    assert lab.group("etl")["DesiredCapacity"] == 1


def test_somebody_elses_change_of_size_is_undone(open_fleet, lab):
    control = open_fleet()
    grown(control, 3)
    lab.account.client("autoscaling").set_desired_capacity(
        AutoScalingGroupName=lab.names.group("etl"), DesiredCapacity=7
    )
    until(control, lambda state: len(state.nodes) == 7)
    state = pool(control.observe())
    assert (state.planned, state.requested) == (3, 7)
    assert [ask for ask in control.repair().asked if ask.kind == "size"] == []  # nobody is named yet
    assert len(lab.nodes("etl")) == 7


def test_a_foreign_node_stops_everything(open_fleet, lab):
    control = open_fleet()
    nodes = grown(control, 3)
    strangers = lab.account.strangers(1)
    strangers += lab.account.strangers(1, dict(Names("prod").tags(MANAGED_BY_LOOP, pool="etl")))
    strangers += lab.account.strangers(1, {"ebbflow:cluster": "lab"})
    for stranger in strangers:
        with pytest.raises(NotOursError, match="nothing was done"):
            control.terminate([nodes[0], stranger])
    control.repair()
    assert {n["id"] for n in lab.account.alive()} == {*nodes, *strangers}
    assert {n.id for p in control.observe().pools for n in p.nodes} == set(nodes)


def test_a_group_without_our_tags_is_left_alone(open_fleet, lab):
    control = open_fleet()
    wish = target(control, 5)
    lab.account.client("autoscaling").delete_tags(
        Tags=[
            {
                "ResourceId": lab.names.group("etl"),
                "ResourceType": "auto-scaling-group",
                "Key": "ebbflow:managed",
            }
        ]
    )
    with pytest.raises(NotOursError):
        control.apply(wish)
    assert "etl" not in open_fleet()._store.read().plans or open_fleet()._store.read().plans["etl"].nodes == 1
    repaired = control.repair()
    assert [refusal.of for refusal in repaired.refused] == ["etl"]
    assert lab.group("etl")["DesiredCapacity"] == 1


def test_a_node_of_ours_outside_any_group_is_shown_and_can_be_ended(open_fleet, lab):
    control = open_fleet()
    tags = dict(lab.names.tags(MANAGED_BY_LOOP, role="spark-worker", pool="etl"))
    (lost,) = lab.account.strangers(1, tags)
    assert lost in {n.id for n in pool(control.observe()).nodes}
    applied = control.terminate([lost, "i-00000000000000000"])
    assert [ask.call for ask in applied.asked] == ["ec2:TerminateInstances"]
    assert [refusal.why for refusal in applied.refused] == ["it is gone"]
    assert lost not in {n["id"] for n in lab.nodes("etl")}


def test_a_shortage_is_dated_and_explained(open_fleet, lab):
    lab.account.configure(most={"spot": 2})
    control = open_fleet()
    before = time.time()
    control.apply(target(control, 5))
    until(control, lambda state: len(state.nodes) == 2 and bool(state.short_why))
    state = pool(control.observe())
    assert state.short_since is not None
    assert before - 2 <= state.short_since <= time.time() + 2
    assert state.short_why.startswith("UnfulfillableCapacity")
    lab.account.configure(most={"spot": None})
    until(control, lambda state: len(state.nodes) == 5)
    assert pool(control.observe()).short_since is None


def test_on_demand_stands_in_where_there_is_no_spot_and_goes_again(open_fleet, lab):
    lab.account.configure(most={"spot": 2})
    control = open_fleet()
    control.apply(target(control, 4))
    until(control, lambda state: len(state.nodes) == 2)
    control.apply(target(control, 4, on_demand=2))
    until(control, lambda state: len(state.nodes) == 4)
    state = pool(control.observe())
    assert sorted(n.market for n in state.nodes) == ["on-demand", "on-demand", "spot", "spot"]
    assert state.on_demand == 2
    assert state.on_demand_since > 0
    lab.account.configure(most={"spot": None})
    leaving = tuple(n.id for n in state.nodes if n.market == "on-demand")
    control.apply(target(control, 4, drain=leaving))
    ended = control.terminate(leaving)
    assert [ask.value for ask in ended.asked] == [1, 1]  # replaced, by spot nodes now
    until(control, lambda state: len(state.nodes) == 4 and all(n.market == "spot" for n in state.nodes))


def test_a_node_that_its_group_ends_has_a_notice_until_it_is_gone(open_fleet, lab):
    lab.account.configure(drain_seconds=150)
    control = open_fleet()
    nodes = grown(control, 3)
    control.apply(target(control, 2, drain=(nodes[0],)))
    control.terminate([nodes[0]])
    fleet = control.observe()
    (notice,) = fleet.notices
    assert (notice.node_id, notice.kind) == (nodes[0], "interruption")
    assert 140 < notice.deadline - time.time() < 151
    assert len(pool(fleet).nodes) == 3  # it is billed
    assert pool(fleet).short_since is None
    again = control.terminate([nodes[0]])
    assert "already" in again.refused[0].why
    assert open_fleet().observe().notices == (notice,)
    lab.account.client("autoscaling").complete_lifecycle_action(
        AutoScalingGroupName=lab.names.group("etl"),
        LifecycleHookName="drain",
        InstanceId=nodes[0],
        LifecycleActionResult="CONTINUE",
    )
    until(control, lambda state: len(state.nodes) == 2)
    assert control.observe().notices == ()


def test_unknown_pools_and_impossible_targets_are_refused(open_fleet):
    control = open_fleet()
    with pytest.raises(OptionError, match="etl, gpu"):
        control.apply(Target("nowhere", 1, 0, "a test"))
    for nodes, on_demand in ((-1, 0), (1, 2), (1, -1)):
        with pytest.raises(OptionError, match="on_demand"):
            control.apply(Target("etl", nodes, 0, "a test", on_demand=on_demand))


def test_a_group_that_terraform_has_not_made(lab, tmp_path):
    lab.account.client("autoscaling").delete_auto_scaling_group(
        AutoScalingGroupName=lab.names.group("gpu"), ForceDelete=True
    )
    clients = Clients(lab.settings.region, lab.account.emulator.url)
    control = SpotFleet(lab.settings, clients, FolderStore(tmp_path, "lab"))
    with pytest.raises(AwsError, match=r"ebbflow-lab-gpu.*terraform apply"):
        control.observe()


def test_throttled_beyond_the_retries_changes_nothing_and_later_it_works(open_fleet, lab):
    control = open_fleet(attempts=1)
    wish = target(control, 3)
    lab.account.faults(Faults(throttled=1.0))
    with pytest.raises(AwsUnavailableError, match="Throttling"):
        control.apply(wish)
    with pytest.raises(AwsUnavailableError):
        control.observe()
    with pytest.raises(AwsUnavailableError):
        control.repair()
    lab.account.faults(Faults())
    assert lab.group("etl")["DesiredCapacity"] == 1
    control.apply(wish)
    assert lab.group("etl")["DesiredCapacity"] == 3


def test_a_request_that_is_carried_out_and_not_answered_is_not_carried_out_twice(
    open_fleet, lab, monkeypatch
):
    control = open_fleet()
    nodes = grown(control, 4)
    control.apply(target(control, 3, drain=(nodes[0],)))
    perform = groups.perform

    def unanswered(clients: Clients, ask: ProviderCall) -> None:
        perform(clients, ask)
        raise AwsUnavailableError("cannot end it: no usable answer from AWS")

    with monkeypatch.context() as patch:
        patch.setattr(groups, "perform", unanswered)
        with pytest.raises(AwsUnavailableError):
            control.terminate([nodes[0]])
    again = open_fleet()
    for _ in range(3):
        again.terminate([nodes[0]])
        again.repair()
    assert until(again, lambda state: len(state.nodes) == 3) == nodes[1:]
    assert lab.group("etl")["DesiredCapacity"] == 3


def test_a_node_that_goes_while_it_is_being_ended_is_no_error(open_fleet, lab, monkeypatch):
    control = open_fleet()
    nodes = grown(control, 3)
    control.apply(target(control, 2, drain=(nodes[0],)))
    perform = groups.perform

    def overtaken(clients: Clients, ask: ProviderCall) -> None:
        lab.account.take([ask.of])
        perform(clients, ask)

    with monkeypatch.context() as patch:
        patch.setattr(groups, "perform", overtaken)
        control.terminate([nodes[0]])
    assert nodes[0] not in {n["id"] for n in lab.nodes("etl")}


def test_expired_credentials_stop_repair_and_say_what_to_do(open_fleet):
    control = open_fleet()
    with Stubber(control._clients.client("autoscaling")) as stub:
        stub.add_client_error("describe_auto_scaling_groups", "ExpiredToken", "The security token is expired")
        with pytest.raises(CredentialsError, match="renew"):
            control.repair()


# --- nodes in place of those that leave ---------------------------------------------------------------------


def leaving(*ids: str, seconds: float = 120.0) -> list[Notice]:
    return [Notice(name, time.time() + seconds) for name in ids]


def test_a_node_with_a_notice_is_replaced_while_it_is_there(open_fleet, lab):
    lab.account.configure(drain_seconds=60)
    control = open_fleet()
    assert isinstance(control, ReplacingFleetControl)
    first, *_ = grown(control, 2)
    notices = leaving(first)
    control.take_notices(notices)
    dry = control.replace_leaving(notices, dry_run=True)
    assert len(lab.nodes("etl")) == 2
    done = control.replace_leaving([*notices, *notices])
    assert [(ask.kind, ask.of, ask.value) for ask in done.asked] == [("end", first, 1)]
    assert dry.asked == done.asked
    ids = until(control, lambda state: len(state.nodes) == 3)
    assert first in ids, "it has the time that its notice leaves"
    state = pool(control.observe())
    assert (state.planned, state.requested) == (2, 2)
    (notice,) = control.observe().notices
    assert notice.deadline < time.time() + 121.0
    again = control.replace_leaving(notices)
    assert (again.asked, again.refused) == ((), ())
    assert len(lab.nodes("etl")) == 3


def test_a_hook_that_holds_too_shortly_takes_no_time_from_a_node(open_fleet, lab):
    control = open_fleet()
    first, *_ = grown(control, 2)
    done = control.replace_leaving(leaving(first, seconds=1000.0))
    assert done.asked == ()
    assert [refusal.of for refusal in done.refused] == [first]
    assert "its Auto Scaling group would terminate it in 150 s" in done.refused[0].why
    assert len(lab.nodes("etl")) == 2


def test_only_nodes_that_leave_and_are_needed_are_replaced(open_fleet, lab):
    control = open_fleet()
    first, second = grown(control, 2)
    stranger = lab.account.strangers(1)[0]
    advice = [Notice(first, time.time() + 60, "rebalance"), *leaving("i-00000000000000000")]
    assert control.replace_leaving(advice) == ApplyResult(control.observe().revision)
    # a process that ended here has planned less and has not asked for it
    group = lab.names.group("etl")
    control.apply(target(control, 1, drain=(second,)))
    lab.account.client("autoscaling").set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=2)
    refused = control.replace_leaving(leaving(second)).refused
    assert [(one.of, one.why) for one in refused] == [(second, "scale-in of pool etl")]
    with pytest.raises(NotOursError, match=stranger):
        control.replace_leaving(leaving(second, stranger))
    assert sorted(node["id"] for node in lab.nodes("etl")) == sorted([first, second])
