"""SRTF and SRSF on leases, as Themis' evaluation has them (NSDI 2020, section 6.1; thesis, section 3.6)."""

from dataclasses import dataclass

import numpy as np

from ebbflow.planners.scheduling.beliefs import remaining_service, remaining_time
from ebbflow.planners.scheduling.leased.leased import Desk, Leased, Moment, one_more


@dataclass(frozen=True, slots=True)
class ShortestTime:
    """The remaining time on the most GPUs that the app can use of those that are free; it gets them all."""

    name: str = "leased-srtf"
    looks_at_room: bool = True

    def key(self, desk: Desk, moment: Moment, rng: np.random.Generator) -> tuple[float, ...]:
        return (remaining_time(desk.app, desk.gpus + max(min(desk.unmet, moment.room.total), 1)),)

    def chunk(self, desk: Desk, moment: Moment) -> int:
        return desk.unmet


@dataclass(frozen=True, slots=True)
class ShortestService:
    """The remaining GPU service on the gang that the user asked for; one GPU at a time."""

    name: str = "leased-srsf"
    looks_at_room: bool = False

    def key(self, desk: Desk, moment: Moment, rng: np.random.Generator) -> tuple[float, ...]:
        return (remaining_service(desk.app, desk.app.gpus),)

    def chunk(self, desk: Desk, moment: Moment) -> int:
        return one_more(desk)


def leased_srtf(lease_s: float = 600.0) -> Leased:
    """All it can use to the app that would end first."""
    return Leased(ShortestTime(), lease_s)


def leased_srsf(lease_s: float = 600.0) -> Leased:
    """Each free GPU to the app with the least service left; stands in for Gittins with exact knowledge."""
    return Leased(ShortestService(), lease_s)
