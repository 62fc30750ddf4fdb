"""Which batches a job may use on so many GPUs, and how a total is split among them.

Pollux, OSDI 2021, section 4.1 (equation 3.10 of the thesis). A total of ``M`` examples on ``K`` GPUs is ``s``
accumulation passes and one with synchronization, each over ``m`` examples a GPU: ``M = K * m * (s + 1)``.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.errors import OptionError

CANDIDATES = 50  # totals tried, evenly spaced on a logarithmic scale
SLACK = 1e-8  # a quotient this little above a whole number is that number


class BatchSplit(NamedTuple):
    """A total batch on several GPUs."""

    batch: int  # examples a GPU in one pass
    accumulation: int  # passes before the one that synchronizes

    def total(self, gpus: int) -> int:
        """Return the examples of one iteration on ``gpus`` GPUs."""
        return gpus * self.batch * (self.accumulation + 1)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What batches an application may use, in examples. ``OptionError`` where they contradict each other."""

    initial: int  # M0, total: what the user's learning rate was made for
    largest: int  # total, up to which the learning-rate rule holds
    smallest_local: int = 1  # of one GPU in one pass
    largest_local: int = 1 << 30  # what the memory of a GPU holds

    def __post_init__(self) -> None:
        if not 1 <= self.initial <= self.largest:
            raise OptionError(
                f"batch limits need 1 <= initial <= largest; got {self.initial}, {self.largest}"
            )
        if not 1 <= self.smallest_local <= self.largest_local:
            raise OptionError(
                "batch limits need 1 <= smallest_local <= largest_local; "
                f"got {self.smallest_local}, {self.largest_local}"
            )

    @property
    def most_gpus(self) -> int:
        """Return the GPUs beyond which even the largest total leaves a GPU too little to do."""
        return self.largest // self.smallest_local


@dataclass(frozen=True, slots=True)
class Candidates:
    """Splits of the candidate totals for 1, 2, ... GPUs; every array is (GPU counts, totals)."""

    gpus: NDArray[np.float64]  # (GPU counts, 1)
    batch: NDArray[np.float64]
    accumulation: NDArray[np.float64]
    total: NDArray[np.float64]  # examples of an iteration
    allowed: NDArray[np.bool_]


@lru_cache(maxsize=64)
def candidates(limits: BatchLimits, gpus: int) -> Candidates:
    """Return the candidate splits on 1 to ``gpus`` GPUs.

    Totals go from the least that ``K`` GPUs can share, but no less than the initial batch, to the largest. A split
    takes the fewest accumulation passes that the memory of a GPU allows. One GPU that trains more than the initial
    batch makes two passes at least: the noise of the gradient needs two samples.
    """
    count = np.arange(1, gpus + 1)[:, None]
    least = np.maximum(limits.initial, limits.smallest_local * count)
    steps = np.linspace(0.0, 1.0, CANDIDATES)
    wished = least * (limits.largest / least) ** steps
    local = wished / count
    accumulation = np.maximum(np.ceil(local / limits.largest_local - SLACK) - 1.0, 0.0)
    alone = (count == 1) & (local > limits.initial + SLACK)
    accumulation = np.where(alone, np.maximum(accumulation, 1.0), accumulation)
    batch = np.ceil(local / (accumulation + 1.0) - SLACK)
    allowed = (batch >= limits.smallest_local) & (batch <= limits.largest_local) & (least <= limits.largest)
    total = count * batch * (accumulation + 1.0)
    return Candidates(count.astype(float), batch, accumulation, total, allowed)


def split(total: float, gpus: int, limits: BatchLimits) -> BatchSplit:
    """Return how ``total`` examples are trained on ``gpus`` GPUs; rounding up can make the total slightly larger.

    Raises ``OptionError`` for no GPUs and for a total that leaves a GPU nothing to do.

    >>> split(2048, 6, BatchLimits(128, 4096, 32, 1024))
    Split(batch=342, accumulation=0)
    """
    if gpus < 1 or total <= 0:
        raise OptionError(
            f"a batch is split over at least one GPU and holds something; got {total} on {gpus}"
        )
    local = ceil(total / gpus - SLACK)
    accumulation = max(0, ceil(local / limits.largest_local - SLACK) - 1)
    if gpus == 1 and total > limits.initial:
        accumulation = max(1, accumulation)
    return within(limits, gpus, ceil(local / (accumulation + 1) - SLACK), accumulation)


def first_split(gpus: int, limits: BatchLimits) -> BatchSplit:
    """Return the batch of a job of which nothing is known yet: the initial one, or the least that the GPUs share."""
    return split(max(limits.initial, limits.smallest_local * gpus), gpus, limits)


def within(limits: BatchLimits, gpus: int, batch: int, accumulation: int) -> BatchSplit:
    """Return a split cut so that its total does not exceed the largest. Raises ``OptionError``."""
    most = limits.largest // (gpus * (accumulation + 1))
    if most < 1:
        raise OptionError(f"a batch of at most {limits.largest} examples leaves {gpus} GPUs without work")
    return BatchSplit(min(batch, most), accumulation)
