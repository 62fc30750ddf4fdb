"""The most throughput in sum (Gavel, OSDI 2020): fast apps first, slow ones only with what is left."""

from dataclasses import dataclass
from typing import Any

from ebbflow.planners.scheduling.shares.linear_program import Programme
from ebbflow.planners.scheduling.shares.rules import Array, Demand


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
