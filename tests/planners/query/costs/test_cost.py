import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.model import Measured, Share, Work
from ebbflow.planners.query.costs.cost import (
    DUCKDB,
    GIB,
    SPARK,
    JoinCostModel,
    Size,
    aggregate,
    join_work,
    partitions,
    scan,
    sort,
    splits,
    write,
)
from ebbflow.planners.query.costs.fitting import BOUND, PRIOR_ERROR, calibrate, pace, q_error
from ebbflow.planners.query.costs.operators import MOST_PARTITIONS, SMALLEST_READ, SPLIT, split_bytes

SHARE = Share.uniform(8, 32, nodes=4)
SIZES = st.builds(Size, st.floats(1, 1e9), st.floats(8, 1e11))
METHODS = st.sampled_from(["broadcast", "shuffle_hash", "sort_merge"])


def test_core_seconds_are_the_sum_over_kinds_of_work():
    work = Work(scanned_rows=1e7, joined_rows=2e6, tasks=3)
    rates = SPARK.rates
    expected = 1e7 * rates.scanned_rows + 2e6 * rates.joined_rows + 3 * rates.tasks
    assert SPARK.core_seconds(work) == pytest.approx(expected)


def test_a_broadcast_counts_once_per_node_and_shuffles_nothing():
    work = join_work("broadcast", Size(1e6, 1e8), Size(100, 1e4), Size(5e5, 1e7), SHARE)
    assert (work.built_rows, work.broadcast_bytes, work.probed_rows) == (400, 4e4, 1e6)
    assert work.shuffled_bytes == 0


def test_shuffled_joins_move_both_sides_and_only_the_merge_join_sorts():
    left, right, out = Size(1e6, 1e8), Size(1e5, 1e7), Size(5e5, 1e7)
    hashed = join_work("shuffle_hash", left, right, out, SHARE)
    merged = join_work("sort_merge", left, right, out, SHARE)
    assert hashed.shuffled_bytes == merged.shuffled_bytes == 1.1e8
    assert (hashed.built_rows, hashed.sorted_rows) == (1e5, 0)
    assert (merged.built_rows, merged.sorted_rows) == (0, 1.1e6)


def test_without_an_equality_every_pair_is_compared():
    left, right = Size(1e4, 1e6), Size(200, 1e4)
    for method in ("broadcast", "sort_merge"):
        assert join_work(method, left, right, Size(1, 8), SHARE, equality=False).probed_rows == 2e6


def test_other_operators_count_their_own_work():
    assert scan(Size(10, 2 * SPLIT)) == Work(scanned_rows=10, scanned_bytes=2 * SPLIT, tasks=2)
    assert aggregate(Size(100, 800), Size(5, 40), 2) == Work(aggregated_rows=100, shuffled_bytes=40, tasks=2)
    assert sort(Size(100, 800), 3) == Work(sorted_rows=100, shuffled_bytes=800, tasks=3)
    assert write(Size(100, 800)) == Work(written_bytes=800)


@given(METHODS, st.tuples(SIZES, SIZES, SIZES), st.booleans(), st.integers(1, 16))
def test_a_price_agrees_with_the_work_counted(method, sizes, equality, nodes):
    left, right, out = sizes
    share = Share.uniform(2.0 * nodes, 8.0 * nodes, nodes)
    cost = JoinCostModel(SPARK, share).price(method, left, right, out, equality=equality)
    work = join_work(method, left, right, out, share, equality=equality)
    assert cost.core_seconds == pytest.approx(SPARK.core_seconds(work))
    assert cost.serial <= cost.core_seconds * (1 + 1e-9)
    assert min(cost) >= 0.0


@given(METHODS, SIZES, SIZES, SIZES, st.floats(1, 100))
def test_more_rows_never_cost_less(method, left, right, out, factor):
    bigger = Size(left.rows * factor, left.bytes * factor)
    before = JoinCostModel(SPARK, SHARE).price(method, left, right, out)
    after = JoinCostModel(SPARK, SHARE).price(method, bigger, right, out)
    assert after.core_seconds >= before.core_seconds * (1 - 1e-9)


@given(st.floats(0, 1e13), st.floats(0.2, 300))
def test_partitions_are_bounded_whole_rounds_and_none_is_too_large(size, cores):
    count = partitions(size, cores)
    whole = max(int(cores), 1)
    assert 1 <= count <= MOST_PARTITIONS
    assert count <= whole or count % whole == 0 or count == MOST_PARTITIONS
    assert size / count <= SPLIT or count == MOST_PARTITIONS
    assert splits(size) >= 1


