"""First in, first out on unlike GPUs (Gavel, OSDI 2020, *FIFO-perf*)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbflow.planners.scheduling.shares.rules import Array, Demand


@dataclass(frozen=True, slots=True)
class FifoPerf:
    """Apps in order of submission, each on the type that is fastest for it and has room; the first that fits
    nowhere ends the walk. Decided anew at each call, so an app may move."""

    name: str = "fifo-perf"
    fastest_first: bool = True
    work_conserving: bool = False

    def shares(self, demand: Demand, memory: Any = None) -> tuple[Array, Any]:
        """Return 1 for each app that starts on its type, 0 elsewhere."""
        shares = np.zeros(demand.throughput.shape)
        left = demand.gpus.copy()
        for app, gang in enumerate(demand.gang):
            room = np.flatnonzero(left >= gang)
            if not len(room):
                break
            best = room[np.argmax(demand.throughput[app, room])]
            if demand.throughput[app, best] > 0:
                shares[app, best] = 1.0
                left[best] -= gang
        return shares, None
