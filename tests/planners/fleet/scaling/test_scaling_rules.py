"""How many nodes a pool is to have: per GPU, by utility, to a deadline; and the same again from a record."""

import json
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import pool

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.scaling.band import UtilityBand
from ebbflow.planners.fleet.scaling.deadline import DeadlineScaling
from ebbflow.planners.fleet.scaling.per_gpu import PerGpuScaling, by_throughput, nodes_wanted, per_gpu_curve
from ebbflow.planners.fleet.scaling.record import Recorded, recorded
from ebbflow.planners.fleet.scaling.utility import utility_curve, utility_now
from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.planners.model.scheduling import App, Decision, Grant, View
from ebbflow.planners.training.speed.batch_size import BatchLimits
from ebbflow.planners.training.speed.goodput import GoodputModel, GradientStatistics
from ebbflow.planners.training.speed.throughput import ThroughputParameters

IMAGENET = GoodputModel(
    ThroughputParameters(0.0638, 0.00449, 0.307, 0.00666, 1e-8, 0.0515, 2.67),
    GradientStatistics(1.0, 5590 / 200),
    BatchLimits(200, 12_800, 20, 200),
)


# --- per GPU ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("now", [1, 2, 4, 7])
def test_the_rule_and_the_function_for_schedulers_agree(now: int) -> None:
    curve = per_gpu_curve(IMAGENET, 16, 4)
    target = PerGpuScaling(explore=16).decide(pool(now, max_nodes=16), 7, curve)
    assert target.nodes == nodes_wanted(IMAGENET, now, 16, 4)
    assert (target.pool, target.revision) == ("etl", 7)


def test_by_throughput_it_grows_where_goodput_says_stay() -> None:
    pooled = pool(8, max_nodes=16)
    goodput = PerGpuScaling().decide(pooled, 0, per_gpu_curve(IMAGENET, 16, 4))
    throughput = PerGpuScaling("throughput").decide(pooled, 0, per_gpu_curve(by_throughput(IMAGENET), 16, 4))
    assert (goodput.nodes, throughput.nodes) == (8, 16)
    assert goodput.reason.startswith("keep 8: goodput per GPU on 8 nodes")
    assert throughput.reason.startswith("grow to 16: throughput per GPU on 8 nodes")


def test_it_explores_no_more_than_so_many_times_the_nodes_that_are_there() -> None:
    target = PerGpuScaling(explore=2.0).decide(pool(3), 0, lambda _: 0.99)
    assert target.nodes in range(3, 7)


def test_it_never_shrinks_unless_the_pool_may_hold_less() -> None:
    assert PerGpuScaling().decide(pool(6), 0, lambda _: 0.01).nodes == 6
    assert PerGpuScaling().decide(pool(6, max_nodes=4), 0, lambda _: 0.9).nodes == 4


# --- utility band -------------------------------------------------------------------------------------------


def seen(mean: float, **more: float) -> UtilityBand:
    band = UtilityBand(**more)  # type: ignore[arg-type]
    for _ in range(band.rounds):
        band = band.after(mean)
    return band


def test_it_waits_until_its_window_is_full() -> None:
    band = UtilityBand(rounds=3).after(0.9).after(0.9)
    target = band.decide(pool(4), 0, lambda _: pytest.fail("nothing needs to be planned yet"))
    assert target.nodes == 4
    assert "2 of 3 rounds" in target.reason


def test_within_the_band_nothing_is_planned() -> None:
    assert seen(0.5).decide(pool(4), 0, lambda _: pytest.fail("within")).nodes == 4


@pytest.mark.parametrize(("mean", "now", "nodes"), [(0.9, 4, 8), (0.1, 16, 8), (0.9, 1, 8)])
def test_outside_of_it_the_count_nearest_to_the_middle_is_found(mean: float, now: int, nodes: int) -> None:
    # utility 4 / n: 0.5 at 8 nodes
    assert seen(mean).decide(pool(now), 0, lambda count: min(1.0, 4 / count)).nodes == nodes


