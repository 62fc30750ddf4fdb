"""The training simulator by events: arrivals, leases, lost nodes, restarts, and policies that break rules."""

from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.errors import SimulationError, WorkloadError
from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.jobs.plain import Locality, plain_jobs
from ebbflow.infra.simulation.protocols import Saves
from ebbflow.infra.simulation.traces.cluster import CapacityChange, Cluster, gpu_node, read_spot_trace
from ebbflow.infra.simulation.traces.generators import philly_like
from ebbflow.infra.simulation.traces.workloads import Job, Workload
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.scheduling import Decision, Grant
from ebbflow.planners.scheduling.gangs.optimus import Optimus
from ebbflow.planners.scheduling.gangs.tiresias import Tiresias
from ebbflow.planners.scheduling.placement import FreeCapacity, most_free_first

DATA = Path(__file__).parents[2] / "fixtures" / "training" / "oobleck"


def jobs(*rows: tuple[float, int, float], **fields) -> Workload:
    """Return jobs of (arrival, GPUs, duration), named a, b, c…"""
    return Workload("w", tuple(Job("abcdefgh"[at], *row, **fields) for at, row in enumerate(rows)))


class Fifo:
    """Whoever came first keeps GPUs; ``lease`` s at a time."""

    name = "fifo"

    def __init__(self, lease: float = inf, wake: float = inf) -> None:
        self.lease, self.every = lease, wake
        self.asked: list[float] = []

    def decide(self, view, memory, rng):
        self.asked.append(view.now)
        room = FreeCapacity(view.capacity.usable, (app.held for app in view.apps))
        grants = {}
        for app in view.apps:
            placement = app.held or most_free_first(room, app, app.gpus) or ()
            until = app.lease_until if app.held and app.lease_until > view.now else view.now + self.lease
            grants[app.id] = Grant(placement, until, "fifo")
        return Decision(grants, wake=view.now + self.every)


class Scripted:
    """Grants what a function says."""

    name = "scripted"

    def __init__(self, grant, elastic: bool = False, wake: float = inf) -> None:
        self.grant, self.elastic, self.wake = grant, elastic, wake

    def decide(self, view, memory, rng):
        return Decision(self.grant(view), wake=self.wake if self.wake == inf else view.now + self.wake)


def finishes(result) -> dict[str, float]:
    return {job.name: job.finish for job in result.jobs}


def test_jobs_queue_and_pay_the_restart_delay():
    result = simulate(jobs((5, 2, 100), (10, 2, 50)), Cluster.grid(1, 2), Fifo())
    assert finishes(result) == {"a": 135, "b": 215}
    assert [job.start for job in result.jobs] == [5, 135]
    assert result.gpu_hours == pytest.approx(2 * 210 / 3600)
    assert result.usage.utilisation(5, 215) == pytest.approx(1)
    assert result.usage.apps["b"].at(134.9) == 0
    assert result.usage.apps["b"].at(135) == 2


def test_a_policy_is_asked_at_arrivals_completions_lease_ends_and_when_it_wishes():
    policy = Fifo(lease=60)
    simulate(jobs((0, 1, 70), (10, 1, 20)), Cluster.grid(1, 2), policy, restart_delay=0)
    assert policy.asked == [0, 10, 30, 60]
    policy = Fifo(wake=25)
    simulate(jobs((0, 1, 70)), Cluster.grid(1, 2), policy, restart_delay=0)
    assert policy.asked == [0, 25, 50]


def test_ticks_see_arrivals_and_completions_late():
    policy = Fifo()
    result = simulate(jobs((0, 1, 70), (61, 1, 20)), Cluster.grid(1, 1), policy, tick=60, restart_delay=0)
    assert policy.asked == [60, 120, 180]
    assert finishes(result) == {"a": 130, "b": 200}
    assert result.intervals == 4
    assert result.gpu_hours == pytest.approx(180 / 3600)


def test_ticks_jump_over_empty_time():
    policy = Fifo()
    result = simulate(jobs((6_000_001, 1, 70)), Cluster.grid(1, 1), policy, tick=60, restart_delay=0)
    assert policy.asked == [6_000_060, 6_000_120]
    assert finishes(result) == {"a": 6_000_130}
    assert result.intervals == 100_003


def test_every_new_placement_restarts_and_first_starts_may_cost_less():
    def swap(view):
        node = "node-0" if view.now < 100 else "node-1"
        return {app.id: Grant(((node, 1),)) for app in view.apps}

    result = simulate(
        jobs((0, 1, 200)), Cluster.grid(2, 1), Scripted(swap, wake=100), restart_delay=20, start_delay=5
    )
    assert finishes(result) == {"a": 225}
    assert result.jobs[0].restarts == 1


