"""Durations as people write them, and as they are shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import duration_of, parse_duration, show_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (60, "1m"),
        (90, "90s"),
        (120, "2m"),
        (3600, "1h"),
        (5400, "90m"),
        (172_800, "2d"),
        (0, "0s"),
        (0.5, "0.5s"),
    ],
)
def test_a_duration_is_shown_in_the_largest_unit_that_divides_it(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


@given(st.integers(0, 10**7))
def test_what_is_shown_is_read_again(seconds: int) -> None:
    assert parse_duration(show_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("value", "seconds"), [(90, 90.0), (0, 0.0), (0.5, 0.5), ("90s", 90.0), ("1h30m", 5400.0)]
)
def test_a_duration_in_a_file_is_a_number_or_a_text(value, seconds):
    assert duration_of(value, "loop.lease_duration") == seconds


@pytest.mark.parametrize("value", [True, -1, float("nan"), float("inf"), None, [1], "soon"])
def test_what_is_no_duration_in_a_file_is_named(value):
    with pytest.raises(OptionError, match=r"loop\.lease_duration must be a duration"):
        duration_of(value, "loop.lease_duration")
