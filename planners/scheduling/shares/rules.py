"""Share rules: which fraction of the time each app should hold its gang on each GPU type (Gavel, OSDI 2020).

A rule answers a matrix; ``planners.scheduling.shares.rounds`` turns it into leases.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.errors import OptionError

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Demand:
    """What a share rule sees. Rows are apps in order of submission, columns GPU types in order of name."""

    apps: tuple[str, ...]
    types: tuple[str, ...]
    throughput: Array  # [apps, types] iterations/s of the whole gang; 0: cannot run there
    gang: Array  # [apps] GPUs
    weight: Array  # [apps]
    remaining: Array  # [apps] iterations
    age: Array  # [apps] s since arrival
    gpus: Array  # [types]

    def __post_init__(self) -> None:
        rows, columns = len(self.apps), len(self.types)
        shapes = {
            "throughput": (self.throughput, (rows, columns)),
            "gang": (self.gang, (rows,)),
            "weight": (self.weight, (rows,)),
            "remaining": (self.remaining, (rows,)),
            "age": (self.age, (rows,)),
            "gpus": (self.gpus, (columns,)),
        }
        for name, (values, shape) in shapes.items():
            if values.shape != shape:
                raise OptionError(f"{name} must have shape {shape}; got {values.shape}")
        if rows and self.gang.min() < 1:
            raise OptionError(f"a gang needs at least 1 GPU; got {self.gang.min():g}")


class ShareRule(Protocol):
    """Demand in, fractions of time out."""

    @property
    def name(self) -> str: ...

    @property
    def fastest_first(self) -> bool:
        """Whether rounds fill the fastest GPU type first (the *perf* rules) or types in random order."""
        ...

    @property
    def work_conserving(self) -> bool:
        """Whether apps with no priority on a type may take what the others leave of it."""
        ...

    def shares(self, demand: Demand, memory: Any) -> tuple[Array, Any]:
        """Return fractions of time in [0, 1], shape [apps, types], and the memory for the next call."""
        ...


def at_most_one(shares: Array) -> Array:
    """Return ``shares`` with every row that sums to more than 1 scaled down to 1."""
    scaled: Array = shares / np.maximum(shares.sum(axis=1), 1.0)[:, None]
    return scaled


def isolated(demand: Demand) -> Array:
    """Return what each app would get of its own 1-over-n of every type (Gavel's *isolated* shares)."""
    if not demand.apps:
        return np.zeros((0, len(demand.types)))
    return at_most_one((demand.gpus / len(demand.apps)) / demand.gang[:, None])


def reference_throughput(demand: Demand, reference: str) -> Array:
    """Return the throughput on type ``reference`` (or the largest, where there is none) for every type."""
    if reference in demand.types:
        one = demand.throughput[:, demand.types.index(reference)]
    else:
        one = demand.throughput.max(axis=1, initial=0.0)
    return np.repeat(one[:, None], len(demand.types), axis=1)