def test_work_since_the_last_checkpoint_is_lost_with_a_node():
    lost = CapacityChange(250, remove=("node-0",))
    cluster = Cluster(Cluster.grid(2, 1).nodes, (lost,))
    for every, finish, wasted in (
        (inf, 250 + 10 + 300, 240),
        (100, 250 + 10 + 300 - 190, 50),
        (250, 560 - 240, 0),
    ):
        result = simulate(jobs((0, 1, 300)), cluster, Fifo(), restart_delay=10, saves=Saves(every=every))
        assert finishes(result) == {"a": finish}
        assert result.jobs[0].lost_gpu_seconds == pytest.approx(wasted)
        assert result.jobs[0].restarts == 1


def test_an_announced_loss_loses_nothing_and_no_new_job_goes_there():
    notice = CapacityChange(130, notices=(Notice("node-0", 250.0),))
    cluster = Cluster(Cluster.grid(2, 1).nodes, (notice, CapacityChange(250, remove=("node-0",))))
    result = simulate(jobs((0, 1, 300), (140, 1, 10)), cluster, Fifo(), restart_delay=0)
    # b takes node-1 for 10 s; a stays until its node leaves and goes on where it was
    assert finishes(result) == {"a": 300, "b": 150}
    assert result.jobs[0].lost_gpu_seconds == 0
    unsaved = simulate(jobs((0, 1, 300)), cluster, Fifo(), restart_delay=0, saves=Saves(on_notice=False))
    assert finishes(unsaved) == {"a": 550}


def test_advice_takes_no_firm_notice_back():
    seen = []

    class Watching(Fifo):
        def decide(self, view, memory, rng):
            seen.append({n.node_id: (n.deadline, n.kind) for n in view.capacity.notices})
            return super().decide(view, memory, rng)

    changes = (
        CapacityChange(10, notices=(Notice("node-0", 900.0, "rebalance"),)),
        CapacityChange(20, notices=(Notice("node-0", 140.0),)),
        CapacityChange(30, notices=(Notice("node-0", 930.0, "rebalance"),)),
        CapacityChange(140, remove=("node-0",)),
    )
    simulate(jobs((0, 1, 300)), Cluster(Cluster.grid(2, 1).nodes, changes), Watching(), restart_delay=0)
    assert [found for found in seen if found] == [
        {"node-0": (900.0, "rebalance")},
        {"node-0": (140.0, "interruption")},
        {"node-0": (140.0, "interruption")},
    ]


def test_nodes_that_arrive_are_used():
    cluster = Cluster((), (CapacityChange(100, add=(gpu_node("late", 2),)),))
    result = simulate(jobs((0, 2, 50)), cluster, Fifo(), restart_delay=0)
    assert finishes(result) == {"a": 150}
    assert result.usage.capacity.at(50) == 0


def test_a_gang_that_can_never_fit_is_rejected_at_admission_with_a_reason():
    seen = []
    result = simulate(
        jobs((0, 5, 10), (1, 2, 10)),
        Cluster.grid(2, 2),
        Fifo(),
        restart_delay=0,
        on_finished=lambda done, total: seen.append((done, total)),
    )
    assert finishes(result) == {"b": 11}
    assert [(job.name, job.reason) for job in result.rejected] == [
        ("a", "needs 5 GPUs at once; the cluster never has more than 4")
    ]
    assert seen == [(1, 2), (2, 2)]
    tick = simulate(jobs((0, 5, 10)), Cluster.grid(2, 2), Fifo(), tick=60)
    assert not tick.jobs
    assert len(tick.rejected) == 1


def test_a_gang_that_a_shrinking_cluster_can_no_longer_hold_is_rejected():
    cluster = Cluster(Cluster.grid(2, 1).nodes, (CapacityChange(50, remove=("node-1",)),))
    result = simulate(jobs((0, 1, 100), (10, 2, 10)), cluster, Fifo(), restart_delay=0)
    assert finishes(result) == {"a": 100}
    assert result.rejected[0].name == "b"


def test_an_elastic_policy_may_start_it_smaller():
    workload = jobs((0, 5, 10), min_gpus=1, max_gpus=8)
    result = simulate(workload, Cluster.grid(1, 2), Optimus(), restart_delay=0)
    assert finishes(result) == {"a": 25}


@pytest.mark.parametrize(
    ("placement", "rule"),
    [
        ((("node-0", 3),), "3 GPUs on node node-0, where 2 are free"),
        ((("node-9", 2),), "node node-9 does not exist"),
        ((("node-0", 1), ("node-0", 1)), "comes twice"),
        ((("node-0", 0), ("node-1", 2)), "must be a whole number >= 1"),
        ((("node-0", 1),), "1 GPUs for a gang of 2"),
    ],
)
def test_a_policy_that_breaks_capacity_or_a_gang_is_stopped(placement, rule):
    policy = Scripted(lambda view: {"a": Grant(placement)})
    with pytest.raises(SimulationError, match=rule):
        simulate(jobs((0, 2, 10)), Cluster.grid(2, 2), policy)


