"""Gandiva-fair (EuroSys 2020) as Gavel and Shockwave compare with it: time split evenly over apps."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbflow.planners.scheduling.shares.rules import Array, Demand, at_most_one


@dataclass(frozen=True, slots=True)
class GandivaFair:
    """Every app the same fraction of time on every type, whatever its gang; capacity may be exceeded."""

    name: str = "gandiva-fair"
    fastest_first: bool = False
    work_conserving: bool = True

    def shares(self, demand: Demand, memory: Any = None) -> tuple[Array, Any]:
        """Return g/m for every type of g GPUs and m apps, rows scaled down to 1."""
        apps = len(demand.apps)
        if not apps:
            return np.zeros((0, len(demand.types))), None
        return at_most_one(np.tile(demand.gpus / apps, (apps, 1))), None
