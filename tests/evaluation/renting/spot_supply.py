"""When one place (an instance type in a zone) has spot nodes to give, at what price, and when it takes them back.

Two things are known of the past: prices, which rise above what one would pay, and presence, the nodes that somebody
held. Presence is of another place and time than the prices, so a trace is played from an offset of its own.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.traces.rows import SpotRow
from ebbflow.planners.model.prices import Series

ROUNDING = 1e-3  # s; more than a sum of Unix times is off by


class Stay(NamedTuple):
    """One node of a presence trace: there from ``start`` until just before ``end``, s."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class PresenceTrace:
    """The stays of a pool's nodes, by start, over ``length`` seconds; it is repeated from there.

    Nodes that are there at its end leave at it.
    """

    stays: tuple[Stay, ...]
    length: float
    starts: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.stays or not self.length > 0:
            raise WorkloadError("a presence trace must have nodes and a length")
        object.__setattr__(self, "starts", tuple(stay.start for stay in self.stays))

    @classmethod
    def of(cls, rows: Sequence[SpotRow]) -> "PresenceTrace":
        """Return the trace of rows as ``read_spot_rows`` gives them."""
        here: dict[str, float] = {}
        stays: list[Stay] = []
        for row in rows:
            if row.kind == "add":
                here[row.node] = row.at / 1000
            else:
                stays.append(Stay(here.pop(row.node), row.at / 1000))
        length = rows[-1].at / 1000
        stays += [Stay(start, length) for start in here.values()]
        return cls(tuple(sorted(stay for stay in stays if stay.end > stay.start)), length)


class Slot(NamedTuple):
    """A stay that is being lived in: in which repetition, which one, and when it ends."""

    lap: int
    number: int
    end: float  # s since the Unix epoch


@dataclass(frozen=True, slots=True)
class Supply:
    """What one place gives. Without ``presence`` it always has nodes at the price; times are Unix time, s."""

    prices: Series
    presence: PresenceTrace | None = None
    offset: float = 0.0  # Unix time, s, of some beginning of the trace

    def affordable(self, time: float, limit: float) -> bool:
        """Tell whether the price is at or below ``limit``, $/h."""
        return self.prices.at(time) <= limit

    def turns(self, limit: float) -> tuple[float, ...]:
        """Return when the price rises above ``limit`` or falls back to it."""
        holds = [price <= limit for price in self.prices.prices]
        crossings = zip(self.prices.times[1:], pairwise(holds), strict=True)
        return tuple(time for time, (before, after) in crossings if before != after)

    def slots(self, time: float) -> list[Slot]:
        """Return the stays of the trace at ``time``, by start; empty without presence."""
        if self.presence is None:
            return []
        found: list[Slot] = []
        for lap, base in self._laps(time):
            starts = self.presence.starts
            for at in range(bisect_right(starts, time - base + ROUNDING)):
                # compared as they are announced: a sum that is rounded otherwise would let time stand still
                if base + starts[at] <= time < (end := base + self.presence.stays[at].end):
                    found.append(Slot(lap, at, end))
        return found

    def next_slot(self, time: float) -> float:
        """Return when after ``time`` the trace has another node; infinite without presence."""
        if self.presence is None:
            return inf
        starts = self.presence.starts
        for _, base in self._laps(time):
            for at in range(bisect_left(starts, time - base - ROUNDING), len(starts)):
                if base + starts[at] > time:
                    return base + starts[at]
        raise AssertionError("the lap after the present one begins later")

    def _laps(self, time: float) -> list[tuple[int, float]]:
        """Return the repetition at ``time`` and those beside it, with their beginnings."""
        assert self.presence is not None
        lap = int((time - self.offset) // self.presence.length)
        return [(one, self.offset + one * self.presence.length) for one in (lap - 1, lap, lap + 1)]

    def take(
        self, time: float, least: float, taken: set[tuple[int, int]], rng: np.random.Generator
    ) -> Slot | None:
        """Return one of the stays at ``time`` that nobody lives in and that last ``least`` s more, each as likely.

        ``None`` if there is none.
        """
        free = [
            slot
            for slot in self.slots(time)
            if slot.end - time > least and (slot.lap, slot.number) not in taken
        ]
        return free[int(rng.integers(len(free)))] if free else None