def test_two_jobs_cannot_hold_the_same_gpu():
    policy = Scripted(lambda view: {app.id: Grant((("node-0", 2),)) for app in view.apps})
    with pytest.raises(SimulationError, match="gives job b 2 GPUs on node node-0, where 0 are free"):
        simulate(jobs((0, 2, 10), (0, 2, 10)), Cluster.grid(2, 2), policy)


def test_more_gpus_than_an_elastic_job_can_use_are_refused():
    policy = Scripted(lambda view: {"a": Grant((("node-0", 4),))}, elastic=True)
    with pytest.raises(SimulationError, match="it can use 1 to 3"):
        simulate(jobs((0, 2, 10), min_gpus=1, max_gpus=3), Cluster.grid(1, 4), policy)


@pytest.mark.parametrize(
    ("grant", "rule"),
    [
        (lambda view: {"nobody": Grant()}, "not active: \\['nobody'\\]"),
        (lambda view: {"a": Grant((("node-0", 1),), until=view.now)}, "a lease that is over"),
    ],
)
def test_grants_to_strangers_and_leases_in_the_past_are_refused(grant, rule):
    with pytest.raises(SimulationError, match=rule):
        simulate(jobs((0, 1, 10)), Cluster.grid(1, 1), Scripted(grant))


@pytest.mark.parametrize("tick", [None, 60.0])
@pytest.mark.parametrize("wake", [inf, 30.0])
def test_a_policy_that_never_starts_anything_ends_in_an_error(tick, wake):
    idle = Scripted(lambda view: {app.id: Grant(reason="not today") for app in view.apps}, wake=wake)
    with pytest.raises(SimulationError, match=r"leaves 1 jobs unfinished \(a\).*not today"):
        simulate(jobs((0, 1, 10)), Cluster.grid(1, 1), idle, tick=tick, idle_limit=100)


def test_a_policy_that_moves_a_job_for_ever_ends_in_an_error():
    def swap(view):
        return {app.id: Grant(((f"node-{int(view.now / 20) % 2}", 1),)) for app in view.apps}

    with pytest.raises(SimulationError, match="allocated no GPU"):
        simulate(jobs((0, 1, 100)), Cluster.grid(2, 1), Scripted(swap), tick=20, idle_limit=100)


def test_a_policy_that_is_woken_without_end_at_one_moment_ends_in_an_error():
    stay = Scripted(lambda view: {"a": Grant((("node-0", 1),))}, wake=1e-9)
    with pytest.raises(SimulationError, match="came within 1e-06 s"):
        simulate(jobs((0, 1, 100)), Cluster.grid(1, 1), stay, restart_delay=0, idle_limit=100)


def test_jobs_that_span_nodes_interfere_where_they_meet():
    def apart(view):
        places = {
            "a": (("node-0", 1), ("node-1", 1)),
            "b": (("node-1", 1), ("node-2", 1)),
            "c": (("node-3", 1),),
        }
        return {app.id: Grant(places[app.id]) for app in view.apps}

    workload = jobs((0, 2, 100), (0, 2, 60), (0, 1, 100))
    result = simulate(workload, Cluster.grid(4, 2), Scripted(apart), restart_delay=0, interference=0.5)
    assert finishes(result) == {"a": 160, "b": 120, "c": 100}


