"""Schedules: the same seed gives the same changes, and each does what its name says."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from tests.benchmarks.sql.schedules import SCHEDULES, Change, changes, hazard

SPANS = st.floats(1.0, 500.0)


def test_nothing_happens_without_a_schedule() -> None:
    assert list(changes("none", 10.0, 3)) == []
    assert hazard("none", 10.0, 3) is None


def test_one_worker_is_killed_at_half_of_the_span() -> None:
    assert list(changes("kill", 40.0, 3)) == [Change(20.0, 2)]


def test_a_notice_comes_a_tenth_of_the_span_before_and_at_least_two_seconds() -> None:
    assert list(changes("notice", 40.0, 3)) == [Change(20.0, 2, 4.0)]
    assert list(changes("notice", 10.0, 3)) == [Change(5.0, 2, 2.0)]


@given(SPANS)
def test_a_notice_is_never_given_before_the_query(span: float) -> None:
    (change,) = changes("notice", span, 3)
    assert 0 < change.notice <= change.after


@given(SPANS, st.text(max_size=5))
def test_volatile_levels_repeat_and_gaps_keep_their_bounds(span: float, seed: str) -> None:
    found = list(islice(changes("volatile", span, 3, seed), 12))
    assert [c.workers for c in found] == [1, 3, 2, 1, 3, 1, 3, 2, 1, 3, 1, 3]
    assert all(max(10.0, span / 12) <= c.after <= max(20.0, span / 4) for c in found)
    assert all(c.notice == 0 for c in found)


@given(SPANS)
def test_a_volatile_notice_never_reaches_back_before_the_change_before(span: float) -> None:
    found = list(islice(changes("volatile-notice", span, 3, "s"), 10))
    assert all(0 < c.notice <= c.after for c in found)


def test_the_seed_decides() -> None:
    first, again, other = (list(islice(changes("volatile", 60, 3, s), 5)) for s in ("a", "a", "b"))
    assert first == again
    assert first != other


def test_with_two_workers_the_levels_stay_within_them() -> None:
    assert {c.workers for c in islice(changes("volatile", 60, 2), 20)} == {1, 2}


def test_hazard_counts_the_losses_that_the_schedule_means() -> None:
    assert hazard("kill", 36.0, 3) == pytest.approx(100 / 3)
    # four losses in five sixths of the span on mean workers (3 + 1 + 3 + 2 + 1) / 5 = 2
    assert hazard("volatile", 120.0, 3) == pytest.approx(4 / (120.0 / 6 * 10 / 3600))
    assert hazard("volatile", 12.0, 3) == pytest.approx(4 / (15.0 * 10 / 3600))


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "none"])
def test_losing_a_worker_needs_two(schedule: str) -> None:
    with pytest.raises(OptionError, match="at least 2 workers; got 1"):
        changes(schedule, 10.0, 1)  # type: ignore[arg-type]


def test_bad_values_are_named() -> None:
    with pytest.raises(OptionError, match="'storm'"):
        changes("storm", 10.0, 3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="span must be > 0"):
        changes("kill", 0.0, 3)
