"""Share rules: what each promises about its fractions of time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.infra.simulation.rounds.trace import read_throughputs, read_trace
from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.shares.allox import AlloX
from ebbflow.planners.scheduling.shares.least_rho import FinishTimeProgramme, Isolation
from ebbflow.planners.scheduling.shares.linear_program import root
from ebbflow.planners.scheduling.shares.max_min import MaxMin, MaxSum, MinMakespan
from ebbflow.planners.scheduling.shares.rules import Demand, ShareRule, isolated, reference_throughput
from ebbflow.planners.scheduling.shares.simple import FifoPerf, GandivaFair, Isolated

FOLDER = Path(__file__).parents[3] / "fixtures/training/gavel"
WITHIN_CAPACITY: list[ShareRule] = [
    Isolated(), FifoPerf(), MaxMin(), MaxMin(perf=True), MaxSum(), MinMakespan(), MinMakespan(perf=True),
    FinishTimeProgramme(), FinishTimeProgramme(perf=True),
]  # fmt: skip


def demand(
    throughput: Any, gpus: Any, gang: Any = None, remaining: Any = None, age: Any = None, weight: Any = None
) -> Demand:
    speed = np.array(throughput, dtype=float)
    apps, types = speed.shape

    def column(values: Any, default: float) -> Any:
        return np.full(apps, default) if values is None else np.array(values, dtype=float)

    return Demand(
        apps=tuple(f"a{i}" for i in range(apps)),
        types=("k80", "p100", "v100")[:types] if types > 1 else ("v100",),
        throughput=speed,
        gang=column(gang, 1.0),
        weight=column(weight, 1.0),
        remaining=column(remaining, 1000.0),
        age=column(age, 0.0),
        gpus=np.array(gpus, dtype=float),
    )


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    apps, types = draw(st.integers(1, 7)), draw(st.integers(1, 3))

    def values(least: float, most: float, count: int) -> list[float]:
        return draw(st.lists(st.floats(least, most), min_size=count, max_size=count))

    return demand(
        np.array(values(0.5, 50.0, apps * types)).reshape(apps, types),
        draw(st.lists(st.integers(1, 6), min_size=types, max_size=types)),
        draw(st.lists(st.sampled_from([1, 1, 2, 4]), min_size=apps, max_size=apps)),
        values(10.0, 1e5, apps),
        values(0.0, 5e3, apps),
        values(0.5, 3.0, apps),
    )


@pytest.mark.parametrize("rule", WITHIN_CAPACITY, ids=lambda rule: rule.name)
@settings(max_examples=6, deadline=None)
@given(demands())
def test_shares_are_fractions_within_capacity(rule: ShareRule, seen: Demand) -> None:
    shares, memory = rule.shares(seen, None)
    assert shares.shape == seen.throughput.shape
    assert shares.min() >= 0
    assert shares.sum(axis=1).max() <= 1 + 1e-7
    assert (seen.gang @ shares <= seen.gpus + 1e-6).all()
    again, _ = rule.shares(seen, None)
    assert (again == shares).all()
    rule.shares(seen, memory)  # its own memory is accepted


@pytest.mark.parametrize("rule", [*WITHIN_CAPACITY, GandivaFair(), AlloX()], ids=lambda rule: rule.name)
def test_nobody_there_gets_nothing(rule: ShareRule) -> None:
    nobody = demand(np.zeros((0, 2)), [4, 4])
    assert rule.shares(nobody, None)[0].shape == (0, 2)


def test_closed_forms() -> None:
    seen = demand(np.ones((4, 2)), [2, 6], gang=[1, 1, 2, 4])
    assert (GandivaFair().shares(seen)[0] == np.tile([0.25, 0.75], (4, 1))).all()  # 0.5, 1.5 scaled to 1
    expected = [[0.25, 0.75], [0.25, 0.75], [0.25, 0.75], [0.125, 0.375]]
    assert np.allclose(Isolated().shares(seen)[0], expected)
    assert np.allclose(isolated(demand(np.ones((8, 1)), [4], gang=[2] * 8)), 0.25)


def test_fifo_takes_the_fastest_type_with_room_and_stops_at_the_first_without() -> None:
    seen = demand([[1, 2], [3, 5], [0, 4], [9, 9]], [2, 1], gang=[1, 1, 1, 2])
    assert FifoPerf().shares(seen)[0].tolist() == [[0, 1], [1, 0], [0, 0], [0, 0]]
    wide_first = demand([[1], [1]], [2], gang=[4, 1])
    assert FifoPerf().shares(wide_first)[0].tolist() == [[0], [0]]


def test_allox_puts_the_shortest_first_and_keeps_single_gpu_apps() -> None:
    seen = demand([[1.0]] * 3, [1], remaining=[300, 100, 200], age=[5, 5, 5])
    shares, memory = AlloX(alpha=1.0).shares(seen)
    assert shares.tolist() == [[0], [1], [0]]
    longer = demand([[1.0]] * 3, [1], remaining=[1, 100, 200], age=[5, 5, 5])
    again, _ = AlloX(alpha=1.0).shares(longer, memory)
    assert again.tolist() == [[0], [1], [0]]  # it stays


def test_allox_looks_at_the_oldest_only() -> None:
    seen = demand([[1.0]] * 10, [1], remaining=[500] * 9 + [1], age=range(10, 0, -1))
    shares, _ = AlloX(alpha=0.2).shares(seen)
    assert shares[:2].sum() == 1  # of the two oldest, not the shortest of all
    assert AlloX(alpha=1.0).shares(seen)[0][9] == 1
    with pytest.raises(OptionError, match="alpha"):
        AlloX(alpha=2.0)


def test_max_min_on_one_type_is_the_isolated_share() -> None:
    seen = demand(np.ones((8, 1)), [4], gang=[1, 1, 2, 4, 1, 1, 1, 1])
    assert np.allclose(MaxMin().shares(seen)[0], isolated(seen), atol=1e-8)


def test_max_min_goes_on_where_the_least_cannot_be_raised() -> None:
    """One app is full at 1; the simple programme would leave the other wherever it likes."""
    seen = demand([[1.0], [1.0]], [4], gang=[1, 4])
    assert np.allclose(MaxMin().shares(seen)[0], [[1.0], [0.75]], atol=1e-8)


@settings(max_examples=6, deadline=None)
@given(demands())
def test_max_min_perf_gives_at_least_the_equal_share(seen: Demand) -> None:
    """Sharing incentive: nobody is slower than with an n-th of all GPUs, up to a whole gang."""
    shares, _ = MaxMin(perf=True).shares(demand(seen.throughput, seen.gpus, seen.gang))
    rate = (seen.throughput * shares).sum(axis=1) * seen.gang
    equal = seen.throughput @ (seen.gpus / seen.gpus.sum())
    alone = (seen.throughput * isolated(seen)).sum(axis=1) * seen.gang
    assert (rate / equal).min() >= (alone / equal).min() * (1 - 1e-6)


@settings(max_examples=6, deadline=None)
@given(demands())
def test_max_sum_beats_every_other_rule_on_the_sum(seen: Demand) -> None:
    def total(rule: ShareRule) -> float:
        return float((seen.throughput * rule.shares(seen, None)[0]).sum())

    best = total(MaxSum())
    assert all(total(rule) <= best * (1 + 1e-5) for rule in WITHIN_CAPACITY)


@settings(max_examples=6, deadline=None)
@given(demands())
def test_min_makespan_beats_every_other_rule_on_the_last_finish(seen: Demand) -> None:
    def last(rule: ShareRule) -> float:
        rate = (seen.throughput * rule.shares(seen, None)[0]).sum(axis=1)
        return float((seen.remaining / np.maximum(rate, 1e-12)).max())

    assert last(MinMakespan(perf=True)) <= min(last(rule) for rule in WITHIN_CAPACITY) * (1 + 1e-6)


def worst_rho(seen: Demand, shares: Any) -> float:
    rate = (seen.throughput * shares).sum(axis=1)
    alone = (seen.throughput * isolated(seen)).sum(axis=1)
    finish = seen.age + seen.remaining / np.maximum(rate, 1e-12)
    return float((finish / (seen.remaining / alone)).max())


@settings(max_examples=6, deadline=None)
@given(demands())
def test_finish_time_fairness_beats_every_other_rule_on_the_worst_rho(seen: Demand) -> None:
    best = worst_rho(seen, FinishTimeProgramme(perf=True).shares(seen)[0])
    assert best <= min(worst_rho(seen, rule.shares(seen, None)[0]) for rule in WITHIN_CAPACITY) * (1 + 1e-6)
    assert best <= worst_rho(seen, isolated(seen)) * (1 + 1e-6)


def test_finish_time_fairness_accumulates_isolated_time() -> None:
    rule, seen = FinishTimeProgramme(), demand([[2.0], [2.0]], [1], remaining=[1000, 1000])
    _, memory = rule.shares(seen)
    assert memory["a0"] == Isolation(0.0, 1000.0, 1.0)
    later = demand([[2.0], [2.0]], [1], remaining=[400, 1000], age=[300, 300])
    shares, memory = rule.shares(later, memory)
    assert memory["a0"].spent == 600.0
    assert memory["a1"].spent == 0.0
    # a0 has 600 + 400 s in isolation, a1 1000 s: equal finish times, so a1 needs all that a0 can spare.
    assert shares.sum() == pytest.approx(1.0)
    assert (400 / (2 * shares[0, 0])) == pytest.approx(1000 / (2 * shares[1, 0]), rel=1e-5)


def test_finish_time_fairness_falls_back_to_isolated_shares_when_not_convex() -> None:
    seen = demand([[2.0], [2.0]], [1], remaining=[-5, 1000])
    assert (FinishTimeProgramme().shares(seen)[0] == isolated(seen)).all()


def test_gavels_first_max_min_perf_allocation_has_the_rates_of_the_reference() -> None:
    """Shares at an optimum are not unique, rates are: the reference gives shares to two digits."""
    trace = [job for job in read_trace(FOLDER / "jobs-96.trace") if job.arrival == 0]
    table = read_throughputs(FOLDER / "simulation_throughputs.json")
    types = ("k80", "p100", "v100")
    speed = [[table.of(gpu, job.type, job.gpus) for gpu in types] for job in trace]
    seen = demand(speed, [24, 16, 8], [job.gpus for job in trace], [job.steps for job in trace])
    shares, _ = MaxMin(perf=True).shares(seen)
    reference = {
        1: (0.75, 0, 0.19), 2: (0.08, 0.92, 0), 3: (0.41, 0, 0.59), 4: (0.82, 0, 0), 5: (0, 0, 0.65),
        22: (0, 0.45, 0.36), 30: (0, 0.52, 0), 33: (0, 0.78, 0.22),
    }  # fmt: skip
    for row, expected in reference.items():
        ours = float(seen.throughput[row] @ shares[row])
        assert ours == pytest.approx(float(seen.throughput[row] @ expected), rel=0.02), trace[row]


def test_reference_throughput() -> None:
    seen = demand([[1, 2, 4], [3, 2, 0]], [1, 1, 1])
    assert reference_throughput(seen, "v100").tolist() == [[4, 4, 4], [0, 0, 0]]
    assert reference_throughput(seen, "h100").tolist() == [[4, 4, 4], [3, 3, 3]]


def test_root_finds_where_a_function_turns_positive() -> None:
    assert root(lambda x: x**3 - 8, 0.0, 100.0) == pytest.approx(2.0, rel=1e-8)
    assert root(lambda x: x, 1.0, 2.0) == 1.0


def test_a_demand_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(OptionError, match="gang must have shape"):
        demand(np.ones((2, 1)), [1], gang=[1])
    with pytest.raises(OptionError, match="at least 1 GPU"):
        demand(np.ones((1, 1)), [1], gang=[0])