@given(
    st.floats(0.05, 30.0),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([0.0, 0.2, 0.7, 1.0]),
)
def test_the_count_is_the_best_within_the_limits(scale: float, now: int, max_nodes: int, mean: float) -> None:
    def curve(nodes: int) -> float:
        return min(1.0, scale / nodes) if nodes else 1.0

    band = seen(mean, rounds=1)
    target = band.decide(pool(now, max_nodes=max_nodes), 0, curve)
    assert 0 <= target.nodes <= max_nodes
    if mean > band.high and now <= max_nodes:
        best = min(abs(curve(nodes) - 0.5) for nodes in range(now, max_nodes + 1))
        assert abs(curve(target.nodes) - 0.5) == best
        assert target.nodes >= now


def test_a_large_pool_is_bisected() -> None:
    tried: list[int] = []

    def curve(nodes: int) -> float:
        tried.append(nodes)
        return min(1.0, 300 / nodes)

    target = recorded(seen(0.9), pool(1, max_nodes=4096), 0, curve).target
    assert target.nodes == 600
    assert len(tried) <= 14


def test_the_window_forgets_the_oldest_and_can_be_cleared() -> None:
    band = UtilityBand(rounds=2).after(0.1).after(0.2).after(0.3)
    assert band.seen == (0.2, 0.3)
    assert band.cleared().seen == ()


class Even:
    """Gives every app the same number of whole nodes."""

    name = "even"

    def decide(self, view: View, memory: object, rng: np.random.Generator) -> Decision:
        each = len(view.capacity.nodes) // len(view.apps)
        grants = {}
        for at, app in enumerate(view.apps):
            mine = view.capacity.nodes[at * each : (at + 1) * each]
            grants[app.id] = Grant(tuple((node.id, node.gpus) for node in mine))
        return Decision(grants)


class Root:
    """Goodput grows as the root of the GPUs."""

    def best(self, nodes: np.ndarray, gpus: np.ndarray) -> np.ndarray:
        return np.sqrt(gpus)


def test_utility_on_other_sizes_is_that_of_allocations_made_for_them() -> None:
    capacity = Capacity(0, tuple(Node(f"n{at}", 8, 32.0, gpus=2) for at in range(4)))
    apps = [
        App("a", goodput=Root(), held=(("n0", 2),)),
        App("b", goodput=Root(), held=(("n1", 2), ("n3", 2))),
    ]
    view = View(0.0, apps, capacity)
    # two GPUs and four of eight: (√2 + √4) / 8
    assert utility_now(view) == pytest.approx((2**0.5 + 2.0) / 8)
    curve = utility_curve(view, Even(), Node("like", 8, 32.0, gpus=2), seed=3)
    # each app has n / 2 nodes of 2 GPUs: 2·√n / 2n
    for count in (2, 4, 8):
        assert curve(count) == pytest.approx(count**-0.5)
    assert curve(0) == 0.0


# --- deadlines ----------------------------------------------------------------------------------------------


@given(
    st.lists(st.one_of(st.floats(0.0, 100.0), st.just(inf)), min_size=1, max_size=20),
    st.floats(-10.0, 100.0),
    st.integers(0, 20),
    st.floats(0.0, 20.0),
)
def test_the_fewest_nodes_that_end_in_time_or_the_soonest(
    values: list[float], seconds: float, there: int, boot: float
) -> None:
    max_nodes = len(values) - 1
    pooled = pool(min(there, max_nodes), max_nodes=max_nodes)
    here = min(there, max_nodes)

    def total(nodes: int) -> float:
        return values[nodes] + (boot if nodes > here else 0.0)

    target = DeadlineScaling(seconds, boot).decide(pooled, 0, values.__getitem__)
    enough = [nodes for nodes in range(max_nodes + 1) if total(nodes) <= seconds]
    if enough:
        assert target.nodes == enough[0]
    else:
        assert "no number of nodes" in target.reason
        soonest = min(map(total, range(max_nodes + 1)))
        assert target.nodes == here if soonest == inf else total(target.nodes) == soonest


