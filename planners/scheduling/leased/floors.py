"""Sanity floors: what a policy that knows nothing achieves."""

from dataclasses import dataclass

import numpy as np

from ebbflow.planners.scheduling.leased.drf import SmallestShare
from ebbflow.planners.scheduling.leased.leased import Desk, Leased, Moment, one_more


@dataclass(frozen=True, slots=True)
class AnyOne:
    """A fresh draw for each GPU."""

    name: str = "random"
    looks_at_room: bool = False

    def key(self, desk: Desk, moment: Moment, rng: np.random.Generator) -> tuple[float, ...]:
        return (float(rng.random()),)

    def chunk(self, desk: Desk, moment: Moment) -> int:
        return one_more(desk)


def random_policy(lease_s: float = 600.0) -> Leased:
    """Each free GPU to an app drawn at random."""
    return Leased(AnyOne(), lease_s)


def equal_share(lease_s: float = 600.0) -> Leased:
    """The same number of GPUs for every app that can use them, levelled again as leases end."""
    return Leased(SmallestShare("equal-share"), lease_s)
