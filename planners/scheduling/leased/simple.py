"""SRTF and SRSF on leases, as Themis' evaluation has them (NSDI 2020, section 6.1; thesis, section 3.6).

Dominant resource fairness (NSDI 2011) on GPUs alone: max-min of shares, tasks run to completion.

Sanity floors: what a policy that knows nothing achieves.

The strawman of the thesis on Themis (section 3.4): apps by reported ρ, each all it can use.
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.leased.leased import AppAllocation, Leased, RoundState, merged, one_more
from ebbflow.planners.scheduling.locality import remaining_service, remaining_time


@dataclass(frozen=True, slots=True)
class ShortestTime:
    """The remaining time on the most GPUs that the app can use of those that are free; it gets them all."""

    name: str = "leased-srtf"
    looks_at_room: bool = True

    def key(self, desk: AppAllocation, moment: RoundState, rng: np.random.Generator) -> tuple[float, ...]:
        return (remaining_time(desk.app, desk.gpus + max(min(desk.unmet, moment.room.total), 1)),)

    def chunk(self, desk: AppAllocation, moment: RoundState) -> int:
        return desk.unmet


@dataclass(frozen=True, slots=True)
class ShortestService:
    """The remaining GPU service on the gang that the user asked for; one GPU at a time."""

    name: str = "leased-srsf"
    looks_at_room: bool = False

    def key(self, desk: AppAllocation, moment: RoundState, rng: np.random.Generator) -> tuple[float, ...]:
        return (remaining_service(desk.app, desk.app.gpus),)

    def chunk(self, desk: AppAllocation, moment: RoundState) -> int:
        return one_more(desk)


def leased_srtf(lease_s: float = 600.0) -> Leased:
    """All it can use to the app that would end first."""
    return Leased(ShortestTime(), lease_s)


def leased_srsf(lease_s: float = 600.0) -> Leased:
    """Each free GPU to the app with the least service left; stands in for Gittins with exact knowledge."""
    return Leased(ShortestService(), lease_s)


@dataclass(frozen=True, slots=True)
class SmallestShare:
    """The share of GPUs that an app holds, over its weight; with GPUs as the only resource, its dominant share."""

    name: str = "drf"
    looks_at_room: bool = False

    def key(self, desk: AppAllocation, moment: RoundState, rng: np.random.Generator) -> tuple[float, ...]:
        return (desk.gpus / desk.app.weight,)

    def chunk(self, desk: AppAllocation, moment: RoundState) -> int:
        return one_more(desk)


def drf() -> Leased:
    """Each free GPU to the app with the smallest share; GPUs come back when the app ends, there are no leases."""
    return Leased(SmallestShare(), inf)


@dataclass(frozen=True, slots=True)
class AnyOne:
    """A fresh draw for each GPU."""

    name: str = "random"
    looks_at_room: bool = False

    def key(self, desk: AppAllocation, moment: RoundState, rng: np.random.Generator) -> tuple[float, ...]:
        return (float(rng.random()),)

    def chunk(self, desk: AppAllocation, moment: RoundState) -> int:
        return one_more(desk)


def random_policy(lease_s: float = 600.0) -> Leased:
    """Each free GPU to an app drawn at random."""
    return Leased(AnyOne(), lease_s)


def equal_share(lease_s: float = 600.0) -> Leased:
    """The same number of GPUs for every app that can use them, levelled again as leases end."""
    return Leased(SmallestShare("equal-share"), lease_s)


@dataclass(frozen=True, slots=True)
class ReportedRho:
    """ρ with what the app holds, infinite with nothing; the largest first."""

    name: str = "worst-off-first"
    looks_at_room: bool = False

    def key(self, desk: AppAllocation, moment: RoundState, rng: np.random.Generator) -> tuple[float, ...]:
        app = desk.app
        if app.bidder is None:
            raise OptionError(f"{self.name} asks every app for its rho; {app.id!r} has no bidder")
        held = merged(desk.counts, tuple(desk.ended.items())) if not desk.won else tuple(desk.counts.items())
        if not held:
            return (-inf, app.arrival)
        return (-app.bidder.rho(held, moment.view.capacity, moment.view.now), app.arrival)

    def chunk(self, desk: AppAllocation, moment: RoundState) -> int:
        return desk.unmet


def worst_off_first(lease_s: float = 600.0) -> Leased:
    """All that it can use to the app that reports the largest ρ: nothing keeps apps from lying."""
    return Leased(ReportedRho(), lease_s)
