"""The search for a plan, the systems that it is compared with, and costs."""

from math import exp
from time import monotonic

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.communication.baselines import SYSTEMS, Problem
from ebbflow.planners.communication.costs import Choice, LinkModel, TableModel, option_of, options_of
from ebbflow.planners.communication.dag import CommOp
from ebbflow.planners.communication.schedule import Plan, schedule
from ebbflow.planners.communication.search import acceptance, brute_force, greedy_plan, metropolis_search
from ebbflow.planners.communication.workloads import A1, A2, A3, dlrm_dag
from ebbflow.planners.errors import OptionError
from tests.planners.communication.fixtures import (
    DLRM,
    DLRM_OPTIONS,
    HAND_ORDER,
    MOTIVATING,
    MOTIVATING_OPTIONS,
)


def ticking(step: float = 0.001) -> "Ticks":
    """Return a clock that goes on by itself."""
    return Ticks(step)


class Ticks:
    def __init__(self, step: float) -> None:
        self._now, self._step = 0.0, step

    def __call__(self) -> float:
        self._now += self._step
        return self._now


def makespan(plan: Plan) -> float:
    return schedule(MOTIVATING, plan, iterations=1).makespan


def period(plan: Plan) -> float:
    return schedule(DLRM.prefetched(), plan).period


def test_disjoint_and_joint_optimum_of_the_motivating_example() -> None:
    best = brute_force(MOTIVATING_OPTIONS, makespan)
    assert best.greedy_cost == pytest.approx(11.0)
    assert best.cost == pytest.approx(9.5)
    assert best.plan["a"].name == "tcp"
    found = metropolis_search(MOTIVATING_OPTIONS, makespan, rng=np.random.default_rng(1), clock=ticking())
    assert found.cost == pytest.approx(9.5)


def test_the_optimum_of_the_dlrm_is_found_by_brute_force_and_by_the_walk() -> None:
    best = brute_force(DLRM_OPTIONS, period)
    assert (best.proposals, best.cost) == (324, pytest.approx(69.3, abs=0.01))
    for seed in range(3):
        found = metropolis_search(
            DLRM_OPTIONS, period, rng=np.random.default_rng(seed), clock=ticking(), min_proposals=300
        )
        assert found.cost == pytest.approx(best.cost, abs=0.01)
        costs = [cost for _, cost in found.improvements]
        assert costs == sorted(costs, reverse=True)
        assert found.cost <= found.greedy_cost


@pytest.mark.parametrize(
    ("proposed", "probability"), [(9.5, 1.0), (10.0, 1.0), (11.0, 0.367879), (12.0, 0.135335)]
)
def test_acceptance(proposed: float, probability: float) -> None:
    assert acceptance(10.0, proposed, 1.0) == pytest.approx(probability, abs=1e-6)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 5))
def test_acceptance_is_metropolis(cost: float, proposed: float, beta: float) -> None:
    assert acceptance(cost, proposed, beta) == (1.0 if proposed <= cost else exp(-beta * (proposed - cost)))


def test_the_systems_stand_as_in_the_thesis() -> None:
    problem = Problem(DLRM, DLRM_OPTIONS, np.random.default_rng(0), ticking(), HAND_ORDER)
    periods = {one.system: one.timeline.period for one in problem.compare()}
    assert list(periods) == list(SYSTEMS)
    wanted = {"FIFO": 103.5, "LIFO": 100.0, "HO": 84.24, "S-Sched": 77.9, "Syndicate": 69.3}
    for name, value in wanted.items():
        assert periods[name] == pytest.approx(value, abs=0.1), name
    assert periods["S-Exec"] <= 83.19 + 0.1  # which has more options here than the thesis' fixture gives it
    assert periods["S-Sched+greedy"] == pytest.approx(70.4, abs=0.1)


def test_a_ring_is_faster_than_a_tree_from_the_crossover_on() -> None:
    model = LinkModel()
    assert model.crossover(128) == pytest.approx(1.248e6, rel=1e-3)
    assert model.ring(128, 1.3e6) < model.tree(128, 1.3e6)
    assert model.ring(128, 1.2e6) > model.tree(128, 1.2e6)


@pytest.mark.parametrize(("kib", "motifs"), [(1, 1), (16, 1), (32, 2), (64, 4), (4096, 4)])
def test_wider_splines_pay_for_larger_all_to_alls(kib: int, motifs: int) -> None:
    model = LinkModel()
    seconds = {w: model.all_to_all(128, kib * 1024, w) for w in (1, 2, 4, 8)}
    assert min(seconds, key=lambda w: seconds[w]) == motifs


def test_a_table_is_linear_between_what_was_measured() -> None:
    table = TableModel({("all-reduce", 4, "ring/1@0"): [(100, 1.0), (200, 2.0), (400, 3.0)]})
    seconds = [
        table.seconds(CommOp("x", "all-reduce", size, 4), Choice("ring")) for size in (50, 100, 150, 300, 600)
    ]
    assert seconds == [1.0, 1.0, 1.5, 2.5, 4.0]
    with pytest.raises(OptionError, match="all-reduce among 4 ranks was not measured as tree/1@0"):
        table.seconds(CommOp("x", "all-reduce", 100, 4), Choice("tree"))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "must not be empty"),
        ([(2, 1), (1, 1)], "must have rising sizes"),
        ([(1, float("nan"))], "must be bytes"),
    ],
)
def test_a_table_that_is_none_is_refused(points: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TableModel({("all-reduce", 4, "ring/1@0"): points})


def test_options_are_those_that_the_channel_s_model_knows() -> None:
    op = CommOp("x", "all-reduce", 1e6, 4)
    choices = [Choice("ring"), Choice("spline", 4), Choice("tree", 2, 1)]
    found = options_of(op, choices, {0: LinkModel(), 1: LinkModel()})
    assert [one.name for one in found] == ["ring/1@0", "tree/2@1"]
    assert option_of(op, Choice("ring", 4), LinkModel()).seconds == pytest.approx(
        LinkModel().seconds(op, Choice("ring", 4))
    )
    with pytest.raises(OptionError, match="no choice can carry out x"):
        options_of(op, [Choice("spline")], {0: LinkModel()})


def test_a_collective_without_options_is_refused() -> None:
    with pytest.raises(OptionError, match="b has no option"):
        greedy_plan({"a": MOTIVATING_OPTIONS["a"], "b": ()})
    with pytest.raises(OptionError, match="goes through 100 plans at most; got 324"):
        brute_force(DLRM_OPTIONS, period, max_plans=100)


@pytest.mark.parametrize("model", [A1, A2, A3])
def test_a_large_dlrm_is_planned_within_its_bound_and_better_than_greedily(model: object) -> None:
    dag = dlrm_dag(model, 128, groups=4)  # type: ignore[arg-type]
    choices = [
        Choice(algorithm, pieces, channel)
        for algorithm in ("whole", "ring", "tree", "spline")
        for pieces in (1, 2, 4)
        for channel in (0, 1)
    ]
    models = {0: LinkModel(), 1: LinkModel(per_byte=1 / 3e9)}
    options = {op.name: options_of(op, choices, models) for op in dag.comm}
    early = dag.prefetched()
    found = metropolis_search(
        options,
        lambda plan: schedule(early, plan).period,
        rng=np.random.default_rng(0),
        clock=monotonic,
        seconds=1.0,
        min_proposals=20,
    )
    assert found.cost <= found.greedy_cost
    assert found.cost >= dag.compute_seconds * (1 - 1e-9)
