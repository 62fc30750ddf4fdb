"""In which order a training run sees its samples, whatever the number of processes.

The order of a pass is a permutation that follows from the run's seed and the number of the pass alone. A step takes
the next samples of it, and only then are these divided among processes. So the place in the data is two numbers,
and a run that restarts on another number of processes continues with the very next sample.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.errors import OptionError


class DataPosition(NamedTuple):
    """How far a run is in its data."""

    turn: int = 0  # passes over the data that are complete
    position: int = 0  # samples of the present pass that complete steps have used


class Share(NamedTuple):
    """What one process does in one accumulation pass of a step: a range of positions in the data's pass."""

    start: int
    stop: int
    weight: float  # of the mean gradient over the range, in the mean over processes; 0: only to participate


@dataclass(frozen=True, slots=True)
class DataOrder:
    """The order of ``length`` samples in every pass. ``OptionError`` for no samples or a negative seed."""

    length: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.length < 1 or self.seed < 0:
            raise OptionError(f"a data order needs length >= 1 and seed >= 0; got {self.length}, {self.seed}")

    def indices(self, turn: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions ``start`` to ``stop`` of pass ``turn``. The array must not be changed."""
        if not self.shuffle:
            return np.arange(start, min(stop, self.length))
        return _permutation(self.length, self.seed, turn)[start:stop]

    def left(self, cursor: DataPosition) -> int:
        """Return the samples that the present pass still has."""
        return self.length - cursor.position

    def after(self, cursor: DataPosition, count: int) -> DataPosition:
        """Return the place after a step over ``count`` samples; a step never reaches into the next pass.

        >>> DataOrder(10).after(Cursor(0, 8), 2)
        Cursor(turn=1, position=0)

        Raises ``OptionError``.
        """
        if not 0 <= count <= self.left(cursor):
            raise OptionError(f"a step at {cursor} of {self.length} samples cannot use {count}")
        position = cursor.position + count
        return (
            DataPosition(cursor.turn + 1, 0)
            if position == self.length
            else DataPosition(cursor.turn, position)
        )


def shares(
    start: int, count: int, world: int, passes: int, smallest: int = 1
) -> tuple[tuple[Share, ...], ...]:
    """Return who does what in a step over the ``count`` samples from ``start``: a row for each process.

    The samples are divided as evenly as they can be over ``world`` processes and ``passes`` accumulation passes, but
    no piece is smaller than ``smallest`` unless the whole step is. All rows are equally long. Where there are fewer
    pieces than places, a process participates with weight 0, over samples that count elsewhere.

    Weights are such that the mean over processes of the sum over passes of weight · (mean gradient of the range) is
    the mean gradient over all ``count`` samples, exactly.

    Raises ``OptionError`` for a step without samples, processes or passes.

    >>> shares(0, 5, world=2, passes=1)
    ((Share(start=0, stop=3, weight=1.2),), (Share(start=3, stop=5, weight=0.8),))
    """
    return tuple(row_of(rank, start, count, world, passes, smallest) for rank in range(world))


def row_of(
    rank: int, start: int, count: int, world: int, passes: int, smallest: int = 1
) -> tuple[Share, ...]:
    """Return what process ``rank`` does in a step: its row of ``shares``, without those of the others.

    Raises ``OptionError``.

    >>> row_of(1, 0, 5, world=2, passes=1)
    (Share(start=3, stop=5, weight=0.8),)
    """
    if count < 1 or world < 1 or passes < 1 or smallest < 1:
        raise OptionError(
            f"a step needs count, world, passes and smallest >= 1; got {count}, {world}, {passes}, {smallest}"
        )
    pieces = min(world * passes, max(1, count // smallest))
    least, larger = divmod(count, pieces)
    row = []
    for piece in range(rank, world * -(-pieces // world), world):
        at, size = start + piece * least + min(piece, larger), least + (piece < larger)
        idle = piece >= pieces
        row.append(Share(start, start + least, 0.0) if idle else Share(at, at + size, world * size / count))
    return tuple(row)


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, turn: int) -> NDArray[np.int64]:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, turn])))
    found = generator.permutation(length)
    found.flags.writeable = False
    return found
