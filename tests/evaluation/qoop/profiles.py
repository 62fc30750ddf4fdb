"""Resource profiles: how many containers one job may use, over time (QOOP, sections 2.2.1 and 2.6)."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from ebbflow.planners.errors import OptionError

MINUTE = 60.0
BUDGET = 5.0  # $/h (QOOP, section 2.2.1)
OVERBID = 1.05  # a bid is so many times the price
STEP = 2  # instances bought at a time
Budget = Literal["spend-rate", "sum-of-bids"]


@dataclass(frozen=True, slots=True)
class Profile:
    """A step function: ``levels[i]`` from ``times[i]`` on. Times begin at 0; the last level holds for ever."""

    times: tuple[float, ...]  # seconds
    levels: tuple[float, ...]
    length: float  # seconds that are known

    def __post_init__(self) -> None:
        if not self.times or len(self.times) != len(self.levels) or self.times[0] != 0:
            raise OptionError("a profile must have as many levels as times, and times must begin at 0")
        if any(a >= b for a, b in pairwise((*self.times, self.length))):
            raise OptionError("a profile's times must increase and end before its length")
        if min(self.levels) < 0:
            raise OptionError(f"a profile's levels must be >= 0; got {min(self.levels)}")

    @classmethod
    def constant(cls, level: float, length: float = MINUTE) -> "Profile":
        """Return a profile that never changes."""
        return cls((0.0,), (level,), length)

    @classmethod
    def every(cls, step: float, levels: Sequence[float]) -> "Profile":
        """Return the profile of ``levels`` sampled every ``step`` seconds."""
        return cls(tuple(i * step for i in range(len(levels))), tuple(levels), step * len(levels))

    @classmethod
    def joined(cls, parts: Sequence["Profile"]) -> "Profile":
        """Return ``parts`` one after the other."""
        times: list[float] = []
        levels: list[float] = []
        offset = 0.0
        for part in parts:
            times += [offset + t for t in part.times]
            levels += part.levels
            offset += part.length
        return cls(tuple(times), tuple(levels), offset).merged()

    def at(self, time: float) -> float:
        """Return the level at ``time`` >= 0."""
        return self.levels[bisect_right(self.times, time) - 1]

    def part(self, start: float, length: float) -> "Profile":
        """Return what happens from ``start`` on, for ``length`` seconds, as a profile of its own."""
        inside = [
            (t - start, v) for t, v in zip(self.times, self.levels, strict=True) if start < t < start + length
        ]
        return Profile(
            (0.0, *(t for t, _ in inside)), (self.at(start), *(v for _, v in inside)), length
        ).merged()

    def merged(self) -> "Profile":
        """Return the same profile without changes that change nothing."""
        kept = [i for i in range(len(self.levels)) if i == 0 or self.levels[i] != self.levels[i - 1]]
        return Profile(tuple(self.times[i] for i in kept), tuple(self.levels[i] for i in kept), self.length)

    def scaled(self, factor: float) -> "Profile":
        """Return the profile with every level times ``factor``."""
        return Profile(self.times, tuple(v * factor for v in self.levels), self.length)

    def sampled(self, step: float) -> npt.NDArray[np.float64]:
        """Return the level every ``step`` seconds, from 0 to the end."""
        moments = np.arange(0.0, self.length - 1e-9, step)
        return np.array(self.levels)[np.searchsorted(self.times, moments + 1e-9, side="right") - 1]

    @property
    def mean(self) -> float:
        """Return the mean level over time."""
        ends = (*self.times[1:], self.length)
        return sum((b - a) * v for a, b, v in zip(self.times, ends, self.levels, strict=True)) / self.length


def spot(prices: Sequence[float], budget: float = BUDGET, rule: Budget = "spend-rate") -> Profile:
    """Return the instances held each minute by a bidder with ``budget`` $/h, given ``prices`` in $/h.

    Every minute, instances whose bid is below the price are revoked at once; then, if the budget allows,
    two more are bought at a bid of 1.05 times the price. None is ever given back. The budget bounds what
    the instances cost at the present price ("spend-rate") or what the bids sum to ("sum-of-bids").
    """
    bids: list[float] = []
    held = []
    for price in prices:
        bids = [b for b in bids if b >= price]
        bid = OVERBID * price
        spent = len(bids) * price if rule == "spend-rate" else sum(bids)
        asked = STEP * (price if rule == "spend-rate" else bid)
        if spent + asked <= budget + 1e-12:
            bids += [bid] * STEP
        held.append(float(len(bids)))
    return Profile.every(MINUTE, held).merged()


@dataclass(frozen=True, slots=True)
class PriceModel:
    """A price that reverts to its base, jumps up now and then, and has one peak. $/h and minutes.

    ``x`` is the logarithm of the price over ``base``; each minute it loses the part ``reversion``, moves by a
    normal step of ``noise``, and jumps up by |N(0, jump)| with probability ``jumps``. Around ``peak_at`` the
    price is drawn up to ``peak`` by a Gaussian bump of ``peak_width`` and never exceeds it.
    """

    base: float = 0.25
    reversion: float = 0.02
    noise: float = 0.02
    jumps: float = 0.05
    jump: float = 0.25
    minutes: int = 300
    peak: float = 0.5828  # the source's trace: highest near its third hour
    peak_at: float = 180.0
    peak_width: float = 6.0

    def prices(self, rng: np.random.Generator) -> tuple[float, ...]:
        """Return the price of each minute."""
        x, out = 0.0, []
        for minute in range(self.minutes):
            x = (1 - self.reversion) * x + self.noise * float(rng.normal())
            if rng.random() < self.jumps:
                x += abs(float(rng.normal(0.0, self.jump)))
            weight = float(np.exp(-0.5 * ((minute - self.peak_at) / self.peak_width) ** 2))
            price = self.base * float(np.exp(x))
            out.append(min((1 - weight) * price + weight * self.peak, self.peak))
        return tuple(out)


@dataclass(frozen=True, slots=True)
class Sharing:
    """A cluster shared fairly by jobs that come and go: each active job gets 1/n of the containers."""

    profile: Profile  # the share of one job over time: containers
    stays: tuple[tuple[float, float], ...]  # (arrival, departure) of each job

    def seen_by(self, job: int) -> tuple[float, ...]:
        """Return the levels that job number ``job`` saw while it was there."""
        start, end = self.stays[job]
        return self.profile.part(start, end - start).levels


def shared(
    rng: np.random.Generator,
    work: Sequence[float] | npt.NDArray[np.float64],
    *,
    containers: float = 600.0,
    mean_gap: float = 20.0,
    mean_time: float = 500.0,
    jobs: int = 1000,
) -> Sharing:
    """Return the shares in a cluster with Poisson arrivals every ``mean_gap`` seconds (QOOP, section 2.2.1).

    Job times are drawn from ``work``, scaled to ``mean_time`` seconds, as the source reports only their
    mean; by Little's law mean_time/mean_gap jobs are active on average. The profile covers the time from
    when the cluster has filled to the last arrival.
    """
    sizes = np.asarray(work, dtype=np.float64)
    if sizes.size == 0 or sizes.min() <= 0 or min(containers, mean_gap, mean_time) <= 0 or jobs < 10:
        raise OptionError("work, containers, mean_gap and mean_time must be positive and jobs >= 10")
    arrivals = np.cumsum(rng.exponential(mean_gap, jobs))
    times = rng.choice(sizes, jobs) * (mean_time / float(sizes.mean()))
    begin, end = min(4 * mean_time, float(arrivals[-1]) / 4), float(arrivals[-1])
    changes = sorted([(float(t), 1) for t in arrivals] + [(float(t), -1) for t in arrivals + times])
    active, moments, levels = 0, [0.0], [0.0]
    for time, change in changes:
        active += change
        if time >= end:
            break
        level = containers / max(active, 1)
        if time <= begin:
            levels[0] = level
        elif time - begin > moments[-1]:
            moments.append(time - begin)
            levels.append(level)
        else:
            levels[-1] = level
    stays = [
        (float(a) - begin, float(a + t) - begin)
        for a, t in zip(arrivals, times, strict=True)
        if a >= begin and a + t < end
    ]
    return Sharing(Profile(tuple(moments), tuple(levels), end - begin).merged(), tuple(stays))
