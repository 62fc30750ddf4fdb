"""Least attained service as max-min fairness over shares (Gavel, OSDI 2020, section 4.1).

The most throughput in sum (Gavel, OSDI 2020): fast apps first, slow ones only with what is left.

The least makespan over shares (Gavel, OSDI 2020, section 4.2).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbflow.planners.scheduling.shares.linear_program import Programme
from ebbflow.planners.scheduling.shares.rules import Array, Demand, reference_throughput


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


@dataclass(frozen=True, slots=True)
class MaxSum:
    """Maximises Σ iterations/s, not normalised; of equal sums, the one that gives most to the oldest apps."""

    name: str = "max-sum"
    fastest_first: bool = True
    work_conserving: bool = True

    def shares(self, demand: Demand, memory: Any = None) -> tuple[Array, Any]:
        """Return shares of the largest sum of throughputs."""
        if not demand.apps:
            return demand.throughput, None
        # Age decides between equals: a bonus of a millionth outweighs no difference of throughputs that is real.
        age = demand.age / max(float(demand.age.max()), 1.0)
        return Programme(demand).maximise(demand.throughput * (1 + 1e-6 * age[:, None])), None


@dataclass(frozen=True, slots=True)
class MinMakespan:
    """Every app so fast that the last one ends as early as can be; then the next to last, and so on."""

    perf: bool = False
    reference: str = "v100"
    work_conserving: bool = True

    @property
    def name(self) -> str:
        return "min-makespan-perf" if self.perf else "min-makespan"

    @property
    def fastest_first(self) -> bool:
        return self.perf

    def shares(self, demand: Demand, memory: Any = None) -> tuple[Array, Any]:
        """Return shares that maximise the least rate over remaining work."""
        speed = demand.throughput if self.perf else reference_throughput(demand, self.reference)
        if not demand.apps:
            return speed, None
        floors = np.maximum(demand.remaining, 0.0)
        return Programme(demand).fairest(speed, floors / max(float(floors.max()), 1.0)), None
