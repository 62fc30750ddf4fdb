"""Shockwave's and Gavel's public simulations, reproduced: closed-form policies job by job, to the last digit."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from time import process_time

import numpy as np
import pytest

from ebbflow.infra.errors import SimulationError, WorkloadError
from ebbflow.infra.simulation.rounds.scenario import RoundsScenario
from ebbflow.infra.simulation.rounds.setting import GAVEL, SHOCKWAVE, Outcome, gpu_cluster, python_generator
from ebbflow.infra.simulation.rounds.trace import Throughputs, TraceJob, read_throughputs, read_trace
from ebbflow.planners.model.scheduling import Decision, Grant, Policy, View
from ebbflow.planners.scheduling.gangs.las import leased_las
from ebbflow.planners.scheduling.shares.allox import AlloX
from ebbflow.planners.scheduling.shares.least_rho import FinishTimeProgramme
from ebbflow.planners.scheduling.shares.max_min import MaxMin, MaxSum, MinMakespan
from ebbflow.planners.scheduling.shares.rounds import RoundBased
from ebbflow.planners.scheduling.shares.rules import ShareRule
from ebbflow.planners.scheduling.shares.simple import FifoPerf, GandivaFair, Isolated

FOLDER = Path(__file__).parents[2] / "fixtures/training"
PUBLISHED = json.loads((FOLDER / "shockwave/published.json").read_text())["simulated"]["simulation"]
SMALL = Throughputs({"v100": {("ResNet-18 (batch size 256)", k): 2.0 * k for k in (1, 2)}})


@pytest.fixture(scope="module")
def shockwave_files() -> tuple[list[TraceJob], Throughputs]:
    folder = FOLDER / "shockwave"
    return read_trace(folder / "jobs-120.trace"), read_throughputs(folder / "tacc_throughputs.json")


@pytest.fixture(scope="module")
def gavel_files() -> tuple[list[TraceJob], Throughputs]:
    folder = FOLDER / "gavel"
    return read_trace(folder / "jobs-96.trace"), read_throughputs(folder / "simulation_throughputs.json")


Files = tuple[list[TraceJob], Throughputs]


def on_shockwave(rule: ShareRule, files: Files) -> Outcome:
    world = RoundsScenario(*files, {"v100": 32}, SHOCKWAVE)
    return world.run(RoundBased(rule, SHOCKWAVE.round_s, SHOCKWAVE.reset_s))


def on_gavel(rule: ShareRule, files: Files) -> Outcome:
    world = RoundsScenario(*files, {"v100": 8, "p100": 16, "k80": 24}, GAVEL)
    return world.run(RoundBased(rule, GAVEL.round_s, GAVEL.reset_s))


@pytest.mark.parametrize(
    ("rule", "published", "makespan", "average", "rounds", "allocations", "first", "utilisation"),
    [
        (GandivaFair(), "gandiva_fair", 32367.434395330914, 12574.272467530895, 270, 28,
         (0, 119.9967, 1199.9335, 2279.9280, 3359.8925), 0.6105),
        (AlloX(), "allox", 32488.621148396294, 9926.30656827876, 271, 25,
         (0, 119.9967, 1199.9335, 2279.9280, 3359.9141), 0.6081),
    ],
    ids=["gandiva-fair", "allox"],
)  # fmt: skip
def test_shockwave_job_by_job(
    rule: ShareRule, published: str, makespan: float, average: float, rounds: int, allocations: int,
    first: tuple[float, ...], utilisation: float, shockwave_files: Files,
) -> None:  # fmt: skip
    outcome = on_shockwave(rule, shockwave_files)
    assert [job.jct for job in outcome.jobs] == PUBLISHED[published]["jct_s"]
    assert [job.rho for job in outcome.jobs] == PUBLISHED[published]["rho"]
    figures = outcome.summary()
    assert figures["makespan_s"] == makespan == PUBLISHED[published]["makespan_s"]
    assert figures["avg_jct_s"] == pytest.approx(average, rel=1e-14)
    assert figures["worst_rho"] == PUBLISHED[published]["worst_rho"]
    assert figures["unfair_pct"] == pytest.approx(100 * PUBLISHED[published]["unfair_share"])
    assert figures["utilisation"] == pytest.approx(utilisation, abs=5e-5)
    assert len(outcome.rounds) == rounds
    assert outcome.rounds[:4] == (0, 119.99670240759264, 239.99340481518527, 359.9901072227779)
    assert len(outcome.allocations) == allocations
    assert outcome.allocations[:5] == pytest.approx(first, abs=5e-5)
    assert not outcome.dropped


def test_time_alone(shockwave_files: Files) -> None:
    world = RoundsScenario(*shockwave_files, {"v100": 32}, SHOCKWAVE)
    assert [world.jobs[i].alone for i in (0, 1, 2, 3, 18, 40)] == [
        1224.7973776609238,
        2996.0316784762317,
        13573.702598961469,
        2860.8417939406777,
        8425.94352735459,
        11717.42253060662,
    ]


@pytest.mark.parametrize(
    ("rule", "makespan", "average", "p50", "p99", "rounds", "first", "starts", "jcts"),
    [
        (Isolated(), 78163.363, 19865.035, 19587.9, 44503.6, 219, (0, 719.9963, 2879.9853, 5039.9661, 7199.9589),
         (0, 359.99656925647, 719.9963247501179, 1079.992894006588),
         [50638.40458037516, 12441.523328705664, 776.0255293221597, 1521.1515662233332, 28714.205554077755,
          10361.860311308561]),
        (FifoPerf(), 72319.858, 19526.854, 20388.7, 31473.2, 202, (0, 719.9995, 2879.9980, 5039.9821, 7199.9665),
         (0, 359.99975549364785, 719.9995109872957, 1079.9992664809436),
         [13237.69626341976, 4404.005658558567, 758.7431098934949, 912.2469901933657, 8921.271668737898,
          4411.004565041744]),
    ],
    ids=["isolated", "fifo-perf"],
)  # fmt: skip
def test_gavel_to_every_printed_digit(
    rule: ShareRule, makespan: float, average: float, p50: float, p99: float, rounds: int,
    first: tuple[float, ...], starts: tuple[float, ...], jcts: list[float], gavel_files: Files,
) -> None:  # fmt: skip
    outcome = on_gavel(rule, gavel_files)
    figures = outcome.summary()
    assert round(figures["makespan_s"], 3) == makespan
    assert round(figures["avg_jct_s"], 3) == average
    assert (round(figures["p50_jct_s"], 1), round(figures["p99_jct_s"], 1)) == (p50, p99)
    assert (len(outcome.rounds), len(outcome.allocations)) == (rounds, 34)
    assert outcome.allocations[:5] == pytest.approx(first, abs=5e-5)
    assert outcome.rounds[:4] == starts
    assert [job.jct for job in outcome.jobs[:6]] == jcts


def test_gavel_isolated_first_round(gavel_files: Files) -> None:
    where: dict[str, set[int]] = {}
    for job, gpu in on_gavel(Isolated(), gavel_files).chosen[0]:
        where.setdefault(gpu, set()).add(job)
    assert where == {
        "v100": {2, 3, 5, 10, 12, 19, 20, 22},
        "p100": {23, 26, 27, 29, 31, 32, 33, 34, 35, 1, 8, 9},
        "k80": {13, 14, 17, 21, 24, 30, 0, 4, 6},
    }


@pytest.mark.parametrize(
    ("rule", "makespan", "average", "within"),
    [
        (MaxMin(), 33207.584, 11262.234, 0.02),
        (FinishTimeProgramme(), 30448.618, 12026.024, 0.02),
        (MaxSum(), 31090.051, 9646.244, 0.02),
        (MinMakespan(), 24126.995, 21012.108, 0.02),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_convex_rules_on_shockwave_are_near_the_reference_with_the_same_solver(
    rule: ShareRule, makespan: float, average: float, within: float, shockwave_files: Files
) -> None:
    figures = on_shockwave(rule, shockwave_files).summary()
    assert figures["makespan_s"] == pytest.approx(makespan, rel=within)
    assert figures["avg_jct_s"] == pytest.approx(average, rel=within)


@pytest.mark.parametrize(
    ("rule", "makespan", "average", "within"),
    [
        # without speeds that differ by GPU they are held to 2 % on Shockwave's jobs, too
        pytest.param(MaxMin(), 76032.0, 19305.7, 0.02, marks=pytest.mark.slow),
        (MaxMin(perf=True), 64718.6, 14705.5, 0.02),
        (FinishTimeProgramme(perf=True), 64182.9, 15017.9, 0.02),
        pytest.param(MaxSum(), 64280.2, 17682.4, 0.02, marks=pytest.mark.slow),
        # Not unique: the spread between solvers that share the mechanism is 8 %, 10 % for the makespan. Both rules
        # are held to 2 % on Shockwave's jobs.
        pytest.param(FinishTimeProgramme(), 75946.0, 20167.6, 0.08, marks=pytest.mark.slow),
        pytest.param(MinMakespan(perf=True), 62286.9, 25256.7, 0.10, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_convex_rules_on_gavel_are_near_the_reference_with_the_same_solver(
    rule: ShareRule, makespan: float, average: float, within: float, gavel_files: Files
) -> None:
    figures = on_gavel(rule, gavel_files).summary()
    assert figures["makespan_s"] == pytest.approx(makespan, rel=within)
    assert figures["avg_jct_s"] == pytest.approx(average, rel=within)


def test_closed_form_policies_are_fast(shockwave_files: Files, gavel_files: Files) -> None:
    began = process_time()
    on_shockwave(GandivaFair(), shockwave_files)
    middle = process_time()
    on_gavel(Isolated(), gavel_files)
    assert middle - began < 30.0
    assert process_time() - middle < 10.0


def test_seeded_words_are_pythons() -> None:
    mine, pythons = python_generator(5), Random(5)
    assert [int(mine.integers(0, 1 << 32, dtype=np.uint32)) for _ in range(2000)] == [
        pythons.getrandbits(32) for _ in range(2000)
    ]


# Small cases of our own


def job(number: int, steps: int = 1000, gpus: int = 1, arrival: float = 0.0) -> TraceJob:
    return TraceJob(number, "ResNet-18 (batch size 256)", steps, gpus, arrival)


def run(jobs: list[TraceJob], gpus: Mapping[str, int], policy: Policy | None = None) -> Outcome:
    return RoundsScenario(jobs, SMALL, gpus, SHOCKWAVE).run(policy or RoundBased(GandivaFair()))


def test_one_job_alone_loses_nothing_but_rounding() -> None:
    outcome = run([job(0, 1000)], {"v100": 1})
    assert outcome.jobs[0].jct == pytest.approx(500.0)
    assert outcome.rounds == (0.0, 120.0, 240.0, 360.0, 480.0)
    assert outcome.jobs[0].restarts == 0


def test_a_job_that_did_not_run_before_loses_the_overhead() -> None:
    outcome = run([job(0, 480), job(1, 480)], {"v100": 1})  # two rounds each, taking turns
    assert len(outcome.rounds) > 4
    assert all(found.restarts > 0 for found in outcome.jobs)
    assert outcome.busy < outcome.makespan - 20


def test_a_job_larger_than_the_cluster_is_rejected_and_the_rest_go_on() -> None:
    outcome = run([job(0, gpus=2), job(1)], {"v100": 1})
    assert [found.name for found in outcome.jobs] == ["1"]
    assert [(found.number, found.status) for found in outcome.dropped] == [(0, "rejected")]
    assert "2 GPUs" in outcome.dropped[0].reason


def test_a_gang_that_was_never_measured_is_rejected_if_nothing_could_hold_it() -> None:
    outcome = run([job(0, gpus=999), job(1)], {"v100": 1})
    assert [found.name for found in outcome.jobs] == ["1"]
    assert "999 GPUs" in outcome.dropped[0].reason


def test_a_job_type_that_was_never_measured_is_named_with_its_line() -> None:
    with pytest.raises(WorkloadError, match=r"line 2 of the trace: .*nothing measured for Unheard-of"):
        run([job(0), replace(job(1), type="Unheard-of (batch size 8)")], {"v100": 1})


def test_shockwave_ends_in_an_idle_gap_and_says_whom_it_dropped() -> None:
    jobs = [job(0, 100), job(1, 100, arrival=9_000.0)]
    outcome = run(jobs, {"v100": 1})
    assert [(found.number, found.status) for found in outcome.dropped] == [(1, "unfinished")]
    gavel = RoundsScenario(jobs, SMALL, {"v100": 1}, GAVEL).run(RoundBased(GandivaFair(), 360.0, 1920.0))
    assert [found.name for found in gavel.jobs] == ["0", "1"]


def test_a_job_that_gains_nothing_leaves_after_five_failures() -> None:
    jobs = [TraceJob(0, "ResNet-18 (batch size 256)", 1, 2, 0.0), job(1, 2000)]  # one step on two GPUs
    outcome = RoundsScenario(jobs, SMALL, {"v100": 3}, GAVEL).run(RoundBased(Isolated(), 360.0, 1920.0))
    assert [(found.number, found.status) for found in outcome.dropped] == [(0, "removed")]
    assert "5 micro-rounds" in outcome.dropped[0].reason


def test_any_policy_may_run_here() -> None:
    jobs = [job(i, 500 + 100 * i, 1 + i % 2, 30.0 * i) for i in range(6)]
    outcome = run(jobs, {"v100": 4}, leased_las(120.0))
    assert len(outcome.jobs) == 6


class Fixed:
    """Grants whatever it is told."""

    name = "fixed"

    def __init__(self, **placements: tuple[tuple[str, int], ...]) -> None:
        self.placements = placements

    def decide(self, view: View, memory: object, rng: np.random.Generator) -> Decision:
        return Decision({name.lstrip("j"): Grant(where) for name, where in self.placements.items()})


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Fixed(j0=(("v100-0000", 2),)), "2 GPUs on v100-0000, which has 1"),
        (Fixed(j0=(("v100-0000", 1),)), "1 GPUs for job 0, a gang of 2"),
        (Fixed(j0=(("moon", 2),)), "moon, which has 0"),
        (Fixed(j9=(("v100-0000", 1),)), "job 9, which is not active"),
        (Fixed(), "wait for ever"),
    ],
)
def test_a_policy_that_no_cluster_could_follow_is_stopped(policy: Policy, reason: str) -> None:
    with pytest.raises(SimulationError, match=reason):
        run([job(0, gpus=2)], {"v100": 2}, policy)


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"ResNet-18 \(batch size 256\) on 3 × v100"):
        RoundsScenario([job(0, gpus=3)], SMALL, {"v100": 4}, SHOCKWAVE)
    with pytest.raises(WorkloadError, match="known types"):
        RoundsScenario([job(0)], SMALL, {"h100": 4}, SHOCKWAVE)


def test_nodes_hold_what_they_should() -> None:
    capacity = gpu_cluster({"v100": 5, "k80": 2}, per_node=2)
    assert [(n.id, n.instance_type, n.gpus) for n in capacity.nodes] == [
        ("k80-0000", "k80", 2), ("v100-0000", "v100", 2), ("v100-0001", "v100", 2), ("v100-0002", "v100", 1),
    ]  # fmt: skip
