"""Isolated shares (Gavel, OSDI 2020): every app as if it had its own 1-over-n of the cluster.

First in, first out on unlike GPUs (Gavel, OSDI 2020, *FIFO-perf*).

Gandiva-fair (EuroSys 2020) as Gavel and Shockwave compare with it: time split evenly over apps.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbflow.planners.scheduling.shares.rules import Array, Demand, at_most_one, isolated


@dataclass(frozen=True, slots=True)
class Isolated:
    """One n-th of the GPUs of every type, as a fraction of time for the whole gang."""

    name: str = "isolated"
    fastest_first: bool = False
    work_conserving: bool = True

    def shares(self, demand: Demand, memory: Any = None) -> tuple[Array, Any]:
        """Return (g/m)/K for every type of g GPUs, m apps and gangs of K, rows scaled down to 1."""
        return isolated(demand), None


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
