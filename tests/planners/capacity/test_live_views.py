"""What policies see of live apps."""

from dataclasses import replace

import numpy as np
import pytest
from ledger_worlds import START, World, app, node

from ebbflow.planners.capacity import view
from ebbflow.planners.capacity.cycle_state import MOST_GPUS, CycleState, bounds
from ebbflow.planners.capacity.estimates import UNKNOWN, LiveBidder, belief
from ebbflow.planners.capacity.values import (
    AppHistoryRecord,
    DesiredAllocation,
    Memory,
    Plan,
    SchedulerInput,
    Settings,
    Team,
)
from ebbflow.planners.model.ledger import AppReport, Decided, Ended
from ebbflow.planners.scheduling.finish_time import CurveStopping, Job
from ebbflow.planners.scheduling.live import live_policy
from ebbflow.planners.scheduling.locality import Level
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit
from ebbflow.planners.training.speed.goodput import GradientStatistics
from ebbflow.planners.training.speed.job_report import JobReport
from ebbflow.planners.training.speed.throughput import ThroughputParameters

SPEED = ThroughputParameters(0.1, 0.01, 0.05, 0.01, 0.1, 0.02, 1.5)
JOB = JobReport(
    BatchLimits(128, 1024, 32, 256), GradientStatistics(1.0, 4.0), SPEED, 1, 2, BatchSplit(64, 0), max_gpus=4
)
RIGID = Settings(policy=live_policy("best-effort"))


def seen(world: World, memory: Memory | None = None, **more) -> view.PolicyView:
    memory = memory or world.memory
    scene = CycleState.of(SchedulerInput(world.now, world.state, world.reports), world.settings)
    lives, crowd = view.lives(scene, memory)
    return view.look(scene, memory, lives, crowd, more.get("stuck", ()), more.get("out", {}), 1e9)


def test_an_app_that_could_use_any_number_of_gpus_is_not_tried_with_each():
    world = World(RIGID, [node("n1", 4)])
    for id_, gpus, most in (("a", 2, 10**12), ("b", 2, 8), ("c", 10**5, 10**5)):
        world.enter(app(id_, gpus, 1, most))
    assert [bounds(record) for record in world.state.active()] == [
        (1, 2, MOST_GPUS),
        (1, 2, 8),
        (1, 10**5, 10**5),
    ]


def test_attained_service_counts_ended_leases_and_running_ones():
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("a", 2))
    world.step()
    world.steps(10)
    [one] = seen(world).view.apps
    assert one.service == pytest.approx(2 * (world.now - world.state.leases[1].since))
    assert one.held == (("n1", 2),)
    assert one.first_start == START + 1
    assert one.lease_until == world.state.leases[1].until
    assert one.run_time == pytest.approx(10.0, abs=1.5)
    before = one.service
    world.write([Ended((1, 2))])
    [one] = seen(world, Memory()).view.apps
    assert one.service == pytest.approx(before)
    assert one.held == ()


def test_restarts_are_counted_when_what_is_held_changes():
    world = World(RIGID, [node("n1", 2), node("n2", 2)])
    world.enter(app("a", 2))
    world.steps(3)
    world.notice("n1" if world.placement("a").get("n1") else "n2", 100)
    world.steps(3)
    assert seen(world).view.apps[0].restarts == 1


def test_gpus_of_nodes_that_leave_or_are_drained_are_not_there():
    world = World(RIGID, [node("n1", 4), node("n2", 4), node("c1", 0)])
    world.notice("n1", 100)
    world.enter(app("a", 4))
    assert [one.id for one in seen(world).view.capacity.nodes] == ["n2"]


def test_gpus_that_are_held_for_too_long_count_for_nobody():
    world = World(RIGID, [node("n1", 4), node("n2", 4)])
    world.enter(app("a", 3))
    world.enter(app("b", 2))
    world.step()
    [number, *_] = [lease.number for lease in world.state.held("a")]
    at = world.state.leases[number].node
    found = seen(world, stuck={number})
    assert {one.id: one.gpus for one in found.view.capacity.nodes}[at] == 3


