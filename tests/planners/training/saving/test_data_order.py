"""No sample is lost or seen twice in a pass, over any sequence of world sizes, splits and restarts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.saving.data_order import DataOrder, DataPosition, shares

WORLDS = st.integers(1, 9)


@given(
    length=st.integers(1, 300),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    choices=st.lists(
        st.tuples(st.integers(1, 120), WORLDS, st.integers(1, 5), st.integers(1, 8), st.booleans()),
        min_size=1,
        max_size=40,
    ),
)
def test_each_sample_once_in_every_pass(
    length: int, seed: int, shuffle: bool, choices: list[tuple[int, int, int, int, bool]]
) -> None:
    cursor, seen = DataPosition(), dict[int, list[int]]()
    while cursor.turn < 3:
        for total, world, passes, smallest, lost in choices:
            order = DataOrder(length, seed, shuffle)  # a restart knows nothing but its cursor
            count = min(total, order.left(cursor))
            rows = shares(cursor.position, count, world, passes, smallest)
            if lost:  # the world ended within the step: it is done again by the next one
                rows = shares(cursor.position, count, world + 1, passes, smallest)
            done = [
                int(i)
                for row in rows
                for share in row
                if share.weight
                for i in order.indices(cursor.turn, share.start, share.stop)
            ]
            assert len(done) == count
            seen.setdefault(cursor.turn, []).extend(done)
            cursor = order.after(cursor, count)
            if cursor.turn >= 3:
                break
    assert [sorted(seen[turn]) for turn in range(3)] == [list(range(length))] * 3


@given(
    length=st.integers(1, 200),
    totals=st.lists(st.integers(1, 60), min_size=1),
    worlds=st.lists(WORLDS, min_size=1),
)
def test_a_step_holds_the_same_samples_on_any_world(
    length: int, totals: list[int], worlds: list[int]
) -> None:
    order, cursor = DataOrder(length, 3), DataPosition()
    for total in totals:
        count = min(total, order.left(cursor))
        sets = set()
        for world in worlds:
            rows = shares(cursor.position, count, world, 2)
            sets.add(frozenset(i for row in rows for s in row if s.weight for i in range(s.start, s.stop)))
        assert sets == {frozenset(range(cursor.position, cursor.position + count))}
        cursor = order.after(cursor, count)


@given(
    st.integers(0, 50), st.integers(1, 200), WORLDS, st.integers(1, 5), st.integers(1, 20), st.integers(0, 99)
)
def test_the_weighted_mean_is_the_mean_over_all_samples(
    start: int, count: int, world: int, passes: int, smallest: int, seed: int
) -> None:
    gradients = np.random.default_rng(seed).normal(size=(start + count, 3))
    rows = shares(start, count, world, passes, smallest)
    mean = sum(s.weight * gradients[s.start : s.stop].mean(axis=0) for row in rows for s in row) / world
    np.testing.assert_allclose(mean, gradients[start:].mean(axis=0), atol=1e-12)
    assert len({len(row) for row in rows}) == 1
    assert len(rows) == world
    sizes = [s.stop - s.start for row in rows for s in row if s.weight]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(smallest, count)
    assert all(s.stop > s.start for row in rows for s in row), (
        "even a process of weight 0 needs data to run on"
    )


def test_the_order_follows_from_seed_and_pass_alone() -> None:
    first = DataOrder(1000, 7).indices(0, 0, 1000)
    assert first.tolist() == DataOrder(1000, 7).indices(0, 0, 1000).tolist()
    assert first.tolist() != DataOrder(1000, 7).indices(1, 0, 1000).tolist()
    assert first.tolist() != DataOrder(1000, 8).indices(0, 0, 1000).tolist()
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.15
    assert DataOrder(5, shuffle=False).indices(3, 1, 9).tolist() == [1, 2, 3, 4]


def test_impossible_steps_are_refused() -> None:
    with pytest.raises(OptionError, match="length >= 1"):
        DataOrder(0)
    with pytest.raises(OptionError, match="cannot use 5"):
        DataOrder(10).after(DataPosition(0, 6), 5)
    with pytest.raises(OptionError, match="got 0, 1, 1, 1"):
        shares(0, 0, 1, 1)
