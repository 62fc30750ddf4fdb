"""Failures in recorded runs, what each way to save leaves to restore, and how long the loss then takes.

The clean run is recorded once. Which iteration each block was last saved at follows from the record, so that a
strategy is a table of iterations; the state after a failure is put together from the record, and only what comes
after a failure is computed, for many failures at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.training.saving.partial import (
    CheckpointSchedule,
    PartialCheckpoints,
    Strategy,
    selection,
)
from tests.evaluation.scar.problems import Problem, States, block_of

NEAR = 1.25  # times the criterion, below which the loss is taken at every iteration
PATIENCE = 3  # times the clean run, after which a run counts as one that ended there


@dataclass(frozen=True, slots=True)
class Record:
    """Clean runs of a problem, one a stream: states after each iteration, and when each met the criterion."""

    problem: Problem
    states: list[States]  # by iteration from 0, the start
    losses: NDArray[np.float64]  # shape (iterations, streams)
    criterion: float
    base: NDArray[np.float64]  # iterations until the criterion, by stream

    def at(self, iterations: NDArray[np.int64], stream: int) -> States:
        """Return one state whose block b is that after ``iterations[b]``; small state as after the latest."""
        blocks = block_of(self.problem)
        state = self.states[int(iterations.max())][stream].copy()
        width = len(blocks)
        for iteration in np.unique(iterations):
            columns = np.flatnonzero(iterations[blocks] == iteration)
            state[..., columns] = self.states[int(iteration)][stream][..., :width][..., columns]
        return state


@dataclass(frozen=True, slots=True)
class Failure:
    """One trial, the same for all strategies."""

    iteration: int  # T: happens after it, and after a checkpoint that was due then
    order: NDArray[np.int64]  # blocks in the order in which they are lost
    stream: int
    seed: int

    def lost(self, share: float) -> NDArray[np.int64]:
        """Return the blocks lost with a share of all; of a smaller share some of the same."""
        return self.order[: round(share * len(self.order))]


def record(problem: Problem, base: int) -> Record:
    """Train without failures. The criterion is the mean loss of the streams after ``base`` iterations."""
    states, losses = [problem.start()], []
    streams = np.arange(len(states[0]))
    losses.append(problem.loss(states[0]))
    # The mean of several streams is met by some only later.
    for iteration in range(base + (base if len(streams) > 1 else 0)):
        states.append(problem.advance(states[-1], iteration, streams))
        losses.append(problem.loss(states[-1]))
    table = np.array(losses)
    criterion = float(table[base].mean())
    return Record(problem, states, table, criterion, _first_below(table, criterion))


def _first_below(losses: NDArray[np.float64], criterion: float) -> NDArray[np.float64]:
    """Return when each column first meets the criterion, between two iterations by linear interpolation."""
    found = np.full(losses.shape[1], float(len(losses) - 1))
    for column, values in enumerate(losses.T):
        met = np.flatnonzero(values <= criterion)
        if len(met):
            found[column] = crossing(values[max(met[0] - 1, 0)], values[met[0]], criterion, int(met[0]))
    return found


def crossing(before: float, after: float, criterion: float, iteration: int, last: int | None = None) -> float:
    """Return when the loss met the criterion that it meets at ``iteration``, and did not at ``last``: one earlier."""
    if before <= criterion:
        return float(iteration)
    last = iteration - 1 if last is None else last
    return last + (iteration - last) * (before - criterion) / (before - after)


def failures(kept: Record, trials: int, seed: int) -> list[Failure]:
    """Draw failures: geometric iterations with a mean of half the clean run's, drawn again unless before its end."""
    blocks = len(kept.problem.offsets) - 1
    made = []
    for trial in range(trials):
        rng = np.random.default_rng([seed, trial])
        stream = trial % len(kept.base)
        base = kept.base[stream]
        iteration = int(rng.geometric(2 / base))
        while iteration >= base:
            iteration = int(rng.geometric(2 / base))
        made.append(Failure(iteration, rng.permutation(blocks), stream, seed * trials + trial))
    return made


