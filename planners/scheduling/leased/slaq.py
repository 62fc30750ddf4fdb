"""SLAQ (SoCC 2017): GPUs where they lower losses most, as Themis' evaluation has it, with the loss curve known."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App
from ebbflow.planners.scheduling.leased.leased import AppAllocation, Leased, RoundState, one_more
from ebbflow.planners.scheduling.locality import iteration_time


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Loss after k iterations: 1/(a·k + b) + c."""

    a: float
    b: float = 1.0
    c: float = 0.0

    def __post_init__(self) -> None:
        if not (self.a >= 0 and self.b > 0):
            raise OptionError(f"a loss curve needs a >= 0 and b > 0; got {self.a}, {self.b}")

    def decrease(self, done: float, iterations: float) -> float:
        """Return by how much the loss falls in ``iterations`` after ``done``."""
        return 1 / (self.a * done + self.b) - 1 / (self.a * (done + iterations) + self.b)


def twentyfold(app: App, total: float) -> LossCurve:
    """Return a curve that falls to a twenty-first over the whole run of ``total`` iterations."""
    return LossCurve(20.0 / total if total > 0 else 0.0)


@dataclass(frozen=True, slots=True)
class LossDecrease:
    """How much more the loss falls over one lease with the next GPU."""

    curve: Callable[[App, float], LossCurve] = twentyfold
    name: str = "slaq"
    looks_at_room: bool = False

    def key(self, desk: AppAllocation, moment: RoundState, rng: np.random.Generator) -> tuple[float, ...]:
        app, has, more = desk.app, desk.gpus, one_more(desk)
        total = moment.first_seen[app.id]
        curve, done = self.curve(app, total), max(total - app.remaining, 0.0)

        def falls(gpus: int) -> float:
            if not gpus:
                return 0.0
            return curve.decrease(done, min(moment.lease_s / iteration_time(app, gpus), app.remaining))

        return (-(falls(has + more) - falls(has)) / more, app.arrival)

    def chunk(self, desk: AppAllocation, moment: RoundState) -> int:
        return one_more(desk)


def slaq(lease_s: float = 600.0, curve: Callable[[App, float], LossCurve] = twentyfold) -> Leased:
    """Each free GPU to the app whose loss it lowers most over a lease. ``curve`` gets app and total iterations."""
    return Leased(LossDecrease(curve), lease_s)
