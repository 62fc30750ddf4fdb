"""Dominant resource fairness (NSDI 2011) on GPUs alone: max-min of shares, tasks run to completion."""

from dataclasses import dataclass
from math import inf

import numpy as np

from ebbflow.planners.scheduling.leased.leased import Desk, Leased, Moment, one_more


@dataclass(frozen=True, slots=True)
class SmallestShare:
    """The share of GPUs that an app holds, over its weight; with GPUs as the only resource, its dominant share."""

    name: str = "drf"
    looks_at_room: bool = False

    def key(self, desk: Desk, moment: Moment, rng: np.random.Generator) -> tuple[float, ...]:
        return (desk.gpus / desk.app.weight,)

    def chunk(self, desk: Desk, moment: Moment) -> int:
        return one_more(desk)


def drf() -> Leased:
    """Each free GPU to the app with the smallest share; GPUs come back when the app ends, there are no leases."""
    return Leased(SmallestShare(), inf)
