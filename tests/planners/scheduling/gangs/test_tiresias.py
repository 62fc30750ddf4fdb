"""Tiresias: worked examples of queues, promotion, skipping and placement, and the paper's three jobs."""

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.traces.cluster import Cluster, gpu_node
from ebbflow.infra.simulation.traces.generators import tiresias_testbed
from ebbflow.infra.simulation.traces.node_traces import NodeEvent, with_trace
from ebbflow.infra.simulation.traces.workloads import Job, Workload
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Notice
from ebbflow.planners.model.scheduling import App, View, gpus_of
from ebbflow.planners.scheduling.gangs.gittins import ServiceDistribution
from ebbflow.planners.scheduling.gangs.tiresias import Tiresias
from ebbflow.planners.scheduling.placement import most_free_first

RNG = np.random.default_rng(0)


def cluster(*gpus: int) -> Capacity:
    return Capacity(1, tuple(gpu_node(f"n{at}", count) for at, count in enumerate(gpus)))


class Driver:
    """Carries a policy's decisions out on apps, with service that a test sets."""

    def __init__(self, policy: Tiresias, capacity: Capacity, *apps: App) -> None:
        self.policy, self.capacity, self.apps = policy, capacity, list(apps)
        for number, app in enumerate(self.apps):
            app.number = number
        self.memory = None

    def decide(self, now: float):
        decision = self.policy.decide(View(now, self.apps, self.capacity), self.memory, RNG)
        self.memory = decision.memory
        for app in self.apps:
            app.held = decision.grants[app.id].placement
            if app.held and app.first_start is None:
                app.first_start = now
        return decision

    def running(self) -> str:
        return " ".join(app.id for app in self.apps if app.held)


@pytest.mark.parametrize(("seconds", "queue"), [(400, "queue 2 of 2"), (399.9, "queue 1 of 2")])
def test_reaching_the_end_of_a_queue_demotes(seconds, queue):
    app = App("x", gpus=8)
    driver = Driver(Tiresias([3200]), cluster(8), app)
    driver.decide(0)
    app.service = 8 * seconds
    assert driver.decide(seconds).grants["x"].reason == queue


def test_wakes_when_a_job_will_be_demoted():
    app = App("x", gpus=4)
    driver = Driver(Tiresias([3200]), cluster(4), app)
    driver.decide(500)
    app.service = 4 * 500
    assert driver.decide(1000).wake == pytest.approx(1300)


def test_promotion_after_waiting_a_multiple_of_the_run_time():
    job, other = App("job", gpus=4), App("other", gpus=4)
    driver = Driver(Tiresias([400], promote_knob=2), cluster(4), job)
    driver.decide(0)
    job.service = 4 * 300
    driver.apps.append(other)
    driver.decide(300)  # demoted and preempted: the newcomer runs
    assert driver.running() == "other"
    other.service = 4 * 50.0
    assert driver.decide(560).wake == pytest.approx(560 + 50)  # the newcomer's end of queue 1
    assert driver.decide(899).grants["job"].placement == ()
    assert driver.decide(900).grants["job"].reason == "queue 1 of 2"  # it started first
    job.service += 4 * 99.0
    assert driver.decide(999).grants["job"].reason == "queue 1 of 2"  # its first 300 s are forgiven
    job.service += 4 * 1.0
    assert driver.decide(1000).grants["job"].placement == ()


def test_without_promotion_a_demoted_job_starves():
    old, new = App("old", gpus=4, service=4000.0), App("new", gpus=4)
    driver = Driver(Tiresias([400]), cluster(4), old)
    driver.decide(0)
    driver.apps.append(new)
    driver.decide(1000)
    for now in range(2000, 100_000, 1000):
        assert driver.decide(now).grants["old"].placement == ()


def test_large_gangs_are_skipped_and_never_block():
    driver = Driver(
        Tiresias(), cluster(4), App("A", gpus=8), App("B", gpus=2), App("C", gpus=4), App("D", gpus=2)
    )
    driver.decide(0)
    assert driver.running() == "B D"


