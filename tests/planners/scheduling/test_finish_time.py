from math import inf

import numpy as np
import pytest
from auction_worlds import capacity

from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.finish_time import (
    ActiveAverage,
    CurveStopping,
    Job,
    SingleJob,
    SuccessiveHalving,
    halving_phases,
    phase_time,
)
from ebbflow.planners.scheduling.locality import Level, Slowdown, level_of

FLAT = Slowdown(1.0, 1.0, 1.0, 1.0)


def search(model: str = "malleable") -> SuccessiveHalving:
    """The page's end-to-end example: 16 GPUs, four jobs, N = 4, B = 10,000 GPU-seconds, at most 8 GPUs a job."""
    jobs = [Job(0, t, 8, FLAT) for t in (80.0, 100.0, 100.0, 120.0)]
    phases = halving_phases(jobs, (8, 16, 36))
    return SuccessiveHalving(
        cluster_gpus=16, n_avg=4.0, phases=phases, budget=10_000.0, max_gpus=32, model=model
    )


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("malleable", {1: 4.0, 2: 2.0, 4: 1.0, 8: 0.5, 16: 0.34}),
        ("lpt", {1: 4.0, 2: 2.0, 4: 1.064, 8: 0.532, 16: 0.356}),
    ],
)
def test_the_worked_example_gives_the_published_rho(model: str, expected: dict[int, float]) -> None:
    app = search(model)
    assert app.time_alone == pytest.approx(2500.0, rel=1e-12)
    rho = app.rho_at(np.array(list(expected)), np.full(len(expected), Level.CLUSTER), 0.0)
    assert rho == pytest.approx(list(expected.values()), rel=1e-9)


def test_phases_of_the_worked_example_take_what_the_paper_says() -> None:
    times = [phase_time([j.work for j in p], np.array([2]), 8, "lpt")[0] for p in search().phases]
    assert times == pytest.approx([1600.0, 1600.0, 1800.0], rel=1e-12)


def test_known_survivors_revise_the_estimate() -> None:
    app = search("lpt")
    first = app.phases[0]
    app.phases = (first, (Job(16, 120.0, 8, FLAT), Job(16, 100.0, 8, FLAT)), (Job(36, 120.0, 8, FLAT),))
    two = np.array([2])
    assert app.remaining(two, Level.CLUSTER)[0] == pytest.approx(5680.0, rel=1e-12)
    assert app.rho_at(two, np.array([Level.CLUSTER]), 0.0)[0] == pytest.approx(2.272, rel=1e-9)


def test_elapsed_time_counts_and_no_gpu_is_unbounded() -> None:
    app = search()
    app.arrival = 100.0
    assert app.rho_at(np.array([2]), np.array([Level.CLUSTER]), 350.0)[0] == pytest.approx(2.1, rel=1e-12)
    assert app.rho((), capacity([8], [0]), 350.0) == inf


def test_placement_instances_violate_sharing_incentive_only_by_the_demand_capped_share() -> None:
    vgg = Slowdown(1.0, 1.0, 1.289, 1.289)
    app = SingleJob(cluster_gpus=8, n_avg=2.0, job=Job(1000, 0.1, 4, vgg), iterations_total=1000)
    nodes = capacity([4, 4], [0, 0])
    local, split = (("m0", 4),), (("m0", 2), ("m1", 2))
    assert app.rho(split, nodes, 0.0) == pytest.approx(0.6445, rel=1e-9)  # printed as 0.644
    assert app.rho_share(local, nodes, 0.0) == pytest.approx(1.0, rel=1e-9)
    assert app.rho_share(split, nodes, 0.0) == pytest.approx(1.289, rel=1e-9)


def test_curve_stopping_takes_the_longest_survival_in_the_band() -> None:
    jobs = (Job(10, 1.0, 1, FLAT), Job(10, 2.0, 1, FLAT))
    app = CurveStopping(cluster_gpus=2, n_avg=1.0, jobs=jobs, bands=((5, 30), (4, 7)), budget=44.0)
    assert app.remaining(np.array([2]), Level.MACHINE)[0] == pytest.approx(30.0)
    assert app.demand == 2
    app.bands = ()
    assert app.remaining(np.array([2]), Level.MACHINE)[0] == pytest.approx(20.0)


def test_levels_are_the_narrowest_enclosing_unit() -> None:
    nodes = capacity([8, 8, 8], [0, 0, 1])
    assert level_of((("m0", 1),), nodes) == Level.SLOT
    assert level_of((("m0", 8),), nodes) == Level.MACHINE
    assert level_of((("m0", 1), ("m1", 1)), nodes) == Level.RACK
    assert level_of((("m0", 1), ("m2", 1)), nodes) == Level.CLUSTER


def test_slowdowns_start_from_defaults_and_learn() -> None:
    assert Slowdown().levels == (1.0, 1.0, 1.1, 1.3)
    assert Slowdown.of_sensitivity(1.1).levels == pytest.approx(Slowdown().levels)
    assert Slowdown.of_sensitivity(0.9).levels == (1.0, 1.0, 1.0, 1.0)
    assert Slowdown().measured(Level.RACK, 1.29).rack == 1.29
    assert Slowdown().measured(Level.RACK, 0.97).rack == 1.0
    with pytest.raises(OptionError, match="slowdown must be"):
        Slowdown(rack=0.5)


@pytest.mark.parametrize("bad", [{"iterations": -1.0}, {"serial_time": 0.0}, {"max_gpus": 0}])
def test_impossible_jobs_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="a job needs"):
        Job(**{"iterations": 1.0, "serial_time": 1.0, **bad})


def test_more_phases_than_halvings_are_refused() -> None:
    assert [len(p) for p in halving_phases([Job(1, 1.0)] * 8, (1, 1, 1, 1))] == [8, 4, 2, 1]
    with pytest.raises(OptionError, match="can be halved"):
        halving_phases([Job(1, 1.0)] * 4, (1, 1, 1, 1))


def test_the_average_of_active_apps_is_weighted_by_time() -> None:
    average = ActiveAverage(start=100.0, count=2)
    assert average.value(100.0) == 2
    average.update(110.0, 4)
    average.update(120.0, 1)
    assert average.value(140.0) == pytest.approx((20 + 40 + 20) / 40)
