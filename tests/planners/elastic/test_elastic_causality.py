"""Versions and cached values: the worked examples of Litz."""

import pytest

from ebbflow.planners.elastic.causality import VersionClock, is_hit, may_depend
from ebbflow.planners.errors import OptionError


def test_a_task_depends_on_what_the_driver_knew() -> None:
    clock = VersionClock()
    t1 = t2 = clock.version
    told1 = clock.complete()
    t3 = clock.version  # dispatched on hearing of T1
    told2 = clock.complete()
    t4 = clock.version
    assert (t1, t2, t3, t4) == (0, 0, 1, 2)
    assert may_depend(told1, t3)
    assert not may_depend(told2, t3)
    assert may_depend(told1, t4)
    assert may_depend(told2, t4)
    assert not may_depend(told1, t2)
    assert not may_depend(None, t4)


@pytest.mark.parametrize(("version", "hit"), [(4, True), (5, True), (6, False)])
def test_a_value_serves_readers_that_depend_on_no_more(version: int, hit: bool) -> None:
    assert is_hit(version, 5) is hit


def test_versions_count_from_zero() -> None:
    with pytest.raises(OptionError, match="version must be >= 0; got -1"):
        VersionClock(-1)