def test_an_arrival_preempts_a_lower_queue_but_not_its_own():
    x, y = App("x", gpus=4), App("y", gpus=1, arrival=10)
    driver = Driver(Tiresias([100]), cluster(4), x)
    driver.decide(0)
    driver.apps.append(y)
    driver.decide(10)
    assert driver.running() == "x"
    x.service = 100
    driver.decide(25)
    assert driver.running() == "y"


def test_a_job_that_never_ran_gets_a_reservation():
    small = [App(f"s{at}", gpus=1) for at in range(4)]
    large = App("large", gpus=4, arrival=1)
    driver = Driver(Tiresias([1e6], reserve_after=600), cluster(4), *small, large)
    assert driver.decide(1).wake == 601
    assert driver.running() == "s0 s1 s2 s3"
    driver.decide(601)
    assert driver.running() == "large"


def test_leaves_a_node_that_got_a_notice():
    app = App("x", gpus=2)
    driver = Driver(Tiresias(placer=most_free_first), cluster(2, 2), app)
    driver.decide(0)
    assert app.held == (("n0", 2),)
    driver.capacity = Capacity(2, driver.capacity.nodes, (Notice("n0", 200.0),))
    driver.decide(80)
    assert app.held == (("n1", 2),)


def test_restarts_may_be_left_out_of_attained_service():
    for counts, queue in ((True, "queue 2 of 2"), (False, "queue 1 of 2")):
        app = App("x", gpus=1)
        driver = Driver(Tiresias([100], count_restarts=counts), cluster(1), app)
        driver.decide(0)
        app.service, app.restart_time = 110.0, 30.0
        assert driver.decide(110).grants["x"].reason == queue


def three_jobs(policy: Tiresias) -> list[float]:
    """Return completion times of (2 GPUs, 2 s), (1, 8), (2, 6) on two GPUs, deciding every second."""
    jobs = tuple(
        Job(str(at), 1.0, gpus, duration) for at, (gpus, duration) in enumerate([(2, 2), (1, 8), (2, 6)])
    )
    result = simulate(Workload("three", jobs), Cluster.grid(1, 2), policy, tick=1, restart_delay=0)
    return [job.jct for job in result.jobs]


KNOWN = ServiceDistribution([4, 8, 12])
TOTAL = ServiceDistribution([4, 8, 12], denominator="total")
SUPREMUM = {"order": "submission", "quantum": "supremum"}


@pytest.mark.parametrize(
    ("policy", "jcts"),
    [
        (Tiresias(range(1, 13), order="submission"), [5, 14, 16]),  # continuous 2D-LAS
        (Tiresias([1000], distribution=KNOWN, **SUPREMUM), [2, 10, 16]),  # the formula as stated
        (Tiresias([1000], distribution=TOTAL, **SUPREMUM), [2, 12, 16]),  # the paper's figure
        (Tiresias([4], order="submission"), [2, 12, 16]),
        (Tiresias([4], order="submission", distribution=KNOWN), [2, 12, 16]),
    ],
)
def test_the_papers_three_jobs(policy, jcts):
    assert three_jobs(policy) == jcts


@pytest.mark.parametrize(("thresholds", "total"), [([8], 28), ([2], 32), ([4, 8], 30)])
def test_thresholds_of_the_three_jobs(thresholds, total):
    assert sum(three_jobs(Tiresias(thresholds, order="submission", distribution=KNOWN))) == total


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"thresholds": (0,)}, "thresholds"),
        ({"thresholds": (10, 10)}, "thresholds"),
        ({"promote_knob": 0}, "promote_knob"),
        ({"order": "lifo"}, "order"),
    ],
)
def test_bad_options_are_refused(options, rule):
    with pytest.raises(OptionError, match=rule):
        Tiresias(**options)