def test_a_bound_saves_estimates_and_changes_nothing() -> None:
    asked: list[int] = []

    def curve(nodes: int) -> float:
        asked.append(nodes)
        return 1000 / nodes + 5 if nodes else inf

    rule, pooled = DeadlineScaling(60.0, 10.0), pool(4, max_nodes=100)
    bounded = rule.decide(pooled, 0, curve, lambda nodes: 1000 / nodes if nodes else inf)
    few = set(asked)
    assert bounded == rule.decide(pooled, 0, curve)
    assert bounded.nodes == 23  # 1000 / 23 + 5 + 10 <= 60
    assert few == {20, 21, 22, 23}
    assert bounded.reason == "grow to 23: the work completes in 58 s, within 60 s; on 22 in 60 s"


# --- what all share -----------------------------------------------------------------------------------------


def test_the_on_demand_base_stays_and_is_never_more_than_all() -> None:
    rule = DeadlineScaling(50.0)
    assert rule.decide(pool(4, on_demand=3), 0, lambda nodes: 100 / max(nodes, 1)).on_demand == 2
    assert rule.decide(pool(8, on_demand=1), 0, lambda nodes: 100 / max(nodes, 1)).on_demand == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: PerGpuScaling(trigger=0.4, target=0.5),
        lambda: PerGpuScaling("speed"),  # type: ignore[arg-type]
        lambda: PerGpuScaling(explore=0.5),
        lambda: UtilityBand(low=0.7, high=0.6),
        lambda: UtilityBand(rounds=0),
        lambda: UtilityBand().after(-0.1),
        lambda: DeadlineScaling(inf),
        lambda: DeadlineScaling(1.0, -1.0),
        lambda: PerGpuScaling().decide(replace(pool(1), min_nodes=5, max_nodes=4), 0, lambda _: 1.0),
    ],
)
def test_bad_settings_are_refused(make: object) -> None:
    with pytest.raises(OptionError):
        make()  # type: ignore[operator]


VALUES = st.dictionaries(
    st.integers(0, 12), st.one_of(st.floats(0.0, 50.0), st.just(inf)), min_size=13, max_size=13
)
RULES = st.one_of(
    st.builds(PerGpuScaling, st.sampled_from(["goodput", "throughput"]), explore=st.floats(1.0, 12.0)),
    st.builds(UtilityBand, rounds=st.just(2), seen=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0))),
    st.builds(DeadlineScaling, st.floats(0.0, 50.0), st.floats(0.0, 10.0)),
)


@given(RULES, VALUES, st.integers(0, 12), st.integers(0, 12))
def test_a_decision_replays_exactly_from_json(
    rule: PerGpuScaling | UtilityBand | DeadlineScaling,
    values: dict[int, float],
    planned: int,
    max_nodes: int,
) -> None:
    made = recorded(rule, pool(planned, max_nodes=max_nodes), 3, values.__getitem__)
    text = json.dumps(made.to_json(), allow_nan=False)
    again = Recorded.from_json(json.loads(text))
    assert again == made
    assert again.again() == made.target
    assert made.target.reason
    assert 0 <= made.target.nodes <= max_nodes or planned == made.target.nodes


def test_a_record_of_other_code_says_so() -> None:
    made = recorded(DeadlineScaling(10.0), pool(1, max_nodes=4), 0, lambda nodes: 20 / max(nodes, 1))
    with pytest.raises(OptionError, match="never asked"):
        replace(made, rule=DeadlineScaling(5.0)).again()
    with pytest.raises(OptionError, match="rule must be one of"):
        Recorded.from_json({**made.to_json(), "rule": "dice"})