def test_placements_wider_than_need_be_are_slower_and_score_less():
    models = plain_jobs({"vgg16": Locality(rack=1.25, cluster=1.5)})
    grid = Cluster.grid(4, 2, per_rack=2)

    def run(*nodes: str):
        policy = Scripted(lambda view: {"a": Grant(tuple((node, 2 // len(nodes)) for node in nodes))})
        result = simulate(jobs((0, 2, 100), model="vgg16"), grid, policy, models=models, restart_delay=0)
        return result.jobs[0].finish, result.summary()["placement_score"]

    assert run("node-0") == (100, 1)
    assert run("node-0", "node-1") == (125, 0.8)
    assert run("node-0", "node-2") == (150, pytest.approx(2 / 3))


def test_ticks_and_events_agree_on_a_job_that_is_never_moved():
    for options in ({}, {"tick": 60.0}):
        result = simulate(jobs((0, 1, 1000.5)), Cluster.grid(1, 1), Fifo(), **options)
        assert result.jobs[0].finish - result.jobs[0].start == pytest.approx(1030.5)


def test_a_job_without_duration_needs_a_profile():
    with pytest.raises(WorkloadError, match="job a has no duration"):
        simulate(Workload("w", (Job("a", 0, 1),)), Cluster.grid(1, 1), Fifo())


@pytest.mark.parametrize("options", [{"tick": 0}, {"restart_delay": -1}, {"interference": 1}])
def test_bad_options_are_refused(options):
    with pytest.raises(OptionError):
        simulate(jobs((0, 1, 10)), Cluster.grid(1, 1), Fifo(), **options)


@pytest.mark.parametrize("text", ["16", "16x", "0x4", "4x0", "axb"])
def test_bad_clusters_are_refused(text):
    with pytest.raises(OptionError):
        Cluster.parse(text)


@given(
    rows=st.lists(
        st.tuples(st.floats(0, 500), st.integers(1, 6), st.floats(0.5, 300)), min_size=1, max_size=8
    ),
    nodes=st.integers(1, 3),
    tick=st.sampled_from([None, 60.0]),
    delay=st.sampled_from([0.0, 30.0]),
    losses=st.lists(st.floats(1, 400), max_size=2),
)
def test_totals_in_equal_totals_out(rows, nodes, tick, delay, losses):
    grid = Cluster.grid(nodes, 2)
    changes = []
    for number, at in enumerate(sorted(losses)):
        changes += [(at, (), (f"node-{number}",)), (at + 100, (gpu_node(f"new-{number}", 2),), ())]
    changes = [change for change in changes if not change[2] or change[2][0] < f"node-{nodes}"]
    cluster = Cluster(
        grid.nodes,
        tuple(CapacityChange(at, add=a, remove=r) for at, a, r in sorted(changes, key=lambda c: c[0])),
    )
    workload = jobs(*rows)
    results = [
        simulate(workload, cluster, Tiresias([50, 200]), tick=tick, restart_delay=delay) for _ in range(2)
    ]
    result = results[0]
    assert result == results[1] or result.policy_seconds != results[1].policy_seconds
    assert result.jobs == results[1].jobs
    assert len(result.jobs) + len(result.rejected) == len(rows)
    by_name = {job.id: job for job in workload.jobs}
    for job in result.jobs:
        spec = by_name[job.name]
        trained = job.gpu_seconds - job.lost_gpu_seconds
        assert job.finish < inf
        assert job.start >= job.arrival
        assert trained >= spec.gpus * spec.duration * (1 - 1e-6)
        assert job.jct >= spec.duration * (1 - 1e-6)
    held = sum(job.gpu_seconds for job in result.jobs)
    assert result.gpu_hours * 3600 >= held * (1 - 1e-9) - 1e-6
    if tick is None:
        assert result.gpu_hours * 3600 == pytest.approx(held)
        assert result.usage.held.integral(0, 1e9) == pytest.approx(held)
    assert all(steps.values[-1] == 0 for steps in result.usage.apps.values())


@pytest.mark.parametrize("seed", [0, 1])
def test_a_loaded_cluster_runs_philly_like_jobs_to_the_end(seed):
    workload = philly_like(np.random.default_rng(seed), 300, span=86_400, longest=86_400)
    result = simulate(workload, Cluster.grid(16, 8), Tiresias())
    assert len(result.jobs) == 300
    assert result.summary()["restarts_mean"] > 0
    peak = max(result.usage.held.values)
    assert peak <= 128


@pytest.mark.parametrize("notice", [0.0, 120.0])
@pytest.mark.parametrize("tick", [None, 60.0])
def test_a_spot_pool_runs_every_job_or_says_why_not(notice, tick):
    """A real pool of 12.6 nodes in the mean, for 10.8 h; announced losses lose no work."""
    cluster = read_spot_trace(DATA / "g4dn-trace.csv", 4, notice=notice)
    workload = philly_like(np.random.default_rng(3), 200, span=36_000, longest=20_000)
    result = simulate(workload, cluster, Tiresias(), tick=tick, saves=Saves(every=600))
    assert len(result.jobs) + len(result.rejected) == 200
    assert all("GPUs at once" in job.reason for job in result.rejected)
    lost = sum(job.lost_gpu_seconds for job in result.jobs)
    assert (lost == 0) == (notice > 0)
    assert sum(job.restarts for job in result.jobs) > 0
    assert all(result.usage.held.at(t) <= result.usage.capacity.at(t) for t in range(0, 60_000, 100))


def test_arrivals_in_milliseconds_of_the_epoch_end_although_the_clock_is_coarse():
    at = 1.7e12  # here the clock's step is 0.2 ms, more than the residue that counts as nothing
    result = simulate(jobs((at, 1, 0.1), (at, 1, 1 / 3)), Cluster.grid(1, 4), Fifo(), restart_delay=0.0)
    assert [job.jct for job in result.jobs] == pytest.approx([0.1, 1 / 3], abs=1e-3)