@given(
    gangs=st.lists(st.integers(1, 8), min_size=1, max_size=12),
    nodes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    rounds=st.lists(st.floats(1, 500), max_size=8),
    order=st.sampled_from(["first-start", "insertion", "submission"]),
    knob=st.sampled_from([inf, 1.0, 4.0]),
)
def test_gangs_stay_whole_capacity_holds_and_nothing_that_fits_waits(gangs, nodes, rounds, order, knob):
    apps = [App(f"a{at}", gpus=gpus) for at, gpus in enumerate(gangs)]
    driver = Driver(Tiresias([100, 400], order=order, promote_knob=knob), cluster(*nodes), *apps)
    now, demoted = 0.0, dict.fromkeys((app.id for app in apps), 1)
    for seconds in [0.0, *rounds]:
        now += seconds
        for app in apps:
            app.service += gpus_of(app.held) * seconds
        decision = driver.decide(now)
        assert all(gpus_of(app.held) in (0, app.gpus) for app in apps)
        used: dict[str, int] = {}
        for app in apps:
            for node, gpus in app.held:
                used[node] = used.get(node, 0) + gpus
        assert all(gpus <= nodes[int(node[1:])] for node, gpus in used.items())
        free = sum(nodes) - sum(used.values())
        assert all(app.gpus > free for app in apps if not app.held)
        for app in apps:
            if app.held:
                queue = int(decision.grants[app.id].reason.split()[1])
                if knob == inf:
                    assert queue >= demoted[app.id]
                    assert queue == 1 + sum(app.service >= end for end in (100, 400))
                demoted[app.id] = queue


@pytest.mark.parametrize("seed", [0, 1])
def test_the_testbed_workload_comes_out_as_the_paper_says(seed):
    """480 jobs on 60 GPUs: short small jobs average about 300 s, and knowing the distribution changes little."""
    workload = tiresias_testbed(np.random.default_rng(seed))
    small = {job.id for job in workload.jobs if job.gpus <= 4 and (job.duration or 0) < 800}
    past = tiresias_testbed(np.random.default_rng(100 + seed)).jobs
    known = ServiceDistribution([job.gpus * (job.duration or 0) for job in past])
    averages = []
    for policy in (Tiresias([3200]), Tiresias([3200], distribution=known)):
        result = simulate(workload, Cluster.grid(15, 4), policy, restart_delay=0)
        averages.append(result.summary()["avg_jct_s"])
        assert 250 <= np.mean([job.jct for job in result.jobs if job.name in small]) <= 300
        assert 26_000 <= result.summary()["makespan_s"] <= 32_000
    assert averages[1] == pytest.approx(averages[0], rel=0.1)


def test_an_unknown_quantum_is_refused():
    with pytest.raises(OptionError, match="quantum must be queue or supremum; got 'best'"):
        Tiresias(quantum="best")


def test_a_gang_that_lost_a_part_is_placed_anew_or_waits():
    app = App("x", gpus=4)
    driver = Driver(Tiresias(), cluster(2, 2, 2), app)
    driver.decide(0)
    app.held = (("n1", 2),)  # n0 left; the rest of the gang holds what stays
    driver.capacity = Capacity(2, driver.capacity.nodes[1:])
    assert gpus_of(driver.decide(10).grants["x"].placement) == 4
    app.held = (("n1", 2),)
    driver.capacity = Capacity(3, driver.capacity.nodes[:1])
    assert not driver.decide(20).grants["x"].placement


def test_a_job_that_restarts_just_before_its_threshold_is_not_looked_at_without_end():
    base = Cluster.grid(1, 2)
    lost = with_trace(
        base, [NodeEvent(49.999999, "remove", "node-0"), NodeEvent(60, "add", "node-0")], base.nodes[0]
    )
    jobs = Workload("w", (Job("a", 0, 2, 200.0), Job("b", 1, 2, 40.0)))
    result = simulate(jobs, lost, Tiresias([100], count_restarts=False), restart_delay=30, start_delay=0)
    assert result.decisions < 100
