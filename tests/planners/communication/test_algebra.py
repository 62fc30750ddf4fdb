"""Rewritings of collectives deliver the same: exhaustively for up to 17 ranks, and by what they do to numbers."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.communication.algebra import (
    Motif,
    Motifs,
    all_reduce,
    all_to_all,
    broadcast,
    check_cover,
    compose,
    hierarchical_all_reduce,
    ring_all_reduce,
    segment,
    spline_all_to_all,
    spline_broadcast,
    tree_all_reduce,
)
from ebbflow.planners.errors import OptionError

RANKS = range(1, 18)


def destinations(motif: Motif, rank: int) -> set[int]:
    return {dst for src, dst, _, _ in motif.transfers() if src == rank}


def test_index_sets_of_the_thesis() -> None:
    one, two = spline_all_to_all(all_to_all(4, 1), 2)
    assert (destinations(one, 0), destinations(two, 0)) == ({0, 1}, {2, 3})
    assert (destinations(one, 3), destinations(two, 3)) == ({3, 0}, {1, 2})
    assert {src for src, dst, _, _ in one.transfers() if dst == 0} == {0, 3}
    assert {src for src, dst, _, _ in two.transfers() if dst == 0} == {2, 1}
    assert [len(spline_all_to_all(all_to_all(128, 1), width)) for width in (128, 64, 32)] == [1, 2, 4]


@pytest.mark.parametrize("ranks", RANKS)
def test_every_rewriting_of_an_all_reduce_counts_each_rank_once(ranks: int) -> None:
    for size in (0, 1, ranks, 13):
        whole = all_reduce(ranks, size)
        rewritings = [
            ring_all_reduce(whole),
            *(tree_all_reduce(whole, fan_in) for fan_in in range(2, ranks + 2)),
            *(segment(whole, part) for part in (1, 2, 5)),
            *(hierarchical_all_reduce(whole, n) for n in range(1, ranks + 1) if ranks % n == 0),
            compose(segment(whole, 5), ring_all_reduce),
            compose(segment(whole, 4), lambda motif: tree_all_reduce(motif, 3)),
            compose(hierarchical_all_reduce(whole, ranks), ring_all_reduce, kind="all-reduce"),
        ]
        assert [problem for motifs in rewritings for problem in check_cover(whole, motifs)] == []


@pytest.mark.parametrize("ranks", RANKS)
def test_every_rewriting_of_an_all_to_all_delivers_each_row_once(ranks: int) -> None:
    whole = all_to_all(ranks, 5)
    rewritings = [
        *(spline_all_to_all(whole, width) for width in range(1, ranks + 1)),
        segment(whole, 2),
        compose(segment(whole, 2), lambda motif: spline_all_to_all(motif, 2)),
        compose(spline_all_to_all(whole, 3), lambda motif: segment(motif, 2)),
    ]
    assert [problem for motifs in rewritings for problem in check_cover(whole, motifs)] == []


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_broadcast_may_be_cut_by_bytes_and_by_receivers(ranks: int) -> None:
    whole = broadcast(ranks, 6)
    for motifs in (segment(whole, 4), spline_broadcast(whole, 2), compose(segment(whole, 4), lambda m: (m,))):
        assert check_cover(whole, motifs) == []


WRONG: dict[str, tuple[Motif, Callable[[Motif], Motifs], str]] = {
    "a segment is missing": (
        all_reduce(3, 4),
        lambda whole: segment(whole, 2)[:1],
        "elements 2 to 4 of rank 0",
    ),
    "a row comes twice": (
        all_to_all(3, 1),
        lambda whole: (*spline_all_to_all(whole, 2), spline_all_to_all(whole, 2)[0]),
        "from 0 to 0 arrives 2 times",
    ),
    "a sum is counted twice": (
        all_reduce(2, 1),
        lambda whole: (whole, Motif("all-reduce", (0, 1), 0, 1, after=(0,))),
        "elements 0 to 1 of rank 0",
    ),
    "two do not wait for each other": (
        all_reduce(2, 2),
        lambda whole: tuple(Motif(one.kind, one.ranks, one.low, one.high) for one in ring_all_reduce(whole)),
        "motifs 0 and 1 touch the same elements of rank 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rewriting_is_found(name: str) -> None:
    whole, rewriting, message = WRONG[name]
    assert message in "; ".join(check_cover(whole, rewriting(whole)))


def run(motifs: Motifs, tensors: np.ndarray) -> np.ndarray:
    """Do to the ranks' tensors what the motifs say, transfer by transfer."""
    held = tensors.copy()
    for motif in motifs:
        parts = [motif] if motif.kind != "all-reduce" else list(ring_all_reduce(motif))
        for part in parts:
            for src, dst, low, high in part.transfers():
                if part.kind in ("reduce", "reduce-scatter"):
                    held[dst, low:high] += held[src, low:high]
                else:
                    held[dst, low:high] = held[src, low:high]
    return held


@given(st.integers(1, 9), st.integers(0, 20), st.integers(1, 7), st.integers(2, 5), st.booleans(), st.data())
def test_a_rewritten_sum_is_the_plain_one(
    ranks: int, size: int, part: int, fan_in: int, ring: bool, data: st.DataObject
) -> None:
    values = data.draw(st.lists(st.integers(-9, 9), min_size=ranks * size, max_size=ranks * size))
    tensors = np.array(values, dtype=np.int64).reshape(ranks, size)
    motifs = compose(
        segment(all_reduce(ranks, size), part),
        ring_all_reduce if ring else lambda motif: tree_all_reduce(motif, fan_in),
    )
    assert (run(motifs, tensors) == tensors.sum(axis=0)).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: all_reduce(0, 1), "at least 1 rank; got 0"),
        (lambda: all_reduce(1, -1), "must be >= 0; got -1"),
        (lambda: segment(all_reduce(2, 4), 0), "at least 1 element; got 0"),
        (lambda: spline_all_to_all(all_to_all(2, 4), 0), "at least 1 destination; got 0"),
        (lambda: tree_all_reduce(all_reduce(2, 4), 1), "fan_in of a tree must be >= 2; got 1"),
        (lambda: hierarchical_all_reduce(all_reduce(4, 4), 3), "per_node must divide the 4 ranks; got 3"),
        (lambda: ring_all_reduce(all_to_all(2, 4)), "rewrites an all-reduce; got all-to-all"),
    ],
)
def test_what_cannot_be_rewritten_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()
