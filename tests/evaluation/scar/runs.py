"""The experiments on recovery: one model, one way to save and one share lost at a time, over the same failures."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ebbflow.planners.training.saving.partial import CheckpointSchedule
from tests.evaluation.scar.failures import (
    Failure,
    Record,
    Saved,
    after_failure,
    failures,
    iterations_until,
    patience,
    record,
)
from tests.evaluation.scar.problems import Problem

Way = tuple[str, int, float]
"""Strategy ("full" for whole checkpoints), how many times as often (1/times of the blocks each), share lost."""

CHAINS = 20


def made(name: str, seed: int, chains: int = CHAINS) -> Problem:
    """Return a problem by name; different seeds differ in all that is drawn."""
    from tests.evaluation.scar.factorisation import Factorisation
    from tests.evaluation.scar.lda import Topics, reference, synthetic
    from tests.evaluation.scar.mlr import Regression

    if name == "mlr":
        return Regression(seed=seed)
    if name == "mf":
        return Factorisation(seed=seed)
    if name.startswith("lda-"):
        return Topics(synthetic() if name == "lda-synthetic" else reference(), chains=chains, seed=seed)
    from tests.evaluation.scar.cnn import Network

    return Network(by="shard" if name == "cnn-shard" else "layer", seed=seed)


def measured(
    problem: str,
    base: int,
    period: int,
    ways: Sequence[Sequence[Any]],
    runs: int,
    trials: int,
    chains: int = CHAINS,
) -> dict[str, Any]:
    """Return the rework of each trial under each way, iterations, and what the trials have in common."""
    result: dict[str, Any] = {"base": [], "criterion": [], "failed": [], "late": {}, "rework": {}}
    for seed in range(runs):
        kept = record(made(problem, seed, chains), base)
        failed = failures(kept, trials // runs + (seed < trials % runs), seed)
        result["base"] += kept.base.tolist()
        result["criterion"].append(kept.criterion)
        result["failed"] += [failure.iteration for failure in failed]
        for strategy, times, lost in ways:
            found = _reworks(kept, failed, (strategy, times, lost), period)
            key = key_of((strategy, times, lost))
            result["rework"].setdefault(key, []).extend(np.round(found, 4).tolist())
            late = int(np.sum(found + _bases(kept, failed) >= patience(kept)))
            result["late"][key] = result["late"].get(key, 0) + late
    return result


def _reworks(kept: Record, failed: Sequence[Failure], way: Way, period: int) -> np.ndarray:
    strategy, times, lost = way
    chosen: Any = "priority" if strategy == "full" else strategy
    saved = Saved(kept, CheckpointSchedule(period, 1 / times), chosen)
    starts = [after_failure(kept, failure, saved.after(failure), lost) for failure in failed]
    ends = iterations_until(kept.problem, starts, failed, kept.criterion, patience(kept))
    return np.asarray(ends - _bases(kept, failed))


def _bases(kept: Record, failed: Sequence[Failure]) -> np.ndarray:
    return kept.base[[failure.stream for failure in failed]]


def key_of(way: Way) -> str:
    """Return the name of a way in results."""
    strategy, times, lost = way
    return f"{strategy} {times}x {lost:g}"
