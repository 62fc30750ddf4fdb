"""GPUs of a tuning run to the trials that promise most, where these use them.

The field's rules. Themis' apps divide their GPUs among their own trials, and in successive halving the survivors of
a phase ask for the GPUs of those that it stopped (NSDI 2020, section 5.2: the best half continue with demand 2);
HyperSched moves GPUs from exploring to the best trials (Liaw et al., SoCC 2019); Ray Tune's
``DistributeResourcesToTopJob`` gives all free ones to the best. Here a trial counts ``factor`` times as much for each
rung that it has passed, and within a rung by its rank, and the GPUs maximise the product of the trials' speedups,
each to the power of what the trial counts (proportional fairness, as in Themis' auction, section 5.1): in proportion
to that where all GPUs are used equally well, and none to a trial that does not use them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, ClassVar

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App, Decision, Grant, Placement, View, gpus_of
from ebbflow.planners.scheduling.leased.leased import AppAllocation, RoundState, give
from ebbflow.planners.scheduling.placement import FreeCapacity

HYSTERESIS = 0.05
"""Share of its speed that a resize costs a trial: a restart of 3.5 s once in 70 s; in place it is less."""
_LEAST = 1e-9  # of a speedup
_EQUAL = 1e-9  # between two logarithms: what rounding may make of equal speedups


@dataclass(frozen=True, slots=True)
class TrialRank:
    """Where a trial stood when it was compared last."""

    weight: float = 1.0  # >= 1; what an example of its training counts for
    epoch: int = 0  # after which it was compared; 0: never
    rank: int = 0  # from 1, the best
    compared: int = 0  # trials, itself included

    def __str__(self) -> str:
        """Return it in words."""
        return (
            f"ranked {self.rank} of {self.compared} after epoch {self.epoch}"
            if self.epoch
            else "not ranked yet"
        )


def unranked(factor: float) -> TrialRank:
    """Return the rank of a trial that was never compared; see ``rank_trials``."""
    return TrialRank(factor**0.5)


def rank_trials(
    curves: Mapping[int, Mapping[int, float]],
    rungs: Sequence[int],
    factor: float,
    *,
    maximize: bool,
    survivors: bool = True,
) -> dict[int, TrialRank]:
    """Return how much each trial promises, by its number.

    A trial is compared at the last rung that it has reached, with all trials that have reached that one, those
    included that have ended. Its weight is ``factor`` to the power of the rungs before that one plus its expected
    quantile: of n trials one that is at least as good as k, itself included, is expected at k / (n + 1), and one that
    was not compared at 1/2. So the last one of a rung counts more than the best of the one before.

    >>> ranks = rank_trials({0: {1: 0.5, 3: 0.6}, 1: {1: 0.4}, 2: {1: 0.7}, 3: {}}, (1, 3), 3, maximize=True)
    >>> {number: round(rank.weight, 2) for number, rank in ranks.items()}
    {0: 5.2, 1: 1.32, 2: 2.28, 3: 1.73}

    Args:
        curves: metric by epoch, by trial; values that are no numbers are the worst.
        rungs: epochs at which trials are compared.
        factor: > 1; one trial in so many passes a rung.
        maximize: whether more is better.
        survivors: whether a rung stops trials, so that those beyond it count more.

    Raises ``OptionError``.
    """
    if not factor > 1:
        raise OptionError(f"factor must be > 1; got {factor}")
    sign = -1.0 if maximize else 1.0
    ladder = sorted(set(rungs))
    found = {}
    at: dict[int, dict[int, float]] = {}  # rung -> trial -> value; less is better
    for rung in ladder:
        at[rung] = {
            number: sign * curve[last] if isfinite(curve[last]) else inf
            for number, curve in curves.items()
            if max(curve, default=0) >= rung and (last := max((e for e in curve if e <= rung), default=0))
        }
    for number in curves:
        passed = [rung for rung in ladder if number in at[rung]]
        if not passed:
            found[number] = unranked(factor)
            continue
        there = at[passed[-1]]
        better = sum(value < there[number] for value in there.values())
        level = len(passed) - 1 if survivors else 0
        weight = factor ** (level + (len(there) - better) / (len(there) + 1))
        found[number] = TrialRank(weight, passed[-1], better + 1, len(there))
    return found


@dataclass(frozen=True, slots=True)
class KnownGoodput:
    """Goodput by GPUs, from one on, as a trial has forecast it; more GPUs than that are of no use to it yet.

    Implements ``planners.model.scheduling.Goodput``.
    """

    by_gpus: tuple[float, ...]

    def best(self, nodes: np.ndarray[Any, Any], gpus: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the goodput of each number of GPUs; the nodes are as the trial took them to be."""
        known = np.array((0.0, *self.by_gpus))
        return np.asarray(known[np.clip(gpus, 0, len(self.by_gpus))])


