"""What simulated apps tell their policy besides what the engine knows: throughputs by GPU type, and bids.

Apps that are hyper-parameter searches have agents of their own (``evaluation.themis_agents``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ebbflow.planners.model.scheduling import App, Decision, Policy, View
from ebbflow.planners.scheduling.finish_time import ActiveAverage, FinishTime
from ebbflow.planners.scheduling.locality import Array, Level, Slowdown, iteration_time
from ebbflow.planners.scheduling.placement_cost import PlacementCost

NO_SLOWDOWN = Slowdown(1.0, 1.0, 1.0, 1.0)


class _PerType:
    """Speed in proportion to GPUs, from the fastest throughput."""

    __slots__ = ("_app",)

    def __init__(self, app: App) -> None:
        self._app = app

    def iteration_time(self, gpus: int) -> float:
        """Return seconds per iteration on ``gpus`` well-placed GPUs."""
        return self._app.gpus / gpus / max(self._app.throughputs.values())


@dataclass(slots=True)
class ReportedSpeed(FinishTime):
    """The bidder of an app with one job, answering by the speed and the remaining work that the app reports."""

    app: App = field(kw_only=True)
    alone: float = field(kw_only=True)  # s from start to end on the GPUs asked for
    slowdown: Slowdown = NO_SLOWDOWN
    cost: PlacementCost | None = None  # of placements, where the app's communication is known
    per_node: int = 1  # GPUs of a node

    def remaining(self, gpus: Array, level: Level) -> Array:
        """Return seconds of work left with ``gpus`` within ``level``; infinite without GPUs."""
        wanted = np.asarray(gpus)
        left = np.full(wanted.shape, np.inf)
        for count in np.unique(wanted[wanted >= 1]).tolist():
            used = min(int(count), self.demand)
            seconds = iteration_time(self.app, used)
            left[wanted == count] = max(self.app.remaining, 0.0) * self._spread(used, level, seconds)
        return left

    def _spread(self, gpus: int, level: Level, seconds: float) -> float:
        """Return the seconds of an iteration within ``level`` that takes ``seconds`` on well-placed GPUs.

        More GPUs than a node has are well placed on several, which ``seconds`` has in it.
        """
        if self.cost is None:
            return seconds * self.slowdown.levels[level]
        placed = Level.MACHINE if gpus <= self.per_node else Level.RACK
        longer = self.cost.seconds(gpus, level) - self.cost.seconds(gpus, placed)
        return seconds + max(longer, 0.0)

    @property
    def total_work(self) -> float:
        return self.alone * self.app.gpus

    @property
    def demand(self) -> int:
        return max(self.app.max_gpus, 1)

    @property
    def time_alone(self) -> float:
        """Return the time on the GPUs asked for, times the mean number of apps (NSDI 2020, equation 1)."""
        return self.alone * self.n_avg


class PolicyWithReports:
    """A policy together with the reports of the apps that it is asked about. One instance serves one run.

    ``elastic`` is the policy's own, or true for one that bids. With ``within_request`` an app that could use other
    numbers gets from 1 GPU up to what its user asked for. ``costs``: model -> what placements cost its apps on nodes
    of ``per_node`` GPUs; apps of other models bid by ``slowdown``.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        within_request: bool,
        slowdown: Slowdown = NO_SLOWDOWN,
        costs: Mapping[str, PlacementCost] | None = None,
        per_node: int = 1,
    ) -> None:
        self.policy, self.within_request, self.slowdown = policy, within_request, slowdown
        self._costs, self._per_node = costs or {}, per_node
        self.elastic = bool(getattr(policy, "elastic", False)) or within_request
        self._active: dict[str, ActiveAverage] = {}
        self._bidders: dict[str, ReportedSpeed] = {}

    @property
    def name(self) -> str:
        return self.policy.name

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Bring what apps report up to date and ask the policy."""
        types = {node.instance_type for node in view.capacity.nodes if node.gpus}
        cluster = max(sum(node.gpus for node in view.capacity.nodes), 1)
        for app in view.apps:
            self._equip(app, types, cluster, view)
        gone = self._bidders.keys() - {app.id for app in view.apps}
        for id_ in gone:
            del self._bidders[id_], self._active[id_]
        return self.policy.decide(view, memory, rng)

    def _equip(self, app: App, types: set[str], cluster: int, view: View) -> None:
        if app.speed is None and app.throughputs:
            app.speed = _PerType(app)
        elif app.speed is not None and not isinstance(app.speed, _PerType):
            # of what the user asked for, which a rigid policy gives even where more than one GPU gains nothing
            app.throughputs = dict.fromkeys(types, 1 / iteration_time(app, app.gpus))
        if self.within_request and app.min_gpus < app.max_gpus:
            app.min_gpus, app.max_gpus = 1, min(app.gpus, app.max_gpus)
        bidder = self._bidders.get(app.id)
        count = float(len(view.apps))
        if bidder is None:
            active = self._active[app.id] = ActiveAverage(view.now, count)
            alone = app.remaining * iteration_time(app, app.gpus)
            bidder = self._bidders[app.id] = ReportedSpeed(
                arrival=app.arrival,
                app=app,
                alone=alone,
                slowdown=self.slowdown,
                cost=self._costs.get(app.model),
                per_node=self._per_node,
            )
            app.bidder = bidder
        else:
            active = self._active[app.id]
            active.update(view.now, count)
        bidder.cluster_gpus, bidder.n_avg = cluster, active.value(view.now)