def test_a_build_side_must_fit_its_part_of_the_largest_node():
    pricer = JoinCostModel(SPARK, SHARE)  # 8 GiB and 2 cores a node
    probe = Size(1e9, 100 * GIB)
    fits = 8 * SPARK.broadcast_fraction / SPARK.hash_factor * GIB
    assert pricer.allows("broadcast", probe, Size(1e6, fits * 0.99))
    assert not pricer.allows("broadcast", probe, Size(1e6, fits * 1.01))
    assert pricer.allows("shuffle_hash", probe, Size(1e6, fits * 1.01))
    assert not pricer.allows("shuffle_hash", Size(1, 8), Size(1e12, 1e5 * GIB))
    assert pricer.allows("sort_merge", probe, Size(1e12, 1e5 * GIB))
    assert not pricer.allows("shuffle_hash", probe, Size(10, 80), equality=False)
    assert not JoinCostModel(SPARK, Share.uniform(0, 0)).allows("broadcast", probe, Size(10, 80))


# Calibration


def history(rates: Work, latency: float, count: int, seed: int, noise: float = 0.0) -> list[Measured]:
    rng = np.random.default_rng(seed)
    model = replace(SPARK, rates=rates)
    out = []
    for _ in range(count):
        amounts = [0.0 if rng.random() < 0.4 else rng.uniform(0.1, 2.0) / rate for rate in SPARK.vector]
        amounts[-1] = float(rng.integers(1, 64))
        work = Work(*amounts)
        seconds = model.core_seconds(work) * float(np.exp(rng.normal(0, noise)))
        tasks = int(work.tasks)
        out.append(Measured("spark", work, seconds, seconds / min(4, tasks) + latency, tasks, 4.0))
    return out


def scaled(factors: list[float]) -> Work:
    return Work(*(r * f for r, f in zip(SPARK.vector, factors, strict=True)))


FACTORS = [0.5, 2.0, 1.0, 3.0, 0.4, 1.5, 0.7, 2.5, 1.0, 0.8, 1.2]


def test_calibration_recovers_known_rates_and_latency():
    fitted = calibrate(SPARK, history(scaled(FACTORS), 0.6, 200, seed=1, noise=0.03))
    for kind, rate in zip(FACTORS[:-1], np.divide(fitted.vector, SPARK.vector), strict=False):
        assert rate == pytest.approx(kind, rel=0.15)
    assert fitted.latency == pytest.approx(0.6, rel=0.1)


def test_a_few_dozen_stages_predict_others_well():
    fitted = calibrate(SPARK, history(scaled(FACTORS), 0.6, 40, seed=1, noise=0.03))
    for measured in history(scaled(FACTORS), 0.6, 50, seed=9):
        assert fitted.core_seconds(measured.work) == pytest.approx(measured.task_seconds, rel=0.2)


def test_stages_slowed_by_something_else_hardly_move_the_fit():
    clean = history(scaled(FACTORS), 0.6, 60, seed=2)
    spoilt = [
        replace(m, task_seconds=m.task_seconds * (30 if i % 10 == 0 else 1)) for i, m in enumerate(clean)
    ]
    fitted = calibrate(SPARK, spoilt)
    for measured in clean:
        assert fitted.core_seconds(measured.work) == pytest.approx(measured.task_seconds, rel=0.2)


def test_a_slower_machine_raises_even_rates_that_no_stage_has_used():
    slow = scaled([3.0] * 11)
    seen = [
        replace(m, work=replace(m.work, sorted_rows=0.0), task_seconds=replace_seconds(m, slow))
        for m in history(slow, 0.25, 30, seed=3)
    ]
    fitted = calibrate(SPARK, seen)
    assert fitted.rates.sorted_rows == pytest.approx(3 * SPARK.rates.sorted_rows, rel=0.15)


def replace_seconds(measured: Measured, rates: Work) -> float:
    return replace(SPARK, rates=rates).core_seconds(replace(measured.work, sorted_rows=0.0))


def test_what_cold_cores_lose_is_told_from_what_work_costs():
    """Half of the stages met four cold cores, each of which lost 3 s, as JVMs on a third of a core do."""
    warm = history(SPARK.rates, 0.3, 40, seed=5, noise=0.03)
    cold = [
        replace(m, cold=4.0, task_seconds=m.task_seconds + 12.0, wall_seconds=m.wall_seconds + 5.0)
        for m in history(SPARK.rates, 0.3, 40, seed=6, noise=0.03)
    ]
    fitted = calibrate(SPARK, [*warm, *cold])
    assert fitted.warm_up == pytest.approx(3.0, rel=0.1)
    assert fitted.latency == pytest.approx(0.3, rel=0.1)  # of warm stages
    blind = calibrate(SPARK, [replace(m, cold=0.0) for m in (*warm, *cold)])
    others = history(SPARK.rates, 0.3, 20, seed=7)
    knowing, averaging = (
        np.median([abs(math.log(model.core_seconds(m.work) / m.task_seconds)) for m in others])
        for model in (fitted, blind)
    )
    assert knowing < 0.1 < averaging
    assert fitted.slower(2.0).warm_up == 2 * fitted.warm_up