def test_an_app_that_needs_more_than_there_is_takes_no_part_and_is_told_why():
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("a", 6))
    world.enter(app("b", 2))
    found = seen(world)
    assert [one.id for one in found.view.apps] == ["b"]
    assert found.left_out == {"a": "needs a gang of 6 GPUs (all-or-nothing); 4 exist"}


def test_a_promise_that_waits_for_others_counts_as_held():
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("a", 2))
    memory = Memory(plan=Plan({"a": DesiredAllocation((("n1", 2),))}, 1, world.now))
    assert seen(world, memory).view.apps[0].held == (("n1", 2),)
    gone = Memory(plan=Plan({"a": DesiredAllocation((("n9", 2),))}, 1, world.now))
    assert seen(world, gone).view.apps[0].held == ()


def test_a_gang_of_which_a_part_is_lost_holds_nothing():
    world = World(RIGID, [node("n1", 2), node("n2", 2)])
    world.enter(app("a", 4))
    world.step()
    world.notice("n1", 50)
    assert seen(world, Memory()).view.apps == []  # and there is no room for it now
    world.capacity(came=(node("n3", 2),))
    assert seen(world, Memory()).view.apps[0].held == ()


def test_a_job_that_reports_its_goodput_counts_in_examples():
    report = AppReport(0.0, (1, 2), seconds_left=100.0, job=JOB.to_dict())
    found = belief(report, 2, 8, 50.0, False)
    model = JOB.model
    assert model is not None
    assert found.sure
    assert found.left == pytest.approx(100.0 * model.at(1, 2, BatchSplit(64, 0)))
    assert found.most == 4
    rate = float(model.best(np.array([1]), np.array([2]))[0])
    assert found.speed.iteration_time(2) == pytest.approx(1 / rate)
    assert found.seconds(2) == pytest.approx(found.left / rate)


def test_a_goodput_looked_up_is_the_models_own():
    model = JOB.model
    found = belief(AppReport(0.0, (1, 2), seconds_left=100.0, job=JOB.to_dict()), 2, 8, 50.0, False).goodput
    for most in (8, 20):
        nodes, gpus = np.meshgrid(np.array([1, 2, 3]), np.arange(most + 1))
        assert found.best(nodes, gpus) == pytest.approx(model.best(nodes, gpus), rel=0, abs=0)


def test_gpu_seconds_left_are_examples_at_one_gpus_goodput():
    report = AppReport(0.0, work_left=300.0, work_total=600.0, job=JOB.to_dict())
    found = belief(report, 2, 8, 50.0, False)
    one = float(JOB.model.best(np.array([1]), np.array([1]))[0])
    assert found.left == pytest.approx(300.0 * one)
    assert found.total == pytest.approx(2 * found.left)


@pytest.mark.parametrize(
    ("report", "service", "left", "sure"),
    [
        (None, 0.0, 2 * UNKNOWN, False),
        (None, 5000.0, 5000.0, False),
        (AppReport(0.0, progress=0.25), 100.0, 300.0, True),
        (AppReport(0.0, (1, 2, 3), seconds_left=10.0), 5.0, 30.0, True),
        (AppReport(0.0, work_left=42.0), 5.0, 42.0, True),
        (AppReport(0.0, work_left=float("nan")), 5000.0, 5000.0, False),
        (AppReport(0.0, work_left=7.0, job={"limits": "nonsense"}), 5.0, 7.0, True),
    ],
)
def test_without_a_model_work_is_in_gpu_seconds(report, service, left, sure):
    found = belief(report, 2, 4, service, False)
    assert found.left == pytest.approx(left)
    assert found.sure is sure
    assert found.goodput is None
    assert found.seconds(4) == pytest.approx(left / 4)
    assert found.seconds(8) == found.seconds(4)
    assert found.seconds(0) == float("inf")


