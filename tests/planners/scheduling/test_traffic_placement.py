"""Exact placement by traffic, and the learnt limit of skew."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.skew import TENSORS
from ebbflow.planners.scheduling.pack_limit import PackLimit
from ebbflow.planners.scheduling.traffic_placement import least_traffic, traffic


def all_traffic(free, existing, workers, sizes) -> list[float]:
    """Return the largest traffic of every placement."""
    return [
        max(traffic(placed, at, sizes, existing))
        for placed in product(*(range(gpus + 1) for gpus in free))
        if sum(placed) == workers
        for at in product(range(len(free)), repeat=len(sizes))
    ]


def test_worked_examples():
    first = least_traffic((2, 1), (0, 0), 3, (6, 2, 1))
    assert (first.workers, first.servers, first.most) == ((2, 1), (0, 0, 0), pytest.approx(9))
    assert max(all_traffic((2, 1), (0, 0), 3, (6, 2, 1))) == 18
    assert least_traffic((2, 2), (0, 5), 2, (3, 1)).most == pytest.approx(5)


@settings(max_examples=30)
@given(
    free=st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(sum),
    existing=st.lists(st.integers(0, 10), min_size=3, max_size=3),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    data=st.data(),
)
def test_equals_enumeration(free, existing, sizes, data):
    workers = data.draw(st.integers(1, sum(free)))
    old = existing[: len(free)]
    found = least_traffic(free, old, workers, sizes)
    assert found.most == pytest.approx(min(all_traffic(free, old, workers, sizes)))
    assert sum(found.workers) == workers
    assert all(own <= gpus for own, gpus in zip(found.workers, free, strict=True))


def test_collocation_adds_nothing_and_an_even_split_costs_half():
    assert traffic((4, 0), (0, 0), (3, 1), (0, 0)) == [0, 0]
    for at in product((0, 1), repeat=3):
        assert max(traffic((2, 2), at, (6, 2, 1), (0, 0))) == 4 * 9 / 2


@pytest.mark.parametrize(("workers", "sizes"), [(0, (1,)), (4, (1,)), (1, ()), (1, (0,))])
def test_what_cannot_be_placed_is_refused(workers, sizes):
    with pytest.raises(OptionError):
        least_traffic((2, 1), (0, 0), workers, sizes)


def test_the_limit_is_learnt_from_jobs_that_ran_spread():
    limit = PackLimit()
    assert limit.value == pytest.approx((TENSORS["googlenet"].skew + TENSORS["alexnet"].skew) / 2, abs=0.005)
    assert limit.learn([(0.1, 1.0), (0.2, 1.04)]) == 0.38  # nobody suffered
    assert limit.learn([(0.3, 1.2)]) == pytest.approx(0.25)
    assert limit.consolidates(0.3)
    assert not limit.consolidates(0.2)
    assert limit.learn([(0.3, 1.0), (0.3, 1.0), (0.7, 1.5)]) == pytest.approx(0.5)


def test_old_jobs_are_forgotten():
    limit = PackLimit(memory=2)
    limit.learn([(0.1, 2.0), (0.9, 1.0)])
    assert limit.learn([(0.2, 1.0), (0.6, 2.0)]) == pytest.approx(0.4)


@pytest.mark.parametrize("job", [(-0.1, 1.0), (1.1, 1.0), (0.5, 0.0)])
def test_bad_jobs_are_refused(job):
    with pytest.raises(OptionError):
        PackLimit().learn([job])
