"""Parameter blocks and stragglers: worked examples and what must always hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.failures.stragglers import StragglerWatch, late_workers, slow_workers
from tests.evaluation.optimus.ps_blocks import assign_blocks, round_robin

BLOCKS = [90, 40, 30, 20, 10, 6, 4, 0.1, 0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("servers", "loads", "requests", "dealt"),
    [
        (2, [100.3, 100.1], [5, 6], [134.2, 66.2]),
        (4, [50.3, 49.9, 50.1, 50.1], [3, 3, 3, 3], [100.1, 46.1, 34.1, 20.1]),
    ],
)
def test_worked_example(servers, loads, requests, dealt):
    assigned = assign_blocks(BLOCKS, servers)
    assert [server.load for server in assigned] == pytest.approx(loads)
    assert [server.requests for server in assigned] == requests
    assert [server.load for server in round_robin(BLOCKS, servers)] == pytest.approx(dealt)


@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_blocks_are_placed_whole_and_loads_stay_near_the_mean(sizes, servers):
    assigned = assign_blocks(sizes, servers)
    placed = [0.0] * len(sizes)
    for server in assigned:
        for block, size in server.pieces:
            placed[block] += size
    assert placed == pytest.approx(sizes)
    mean = sum(sizes) / servers
    small = sum(size for size in sizes if size < 0.01 * mean)
    largest = min(max(sizes), mean)  # of what is placed in one piece
    assert max(server.load for server in assigned) <= (mean + largest + small) * (1 + 1e-9)


@pytest.mark.parametrize(("sizes", "servers"), [([1.0], 0), ([0.0], 1), ([float("inf")], 1)])
def test_bad_blocks_are_refused(sizes, servers):
    with pytest.raises(OptionError):
        assign_blocks(sizes, servers)


def test_a_worker_is_late_if_its_median_lateness_is_large():
    steady = [[1.0, 1.1, 1.0, 1.9]] * 20
    assert late_workers(steady, step_time=1.0) == {3}
    assert late_workers(steady, step_time=2.0) == frozenset()
    once = [[1.0, 1.1, 1.0, 9.0]] + [[1.0, 1.1, 1.0, 1.0]] * 19
    assert late_workers(once, step_time=1.0) == frozenset()
    assert late_workers([], step_time=1.0) == frozenset()


def test_a_worker_is_slow_below_half_the_median():
    assert slow_workers({0: 10, 1: 9, 2: 4.7, 3: 11}) == {2}
    assert slow_workers({0: 10, 1: 10, 2: 5, 3: 10}) == frozenset()
    assert slow_workers({}) == frozenset()


def test_replacements_need_two_windows_and_a_pause():
    watch = StragglerWatch()
    assert watch.look(0, frozenset({1})) is None
    assert watch.look(20, frozenset()) is None
    assert watch.look(40, frozenset({1, 2})) is None
    assert watch.look(60, frozenset({1, 2})) == 1
    assert watch.look(80, frozenset({2})) is None  # a pause of 300 s since the last one
    assert watch.look(361, frozenset({2})) == 2
