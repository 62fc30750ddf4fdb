"""When a crashed daemon is started again: waits that double, a bound, and a fresh start after long service."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.restarts import RestartPolicy, Restarts

POLICY = RestartPolicy(first=1.0, most=5.0, limit=5, settled=100.0)


def test_waits_double_up_to_the_most_and_the_last_crash_is_the_end() -> None:
    seen, now, waits = Restarts(POLICY), 1000.0, []
    while not (seen := seen.crashed(now)).given_up:
        assert seen.due is not None
        waits.append(seen.due - now)
        now = seen.due
        seen = seen.started(now)
        assert seen.due is None
    assert waits == [1.0, 2.0, 4.0, 5.0]
    assert sum(waits) == POLICY.waited
    assert seen.due is None


def test_crashes_before_a_long_service_count_no_longer() -> None:
    seen = Restarts(POLICY)
    for _ in range(20):
        now = seen.since + POLICY.settled
        seen = seen.crashed(now)
        assert (seen.crashes, seen.due) == (1, now + 1.0)
        seen = seen.started(now + 1.0)


@given(
    st.floats(0, 10),
    st.floats(0, 100),
    st.integers(1, 12),
    st.lists(st.floats(0, 1000), min_size=1, max_size=60),
)
def test_starts_are_bounded_between_services_that_settle(
    first: float, more: float, limit: int, services: list[float]
) -> None:
    policy = RestartPolicy(first, first + more, limit, settled=500.0)
    seen, now, starts = Restarts(policy), 0.0, 0
    for service in services:
        now += service
        starts = 0 if now - seen.since >= policy.settled else starts
        seen = seen.crashed(now)
        if seen.given_up:
            assert seen.due is None
            assert starts == limit - 1
            return
        assert seen.due is not None
        assert first - 1e-6 <= seen.due - now <= first + more + 1e-6
        now = seen.due
        seen, starts = seen.started(now), starts + 1
        assert starts < limit


@pytest.mark.parametrize(
    "values", [{"first": -1.0}, {"first": 2.0, "most": 1.0}, {"limit": 0}, {"settled": -1.0}]
)
def test_values_outside_their_rules_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="restarts need 0 <= first <= most, limit >= 1 and settled >= 0"):
        RestartPolicy(**values)  # type: ignore[arg-type]
