"""Themis' evaluation: what apps bid, one run, and the page of the quick experiments."""

import numpy as np
import pytest

from ebbflow.infra.simulation.jobs.tuning import Stage, TunedApp, Tuning
from ebbflow.infra.simulation.jobs.tuning_workloads import NETWORK
from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.finish_time import Job, SuccessiveHalving
from ebbflow.planners.scheduling.locality import Level
from ebbflow.tasks.simulation.bidding import BidDistortion, TunedBidder, whole_share
from tests.evaluation.experiments import run_experiments
from tests.evaluation.systems import evaluate, evaluations
from tests.evaluation.themis.cases import run_case
from tests.evaluation.themis.page import interval, over, shown, worst
from tests.evaluation.themis.runs import experiments

TRUE = BidDistortion()
SMALL = {"apps": 8, "hours": 2.0}


def bidder(tuning: Tuning, belief: BidDistortion = TRUE, gpus: int = 16, n: float = 1.0) -> TunedBidder:
    model = TunedApp(tuning, gpus)
    return TunedBidder(cluster_gpus=gpus, n_avg=n, model=model, belief=belief, sizes=(4, 4))


def test_bids_of_a_halving_search_are_those_of_the_published_table() -> None:
    """NSDI 2020, Table 2, and the bidder that planners have for it."""
    stages = (Stage(3200.0, 960.0, 4, 8), Stage(3200.0, 1600.0, 2, 8), Stage(3600.0, 3600.0, 1, 8))
    gpus, levels = np.array([1, 2, 4, 8, 16]), np.full(5, int(Level.MACHINE))
    mine = bidder(Tuning(stages), n=4.0)
    assert mine.time_alone == pytest.approx(2500.0)
    assert mine.rho_at(gpus, levels, 0.0) == pytest.approx([4, 2, 1, 0.5, 0.34])
    times = ((80.0, 100.0, 100.0, 120.0), (100.0, 100.0), (100.0,))
    phases = [[Job(i, t, 8) for t in jobs] for jobs, i in zip(times, (8, 16, 36), strict=True)]
    theirs = SuccessiveHalving(cluster_gpus=16, n_avg=4.0, phases=phases, budget=10_000.0, max_gpus=16)
    assert mine.rho_at(gpus, levels, 300.0) == pytest.approx(theirs.rho_at(gpus, levels, 300.0))


def test_one_gang_pays_for_its_level_and_several_for_the_part_that_is_spread() -> None:
    mine = bidder(Tuning((Stage(1000.0, 100.0, 10, 2),), NETWORK))
    # of a node of 4: 0, 2, 2 and 4 of 1, 2, 3 and 4 GPUs lie in whole gangs of 2
    assert whole_share((4, 4), 2) == pytest.approx(0.8)
    assert mine.slowdown(np.array([2, 8]), 2, Level.CLUSTER) == pytest.approx([1.6, 1 / (0.8 + 0.2 / 1.6)])
    assert mine.slowdown(np.array([2, 8]), 2, Level.MACHINE) == pytest.approx([1, 1])
    single = bidder(Tuning((Stage(1000.0, 100.0, 10, 1),), NETWORK))
    assert single.slowdown(np.array([1, 8]), 1, Level.CLUSTER) == pytest.approx([1, 1])


def test_beliefs_scale_work_and_slowdowns() -> None:
    tuning = Tuning((Stage(800.0, 800.0, 1, 4),), NETWORK)
    gpus, far, near = np.array([4]), np.array([int(Level.CLUSTER)]), np.array([int(Level.MACHINE)])
    truth = bidder(tuning)
    wrong = bidder(tuning, BidDistortion(work=2.0))
    assert wrong.rho_at(gpus, far, 0.0) == pytest.approx(
        truth.rho_at(gpus, far, 0.0)
    )  # T_id is wrong as well
    assert wrong.remaining(gpus, Level.CLUSTER) == pytest.approx(2 * truth.remaining(gpus, Level.CLUSTER))
    inflated = bidder(tuning, BidDistortion(spread=1.5))
    assert inflated.rho_at(gpus, far, 0.0) == pytest.approx(1.5 * truth.rho_at(gpus, far, 0.0))
    assert inflated.rho_at(gpus, near, 0.0) == pytest.approx(truth.rho_at(gpus, near, 0.0))
    deflated = bidder(tuning, BidDistortion(dense=0.5))
    assert deflated.rho_at(gpus, near, 0.0) == pytest.approx(truth.rho_at(gpus, near, 0.0) / 2)
    assert bidder(tuning, BidDistortion(spread=0.1)).slowdown(gpus, 4, Level.RACK) == pytest.approx([1.0])


@pytest.mark.parametrize("policy", ["themis", "gandiva"])
def test_equal_cases_give_equal_runs_and_all_apps_end(policy: str) -> None:
    one, two = (run_case(policy, "w2", seed=1, paused=True, **SMALL) for _ in range(2))
    for name in ("rho", "jct_s", "gpu_min", "score", "decisions", "notes"):
        assert one[name] == two[name]
    assert len(one["rho"]) == 8
    assert sum(one["gpu_min"]) == pytest.approx(60 * one["gpu_hours"], rel=1e-4)
    # the work is 80 GPUs for 2 h; slowdowns and pauses only add to it
    assert one["gpu_hours"] >= 160 - 1e-6


def test_pauses_cost_gpu_time() -> None:
    free, paid = (run_case("las", "w1", paused=p, **SMALL)["gpu_hours"] for p in (False, True))
    assert paid > free


def test_bad_cases_name_the_rule() -> None:
    with pytest.raises(OptionError, match="a policy must be"):
        run_case("nobody", **SMALL)
    with pytest.raises(OptionError, match="a workload must be"):
        run_case(workload="w3", **SMALL)
    with pytest.raises(OptionError, match="a lie must be"):
        run_case(workload="identical", cluster="one-dense-64", lie=0.5, lie_about="age")


def test_intervals_are_those_of_student() -> None:
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert (mean, high - mean) == pytest.approx((2.0, 4.302653 / 3**0.5), rel=1e-5)
    assert mean - low == pytest.approx(high - mean)
    assert interval([5.0]) == (5.0, 5.0, 5.0)
    assert interval([5.0, 7.0]) == (6.0, 5.0, 7.0)
    assert shown([5.0]) == "5.00"
    assert over([4.0], [2.0]) == [2.0]
    assert worst([{"rho": [1.0, 3.0]}]) == [3.0]


@pytest.mark.slow  # the quick run of a whole evaluation
def test_the_quick_evaluation_writes_page_and_pictures_and_is_kept(tmp_path) -> None:
    (document,) = evaluate(evaluations("themis"), tmp_path / "kept", tmp_path / "docs", quick=True)
    text = document.read_text(encoding="utf-8")
    for heading in ("## Largest ρ", "## GPU time", "## Fairness knob", "## Lies", "## Orders", "published"):
        assert heading in text
    assert "nan" not in text
    for line in text.splitlines():
        if line.startswith("!["):
            picture = document.parent / line.split("(")[1].rstrip(")")
            assert picture.read_text(encoding="utf-8").startswith("<svg")
    files = sorted((tmp_path / "kept" / "themis").glob("*.json"))
    assert len(files) == len(experiments(quick=True))
    before = [file.stat().st_mtime_ns for file in files]
    found = run_experiments("themis", experiments(quick=True), tmp_path / "kept")
    assert [file.stat().st_mtime_ns for file in files] == before  # nothing was run again
    assert found["testbed-w2-themis"][0]["case"]["workload"] == "w2"
