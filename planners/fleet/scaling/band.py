"""Several jobs on one rented cluster: as many nodes as keep its utility within a band (Pollux, as published in code).

Utility is the sum of the jobs' speed-ups over one GPU, each on what it holds, over all GPUs: 1 when every GPU does
what it would alone, 0 when none does anything. The published policy averages 15 rounds, wants 0.35 to 0.65, and
outside of that bisects for the count in the middle, with allocations made anew for each count that it tries.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.scaling.limits import Curve, limits, to
from ebbflow.planners.model.fleet import PoolState, Target

LOW, HIGH, ROUNDS = 0.35, 0.65, 15


def cluster_utility(speedups: Iterable[float], gpus: int) -> float:
    """Return the sum of ``speedups`` (each over one GPU) over all ``gpus`` that are paid for; 0 without GPUs.

    Raises ``OptionError``.
    """
    if gpus < 0:
        raise OptionError(f"gpus must be >= 0; got {gpus}")
    return sum(speedups) / gpus if gpus else 0.0


@dataclass(frozen=True, slots=True)
class UtilityBand:
    """Keeps the mean utility of the last ``rounds`` rounds within [``low``, ``high``].

    ``seen`` is that window; ``after`` adds to it, and whoever carries a change out clears it (``cleared``), since
    what was seen on another number of nodes says nothing about the present one.
    """

    name: ClassVar[str] = "utility-band"
    low: float = LOW
    high: float = HIGH
    rounds: int = ROUNDS
    seen: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high <= 1:
            raise OptionError(f"0 < low < high <= 1 must hold; got {self.low}, {self.high}")
        if self.rounds < 1:
            raise OptionError(f"rounds must be >= 1; got {self.rounds}")

    def after(self, utility: float) -> "UtilityBand":
        """Return the band with one more round in its window. Raises ``OptionError`` unless utility is >= 0."""
        if not utility >= 0:
            raise OptionError(f"utility must be >= 0; got {utility}")
        return replace(self, seen=(*self.seen, utility)[-self.rounds :])

    def cleared(self) -> "UtilityBand":
        """Return the band with an empty window."""
        return replace(self, seen=())

    def decide(self, pool: PoolState, revision: int, curve: Curve) -> Target:
        """Return the pool's target. ``curve``: the utility of n nodes with allocations made for them.

        It is asked for O(log(most)) counts, and taken to fall with their number: a job's GPUs add less and less.
        """
        least, most = limits(pool)
        now = min(max(pool.planned, least), most)
        if len(self.seen) < self.rounds:
            return to(pool, revision, now, f"{len(self.seen)} of {self.rounds} rounds observed at this size")
        mean = fmean(self.seen)
        band = f"[{self.low:g}, {self.high:g}]"
        if self.low <= mean <= self.high:
            return to(pool, revision, now, f"mean utility {mean:.3f} lies within {band}")
        if mean > self.high:
            first, last = now, most
        else:
            first, last = max(least, 1 if now else 0), now
        found = _middle(curve, first, last, (self.low + self.high) / 2)
        if found == now:
            rest = (
                f"no number of nodes from {first} to {last} comes nearer"
                if first < last
                else "max_nodes of the pool is reached"
            )
            return to(pool, revision, now, f"mean utility {mean:.3f} lies outside {band}, but {rest}")
        where = "above" if mean > self.high else "below"
        said = f"mean utility {mean:.3f} lies {where} {band}; on {found} nodes it would be {curve(found):.3f}"
        return to(pool, revision, found, said)


def _middle(curve: Curve, first: int, last: int, wanted: float) -> int:
    """Return the count from ``first`` to ``last`` whose value comes nearest to ``wanted``, the values falling."""
    low, high = first, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if curve(middle) > wanted else (low, middle)
    return min((low, high), key=lambda nodes: (abs(curve(nodes) - wanted), nodes))
