"""Jain's index and percentiles."""

import pytest
from clusters import job, ledger
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.query.shares import jain
from tests.evaluation.qoop.fairness import Fairness, percentile

shares = st.lists(st.floats(0.001, 1000), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("held", "index"),
    [((1, 1, 1, 1), 1), ((1, 0), 0.5), ((1, 2, 3), 36 / 42), ((5, 0, 0, 0), 0.25), ((0, 0), 1), ((7,), 1)],
)
def test_jains_index_by_example(held: tuple[float, ...], index: float) -> None:
    assert jain(held) == pytest.approx(index)


@given(shares, st.floats(0.01, 100))
def test_jains_index_is_between_one_over_n_and_one_whatever_the_unit(held: list[float], unit: float) -> None:
    assert 1 / len(held) - 1e-9 <= jain(held) <= 1 + 1e-9
    assert jain([x * unit for x in held]) == pytest.approx(jain(held))


def test_an_index_needs_shares() -> None:
    with pytest.raises(OptionError, match="one or more shares"):
        jain([])
    with pytest.raises(OptionError, match="one or more shares"):
        jain([1.0, -1.0])


def test_only_jobs_there_throughout_a_window_count() -> None:
    books = ledger((4, 16))
    a, b, c = (job(books, n, (1, 1, 9), order=i) for i, n in enumerate("abc"))
    books.place(a, a.pools[0], 0, 3)
    books.place(b, b.pools[0], 0, 1)
    fairness = Fairness(machines=1, window=10)
    fairness.advance(0, 4, [a, b, c])
    fairness.advance(4, 10, [a, b])  # c has left
    assert fairness.windows == 1
    assert fairness.jain == pytest.approx(jain([3, 1]))
    fairness.advance(10, 20, [a])  # one job says nothing
    assert fairness.windows == 1


def test_entitlements_follow_weights() -> None:
    books = ledger((4, 16))
    a, b = job(books, "a", (1, 1, 9), weight=3), job(books, "b", (1, 1, 9), order=1)
    books.place(a, a.pools[0], 0, 3)
    books.place(b, b.pools[0], 0, 1)
    fairness = Fairness(machines=1, window=10)
    fairness.advance(0, 10, [a, b])
    assert fairness.jain == pytest.approx(1)


def test_a_job_that_wants_little_is_unequal_but_honoured() -> None:
    books = ledger((4, 16))
    narrow, wide = job(books, "narrow", (1, 1, 1)), job(books, "wide", (1, 1, 9), order=1)
    books.place(narrow, narrow.pools[0], 0, 1)
    books.place(wide, wide.pools[0], 0, 3)
    fairness = Fairness(machines=1, window=10)
    fairness.advance(0, 10, [narrow, wide])
    assert fairness.jain == pytest.approx(jain([1, 3]))
    assert fairness.honoured == pytest.approx(1)


def test_a_job_kept_waiting_is_not_honoured() -> None:
    books = ledger((4, 16))
    waiting, greedy = job(books, "waiting", (1, 1, 9)), job(books, "greedy", (1, 1, 9), order=1)
    books.place(waiting, waiting.pools[0], 0, 1)
    books.place(greedy, greedy.pools[0], 0, 3)
    fairness = Fairness(machines=1, window=10)
    fairness.advance(0, 10, [waiting, greedy])
    assert fairness.honoured == pytest.approx(jain([0.5, 1]))


def test_windows_are_split_at_their_borders_and_idle_time_is_skipped() -> None:
    books = ledger((4, 16))
    a, b = job(books, "a", (1, 1, 9)), job(books, "b", (1, 1, 9), order=1)
    books.place(a, a.pools[0], 0, 2)
    fairness = Fairness(machines=1, window=10)
    fairness.advance(0, 1e6, [])
    fairness.advance(1e6, 1e6 + 35, [a, b])
    assert (fairness.windows, fairness.jain) == (3, pytest.approx(0.5))
    with pytest.raises(OptionError, match="window"):
        Fairness(1, 0)


def test_percentiles_are_interpolated() -> None:
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([1, 2, 3], 0) == 1
    assert percentile([1, 2, 3], 1) == 3
    assert percentile([10], 0.9) == 10
    with pytest.raises(OptionError, match="percentile"):
        percentile([], 0.5)
