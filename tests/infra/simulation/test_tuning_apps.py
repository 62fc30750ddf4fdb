"""Hyper-parameter apps in the simulator: hand-computed runs, pauses, gangs, phases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.engine import Result, simulate
from ebbflow.infra.simulation.jobs.plain import Locality
from ebbflow.infra.simulation.jobs.tuning import (
    NO_PAUSE,
    Pause,
    Stage,
    TunedApp,
    Tuning,
    gang_rates,
    tuned_apps,
)
from ebbflow.infra.simulation.jobs.tuning_workloads import INVENTORIES, inventory, tuning_apps
from ebbflow.infra.simulation.traces.cluster import Cluster, gpu_node
from ebbflow.infra.simulation.traces.workloads import Job, Workload
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import Decision, Grant, Placement
from ebbflow.planners.scheduling.finish_time import phase_time

NETWORK = Locality(1.0, 1.29, 1.6)
NODES = {
    f"{rack}{number}": gpu_node(f"{rack}{number}", 4, rack=rack) for rack in ("a", "b") for number in range(3)
}


class Plan:
    """Gives each app what a plan says for the time: (until, placement), one after the other."""

    name, elastic = "plan", True

    def __init__(self, **plans: list[tuple[float, Placement]]) -> None:
        self.plans = plans
        self.asked: list[float] = []

    def decide(self, view, memory, rng):
        self.asked.append(view.now)
        grants, wake = {}, np.inf
        for app in view.apps:
            until, placement = next(step for step in self.plans[app.id] if step[0] > view.now)
            grants[app.id] = Grant(placement, until)
            wake = min(wake, until)
        return Decision(grants, None, wake)


def run(tunings: dict[str, Tuning], policy: object, pause: Pause = NO_PAUSE) -> Result:
    jobs = tuple(
        Job(id_, 0.0, t.demand, None, "m", min_gpus=1, max_gpus=t.demand) for id_, t in tunings.items()
    )
    cluster = Cluster(tuple(NODES.values()))
    models = tuned_apps(tunings, cluster.gpus, pause)
    return simulate(
        Workload("w", jobs), cluster, policy, models=models, restart_delay=0.0, contention="lifetime"
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("placement", "slowdown"),
    [((("a0", 4),), 1.0), ((("a0", 2), ("a1", 2)), 1.29), ((("a0", 2), ("b0", 2)), 1.6)],
)
def test_one_app_alone_takes_its_work_times_slowdown_over_its_gpus(
    placement: Placement, slowdown: float
) -> None:
    job = Tuning((Stage(4000.0, 4000.0, 1, 4),), NETWORK)
    found = run({"x": job}, Plan(x=[(np.inf, placement)]))
    assert found.jobs[0].finish == pytest.approx(4000 * slowdown / 4)
    assert found.gpu_hours == pytest.approx(4 * 1000 * slowdown / 3600)
    assert found.jobs[0].score == pytest.approx(1 / slowdown)
    assert found.jobs[0].rho == pytest.approx(slowdown)  # alone: N is 1, T_cluster 4000/4


def test_gpu_time_is_the_sum_of_holdings() -> None:
    plan = Plan(x=[(100.0, (("a0", 2),)), (200.0, (("a0", 4),)), (np.inf, (("a0", 1),))])
    found = run({"x": Tuning((Stage(900.0, 100.0, 9, 1),))}, plan)
    # 200 + 400 GPU-s until 200 s, then 300 s on one GPU
    assert found.jobs[0].finish == pytest.approx(500.0)
    assert found.jobs[0].gpu_seconds == pytest.approx(2 * 100 + 4 * 100 + 300)
    assert found.gpu_hours * 3600 == pytest.approx(900.0)


def test_phases_of_successive_halving_take_what_the_worked_example_says() -> None:
    """NSDI 2020, Table 2: phases of 4, 2 and 1 jobs on 2 GPUs take 1600, 1600 and 1800 s."""
    stages = (Stage(3200.0, 960.0, 4, 8), Stage(3200.0, 1600.0, 2, 8), Stage(3600.0, 3600.0, 1, 8))
    plan = Plan(x=[(np.inf, (("a0", 2),))])
    found = run({"x": Tuning(stages)}, plan)
    assert found.jobs[0].finish == pytest.approx(5000.0)
    assert plan.asked == pytest.approx([0.0, 1600.0, 3200.0])  # a new phase is an event: demand changed


def test_a_changed_set_pauses_and_an_unchanged_one_does_not() -> None:
    job = {"x": Tuning((Stage(4000.0, 4000.0, 1, 4),))}
    pause = Pause(7.5, 35.0)
    stay = Plan(x=[(float(at), (("a0", 4),)) for at in (100, 200, 300)] + [(np.inf, (("a0", 4),))])
    assert run(job, stay, pause).jobs[0].finish == pytest.approx(
        1000 + 35
    )  # containers once, nothing to save
    move = Plan(x=[(200.0, (("a0", 4),)), (np.inf, (("a1", 4),))])
    assert run(job, move, pause).jobs[0].finish == pytest.approx(1000 + 35 + 42.5)


def test_only_jobs_whose_gpus_changed_pause() -> None:
    search = {"x": Tuning((Stage(4000.0, 100.0, 40, 1),))}
    grow = Plan(x=[(535.0, (("a0", 2),)), (np.inf, (("a0", 2), ("a1", 2)))])
    # 500 s on 2 GPUs, 42.5 s more of it while two GPUs start, then 4 GPUs
    at = 35 + 500 + 42.5 + (4000 - 1000 - 85) / 4
    assert run(search, grow, Pause(7.5, 35.0)).jobs[0].finish == pytest.approx(at)
    whole = 35 + 500 + 42.5 + (4000 - 1000) / 4
    assert run(search, grow, Pause(7.5, 35.0, whole=True)).jobs[0].finish == pytest.approx(whole)
    shrink = Plan(x=[(535.0, (("a0", 4),)), (np.inf, (("a0", 2),))])
    assert run(search, shrink, Pause(7.5, 35.0)).jobs[0].finish == pytest.approx(35 + 500 + 2000 / 2)


def test_waiting_costs_the_containers_again() -> None:
    search = {"x": Tuning((Stage(400.0, 10.0, 40, 1),)), "y": Tuning((Stage(10_000.0, 10_000.0),))}
    plan = Plan(
        x=[(135.0, (("a0", 2),)), (300.0, ()), (np.inf, (("a0", 2),))],
        y=[(float(at), (("b0", 1),)) for at in (135, 300)] + [(np.inf, (("b0", 1),))],
    )
    found = run(search, plan, Pause(7.5, 35.0))
    assert found.jobs[0].finish == pytest.approx(300 + 35 + 100)


@pytest.mark.parametrize(
    ("placement", "tasks", "jobs", "rates"),
    [
        ((("a0", 4),), 2, 9, [2, 2]),
        ((("a0", 3), ("a1", 1)), 2, 9, [2, 2 / 1.29]),
        ((("a0", 3), ("b0", 1)), 2, 9, [2, 2 / 1.6]),
        ((("a0", 3), ("b0", 1)), 1, 9, [1, 1, 1, 1]),
        ((("a0", 3),), 2, 9, [2, 1]),
        ((("a0", 4), ("a1", 4)), 2, 3, [2, 2, 2]),
        ((("a0", 1), ("a1", 1), ("b0", 1)), 4, 1, [3 / 1.6]),
        ((("a0", 1), ("a1", 1)), 4, 1, [2 / 1.29]),
    ],
)
def test_gangs_are_cut_from_nodes_then_racks_then_anywhere(placement, tasks, jobs, rates) -> None:
    assert gang_rates(placement, NODES, tasks, jobs, NETWORK) == pytest.approx(rates)


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 4))
def test_on_one_node_a_phase_takes_what_the_auction_believes(works, tasks, gpus) -> None:
    stage = Stage(sum(works), max(works), len(works), tasks)
    model = TunedApp(Tuning((stage,)), 24)
    model.place((("a0", gpus),), NODES)
    believed = float(phase_time(works, np.array([gpus]), tasks, "malleable")[0])
    # two gangs of unequal size may be slower than GPUs that are divided at will, never faster
    assert model.horizon() >= believed * (1 - 1e-9)
    if gpus % tasks == 0 or len(works) > gpus // tasks:
        assert model.horizon() == pytest.approx(believed)
    assert stage.seconds(gpus) == pytest.approx(believed)
    assert stage.seconds(stage.demand) == pytest.approx(stage.seconds(1000))


def test_the_outlook_forecasts_later_phases_and_narrows_the_band() -> None:
    stages = (Stage(100.0, 50.0, 2), Stage(70.0, 70.0))
    model = TunedApp(Tuning(stages, forecast=(Stage(1.0, 1.0), Stage(50.0, 50.0)), band=1.5), 24)
    model.place((("a0", 2),), NODES)
    assert [s.work for s in model.remaining_stages()] == [150.0, 50.0]
    model.advance(25.0)
    assert model.remaining_stages()[0].work == pytest.approx(50 * 1.25)
    model.advance(25.0)
    assert [s.work for s in model.remaining_stages()] == [105.0]  # its true work is known once it has begun
    assert model.phase == 1


@pytest.mark.parametrize("halving", [False, True])
def test_workloads_have_the_work_that_was_asked_for_and_equal_seeds_are_equal(halving: bool) -> None:
    made = tuning_apps(np.random.default_rng(3), halving=halving, apps=40, span=7200.0, gpus=10.0)
    assert sum(t.work for t in made.tunings.values()) == pytest.approx(72_000.0)
    arrivals = [job.arrival for job in made.workload.jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    assert 6500 < arrivals[-1] <= 7200.0
    tasks = {t.stages[0].tasks for t in made.tunings.values()}
    assert tasks == ({2, 4, 8} if halving else {1, 2})
    for tuning in made.tunings.values():
        counts = [stage.jobs for stage in tuning.stages]
        assert counts == [counts[0] >> n for n in range(len(counts))]
        assert counts[-1] == 1 or not halving
    again = tuning_apps(np.random.default_rng(3), halving=halving, apps=40, span=7200.0, gpus=10.0)
    assert again == made


def test_the_share_of_network_intensive_apps_only_adds_apps() -> None:
    def chosen(share: float) -> set[str]:
        made = tuning_apps(np.random.default_rng(5), halving=True, apps=20, network_share=share)
        return {id_ for id_, t in made.tunings.items() if t.locality.cluster > 1.1}

    assert [len(chosen(s)) for s in (0.0, 0.4, 1.0)] == [0, 8, 20]
    assert chosen(0.2) < chosen(0.6)


def test_inventories_have_the_gpus_of_their_names() -> None:
    for name in INVENTORIES:
        cluster = inventory(name)
        assert cluster.gpus == int(name.rsplit("-", 1)[1])
        assert len({node.rack for node in cluster.nodes}) == 4


def test_bad_input_names_the_rule() -> None:
    with pytest.raises(OptionError, match="must be one of"):
        inventory("moon")
    with pytest.raises(OptionError, match="apps >= 1"):
        tuning_apps(np.random.default_rng(0), halving=True, apps=0)
    with pytest.raises(WorkloadError, match="longest <= work"):
        Stage(1.0, 2.0)
    with pytest.raises(WorkloadError, match="at least one phase"):
        Tuning(())
    with pytest.raises(WorkloadError, match="2 phases need"):
        Tuning((Stage(1.0, 1.0), Stage(1.0, 1.0)), forecast=(Stage(1.0, 1.0),))
    with pytest.raises(OptionError, match="pauses"):
        Pause(-1.0)
    with pytest.raises(WorkloadError, match="not among"):
        tuned_apps({}, 4)(Job("x", 0.0, 1))