def test_a_runs_pace_is_what_its_stages_have_in_common_and_little_of_it_where_they_are_few():
    models = {"spark": SPARK}
    slow = [replace(m, task_seconds=4 * m.task_seconds) for m in history(SPARK.rates, 0.3, 60, seed=8)]
    assert pace(models, []) == 1.0
    assert pace(models, slow[:1]) == pytest.approx(4 ** (1 / 3))
    assert pace(models, slow) == pytest.approx(4, rel=0.05)
    assert pace(models, [replace(one, engine="duckdb") for one in slow]) == 1.0
    warming = replace(SPARK, warm_up=3.0)
    cold = [
        replace(m, cold=1.0, task_seconds=m.task_seconds + 3.0) for m in history(SPARK.rates, 0.3, 9, seed=9)
    ]
    assert pace({"spark": warming}, cold) == pytest.approx(1.0)
    assert pace(models, [replace(slow[0], work=Work())]) == 1.0


@given(st.lists(st.floats(0.01, 100), max_size=12), st.floats(0.1, 10))
def test_an_error_is_at_least_one_and_what_all_stages_have_in_common_is_none(ratios, factor):
    error = q_error(ratios)
    assert error >= 1.0
    assert q_error([factor * ratio for ratio in ratios]) == pytest.approx(error)
    assert q_error([factor] * 3) < q_error([factor] * 2) < q_error([factor]) == pytest.approx(PRIOR_ERROR)


@given(st.lists(st.floats(0.5, 2), min_size=2, max_size=6), st.floats(2, 100))
def test_a_stage_that_is_farther_off_makes_the_error_larger(ratios, off):
    assert q_error([*ratios, 1.0, 1.0, 1.0, off * 2]) > q_error([*ratios, 1.0, 1.0, 1.0, off])
    assert q_error([]) == PRIOR_ERROR
    assert q_error([0.0, math.inf]) == PRIOR_ERROR


def test_little_history_moves_little():
    one = [Measured("spark", Work(joined_rows=1e7), 10 * 1e7 * SPARK.rates.joined_rows, 10.0, 4, 4.0)]
    fitted = calibrate(SPARK, one)
    assert SPARK.rates.scanned_rows <= fitted.rates.scanned_rows <= 3 * SPARK.rates.scanned_rows
    assert calibrate(SPARK, []) is SPARK


def test_other_engines_and_impossible_measurements_are_left_out():
    good = history(SPARK.rates, 0.25, 10, seed=4)
    bad = [
        replace(good[0], engine="duckdb", task_seconds=1e6),
        replace(good[0], task_seconds=math.nan),
        replace(good[0], task_seconds=0.0),
        replace(good[0], work=Work()),
    ]
    assert calibrate(SPARK, [*good, *bad]) == calibrate(SPARK, good)
    assert calibrate(DUCKDB, good) is DUCKDB


@given(st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=6), st.integers(0, 99))
def test_rates_stay_within_their_bounds_and_the_fit_is_repeatable(seconds, seed):
    base = history(SPARK.rates, 0.25, len(seconds), seed)
    measured = [replace(m, task_seconds=s) for m, s in zip(base, seconds, strict=True)]
    fitted = calibrate(SPARK, measured)
    for rate, prior in zip(fitted.vector, SPARK.vector, strict=True):
        assert prior / BOUND * (1 - 1e-9) <= rate <= prior * BOUND * (1 + 1e-9)
    assert SPARK.latency / BOUND <= fitted.latency * (1 + 1e-9)
    assert fitted == calibrate(SPARK, measured)


@given(st.floats(1, 1e11), st.floats(0.5, 500))
def test_a_scan_makes_whole_rounds_of_the_cores(largest, cores):
    split, whole = split_bytes(largest, cores), int(cores) or 1
    tasks = math.ceil(largest / split)
    assert split >= SMALLEST_READ
    if split > SMALLEST_READ:
        assert split <= 1.5 * SPLIT + 2**20  # never much more than a split
        assert -tasks % whole <= tasks / 3  # and few cores idle in the last round


def test_a_scan_on_three_cores_is_two_even_rounds():
    assert math.ceil(230e6 / split_bytes(230e6, 3)) == 6
