"""Even loads with the fewest moves."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.elastic.rebalance import Load, Move, imbalance, plan_moves
from ebbflow.planners.errors import OptionError

NAMES = ["a", "b", "c", "d"]


def test_sixteen_executors_on_six_workers() -> None:
    loads = [Load(item, "", 1) for item in range(16)]
    counts = Counter(move.target for move in plan_moves(loads, [f"w{n}" for n in range(6)]))
    assert sorted(counts.values(), reverse=True) == [3, 3, 3, 3, 2, 2]
    assert imbalance(list(counts.values())) == pytest.approx(1.125)


def test_the_smallest_move_from_the_most_loaded() -> None:
    loads = [Load(0, "a", 5), Load(1, "a", 1), Load(2, "a", 1), Load(3, "b", 9)]
    assert plan_moves(loads, ["a", "b", "c"]) == [Move(1, "a", "c")]


@given(
    owners=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9)), max_size=12),
    here=st.sets(st.sampled_from(NAMES), min_size=1),
    data=st.data(),
)
def test_even_and_nothing_left_behind(
    owners: list[tuple[str, int]], here: set[str], data: st.DataObject
) -> None:
    leaving = data.draw(st.sets(st.sampled_from(sorted(here)), max_size=len(here) - 1))
    loads = [Load(item, owner, size) for item, (owner, size) in enumerate(owners)]
    moves = plan_moves(loads, here, leaving)
    assert moves == plan_moves(list(reversed(loads)), sorted(here), leaving)
    after = {load.item: load.owner for load in loads}
    for move in moves:
        assert after[move.item] == move.source
        after[move.item] = move.target
    assert len({move.item for move in moves}) == len(moves)
    counts = Counter(after.values())
    staying = here - leaving
    assert set(counts) <= staying
    numbers = [counts[name] for name in staying]
    assert max(numbers) - min(numbers) <= 1


@given(owners=st.lists(st.sampled_from(NAMES[:3]), max_size=6), here=st.integers(1, 3))
def test_no_plan_needs_fewer_moves(owners: list[str], here: int) -> None:
    staying = NAMES[:here]
    moves = plan_moves([Load(item, owner, 1) for item, owner in enumerate(owners)], staying)
    best = min(
        sum(new != old for new, old in zip(plan, owners, strict=True))
        for plan in product(staying, repeat=len(owners))
        if max(c := [plan.count(name) for name in staying]) - min(c) <= 1
    )
    assert len(moves) == best


def test_somebody_must_stay() -> None:
    with pytest.raises(OptionError, match="at least one worker must stay"):
        plan_moves([Load(0, "a", 1)], ["a"], ["a"])
    with pytest.raises(OptionError, match="positive sum"):
        imbalance([0, 0])
