"""From kept fractions to whole GPUs: five ways, since the source leaves it open."""

from math import floor
from typing import Literal

import numpy as np

from ebbflow.planners.scheduling.auction.problem import Bundle

Rounding = Literal["floor-at-one", "floor", "nearest", "stochastic", "time"]
"""``floor-at-one`` keeps at least the smallest useful number, so that a small win is not lost whole; ``floor`` and
``nearest`` as they say; ``stochastic`` rounds up with the fraction's probability; ``time`` keeps every GPU for c of
the lease."""


def kept_gpus(
    kept: float, gpus: int, mode: Rounding, least: int = 1, rng: np.random.Generator | None = None
) -> int:
    """Return how many of ``gpus`` stay: 0, or between ``least`` (the gang that can run at all) and ``gpus``."""
    if not gpus or mode == "time":
        return gpus
    exact = kept * gpus + 1e-9  # 0.5 of 2 is 1 whatever the last digit
    if mode == "floor-at-one":
        return min(max(least, floor(exact)), gpus)
    if mode == "nearest":
        number = floor(exact + 0.5)
    else:
        number = floor(exact)
        if mode == "stochastic":
            assert rng is not None
            number += int(rng.random() < exact - number - 2e-9)
    return min(number, gpus) if number >= least else 0


def released(bundle: Bundle, number: int) -> Bundle:
    """Return ``number`` GPUs to give up: from where the bundle has fewest, so that the rest keeps or narrows its
    level."""
    out: Bundle = {}
    for machine in sorted(bundle, key=lambda m: (bundle[m], -m)):
        taken = min(bundle[machine], number)
        if taken:
            out[machine] = taken
            number -= taken
    return out