def test_a_search_shares_its_gpus_among_its_trials():
    trials = (
        {"id": "t1", "work_left": 100.0, "max_gpus": 2},
        {"id": "t2", "work_left": 300.0, "max_gpus": 2},
    )
    found = belief(AppReport(0.0, work_left=400.0, work_total=500.0, trials=trials), 2, 8, 100.0, True)
    assert found.most == 4
    assert found.left == 400.0
    # the longer one decides: 300 GPU-seconds on 2 GPUs
    assert found.seconds(4) == pytest.approx(150.0)
    assert found.seconds(2) == pytest.approx(200.0)
    wanted = CurveStopping(jobs=[Job(100.0, 1.0, 2), Job(300.0, 1.0, 2)], budget=500.0)
    gpus = np.array([1, 2, 3, 4])
    ours = LiveBidder(believed=found).remaining(gpus, Level.MACHINE)
    assert ours == pytest.approx(wanted.remaining(gpus, Level.SLOT))


def test_trials_yet_to_come_can_use_gpus_beside_those_that_run():
    trials = ({"id": "t1", "work_left": 100.0, "max_gpus": 1},)
    found = belief(AppReport(0.0, work_left=400.0, work_total=500.0, trials=trials), 4, 4, 100.0, True)
    assert found.most == 4
    assert found.seconds(4) == pytest.approx(100.0)
    assert found.seconds(1) == pytest.approx(400.0)


def test_rho_is_the_time_shared_over_the_time_alone_times_the_mean_number_of_apps():
    found = belief(AppReport(0.0, work_left=300.0, work_total=400.0), 2, 4, 100.0, False)
    bidder = LiveBidder(arrival=0.0, cluster_gpus=8, n_avg=2.0, believed=found)
    # 50 s have passed, 300 GPU-s on 2 GPUs are to come; alone 400 GPU-s on 4 GPUs, for two apps
    assert bidder.rho_at(np.array([2]), np.array([Level.MACHINE]), 50.0)[0] == pytest.approx(200.0 / 200.0)
    assert bidder.rho_at(np.array([0]), np.array([Level.MACHINE]), 50.0)[0] == float("inf")


def test_the_mean_number_of_apps_is_over_an_apps_own_life():
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("a", 1))
    world.steps(11)
    world.enter(app("b", 1))
    world.steps(10)
    first, second = (one.bidder for one in seen(world).view.apps)
    assert first.n_avg == pytest.approx(1.5, abs=0.06)
    assert second.n_avg == pytest.approx(2.0)


def test_a_teams_weight_is_its_apps_together():
    rules = replace(RIGID, teams={"red": Team(weight=3.0), "blue": Team(weight=1.0)})
    world = World(rules, [node("n1", 4)])
    for id_, team, weight in (("a", "red", 1.0), ("b", "red", 2.0), ("c", "blue", 5.0), ("d", "", 0.5)):
        world.enter(app(id_, 1, team=team, weight=weight))
    weights = {one.id: one.weight for one in seen(world).view.apps}
    assert weights["a"] + weights["b"] == pytest.approx(3 * weights["c"])
    assert weights["b"] == pytest.approx(2 * weights["a"])
    assert weights["d"] == 0.5
    (auction,) = [one for one in world.step().changes if isinstance(one, Decided) and one.kind == "auction"]
    assert auction.inputs["teams"] == {"blue": 1.0, "red": 3.0}, "the report's fairness goes by them"


def test_an_app_counts_more_as_its_deadline_nears_whatever_it_holds():
    world = World(RIGID, [node("n1", 4)])
    world.enter(app("a", 2, deadline=START + 1000.0), work=2000.0)
    world.step()
    early = seen(world).view.apps[0].weight
    assert early == pytest.approx(2.0, rel=0.01)
    held = replace(world.memory, ran={"a": AppHistoryRecord(0.0, START)})
    assert seen(world, held).view.apps[0].weight == pytest.approx(early, rel=0.01)
    world.now = START + 2000.0
    assert seen(world).view.apps[0].weight == 1.0
