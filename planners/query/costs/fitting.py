"""How measurements of finished stages correct what the cost model begins with."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ebbflow.planners.model import Measured, Work
from ebbflow.planners.query.costs.bounded_fit import bounded_ridge
from ebbflow.planners.query.costs.cost import CostModel

Array: TypeAlias = npt.NDArray[np.float64]

BOUND = 10.0  # calibration keeps every rate within this factor of the prior
PRIOR_SPREAD = 1.0  # standard deviation of a rate around the prior, relative to it
PRIOR_NOISE = 0.3  # relative error of a stage's predicted time, before any is known
NOISE_POINTS = 8.0  # measured stages that PRIOR_NOISE counts for
LEVEL_POINTS = 2.0  # measured stages that the prior's overall level counts for
UNDISTURBED = 1  # quartile of what stages waited: what disturbs one only adds to it
ROUNDS = 20  # of reweighting, at most
CAUCHY = 2.385  # tuning constant: 95 % efficiency under normal errors (Holland and Welsch 1977)
PRIOR_ERROR = 2.0  # q-error of a run's stages before any has finished
ERROR_STAGES = 2.0  # measured stages that PRIOR_ERROR counts for
_COLD = 0.1  # of its cores that a stage may have found cold and counts as warm


def calibrate(prior: CostModel, history: Sequence[Measured]) -> CostModel:
    """Return ``prior`` with its rates fitted to finished stages of its engine.

    First one factor for all rates (how fast this machine is), a median shrunk towards 1 with few stages; then
    ``min Σ w_i ((x_i·β − y_i)/scale_i)² + (noise/PRIOR_SPREAD)² · Σ_j (β_j/prior_j − factor)²`` with
    prior/BOUND ≤ β ≤ prior·BOUND (bounded ridge least squares) on task seconds ``y``. The weights w are
    Cauchy's and the noise is the spread of the errors, both refitted until they settle: a stage slowed by
    something else counts little, and clean measurements outweigh the prior sooner than scattered ones. Work
    that no stage has done keeps its prior times the factor. What cold cores lost is one more kind of work: without it
    the rates of cold and of warm stages would be averaged, and wrong for both. The latency is a low quantile of wall
    time not spent in tasks, of warm stages where there are any.
    Deterministic; an empty history returns the prior.
    """
    used = [m for m in history if m.engine == prior.engine and _usable(m, prior)]
    if not used:
        return prior
    base = np.array([*prior.vector, prior.warm_up])
    # seconds by kind, as the prior predicts
    parts = np.array([[*m.work.vector(), m.cold] for m in used]) * base
    seconds = np.array([m.task_seconds for m in used])
    factor = _shrunk(seconds / parts.sum(axis=1), 2)
    scale = np.maximum(seconds, factor * parts.sum(axis=1))
    ratios = _robust_ridge(parts / scale[:, None], seconds / scale, factor)
    *rates, warm_up = (float(b * r) for b, r in zip(base, ratios, strict=True))
    latency = _fitted_latency(prior.latency, used)
    return replace(prior.with_rates(Work(*rates), latency), warm_up=warm_up)


def pace(models: Mapping[str, CostModel], stages: Sequence[Measured]) -> float:
    """Return how many times slower than by ``models``, given by engine, ``stages`` ran: their median, drawn towards 1
    where they are few."""
    ratios = [m.task_seconds / expected(models[m.engine], m) for m in stages if m.engine in models]
    ratios = [ratio for ratio in ratios if math.isfinite(ratio) and ratio > 0.0]
    return _shrunk(np.array(ratios), 2) if ratios else 1.0


def expected(model: CostModel, stage: Measured) -> float:
    """Return the task-seconds of ``stage`` by ``model``; infinite where it takes nothing."""
    seconds = model.core_seconds(stage.work) + model.warm_up * stage.cold
    return seconds if seconds > 0.0 else math.inf


def q_error(ratios: Sequence[float]) -> float:
    """Return how many times longer, or shorter, than expected the next stage of a run may take.

    ``ratios`` are those of measured to expected times of its finished stages. What they have in common makes every
    plan slower alike and is no error: what counts is the geometric mean of their distances from their median, as if
    ``ERROR_STAGES`` stages had been off by ``PRIOR_ERROR``. The median takes one stage itself.

    >>> q_error([]), round(q_error([3.0, 3.0, 3.0]), 2)
    (2.0, 1.41)
    """
    logs = [math.log(ratio) for ratio in ratios if ratio > 0.0 and math.isfinite(ratio)]
    middle = statistics.median(logs) if logs else 0.0
    off = sum(abs(one - middle) for one in logs) + ERROR_STAGES * math.log(PRIOR_ERROR)
    return math.exp(off / (max(len(logs) - 1, 0) + ERROR_STAGES))


def _usable(measured: Measured, prior: CostModel) -> bool:
    amounts = (*measured.work.vector(), measured.task_seconds, measured.wall_seconds, measured.cold)
    if not all(math.isfinite(a) and a >= 0.0 for a in amounts):
        return False
    return measured.task_seconds > 0.0 and prior.core_seconds(measured.work) > 0.0


def _shrunk(ratios: Array, quartile: int) -> float:
    """Return a quartile of positive ratios, drawn towards 1 as if LEVEL_POINTS stages had said 1."""
    weight = len(ratios) / (len(ratios) + LEVEL_POINTS)
    logs = np.log(ratios).tolist() * (1 if len(ratios) > 1 else 2)
    level = math.exp(weight * statistics.quantiles(logs, n=4, method="inclusive")[quartile - 1])
    return min(max(level, 1.0 / BOUND), BOUND)


def _robust_ridge(
    parts: Array,
    target: Array,
    centre: float,
) -> Array:
    count, kinds = parts.shape
    weights, noise = np.ones(count), PRIOR_NOISE
    ratios = np.full(kinds, centre)
    for _ in range(ROUNDS):
        root, before = np.sqrt(weights)[:, None], ratios
        bounds = (1.0 / BOUND, BOUND)
        ratios = bounded_ridge(parts * root, target * root[:, 0], noise / PRIOR_SPREAD, centre, bounds)
        moved = float(np.max(np.abs(ratios - before)))
        errors = parts @ ratios - target
        spread = 1.4826 * statistics.median(np.abs(errors).tolist())
        noise = math.sqrt((NOISE_POINTS * PRIOR_NOISE**2 + count * spread**2) / (NOISE_POINTS + count))
        weights = 1.0 / (1.0 + (errors / (CAUCHY * max(spread, 0.02))) ** 2)
        if moved < 1e-6:
            break
    return ratios


def _fitted_latency(prior: float, used: Sequence[Measured]) -> float:
    """Return what an undisturbed stage waits beyond what its tasks need on their cores, shrunk to the prior."""
    if prior <= 0.0:
        return prior
    floor = prior / BOUND
    used = [m for m in used if m.cold <= _COLD * m.cores] or used
    idle = [m.wall_seconds - m.task_seconds / max(min(m.cores, m.tasks), 1.0) for m in used]
    return prior * _shrunk(np.array([max(i, floor) for i in idle]) / prior, UNDISTURBED)
