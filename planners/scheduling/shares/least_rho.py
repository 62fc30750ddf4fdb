"""Finish-time fairness as a programme over shares (Gavel, OSDI 2020, section 4.2; Themis' ρ, NSDI 2020)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ebbflow.planners.scheduling.shares.linear_program import Programme, root
from ebbflow.planners.scheduling.shares.rules import Array, Demand, isolated, reference_throughput


class Isolation(NamedTuple):
    """An app's account with an isolated share, as of the last call."""

    spent: float  # s in isolation that its progress so far would have taken
    remaining: float  # iterations
    rate: float  # iterations/s on its isolated share


@dataclass(frozen=True, slots=True)
class FinishTimeProgramme:
    """The largest finish time over that of an isolated share as small as possible, then the next largest.

    ``perf`` knows the apps' throughputs on each type; without it they all count as ``reference``.
    """

    perf: bool = False
    reference: str = "v100"
    work_conserving: bool = True

    @property
    def name(self) -> str:
        return "finish-time-programme-perf" if self.perf else "finish-time-programme"

    @property
    def fastest_first(self) -> bool:
        return self.perf

    def shares(
        self, demand: Demand, memory: Mapping[str, Isolation] | None = None
    ) -> tuple[Array, Mapping[str, Isolation]]:
        """Return shares that minimise max (age + remaining/rate)/isolated finish time."""
        if not demand.apps:
            return demand.throughput, {}
        speed = demand.throughput if self.perf else reference_throughput(demand, self.reference)
        alone = isolated(demand)
        rate = (speed * alone).sum(axis=1)
        spent = np.zeros(len(demand.apps))
        for row, app in enumerate(demand.apps):
            if memory and app in memory:
                last = memory[app]
                gained = (last.remaining - demand.remaining[row]) / last.rate if last.rate > 0 else 0.0
                spent[row] = last.spent + gained
        answer = {
            app: Isolation(float(spent[row]), float(demand.remaining[row]), float(rate[row]))
            for row, app in enumerate(demand.apps)
        }
        runs = rate > 0
        ideal = spent + demand.remaining / np.where(runs, rate, 1.0)
        if (ideal[runs] <= 0).any():
            return alone, answer  # not convex; the artefact does the same
        return self._fairest(demand, speed, np.where(runs, ideal, np.inf), alone), answer

    def _fairest(self, demand: Demand, speed: Array, ideal: Array, alone: Array) -> Array:
        programme = Programme(demand)
        work, top = np.maximum(demand.remaining, 0.0), speed.max(axis=1)

        def finish(rate: Array) -> Array:
            with np.errstate(divide="ignore"):
                return np.where(work > 0, demand.age + work / rate, demand.age) / ideal

        def floors(rho: float) -> Array:
            left = rho * ideal - demand.age
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.where((work > 0) & np.isfinite(ideal), work / left, 0.0)

        counts = np.isfinite(ideal)
        low = float(finish(top)[counts].max(initial=0.0))
        high = max(float(finish((speed * alone).sum(axis=1))[counts].max(initial=0.0)), low)

        def spare(rho: float) -> float:
            return programme.stretch(speed, floors(rho))[0] - 1.0

        rho = root(spare, low * (1 + 1e-9), high * (1 + 1e-9))
        return programme.fairest(speed, floors(rho))
