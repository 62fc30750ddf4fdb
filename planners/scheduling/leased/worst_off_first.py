"""The strawman of the thesis on Themis (section 3.4): apps by reported ρ, each all it can use."""

from dataclasses import dataclass
from math import inf

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.leased.leased import Desk, Leased, Moment, merged


@dataclass(frozen=True, slots=True)
class ReportedRho:
    """ρ with what the app holds, infinite with nothing; the largest first."""

    name: str = "worst-off-first"
    looks_at_room: bool = False

    def key(self, desk: Desk, moment: Moment, rng: np.random.Generator) -> tuple[float, ...]:
        app = desk.app
        if app.bidder is None:
            raise OptionError(f"{self.name} asks every app for its rho; {app.id!r} has no bidder")
        held = merged(desk.counts, tuple(desk.ended.items())) if not desk.won else tuple(desk.counts.items())
        if not held:
            return (-inf, app.arrival)
        return (-app.bidder.rho(held, moment.view.capacity, moment.view.now), app.arrival)

    def chunk(self, desk: Desk, moment: Moment) -> int:
        return desk.unmet


def worst_off_first(lease_s: float = 600.0) -> Leased:
    """All that it can use to the app that reports the largest ρ: nothing keeps apps from lying."""
    return Leased(ReportedRho(), lease_s)
