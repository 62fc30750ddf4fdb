"""Least attained service first: every app as many GPU-seconds as any other.

``las`` runs whole gangs; ``leased_las`` is Tiresias as Themis' evaluation has it, one GPU at a time (NSDI 2020,
section 6.1).
"""

from dataclasses import dataclass

import numpy as np

from ebbflow.planners.model.scheduling import App, View
from ebbflow.planners.scheduling.gangs.ordered import Ordered
from ebbflow.planners.scheduling.leased.leased import AppAllocation, Leased, RoundState, one_more
from ebbflow.planners.scheduling.placement import Placer, by_skew


def las(quantum_s: float = 60.0, placer: Placer = by_skew) -> Ordered:
    """Gangs with the least attained service first, looked at again every ``quantum_s``; no queues, so it preempts
    often."""

    def attained(app: App, view: View) -> tuple[float, ...]:
        return app.service / app.weight, app.arrival

    return Ordered("las", attained, refresh=quantum_s, placer=placer)


@dataclass(frozen=True, slots=True)
class LeastService:
    """Service so far, plus what the GPUs handed out will add over a lease."""

    name: str = "leased-las"
    looks_at_room: bool = False

    def key(self, desk: AppAllocation, moment: RoundState, rng: np.random.Generator) -> tuple[float, ...]:
        granted = min(moment.lease_s, 1e12) * sum(desk.won.values())
        return ((desk.app.service + granted) / desk.app.weight,)

    def chunk(self, desk: AppAllocation, moment: RoundState) -> int:
        return one_more(desk)


def leased_las(lease_s: float = 600.0) -> Leased:
    """Each free GPU to the app with the least attained service."""
    return Leased(LeastService(), lease_s)
