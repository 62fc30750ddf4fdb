"""Which documents share a row of tokens, so that few tokens are padding.

First-fit decreasing (Johnson, 1973) within windows of documents, as Krell et al. (arXiv 2107.02027, 2021) pack
sequences of training: the longest document of a window goes first, each into the first row that has room. A document
that is longer than a row is cut into pieces. All follows from the lengths, their order and the window alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ebbflow.planners.errors import OptionError

WINDOW = 1024
"""Pieces that are packed together. More fill rows better; fewer keep a row's documents close in their order."""

Numbers = NDArray[np.int64]


class Piece(NamedTuple):
    """A document, or a part of one that is longer than a row."""

    document: int
    start: int  # token
    stop: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows of pieces: row ``r`` has the pieces ``bounds[r]`` to ``bounds[r + 1]``, in this order."""

    length: int  # tokens that a row holds
    documents: Numbers  # of each piece
    starts: Numbers  # first token
    stops: Numbers  # token after the last
    bounds: Numbers

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.bounds) - 1

    def row(self, number: int) -> tuple[Piece, ...]:
        """Return the pieces of a row."""
        inside = slice(int(self.bounds[number]), int(self.bounds[number + 1]))
        columns = (self.documents[inside], self.starts[inside], self.stops[inside])
        return tuple(Piece(*map(int, one)) for one in zip(*columns, strict=True))

    @property
    def tokens(self) -> int:
        """Return the tokens of all rows, padding left out."""
        return int(np.sum(self.stops - self.starts))

    @property
    def padding(self) -> float:
        """Return the share of the rows' tokens that is padding."""
        return 1.0 - self.tokens / (len(self) * self.length)


def pack(lengths: ArrayLike, length: int, order: ArrayLike | None = None, window: int = WINDOW) -> Packing:
    """Return the rows of ``length`` tokens that hold all documents.

    Args:
        lengths: tokens of each document; one without tokens is in no row.
        length: tokens of a row.
        order: numbers of the documents in the order that windows are taken from; as they are unless given.
        window: pieces that are packed together.

    Raises ``OptionError``: nothing to pack, a negative length, a row or window below 1.

    >>> [pack([3, 5, 2], 6).row(r) for r in range(2)]
    [(Piece(document=1, start=0, stop=5),), (Piece(document=0, start=0, stop=3), Piece(document=2, start=0, stop=2))]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if length < 1 or window < 1:
        raise OptionError(f"rows and windows must be >= 1; got rows of {length} tokens, windows of {window}")
    if sizes.ndim != 1 or (sizes < 0).any():
        raise OptionError("lengths of documents must be a list of numbers >= 0")
    documents, starts, stops = _pieces(sizes, length, np.arange(len(sizes)) if order is None else order)
    if not len(documents):
        raise OptionError("there must be a document with a token to pack; there is none")
    sorted_, rows = _first_fit(stops - starts, length, window)
    bounds = np.flatnonzero(np.diff(rows, prepend=-1, append=rows[-1] + 1))
    return Packing(length, documents[sorted_], starts[sorted_], stops[sorted_], bounds)


def _pieces(sizes: Numbers, length: int, order: ArrayLike) -> tuple[Numbers, Numbers, Numbers]:
    """Return documents, first and last tokens of the pieces, in order."""
    ordered = np.asarray(order, dtype=np.int64)
    counts = -(-sizes[ordered] // length)
    documents = np.repeat(ordered, counts)
    ends = np.cumsum(counts)
    within = np.arange(len(documents)) - np.repeat(ends - counts, counts)
    starts = within * length
    return documents, starts, np.minimum(starts + length, sizes[documents])


def _first_fit(sizes: Numbers, length: int, window: int) -> tuple[NDArray[np.intp], Numbers]:
    """Return the pieces sorted by row, and the row of each of these.

    All windows are packed at once: step i places the i-th longest piece of each.
    """
    count = -(-len(sizes) // window)
    padded = np.zeros(count * window, dtype=np.int64)
    padded[: len(sizes)] = sizes
    table = padded.reshape(count, window)
    longest_first = np.argsort(-table, axis=1, kind="stable")
    here = np.arange(count)
    room = np.full((count, window), length, dtype=np.int64)
    taken = np.full((count, window), -1, dtype=np.int64)  # row of each piece in its window
    used = 0  # rows that any window has begun
    for step in range(window):
        piece = longest_first[:, step]
        size = table[here, piece]
        if not size.any():
            break
        fits = np.argmax(room[:, : used + 1] >= size[:, None], axis=1)  # a fresh row always has room
        placed = size > 0
        room[here[placed], fits[placed]] -= size[placed]
        taken[here[placed], piece[placed]] = fits[placed]
        used = max(used, int(fits[placed].max()) + 1)
        if used == window:
            used -= 1  # as many rows as pieces: the last is there already
    first = np.cumsum(taken.max(axis=1) + 1) - (taken.max(axis=1) + 1)
    rows = (taken + first[:, None]).reshape(-1)[: len(sizes)]
    sorted_ = np.argsort(rows, kind="stable")
    return sorted_, rows[sorted_]
