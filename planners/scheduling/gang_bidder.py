"""Bids of a rigid gang whose time alone is known: Shockwave's ρ (NSDI 2023, artefact) looked at in advance."""

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.scheduling import App, Placement, gpus_of
from ebbflow.planners.scheduling.beliefs import remaining_time


@dataclass(slots=True)
class GangBidder:
    """ρ of ``app`` if it ran from now to its end: finish time over time alone x max(1, jobs per GPU).

    ``alone`` in seconds. ``contention`` is jobs per GPU: of the whole trace, or what is believed of it.
    """

    app: App
    alone: float
    contention: float = 1.0

    def projected(self, now: float) -> float:
        """Return ρ with the whole gang from ``now`` on."""
        left = remaining_time(self.app, self.app.gpus)
        return (now - self.app.arrival + left) / (self.alone * max(1.0, self.contention))

    def rho(self, placement: Placement, capacity: Capacity, now: float) -> float:
        """Return ρ with ``placement``; infinite for less than the gang."""
        return self.projected(now) if gpus_of(placement) >= self.app.gpus else inf

    def rho_at(
        self, gpus: np.ndarray[Any, Any], levels: np.ndarray[Any, Any], now: float
    ) -> np.ndarray[Any, Any]:
        """Return ρ for each number of GPUs; levels don't matter to it."""
        return np.where(np.asarray(gpus) >= self.app.gpus, self.projected(now), inf)
