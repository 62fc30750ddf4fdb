"""Seeded faults: nodes that fail and are repaired, nodes that are slow.

What hits a node depends on the seed and its name, on nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite
from zlib import crc32

import numpy as np

from ebbflow.infra.simulation.protocols import JobModel, ModelOf
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.node_traces import AvailabilityInterval, cluster_of, presences
from ebbflow.infra.simulation.traces.workloads import Job
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, Placement


@dataclass(frozen=True, slots=True)
class Failures:
    """Losses without notice: a Poisson process of ``rate`` per node-hour; a node is back ``repair`` s later."""

    rate: float
    repair: float = 1800.0

    def __post_init__(self) -> None:
        if not 0 <= self.rate < inf or not 0 < self.repair < inf:
            raise OptionError(
                "failures need a rate >= 0 per node-hour and a repair time > 0 s;"
                f" got {self.rate}, {self.repair}"
            )


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Slow nodes: each is one with chance ``share``, and iterations on it take ``factor`` times as long."""

    share: float
    factor: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not (self.factor >= 1 and isfinite(self.factor)):
            raise OptionError(
                "stragglers need a share from 0 to 1 and a finite factor >= 1;"
                f" got {self.share}, {self.factor}"
            )


def _generator(seed: int, what: str, node: str) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(what.encode()), crc32(node.encode())])


def with_failures(cluster: Cluster, failures: Failures, seed: int, horizon: float) -> Cluster:
    """Return ``cluster`` with failures until ``horizon`` s.

    Equal seeds give equal failures, whatever else the cluster holds; a longer horizon only adds later ones. A node
    that comes back before the deadline of its notice is told again. Raises ``OptionError`` for an endless horizon.
    """
    if not horizon < inf:
        raise OptionError(f"the horizon of failures must be finite; got {horizon} s")
    if failures.rate == 0:
        return cluster
    down: dict[str, list[tuple[float, float]]] = {}
    pieces: list[AvailabilityInterval] = []
    for whole in presences(cluster):
        id_ = whole.node.id
        if id_ not in down:
            down[id_] = _down(failures, _generator(seed, "failures", id_), horizon)
        start = whole.start
        for lost, back in down[id_]:
            if back <= start or lost >= whole.end:
                continue
            pieces.append(replace(whole, start=start, end=max(lost, start)))
            start = back
        pieces.append(replace(whole, start=min(start, whole.end)))
    return cluster_of(pieces)


def _down(failures: Failures, rng: np.random.Generator, horizon: float) -> list[tuple[float, float]]:
    times: list[tuple[float, float]] = []
    at = 0.0
    while True:
        at += float(rng.exponential(3600 / failures.rate))
        if at >= horizon:
            return times
        times.append((at, at + failures.repair))
        at += failures.repair


def slow_nodes(cluster: Cluster, stragglers: Stragglers, seed: int) -> dict[str, float]:
    """Return the factor of each slow node."""
    ids = {one.node.id for one in presences(cluster)}
    return {
        id_: stragglers.factor
        for id_ in sorted(ids)
        if _generator(seed, "stragglers", id_).random() < stragglers.share
    }


def slowed(models: ModelOf, factors: Mapping[str, float]) -> ModelOf:
    """Return ``models`` with jobs that run at the pace of their slowest node. Agents and policies are not told."""

    def model(job: Job) -> JobModel:
        return _SlowedJob(models(job), factors)

    return model if factors else models


class _SlowedJob:
    """A job whose rate is lowered by the slowest node that it runs on."""

    __slots__ = ("_factors", "_model", "_pace")

    def __init__(self, model: JobModel, factors: Mapping[str, float]) -> None:
        self._model, self._factors = model, factors
        self._pace = 1.0

    @property
    def done(self) -> bool:
        return self._model.done

    @property
    def steady(self) -> bool:
        return self._model.steady

    @property
    def phase(self) -> int:
        return getattr(self._model, "phase", 0)

    def place(self, placement: Placement, nodes: Mapping[str, Node]) -> None:
        self._pace = 1 / max((self._factors.get(id_, 1.0) for id_, _ in placement), default=1.0)
        self._model.place(placement, nodes)

    def _lost(self, interference: float) -> float:
        return 1 - (1 - interference) * self._pace

    def advance(self, seconds: float, interference: float = 0.0) -> float:
        return self._model.advance(seconds, self._lost(interference))

    def horizon(self, interference: float = 0.0) -> float:
        return self._model.horizon(self._lost(interference))

    def complete(self) -> None:
        self._model.complete()

    def save(self) -> None:
        self._model.save()

    def lose(self, kept: Placement) -> Placement:
        return self._model.lose(kept)

    def report(self, app: App) -> None:
        self._model.report(app)

    def alone(self) -> float:
        return self._model.alone()

    def score(self) -> float:
        return self._model.score()
