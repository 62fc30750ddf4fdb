"""What apps of Themis' evaluation tell the scheduler: bids by their forecasts, with errors, and with lies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from time import process_time
from typing import Any

import numpy as np

from ebbflow.infra.simulation.jobs.tuning import TunedApp
from ebbflow.planners.model.scheduling import App, Decision, Policy, View
from ebbflow.planners.scheduling.bids import Offer, prepare_bid
from ebbflow.planners.scheduling.finish_time import ActiveAverage, FinishTime
from ebbflow.planners.scheduling.locality import Array, Level, Slowdown


@dataclass(frozen=True, slots=True)
class BidDistortion:
    """What an app reports instead of the truth: factors on work, on S of spread bundles, and on S of dense ones.

    A lie that inflates staggered S has ``spread`` > 1, one that deflates dense S ``dense`` < 1. S of a spread bundle
    is never believed to be below 1.
    """

    work: float = 1.0
    spread: float = 1.0
    dense: float = 1.0


@dataclass(slots=True)
class TunedBidder(FinishTime):
    """ρ of a hyper-parameter app by the forecasts of its tuner (NSDI 2020, equation 2).

    A bundle of more GPUs than one gang holds several: a share of it (:func:`whole_share`) is believed to lie in whole
    gangs on single nodes, the rest is slowed by the bundle's level.
    """

    model: TunedApp = field(kw_only=True)
    belief: BidDistortion = field(default_factory=BidDistortion)
    sizes: tuple[int, ...] = field(kw_only=True)  # GPUs of the cluster's nodes

    def slowdown(self, gpus: Array, tasks: Array | int, level: Level) -> Array:
        """Return S of ``gpus`` within ``level`` for gangs of ``tasks``."""
        locality, belief = self.model.tuning.locality, self.belief
        near = locality.node * belief.dense
        true = (near, near, locality.rack * belief.spread, locality.cluster * belief.spread)[level]
        far = true if level <= Level.MACHINE else max(true, 1.0)
        whole = np.array([whole_share(self.sizes, int(t)) for t in np.ravel(tasks)]).reshape(np.shape(tasks))
        several = 1 / (whole / near + (1 - whole) / far)
        one: Array = np.where(np.asarray(tasks) == 1, near, far)
        return np.where(np.asarray(gpus) > tasks, several, one)

    def remaining(self, gpus: Array, level: Level) -> Array:
        """Return seconds of work left with ``gpus`` within ``level`` to the end; infinite without GPUs."""
        have = np.asarray(gpus, float)[:, None]
        left = [(s.work, s.longest, s.jobs * s.tasks, s.tasks) for s in self.model.remaining_stages()]
        work, longest, most, tasks = np.array(left, float).reshape(-1, 4).T
        with np.errstate(divide="ignore"):
            each = np.maximum(work / np.minimum(have, most), longest / np.minimum(have, tasks))
        total: Array = (each * self.slowdown(have, tasks, level)).sum(axis=1) * self.belief.work
        return total

    @property
    def total_work(self) -> float:
        """Return the budget B, GPU-s."""
        return self.model.tuning.work * self.belief.work

    @property
    def demand(self) -> int:
        """Return the most GPUs that make any phase shorter."""
        return self.model.tuning.demand


@cache
def whole_share(sizes: tuple[int, ...], tasks: int) -> float:
    """Return the mean share of a bundle in whole gangs of ``tasks`` on single nodes of these sizes.

    Every number of GPUs of a node is taken as equally likely to be what the bundle has of it.
    """
    parts = [part for size in sizes for part in range(1, size + 1)]
    return sum(part // tasks * tasks for part in parts) / sum(parts)


class Agents:
    """A policy with the agents of its apps, which keep N_avg up to date. One instance serves one run.

    ``probe`` > 0 measures CPU time: of each round, and of a bid of every app in every ``probe``-th round.
    """

    elastic = True

    def __init__(self, policy: Policy, bidders: Mapping[str, TunedBidder], probe: int = 0) -> None:
        self.policy, self.bidders, self.probe = policy, bidders, probe
        self._active: dict[str, ActiveAverage] = {}
        self.rounds_s: list[float] = []
        self.bids_s: list[float] = []
        self.calls = 0

    @property
    def name(self) -> str:
        return self.policy.name

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Bring N_avg up to date and ask the policy."""
        count = float(len(view.apps))
        for app in view.apps:
            if app.id not in self._active:
                self._active[app.id] = ActiveAverage(view.now, count)
            active = self._active[app.id]
            active.update(view.now, count)
            self.bidders[app.id].n_avg = active.value(view.now)
        if self.probe:
            self._measure_bids(view)
        began = process_time()
        decision = self.policy.decide(view, memory, rng)
        if self.probe and decision.notes:
            self.rounds_s.append(process_time() - began)
        return decision

    def _measure_bids(self, view: View) -> None:
        self.calls += 1
        if self.calls % self.probe:
            return
        offer = Offer.of(view.capacity, {})
        for app in view.apps:
            began = process_time()
            prepare_bid(app.id, self.bidders[app.id], offer, view.capacity, view.now, max_gpus=app.max_gpus)
            self.bids_s.append(process_time() - began)


def believed_slowdown(bidders: Mapping[str, TunedBidder]) -> Callable[[App], Slowdown]:
    """Return what policies by placement believe of an app's S at each level, for as many GPUs as it can use."""

    def slowdown(app: App) -> Slowdown:
        bidder = bidders[app.id]
        gpus, tasks = np.array([app.max_gpus]), bidder.model.stage.tasks
        rack, cluster = (
            float(bidder.slowdown(gpus, tasks, level)[0]) for level in (Level.RACK, Level.CLUSTER)
        )
        return Slowdown(1.0, 1.0, rack, max(rack, cluster))

    return slowdown
