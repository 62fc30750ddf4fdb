"""Levels of locality, how much each slows training down, and a bidder that answers by level (Themis, NSDI 2020).

What policies compute from an app's own report of its speed and remaining work.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from math import isfinite
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.scheduling import App, Placement, gpus_of

Array = np.ndarray[Any, Any]


class Level(IntEnum):
    """The narrowest unit that encloses a bundle; its slowest interconnect sets the pace (NSDI 2020, section 8.1)."""

    SLOT = 0  # GPUs on one switch of a machine; nodes do not say theirs, so only a single GPU counts as one
    MACHINE = 1
    RACK = 2
    CLUSTER = 3


def level_of(placement: Placement, capacity: Capacity) -> Level:
    """Return the narrowest level that encloses ``placement``. Nodes unknown to ``capacity`` share the rack ``""``."""
    if len(placement) <= 1:
        return Level.SLOT if gpus_of(placement) <= 1 else Level.MACHINE
    members = {node for node, _ in placement}
    racks = {n.rack for n in capacity.nodes if n.id in members}
    return Level.RACK if len(racks) <= 1 else Level.CLUSTER


@runtime_checkable
class TableBidder(Protocol):
    """A bidder that answers for many bundles at once."""

    def rho_at(self, gpus: Array, levels: Array, now: float) -> Array:
        """Return ρ for each pair of GPUs held in total (≥ 1) and level that encloses them (equal shapes)."""
        ...


@dataclass(frozen=True, slots=True)
class Slowdown:
    """By what an iteration takes longer at each level: S ≥ 1. The defaults are those to start from online."""

    slot: float = 1.0
    machine: float = 1.0
    rack: float = 1.1
    cluster: float = 1.3

    def __post_init__(self) -> None:
        for value in self.levels:
            if not (isfinite(value) and value >= 1.0):
                raise OptionError(f"a slowdown must be a finite number >= 1; got {value}")

    @property
    def levels(self) -> tuple[float, float, float, float]:
        """Return S by :class:`Level`."""
        return self.slot, self.machine, self.rack, self.cluster

    @classmethod
    def of_sensitivity(cls, sensitivity: float) -> "Slowdown":
        """Return the slowdowns of a scalar sensitivity s: 1 + (s - 1)·w, w = 0, 0, 1, 3, never below 1."""
        extra = max(sensitivity - 1.0, 0.0)
        return cls(1.0, 1.0, 1.0 + extra, 1.0 + 3.0 * extra)

    def measured(self, level: Level, ratio: float) -> "Slowdown":
        """Return the model with ``level`` replaced by a measured ratio, at least 1."""
        return replace(self, **{level.name.lower(): max(ratio, 1.0)})


def iteration_time(app: App, gpus: int) -> float:
    """Return seconds per iteration on ``gpus`` well-placed GPUs.

    Without a reported speed it follows from the fastest throughput, taken as linear in GPUs. Raises ``OptionError``
    for an app that reports neither.
    """
    if app.speed is not None:
        return app.speed.iteration_time(gpus)
    fastest = max(app.throughputs.values(), default=0.0)
    if not fastest > 0:
        raise OptionError(f"app {app.id!r} reports neither a speed nor a throughput above 0")
    return app.gpus / gpus / fastest


def remaining_time(app: App, gpus: int) -> float:
    """Return the seconds that are left on ``gpus`` well-placed GPUs."""
    return max(app.remaining, 0.0) * iteration_time(app, gpus)


def remaining_service(app: App, gpus: int) -> float:
    """Return the GPU-seconds that are left on ``gpus`` well-placed GPUs."""
    return gpus * remaining_time(app, gpus)


def throughput(app: App, gpu: str) -> float:
    """Return iterations/s of the app's gang on GPUs of type ``gpu``, 0 where it cannot run.

    An app that reports no throughputs by type is as fast on all of them. Raises ``OptionError`` for an app that
    reports no speed either.
    """
    if app.throughputs:
        return app.throughputs.get(gpu, 0.0)
    return 1 / iteration_time(app, app.gpus)
