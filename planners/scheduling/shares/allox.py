"""AlloX (EuroSys 2020) as Gavel and Shockwave compare with it: least total completion time by assignment."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.shares.rules import Array, Demand

Remembered = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class AlloX:
    """The oldest apps, matched to GPUs and places in line so that completion times sum to the least.

    A single-GPU app keeps the GPU it was given. ``alpha`` is the fraction of apps, oldest first, that is looked
    at (AlloX's guard against starvation); as many as there are free GPUs are looked at in any case.
    """

    alpha: float = 0.2
    name: str = "allox"
    fastest_first: bool = True
    work_conserving: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise OptionError(f"alpha must be from 0 to 1; got {self.alpha}")

    def shares(self, demand: Demand, memory: Remembered | None = None) -> tuple[Array, Remembered]:
        """Return the assignment: 1/K on one type for each app of K GPUs at the head of a line.

        Apps that this call says nothing about keep their last answer, or 0. ``memory`` is those answers.
        """
        shares = np.zeros(demand.throughput.shape)
        for row, app in enumerate(demand.apps):
            for column, gpu in enumerate(demand.types):
                shares[row, column] = (memory or {}).get(app, {}).get(gpu, 0.0)
        fixed = shares.sum(axis=1) == 1
        slots = _slots(demand, shares[fixed])
        waiting = sorted(np.flatnonzero(~fixed).tolist(), key=lambda row: -demand.age[row])
        waiting = waiting[: max(int(self.alpha * len(waiting)), len(slots))]
        for row, column in _heads(demand, waiting, slots):
            shares[row] = 0.0
            shares[row, column] = 1.0 / demand.gang[row]
        answer = {
            app: dict(zip(demand.types, map(float, shares[row]), strict=True))
            for row, app in enumerate(demand.apps)
        }
        return shares, answer


def _slots(demand: Demand, taken: Array) -> list[int]:
    """Return the type of every GPU that no app has for itself."""
    free = demand.gpus - np.count_nonzero(taken, axis=0)
    return [column for column, count in enumerate(free) for _ in range(max(int(count), 0))]


def _heads(demand: Demand, rows: list[int], slots: list[int]) -> list[tuple[int, int]]:
    """Return (app, type) for the app at the head of each slot's line.

    Entry (i, k·n + c) of the cost matrix is what app i adds to the sum of completion times if k apps follow it
    on slot c: its own processing time k + 1 times, and its age.
    """
    if not rows or not slots:
        return []
    speed = demand.throughput[np.ix_(rows, slots)]
    work = demand.remaining[rows, None] / np.where(speed > 0, speed, 1e-10)
    cost = np.hstack([k * work + demand.age[rows, None] for k in range(1, len(rows) + 1)])
    # Slots of a type are alike, so many assignments are optimal. Which one the solver takes depends on rounding;
    # taking off the least entry gives the choice of the artefact's SciPy 1.5, which did that itself.
    heads: dict[int, tuple[int, int]] = {}
    for index, column in zip(*linear_sum_assignment(cost - cost.min()), strict=True):
        block, slot = divmod(int(column), len(slots))
        heads[slot] = max(heads.get(slot, (-1, -1)), (block, int(index)))
    return [(rows[index], slots[slot]) for slot, (_, index) in sorted(heads.items())]
