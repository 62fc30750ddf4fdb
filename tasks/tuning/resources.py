"""The GPUs of a tuning run, of its own nodes or leased ones, and which trial has which of them."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Protocol

import numpy as np

from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.planners.model.scheduling import App, Grant, Placement, Policy, View, gpus_of
from ebbflow.planners.scheduling.gangs.las import leased_las
from ebbflow.planners.tuning.early_stopping import rungs
from ebbflow.planners.tuning.promise import ByPromise, TrialRank, rank_trials, unranked
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.tuning.request import TuningRequest
from ebbflow.tasks.tuning.study import Study
from ebbflow.tasks.tuning.trial import Trial


class TrialResources(Protocol):
    """What a tuning run may use now. Called in the tuning run's thread."""

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes with the GPUs that its trials may have now, those included that they have."""
        ...

    def held(self, one: Trial) -> Placement:
        """Return what a trial still has of what it was given."""
        ...

    def give(self, one: Trial, placement: Placement) -> None:
        """Give a trial these GPUs instead of those that it has; its ``nodes`` are there afterwards."""
        ...

    def recover(self, one: Trial) -> None:
        """See to a trial that keeps what it has: its processes may be gone from a node that is still there."""
        ...

    def deadline(self, one: Trial) -> float | None:
        """Return by when a trial that is to pause must be gone (s since the Unix epoch); ``None``: its own grace."""
        ...

    def take_back(self, one: Trial) -> None:
        """Take note that nothing of a trial runs any more."""
        ...

    def settled(self) -> bool:
        """Return whether no GPU is in use that a trial has given up."""
        ...


class OwnTrialResources:
    """The search's own nodes, which stay. A run never uses a name twice: a node that comes back has another one."""

    def __init__(self, request: TuningRequest) -> None:
        self._request = request
        self._nodes = tuple(Node(name, slots, 0.0, gpus=slots) for name, slots in request.placement.items())

    def nodes(self) -> tuple[Node, ...]:
        """See ``TrialResources``."""
        return self._nodes

    def held(self, one: Trial) -> Placement:
        """See ``TrialResources``."""
        return one.app.held

    def give(self, one: Trial, placement: Placement) -> None:
        """See ``TrialResources``."""
        for node in list(one.names):
            if node not in dict(placement):
                del one.names[node]
        for node, slots in placement:  # what stays keeps its name, so that its processes may train on
            parts = one.names.setdefault(node, {})
            more = slots - sum(parts.values())
            while more < 0:
                more += parts.pop(list(parts)[-1])
            while more:
                size = self._together(one, more)
                one.turns += 1
                parts[f"{node}.{one.turns}"] = size
                more -= size
        wanted = {name: slots for parts in one.names.values() for name, slots in parts.items()}
        if one.nodes is None:
            one.nodes = Nodes(wanted, self._request.most_gpus, self._request.gpus_per_trial)
        else:
            one.nodes.become(wanted)

    def _together(self, one: Trial, more: int) -> int:
        """Return how many of ``more`` GPUs of a node have a name in common.

        Those that may go to another trial have one each: the processes on the others train on where they leave.
        """
        if not self._request.by_promise:
            return more
        return 1 if any(one.names.values()) else min(more, self._request.gpus_per_trial)

    def recover(self, one: Trial) -> None:
        """See ``TrialResources``."""
        if one.nodes is not None and one.nodes.slots < gpus_of(one.app.held):
            one.names.clear()  # its processes are gone, the node is not
            self.give(one, one.app.held)

    def deadline(self, one: Trial) -> float | None:
        """See ``TrialResources``."""
        return None

    def take_back(self, one: Trial) -> None:
        """See ``TrialResources``."""

    def settled(self) -> bool:
        """See ``TrialResources``; what its trials train on, they say."""
        return True


class TrialAllocator:
    """Divides the GPUs of a tuning run. For one thread."""

    def __init__(self, request: TuningRequest, study: Study) -> None:
        self._request, self._study = request, study
        # the latter: equal service; GPUs are kept until a trial ends
        self._policy: Policy = ByPromise() if request.by_promise else leased_las(inf)
        self._memory: Any = None
        self._rng = np.random.default_rng(request.seed)
        self._ranks: dict[int, TrialRank] = {}

    def compare(self, running: Collection[Trial]) -> None:
        """Rank the trials, by all that the study has of them. To be called when one has reported.

        Raises ``LedgerUnavailableError``.
        """
        request = self._request
        if not request.by_promise:
            return
        curves = {one.number: one.intermediate_values for one in self._study.trials()}
        self._ranks = rank_trials(
            curves,
            self._rungs(max((max(curve, default=0) for curve in curves.values()), default=0)),
            request.reduction_factor,
            maximize=request.maximize,
            survivors=request.pruner != "pbt",
        )

    def _rungs(self, most: int) -> Sequence[int]:
        """Return the epochs, up to ``most``, after which trials are compared."""
        request = self._request
        if request.pruner == "pbt":
            return range(request.population_interval, most + 1, request.population_interval)
        if most < request.min_epochs:
            return ()
        # the end of a complete trial is no rung
        return rungs(request.min_epochs, min(most + 1, request.epochs or most + 1), request.reduction_factor)

    def decide(
        self, trials: Collection[Trial], nodes: tuple[Node, ...], now: float
    ) -> Iterator[tuple[str, Grant]]:
        """Return the GPUs of each trial that may run, by its run; those that get fewer than they have come first."""
        for one in trials:
            one.rank = self._ranks.get(one.trial.number, unranked(self._request.reduction_factor))
            one.app.weight = one.rank.weight
        by_number = sorted(trials, key=lambda one: one.app.number)
        view = View(now, tuple(map(_as_app, by_number)), Capacity(0, nodes, at=now))
        decision = self._policy.decide(view, self._memory, self._rng)
        self._memory = decision.memory
        held = {one.run: gpus_of(one.app.held) for one in trials}
        yield from sorted(
            decision.grants.items(), key=lambda each: gpus_of(each[1].placement) >= held[each[0]]
        )


def _as_app(one: Trial) -> App:
    """Return a trial as the policy sees it: one that was requested to leave keeps what it has."""
    held = gpus_of(one.app.held)
    if held and (one.pruned or one.leaves):
        return replace(one.app, min_gpus=held, max_gpus=held)
    return one.app