@dataclass(frozen=True, slots=True)
class ByPromise:
    """A policy for the trials of one tuning run: ``App.weight`` is a trial's promise.

    Each trial has its ``min_gpus`` at least: where they are not enough for all, those run that run, then those that
    promise most. Beyond that the sum of weight times log speedup is maximal; where nothing is known of a trial's
    goodput, it is taken to be in proportion to its GPUs, as Pollux does (OSDI 2021, section 4.1).

    ``hysteresis`` is the share of its speed that a change costs a trial which runs: a change must bring the trials
    concerned 1 / (1 - ``hysteresis``) of their speed, by their weights, and GPUs that bring less stay free.
    """

    elastic: ClassVar[bool] = True
    name: str = "by-promise"
    hysteresis: float = HYSTERESIS

    def __post_init__(self) -> None:
        if not 0 <= self.hysteresis < 1:
            raise OptionError(f"hysteresis must be within [0, 1); got {self.hysteresis}")

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Return the GPUs of each trial."""
        usable = {node.id: node.gpus for node in view.capacity.usable}
        held = {app.id: _still(app.held, usable) for app in view.apps}
        room = FreeCapacity(view.capacity.usable)
        counts = self.divide(view.apps, {app: sum(mine.values()) for app, mine in held.items()}, room)
        desks = {
            app.id: AppAllocation(app, (), _shrunk(held[app.id], counts[app.id]), {}) for app in view.apps
        }
        for desk in desks.values():
            room.hold(tuple(desk.counts.items()))
        racks = {node.id: node.rack for node in view.capacity.nodes}
        moment = RoundState(view, inf, room, racks, {})
        for app in sorted(view.apps, key=lambda one: (-one.weight, one.number)):
            if (more := counts[app.id] - desks[app.id].gpus) > 0:
                give(desks[app.id], more, moment)
        best = sorted((app.weight for app in view.apps), reverse=True)
        grants = {}
        for app in view.apps:
            got = desks[app.id].counts
            placement = app.held if got == dict(app.held) else tuple(sorted(got.items()))
            grants[app.id] = Grant(placement, reason=_reason(app, placement, best))
        return Decision(grants)

    def divide(self, apps: Sequence[App], held: Mapping[str, int], room: FreeCapacity) -> dict[str, int]:
        """Return the number of GPUs of each trial, out of all those in ``room``; ``held``: that it has of them."""
        total = room.total
        each = max(room.free, default=1)
        first = sorted(apps, key=lambda app: (held[app.id] < app.min_gpus, -app.weight, app.number))
        counts = dict.fromkeys((app.id for app in apps), 0)
        chosen: list[App] = []
        needed = 0
        for app in first:
            if needed + app.min_gpus <= total:
                chosen.append(app)
                needed += app.min_gpus
        value = np.zeros(total + 1)  # of the trials so far, by GPUs that they have at most
        picks: list[np.ndarray[Any, Any]] = []
        for app in chosen:
            options = self._options(app, held[app.id], total, each)
            rows = np.full((len(options), total + 1), -inf)
            for row, (gpus, worth) in zip(rows, options, strict=True):
                row[gpus:] = value[: total + 1 - gpus] + app.weight * worth
            at = rows.argmax(axis=0)
            value = rows[at, np.arange(total + 1)]
            picks.append(np.array([gpus for gpus, _ in options])[at])
        left = total
        for app, pick in zip(reversed(chosen), reversed(picks), strict=True):
            counts[app.id] = int(pick[left])
            left -= counts[app.id]
        return counts

    def _options(self, app: App, held: int, total: int, each: int) -> list[tuple[int, float]]:
        """Return the numbers of GPUs that are worth a thought, and the logarithm of the speedup of each.

        What it holds comes first, then from few to many, of which each is worth more than those with fewer: so that
        a trial which promises more never gets fewer.
        """
        gpus = np.arange(app.min_gpus, max(min(app.max_gpus, total), app.min_gpus) + 1)
        speed = gpus / app.min_gpus
        if app.goodput is not None:
            known = app.goodput.best(-(-gpus // each), gpus)
            if known[0] > 0:
                speed = known / known[0]
        if held in gpus:
            speed = np.where(gpus == held, speed, speed * (1 - self.hysteresis))
        found: list[tuple[int, float]] = []
        for count, worth in zip(gpus.tolist(), np.log(np.maximum(speed, _LEAST)).tolist(), strict=True):
            if not found or worth > found[-1][1] + _EQUAL:
                found.append((count, worth))
        return sorted(found, key=lambda one: (one[0] != held, one[0]))


def _still(held: Placement, usable: Mapping[str, int]) -> dict[str, int]:
    """Return what is left of ``held``."""
    return {node: min(gpus, usable[node]) for node, gpus in held if node in usable}


def _shrunk(held: Mapping[str, int], gpus: int) -> dict[str, int]:
    """Return ``gpus`` of those held at most, on the nodes where most are."""
    kept: dict[str, int] = {}
    for node, count in sorted(held.items(), key=lambda one: (-one[1], one[0])):
        if (taken := min(count, gpus - sum(kept.values()))) > 0:
            kept[node] = taken
    return kept


def _reason(app: App, given: Placement, best: Sequence[float]) -> str:
    """Return what changes for a trial, in words."""
    before, after = gpus_of(app.held), gpus_of(given)
    if not after:
        return "pending (Resources): the trials before it took all GPUs"
    if after == before:
        return f"keeps its {before} GPUs"
    place = best.index(app.weight) + 1
    why = f"promise {app.weight:.3g}, {place} of {len(best)} trials"
    if not before:
        return f"starts on {after} GPUs: {why}"
    return f"{'scale-up' if after > before else 'scale-down'} {before} → {after} GPUs: {why}"
