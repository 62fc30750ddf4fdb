"""Which experiments SCAR's evaluation consists of."""

from typing import Any, NamedTuple

from tests.evaluation.experiments import Experiment
from tests.evaluation.scar import bounds
from tests.evaluation.scar.concentration import concentration
from tests.evaluation.scar.runs import Way, measured

SHARES = (0.25, 0.5, 0.75)
TIMES = (2, 4, 8)
STRATEGIES = ("priority", "round", "random")

TRADITIONAL: Way = ("full", 1, 1.0)
PARTIAL: tuple[Way, ...] = (TRADITIONAL, *(("full", 1, share) for share in SHARES))
PRIORITY: tuple[Way, ...] = tuple((strategy, times, 0.5) for strategy in STRATEGIES for times in TIMES)
TOTAL: tuple[Way, ...] = tuple((strategy, 8, 1.0) for strategy in STRATEGIES)
MOST: tuple[Way, ...] = tuple((strategy, 8, 0.5) for strategy in STRATEGIES)


class Setting(NamedTuple):
    """A model, its criterion (the loss of the clean run after ``base`` iterations), and the period C."""

    problem: str
    base: int
    period: int
    runs: int  # clean runs, each of its own data order, start or matrix
    trials: int = 100


SETTINGS: dict[str, Setting] = {
    "mlr-8": Setting("mlr", 60, 8, 5),
    "mlr": Setting("mlr", 100, 16, 5),
    "mf": Setting("mf", 60, 16, 20, 400),
    "cnn-shard": Setting("cnn-shard", 100, 16, 5),
    "cnn-layer": Setting("cnn-layer", 100, 16, 5),
    "lda-synthetic": Setting("lda-synthetic", 16, 8, 1),
    "lda-reference": Setting("lda-reference", 24, 8, 1),
}
"""By the name of the experiments. The runs of LDA are chains of one problem."""


GROUPS: dict[str, dict[str, tuple[Way, ...]]] = {
    "mlr-8": {"partial": PARTIAL, "priority": PRIORITY, "total": TOTAL},
    "mlr": {"partial": PARTIAL, "priority": PRIORITY, "total": TOTAL},
    "mf": {"partial": PARTIAL, "priority": PRIORITY, "total": TOTAL},
    "cnn-shard": {"partial": PARTIAL, "priority": PRIORITY},
    "cnn-layer": {"partial": PARTIAL, "priority": MOST},
    "lda-synthetic": {"partial": PARTIAL, "priority": MOST},
    "lda-reference": {"partial": PARTIAL, "priority": MOST},
}
"""Parts in files of their own, so that a run that was interrupted loses little."""

WEIGHTS = {"cnn": 20.0, "lda": 10.0, "mlr": 1.0, "mf": 2.0}


def experiments(quick: bool) -> list[Experiment]:
    """Return all, those on bounds first; the quick ones have few trials, the CNN and LDA short runs."""
    found = bounds.experiments(quick)
    for name, parts in GROUPS.items():
        setting, kind = SETTINGS[name], name.split("-")[0]
        common: dict[str, Any] = {
            "problem": setting.problem, "base": setting.base, "period": setting.period
        }  # fmt: skip
        if quick:
            common |= {"chains": 2} | {"cnn": {"base": 20}, "lda": {"base": 6, "period": 4}}.get(kind, {})
        for part, ways in parts.items():
            parameters = common | {"ways": [list(way) for way in ways], "runs": setting.runs}
            parameters |= {"trials": setting.trials}
            if quick:
                parameters |= {"runs": 1, "trials": {"mlr": 6, "mf": 8}.get(kind, 2)}
            found.append(Experiment(f"{name}-{part}", measured, parameters, WEIGHTS[kind] * len(ways) / 4))
        found.append(Experiment(f"{name}-concentration", concentration, common, WEIGHTS[kind] / 10))
    return found
