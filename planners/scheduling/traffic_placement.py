"""Workers and parameter servers with the least traffic on the busiest machine, exactly (Tiresias, NSDI 2019, 3.4).

The paper formulates this integer programme and rejects it: it is slow, and balanced traffic does not say which models
suffer. It serves as a baseline and as an oracle for small cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from ebbflow.planners.errors import OptionError, PlanningError


@dataclass(frozen=True, slots=True)
class TrafficPlacement:
    """Workers by machine, the machine of each server, and the traffic of the busiest machine (unit of the sizes)."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    most: float


def traffic(
    workers: Sequence[int], servers: Sequence[int], sizes: Sequence[float], existing: Sequence[float]
) -> list[float]:
    """Return the traffic of each machine in one step: existing, fetched by its workers, given by its servers."""
    model, total = sum(sizes), sum(workers)
    here = [0.0] * len(workers)
    for machine, size in zip(servers, sizes, strict=True):
        here[machine] += size
    return [
        old + own * (model - hosted) + hosted * (total - own)
        for old, own, hosted in zip(existing, workers, here, strict=True)
    ]


def least_traffic(
    free: Sequence[int],
    existing: Sequence[float],
    workers: int,
    sizes: Sequence[float],
    *,
    limit: float = 60.0,
) -> TrafficPlacement:
    """Return the placement of ``workers`` workers and servers of ``sizes`` with the least largest traffic.

    Args:
        free: GPUs by machine; a worker takes one, a server none.
        existing: traffic already there by machine.
        limit: s that the solver may take.

    Raises:
        OptionError: more workers than GPUs, nothing to place, or unequal lengths.
        PlanningError: no optimum was proven within ``limit``.
    """
    if not 1 <= workers <= sum(free) or not sizes or min(sizes) <= 0 or len(existing) != len(free):
        raise OptionError(
            f"1 to {sum(free)} workers and servers of positive size must be placed; got {workers}, {list(sizes)}"
        )
    machines, servers = len(free), len(sizes)
    model = float(sum(sizes))
    # columns: workers by machine, then server x machine, then workers beside a server x machine, then the maximum
    hosts, beside = machines, machines + servers * machines
    columns = beside + servers * machines + 1
    rows: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
    low: list[float] = []
    high: list[float] = []

    def limit_row(entries: dict[int, float], least: float, most: float) -> None:
        row = np.zeros(columns)
        for column, value in entries.items():
            row[column] = value
        rows.append(row)
        low.append(least)
        high.append(most)

    limit_row(dict.fromkeys(range(machines), 1.0), workers, workers)
    for server in range(servers):
        limit_row({hosts + server * machines + machine: 1.0 for machine in range(machines)}, 1, 1)
        for machine in range(machines):
            column = beside + server * machines + machine
            limit_row({column: 1.0, machine: -1.0}, -np.inf, 0)
            limit_row({column: 1.0, hosts + server * machines + machine: -float(free[machine])}, -np.inf, 0)
    for machine in range(machines):
        entries = {machine: model, columns - 1: -1.0}
        for server, size in enumerate(sizes):
            entries[hosts + server * machines + machine] = workers * size
            entries[beside + server * machines + machine] = -2 * size
        limit_row(entries, -np.inf, -existing[machine])
    upper = np.concatenate(
        [np.array(free, float), np.ones(servers * machines), np.full(servers * machines, np.inf)]
    )
    whole = np.concatenate([np.ones(beside), np.zeros(servers * machines + 1)])
    target = np.zeros(columns)
    target[-1] = 1
    found = milp(
        target,
        constraints=LinearConstraint(np.array(rows), low, high),
        bounds=Bounds(np.zeros(columns), np.append(upper, np.inf)),
        integrality=whole,
        options={"time_limit": limit},
    )
    if found.status != 0 or found.x is None:
        raise PlanningError(f"no placement was proven best within {limit:g} s: {found.message}")
    placed = tuple(round(value) for value in found.x[:machines])
    hosted = found.x[hosts:beside].reshape(servers, machines)
    at = tuple(int(machine) for machine in hosted.argmax(axis=1))
    return TrafficPlacement(placed, at, max(traffic(placed, at, sizes, existing)))
