"""Documents in rows: none is lost or doubled, no row is overfull, and rows are those of first-fit decreasing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.packing import Piece, pack

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any)
ROWS, WINDOWS = st.integers(1, 20), st.integers(1, 24)


def by_hand(pieces: list[Piece], length: int, window: int) -> list[list[Piece]]:
    """Return the rows of first-fit decreasing, window by window, as it is written."""
    rows = []
    for begin in range(0, len(pieces), window):
        bins: list[list[Piece]] = []
        here = sorted(
            enumerate(pieces[begin : begin + window]), key=lambda one: (one[1].start - one[1].stop, one[0])
        )
        placed: list[list[tuple[int, Piece]]] = []
        for number, piece in here:
            size = piece.stop - piece.start
            fits = [one for one in placed if sum(p.stop - p.start for _, p in one) + size <= length]
            if not fits:
                fits = [[]]
                placed.append(fits[0])
            fits[0].append((number, piece))
        bins += [[piece for _, piece in sorted(one)] for one in placed]
        rows += bins
    return rows


@given(LENGTHS, ROWS, WINDOWS, st.randoms(use_true_random=False))
def test_rows_are_those_of_first_fit_decreasing_and_hold_each_token_once(
    lengths: list[int], length: int, window: int, random: object
) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    packing = pack(lengths, length, order, window)
    pieces = [
        Piece(document, start, min(start + length, lengths[document]))
        for document in order
        for start in range(0, lengths[document], length)
    ]
    rows = [list(packing.row(number)) for number in range(len(packing))]
    assert rows == by_hand(pieces, length, window)
    assert sorted(piece for row in rows for piece in row) == sorted(pieces)
    assert all(0 < sum(piece.stop - piece.start for piece in row) <= length for row in rows)
    assert packing.tokens == sum(lengths)
    assert packing.padding == pytest.approx(1 - sum(lengths) / (len(rows) * length))


@given(LENGTHS, ROWS)
def test_in_a_window_at_most_one_row_is_not_half_full(lengths: list[int], length: int) -> None:
    packing = pack(lengths, length, window=10**4)
    filled = [
        sum(piece.stop - piece.start for piece in packing.row(number)) for number in range(len(packing))
    ]
    assert sum(2 * tokens <= length for tokens in filled) <= 1


def test_packing_many_documents_of_a_window_leaves_little_padding() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.5, 1.0, 5000).astype(int) + 1, 3000)
    packing = pack(lengths, 2048)
    assert packing.padding < 0.01
    assert packing.tokens == int(lengths.sum())


@pytest.mark.parametrize(
    ("lengths", "length", "window", "why"),
    [
        ([3], 0, 1, "rows and windows must be >= 1"),
        ([3], 4, 0, "rows and windows must be >= 1"),
        ([-1], 4, 8, "numbers >= 0"),
        ([0, 0], 4, 8, "there is none"),
        ([[3]], 4, 8, "a list of numbers"),
    ],
)
def test_what_cannot_be_packed_is_told(lengths: list[int], length: int, window: int, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        pack(lengths, length, window=window)
