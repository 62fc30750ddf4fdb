"""Isolated shares (Gavel, OSDI 2020): every app as if it had its own 1-over-n of the cluster."""

from dataclasses import dataclass
from typing import Any

from ebbflow.planners.scheduling.shares.rules import Array, Demand, isolated


@dataclass(frozen=True, slots=True)
class Isolated:
    """One n-th of the GPUs of every type, as a fraction of time for the whole gang."""

    name: str = "isolated"
    fastest_first: bool = False
    work_conserving: bool = True

    def shares(self, demand: Demand, memory: Any = None) -> tuple[Array, Any]:
        """Return (g/m)/K for every type of g GPUs, m apps and gangs of K, rows scaled down to 1."""
        return isolated(demand), None
