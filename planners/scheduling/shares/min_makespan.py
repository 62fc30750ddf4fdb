"""The least makespan over shares (Gavel, OSDI 2020, section 4.2)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbflow.planners.scheduling.shares.linear_program import Programme
from ebbflow.planners.scheduling.shares.rules import Array, Demand, reference_throughput


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
