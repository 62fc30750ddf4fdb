"""The experiments on recovery: one model, one way to save and one share lost at a time, over the same failures."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ebbflow.planners.training.partial_checkpoint import CheckpointSchedule
from ebbflow.tasks.rework.failures import Record, Saved, after_failure, failures, iterations_until, record
from ebbflow.tasks.rework.problems import Problem
from ebbflow.tasks.training_sim.evaluation.experiments import Experiment

Way = tuple[str, int, float]
"""Strategy ("full" for whole checkpoints), times its frequency (of 1/times of the blocks), share of the blocks lost."""

SHARES = (0.25, 0.5, 0.75)
TIMES = (2, 4, 8)
STRATEGIES = ("priority", "round", "random")

TRADITIONAL: Way = ("full", 1, 1.0)
PARTIAL: tuple[Way, ...] = (TRADITIONAL, *(("full", 1, share) for share in SHARES))
PRIORITY: tuple[Way, ...] = tuple((strategy, times, 0.5) for strategy in STRATEGIES for times in TIMES)
TOTAL: tuple[Way, ...] = tuple((strategy, 8, 1.0) for strategy in STRATEGIES)
MOST: tuple[Way, ...] = tuple((strategy, 8, 0.5) for strategy in STRATEGIES)


class Setting:
    """A model with its criterion, the loss of the clean run after ``base`` iterations, and its period C."""

    def __init__(self, problem: str, base: int, period: int, runs: int, published: str = "") -> None:
        self.problem, self.base, self.period, self.runs, self.published = problem, base, period, runs, published


SETTINGS: dict[str, Setting] = {
    "mlr-8": Setting("mlr", 60, 8, 5, "MLR"),
    "mlr": Setting("mlr", 100, 16, 5, "MLR"),
    "mf": Setting("mf", 60, 16, 20, "MF"),
    "cnn-shard": Setting("cnn-shard", 100, 16, 5, "CNN"),
    "cnn-layer": Setting("cnn-layer", 100, 16, 5, "CNN"),
    "lda-synthetic": Setting("lda-synthetic", 16, 8, 1, "LDA"),
    "lda-reference": Setting("lda-reference", 24, 8, 1, "LDA"),
}
"""``runs`` are clean runs, each of its own data order, start or matrix; those of LDA are chains of one problem."""

CHAINS = 20


def made(name: str, seed: int, chains: int = CHAINS) -> Problem:
    """Return a problem by name; different seeds differ in all that is drawn."""
    from ebbflow.tasks.rework.factorisation import Factorisation
    from ebbflow.tasks.rework.lda import Topics, reference, synthetic
    from ebbflow.tasks.rework.mlr import Regression

    if name == "mlr":
        return Regression(seed=seed)
    if name == "mf":
        return Factorisation(seed=seed)
    if name.startswith("lda-"):
        return Topics(synthetic() if name == "lda-synthetic" else reference(), chains=chains, seed=seed)
    from ebbflow.tasks.rework.cnn import Network

    return Network(by="shard" if name == "cnn-shard" else "layer", seed=seed)


def measured(
    problem: str, base: int, period: int, ways: Sequence[Sequence[Any]], runs: int, trials: int, chains: int = CHAINS
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
            late = np.sum(np.array(found) + kept.base[[f.stream for f in failed]] >= _limit(kept))
            result["late"][key] = result["late"].get(key, 0) + int(late)
    return result


def _reworks(kept: Record, failed: Sequence[Any], way: Way, period: int) -> np.ndarray:
    strategy, times, lost = way
    chosen: Any = "priority" if strategy == "full" else strategy
    saved = Saved(kept, CheckpointSchedule(period, 1 / times), chosen)
    starts = [after_failure(kept, failure, saved.after(failure), lost) for failure in failed]
    ends = iterations_until(kept.problem, starts, failed, kept.criterion, float(kept.base.mean()))
    return ends - kept.base[[failure.stream for failure in failed]]


def _limit(kept: Record) -> float:
    from ebbflow.tasks.rework.failures import PATIENCE

    return float(round(PATIENCE * kept.base.mean()))


def key_of(way: Way) -> str:
    """Return the name of a way in results."""
    strategy, times, lost = way
    return f"{strategy} {times}x {lost:g}"


def experiments(quick: bool) -> list[Experiment]:
    """Return those on recovery; the quick ones have few trials and leave the CNN and the chains of LDA short."""
    groups: dict[str, dict[str, tuple[Way, ...]]] = {
        "mlr-8": {"partial": PARTIAL, "priority": PRIORITY, "total": TOTAL},
        "mlr": {"partial": PARTIAL, "priority": PRIORITY, "total": TOTAL},
        "mf": {"partial": PARTIAL, "priority": PRIORITY, "total": TOTAL},
        "cnn-shard": {"partial": PARTIAL, "priority": PRIORITY},
        "cnn-layer": {"partial": PARTIAL, "priority": MOST},
        "lda-synthetic": {"partial": PARTIAL, "priority": MOST},
        "lda-reference": {"partial": PARTIAL, "priority": MOST},
    }
    weights = {"cnn": 20.0, "lda": 6.0, "mlr": 1.0, "mf": 1.0}
    found = []
    for name, parts in groups.items():
        setting = SETTINGS[name]
        kind = name.split("-")[0]
        for part, ways in parts.items():
            parameters: dict[str, Any] = {
                "problem": setting.problem,
                "base": setting.base,
                "period": setting.period,
                "ways": [list(way) for way in ways],
                "runs": setting.runs,
                "trials": 100,
            }
            if quick:
                parameters |= {"runs": 1, "trials": {"cnn": 1, "lda": 2}.get(kind, 15), "chains": 2}
                if kind == "cnn":
                    parameters["base"] = 20
            weight = weights[kind] * len(ways) / 4
            found.append(Experiment(f"{name}-{part}", measured, parameters, weight))
    return found