class Saved:
    """The iterations at which blocks were last saved, under one strategy: the same runs for all trials."""

    def __init__(self, kept: Record, schedule: CheckpointSchedule, strategy: Strategy = "priority") -> None:
        self.kept, self.schedule, self.strategy = kept, schedule, strategy
        self._tables: dict[tuple[int, int], list[NDArray[np.int64]]] = {}

    def after(self, failure: Failure) -> NDArray[np.int64]:
        """Return the iteration that storage holds of each block, after the failure's; shape (blocks,)."""
        # What priority chooses does not depend on chance, so that trials of one stream share its table.
        seed = 0 if self.strategy == "priority" else failure.seed + 1
        key = (failure.stream, seed)
        table = self._tables.setdefault(key, [])
        if not table:
            table += self._table(failure.stream, seed)
        return table[failure.iteration]

    def _table(self, stream: int, seed: int) -> list[NDArray[np.int64]]:
        problem = self.kept.problem
        sizes = np.diff(problem.offsets).tolist()
        plan = PartialCheckpoints(self.schedule, sizes, selection(self.strategy), max_age=float("inf"))
        rng = np.random.default_rng([seed, stream, 3])
        rows, far = [plan.saved.copy()], np.zeros(len(sizes))
        for iteration in range(1, len(self.kept.states)):
            if plan.due(iteration):
                if self.strategy == "priority":
                    now = self.kept.states[iteration][[stream]]
                    far = problem.distances(now, self.kept.at(plan.saved, stream)[None])[0]
                plan.choose(iteration, far, rng)
            rows.append(plan.saved.copy())
        return rows


def after_failure(kept: Record, failure: Failure, saved: NDArray[np.int64], lost: float) -> States:
    """Return the state that training goes on with: lost blocks as saved, the others as they were."""
    if lost >= 1:
        return kept.at(saved, failure.stream)
    held = np.full(len(saved), failure.iteration)
    held[failure.lost(lost)] = saved[failure.lost(lost)]
    whole = kept.at(np.full(len(saved), failure.iteration), failure.stream)
    mixed = kept.at(held, failure.stream)
    width = int(kept.problem.offsets[-1])
    mixed[..., width:] = whole[..., width:]
    return mixed


def patience(kept: Record) -> int:
    """Return the iteration at which a run that has not met the criterion is given up."""
    return round(PATIENCE * float(kept.base.mean()))


def iterations_until(
    problem: Problem, starts: Sequence[States], failed: Sequence[Failure], criterion: float, limit: int
) -> NDArray[np.float64]:
    """Return when each run meets the criterion, counted like the clean run's iterations.

    Runs begin with their state right after their failure and go on with the data stream from there. One that has not
    met it after iteration ``limit`` ends there.
    """
    ends = np.full(len(starts), float(limit))
    for first in range(0, len(starts), problem.chunk):
        last = min(first + problem.chunk, len(starts))
        ends[first:last] = _chunk(problem, starts[first:last], failed[first:last], criterion, limit)
    return ends


def _chunk(
    problem: Problem, starts: Sequence[States], failed: Sequence[Failure], criterion: float, limit: int
) -> NDArray[np.float64]:
    begins = np.array([failure.iteration for failure in failed])
    streams = np.array([failure.stream for failure in failed])
    states = np.stack(list(starts))
    ends = np.full(len(starts), float(limit))
    losses, looked = problem.loss(states), begins.copy()
    unmet = losses > criterion
    ends[~unmet] = begins[~unmet]
    for iteration in range(int(begins.min()), limit):
        active = np.flatnonzero(unmet & (begins <= iteration))
        if not len(active):
            if not unmet.any():
                break
            continue
        states[active] = problem.advance(states[active], iteration, streams[active])
        near = losses[active] < NEAR * criterion
        rows = active[near | (iteration + 1 - looked[active] >= problem.look_every)]
        if not len(rows):
            continue
        for row, after in zip(rows, problem.loss(states[rows]), strict=True):
            if after <= criterion:
                ends[row] = crossing(losses[row], after, criterion, iteration + 1, int(looked[row]))
                unmet[row] = False
            losses[row], looked[row] = after, iteration + 1
    return ends
