"""Least attained service as max-min fairness over shares (Gavel, OSDI 2020, section 4.1)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbflow.planners.scheduling.shares.linear_program import Programme
from ebbflow.planners.scheduling.shares.rules import Array, Demand


@dataclass(frozen=True, slots=True)
class MaxMin:
    """The least normalised rate as large as possible, then the next least, and so on.

    An app's rate is its throughput times its GPUs, over its weight and what an equal share of all GPUs would give
    it. ``perf`` knows that GPU types differ in speed; without it they count as equal.
    """

    perf: bool = False
    work_conserving: bool = True

    @property
    def name(self) -> str:
        return "max-min-perf" if self.perf else "max-min"

    @property
    def fastest_first(self) -> bool:
        return self.perf

    def shares(self, demand: Demand, memory: Any = None) -> tuple[Array, Any]:
        """Return the fairest shares (lexicographic max-min)."""
        speed = demand.throughput if self.perf else np.ones(demand.throughput.shape)
        if not demand.apps:
            return speed, None
        # g/m over its sum, in this order: g/G differs in the last bit, and ties in priority are common.
        each = demand.gpus / len(demand.apps)
        equal = speed @ (each / each.sum())
        rates = speed * (demand.gang / (demand.weight * np.where(equal > 0, equal, 1.0)))[:, None]
        return Programme(demand).fairest(rates, (equal > 0).astype(float)), None
