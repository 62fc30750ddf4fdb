"""Which trials of a tuning run have no prospects, and how much work each has left.

A scheduler of tuning runs needs the latter of every trial (Themis, NSDI 2020, section 5.2): of successive halving,
the epochs that a trial is expected to live; of stopping by learning curves, the longest life within the error band.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, isfinite, log

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.finish_time import CurveStopping, Job
from ebbflow.planners.tuning.convergence import LossCurve

LEAST_POINTS = 5  # of a curve before anything is said about its end
_HELD_BACK = 2  # last points that are ignored in turn, to see how much the forecast depends on them


def rungs(least: int, most: int, factor: int) -> tuple[int, ...]:
    """Return the epochs at which successive halving compares trials: ``least`` · ``factor``ᵏ below ``most``.

    Jamieson and Talwalkar, AISTATS 2016; in its asynchronous form Li et al., MLSys 2020.

    >>> rungs(1, 27, 3)
    (1, 3, 9)

    Raises ``OptionError``.
    """
    if least < 1 or most < least or factor < 2:
        raise OptionError(f"rungs need 1 <= least <= most and factor >= 2; got {least}, {most}, {factor}")
    found = []
    while least < most:
        found.append(least)
        least *= factor
    return tuple(found)


def epochs_left(done: float, most: int, compared_at: Sequence[int], factor: int) -> float:
    """Return the epochs that a trial is expected to live yet: at each rung one of ``factor`` continues.

    >>> epochs_left(0, 9, (1, 3), 3)
    2.333333333333333

    Raises ``OptionError``.
    """
    if not 0 <= done <= most:
        raise OptionError(f"done must be within [0, {most}] epochs; got {done}")
    left, chance, at = 0.0, 1.0, float(done)
    for rung in (*(r for r in sorted(compared_at) if done < r < most), most):
        left += chance * (rung - at)
        at, chance = float(rung), chance / factor
    return left


def brackets(least: int, most: int, factor: int) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """Return the share of the trials and the rungs of each bracket of Hyperband (Li et al., JMLR 2018, section 3).

    Brackets and shares are those of Optuna's ``HyperbandPruner``: bracket s begins to compare at ``least`` · factorˢ.

    >>> [rungs for _, rungs in brackets(1, 9, 3)]
    [(1, 3), (3,), ()]

    Raises ``OptionError``.
    """
    rungs(least, most, factor)
    count = floor(log(most / least, factor)) + 1  # in floating point, as there
    sizes = [ceil(count * factor ** (count - 1 - s) / (count - s)) for s in range(count)]
    return tuple((size / sum(sizes), rungs(least * factor**s, most, factor)) for s, size in enumerate(sizes))


def hyperband_epochs_left(done: float, least: int, most: int, factor: int) -> float:
    """Return the epochs that a trial of Hyperband is expected to live yet, whichever bracket it is in.

    A bracket counts by its trials and by how likely one of them is to have lived ``done`` epochs. Raises
    ``OptionError``.
    """
    left = total = 0.0
    for share, compared_at in brackets(least, most, factor):
        likely = share / factor ** sum(rung <= done for rung in compared_at)
        left += likely * epochs_left(done, most, compared_at, factor)
        total += likely
    return left / total


@dataclass(frozen=True, slots=True)
class Forecast:
    """Where a learning curve will end, as the metric has it."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Curves:
    """Forecasts learning curves of one metric, with l(k) = 1/(β₀k + β₁) + β₂ (Optimus, EuroSys 2018, section 3.1).

    ``maximise`` is for metrics where more is better, which must not exceed ``bound``; others must be positive.
    """

    most: int  # epochs of a whole trial
    maximise: bool = True
    bound: float = 1.0
    width: float = 2.0  # of the error band, in standard deviations of what the fit leaves

    def __post_init__(self) -> None:
        if self.most < 1 or not self.width >= 0:
            raise OptionError(f"curves need most >= 1 epoch and width >= 0; got {self.most}, {self.width}")

    def forecast(self, values: Sequence[tuple[int, float]]) -> Forecast | None:
        """Return where the curve through (epoch, value) ends; ``None`` where it cannot be told."""
        ends, errors = [], []
        for held in range(_HELD_BACK + 1):
            shown = values[: len(values) - held]
            found = self._end(shown) if len(shown) >= LEAST_POINTS else None
            if found is not None:
                ends.append(found[0])
                errors.append(found[1])
        if not ends:
            return None
        slack = self.width * max(errors)
        low, high = min(ends) - slack, max(ends) + slack
        if self.maximise:
            return Forecast(self.bound - high, self.bound - ends[0], self.bound - low)
        return Forecast(low, ends[0], high)

    def hopeless(self, values: Sequence[tuple[int, float]], best: float | None) -> bool:
        """Return whether even the best end within the error band is worse than ``best``."""
        if best is None or (found := self.forecast(values)) is None:
            return False
        return found.high < best if self.maximise else found.low > best

    def _end(self, values: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
        """Return the fitted loss at the end, and the standard deviation of what the fit leaves."""
        curve, points = LossCurve(), []
        for epoch, value in values:
            loss = self.bound - value if self.maximise else value
            if not (isfinite(loss) and loss > 0):
                return None
            curve.add(epoch, loss)
            points.append((epoch, loss))
        model = curve.fit(LEAST_POINTS)
        if model is None:
            return None
        left = [loss - model.scale * model.loss(epoch) for epoch, loss in points]
        return model.scale * model.loss(self.most), float(np.std(left))


@dataclass(frozen=True, slots=True)
class TrialState:
    """What is known of one trial that runs."""

    epochs: float  # done
    left: float  # expected, as ``epochs_left`` has it, or to the end
    seconds: float  # of an epoch on one GPU; infinite while none is done
    longest: float = 0.0  # epochs left at most within the error band; 0: as expected


def work_left(
    trials: Sequence[TrialState], max_gpus: int, spent: float, default: float = 60.0
) -> CurveStopping:
    """Return what the tuning run as a whole answers a scheduler: the work of all trials that run, and its band.

    Args:
        trials: those that run.
        max_gpus: of each.
        spent: GPU-seconds so far.
        default: seconds of an epoch on one GPU where nothing was measured yet.
    """
    known = [trial.seconds for trial in trials if 0 < trial.seconds < inf]
    usual = float(np.median(known)) if known else default
    jobs = [
        Job(trial.left, trial.seconds if 0 < trial.seconds < inf else usual, max_gpus) for trial in trials
    ]
    bands = [(max(trial.left, trial.longest),) for trial in trials]
    return CurveStopping(jobs=jobs, bands=bands, budget=spent + sum(job.work for job in jobs))
