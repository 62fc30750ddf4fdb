"""The experiments on the bounds: gradient descent with perturbations, its errors beside the theorems' estimates."""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.training.saving.rework import (
    envelope,
    estimate_contraction,
    kappa,
    log_aggregate,
    rework_bound,
)
from tests.evaluation.experiments import Experiment
from tests.evaluation.scar.problems import digits

Floats = NDArray[np.float64]
Step = Callable[[Floats], Floats]
"""One iteration of all trials; shape (trials, numbers)."""
Objective = Callable[[Floats], Floats]
"""What training minimises, of each trial."""

ROUNDING = 1e-9  # relative: an error this much above the envelope is no violation

QP_CONTRACTION = 0.986
QP_CLEAN, QP_FAILURE, QP_CHANCE = 1000, 500, 0.001
MLR_CLEAN, MLR_FAILURE = 100, 50
MLR_PENALTY, MLR_RATE = 0.1, 0.1
MLR_CONTRACTION = (
    1 - MLR_RATE * MLR_PENALTY
)  # of gradient descent where it is λ-strongly convex and the rate small
KINDS = ("gaussian", "adversarial", "reset")


def quadratic(start: str, how: str, trials: int, seed: int = 0) -> dict[str, Any]:
    """Perturb gradient descent on 4-dimensional quadratics.

    Args:
        start: "generic" for a normal one, "slowest" for one on the direction that converges slowest.
        how: "once" at iteration 500, or "often": with a chance of 0.001 at each iteration up to the 1000th.
        trials: of normal perturbations whose sizes are log-uniform, from a tenth to ten times the error then.
        seed: of all of it.
    """
    rng = np.random.default_rng([seed, 8])
    factors = np.array([QP_CONTRACTION, 0.95, 0.8, 0.5])  # 1 − rate × eigenvalue
    turn, _ = np.linalg.qr(rng.standard_normal((4, 4)))
    matrix = turn * factors @ turn.T
    begin = turn[:, 0] if start == "slowest" else rng.standard_normal(4)
    clean = np.linalg.norm(_descend(lambda w: w @ matrix, begin[None], {}, QP_CLEAN)[0], axis=2)[:, 0]
    if how == "once":
        steps = np.tile(np.arange(QP_CLEAN) == QP_FAILURE, (trials, 1))
    else:
        steps = rng.random((trials, QP_CLEAN)) < QP_CHANCE
    deltas = {}
    for step in np.flatnonzero(steps.any(axis=0)):
        change = _normal(rng, trials, 4) * clean[step] * 10 ** rng.uniform(-1, 1, (trials, 1))
        deltas[int(step)] = change * steps[:, [step]]
    return _judged(lambda w: w @ matrix, begin, np.zeros(4), deltas, trials, QP_CLEAN, QP_CONTRACTION)


def regression(kind: str, trials: int, seed: int = 0) -> dict[str, Any]:
    """Perturb gradient descent on multinomial logistic regression with an L2 penalty, at iteration 50.

    Rework counts twice: until the error is that of the clean run at iteration 100, as in the theorems, and until the
    objective is, as a user would see it.

    Args:
        kind: "gaussian"; "adversarial", straight away from the optimum; or "reset", a random part of the rows to 0.
        trials: sizes of the first two are log-uniform, from a tenth to ten times the error then; the part that is
            reset is uniform.
        seed: of all of it.
    """
    rng = np.random.default_rng([seed, 9])
    step, objective, width, rows = _logistic()
    start = np.zeros(width)
    best = _optimum()
    at = start[None]
    for _ in range(MLR_FAILURE):
        at = step(at)
    away = at[0] - best[0]
    size = float(np.linalg.norm(away)) * 10 ** rng.uniform(-1, 1, (trials, 1))
    if kind == "gaussian":
        change = _normal(rng, trials, width) * size
    elif kind == "adversarial":
        change = away / np.linalg.norm(away) * size
    else:
        lost = rng.random((trials, rows)).argsort(axis=1) < rng.uniform(0, 1, (trials, 1)) * rows
        change = -at * np.repeat(lost, width // rows, axis=1)
    deltas = {MLR_FAILURE: change}
    return _judged(step, start, best[0], deltas, trials, MLR_CLEAN, MLR_CONTRACTION, objective)


def _judged(
    step: Step,
    start: Floats,
    best: Floats,
    deltas: Mapping[int, Floats],
    trials: int,
    clean_iterations: int,
    contraction: float,
    objective: Objective | None = None,
) -> dict[str, Any]:
    """Return the rework of each trial, its bound, and how often what must hold does not."""
    clean_path = _descend(step, start[None], {}, clean_iterations)[0]
    clean = _errors(clean_path, best)
    eps = float(clean[-1, 0])
    paths, pushed = _descend(step, np.tile(start, (trials, 1)), deltas, 0, best=best, eps=eps)
    errors = _errors(paths, best)
    error = float(clean[0, 0])
    rework, bounds, worst, beyond = [], [], 0.0, 0
    for trial in range(trials):
        norms = {at: float(np.linalg.norm(change[trial])) for at, change in deltas.items()}
        estimate = kappa(contraction, error, eps, log_aggregate(contraction, norms))
        reached = int(np.flatnonzero(errors[:, trial] >= eps)[-1]) + 1
        beyond += reached > floor(estimate * (1 + ROUNDING)) + 1
        limit = envelope(contraction, error, norms, len(errors) - 1)
        worst = max(worst, float(np.max(errors[:, trial] / limit)))
        rework.append(round(_crossed(errors[:, trial], eps) - clean_iterations, 4))
        bounds.append(round(rework_bound(contraction, error, norms), 4))
    result = {
        "rework": rework,
        "bound": bounds,
        "beyond": beyond,  # trials that took longer than their κ
        "envelope": worst,  # the largest error over the envelope's
        "contraction": contraction,
    }
    if objective:
        goal = float(objective(clean_path[-1])[0])
        ends = [_objective_met(paths[:, trial], objective, goal, max(deltas) + 1) for trial in range(trials)]
        result["by_objective"] = [end - clean_iterations for end in ends]
        result["seen"] = _contraction([clean, errors], pushed, best)  # the largest factor of any step
    return result


def _descend(
    step: Step,
    start: Floats,
    deltas: Mapping[int, Floats],
    iterations: int,
    *,
    best: Floats | None = None,
    eps: float = 0.0,
) -> tuple[Floats, dict[int, tuple[Floats, Floats]]]:
    """Return the states at every iteration, and those right after each perturbation with what became of them.

    Goes on for ``iterations``; with ``best`` until all are nearer than ``eps`` to it, the last perturbation past.
    """
    states, pushed, at = [start], {}, 0
    last = max(deltas, default=-1)
    while at < iterations if best is None else at <= last or _far(states[-1], best, eps):
        here = states[-1]
        if at in deltas:
            moved = here + deltas[at]
            states.append(step(moved))
            pushed[at] = (moved, states[-1])
        else:
            states.append(step(here))
        at += 1
    return np.stack(states), pushed


def _far(states: Floats, best: Floats, eps: float) -> bool:
    return bool((np.linalg.norm(states - best, axis=1) >= eps).any())


def _errors(states: Floats, best: Floats) -> Floats:
    return np.asarray(np.linalg.norm(states - best, axis=2))


def _contraction(runs: list[Floats], pushed: Mapping[int, tuple[Floats, Floats]], best: Floats) -> float:
    """Return the largest factor of a step; a step after a perturbation counts from the perturbed state."""
    found = []
    for errors in runs:
        perturbed = pushed if errors.shape[1] > 1 else {}
        cuts = [0, *(at + 1 for at in sorted(perturbed)), len(errors)]
        for first, end in pairwise(cuts):
            found += list(errors[first:end].T)
    for before, after in pushed.values():
        found += list(
            np.stack([np.linalg.norm(before - best, axis=1), np.linalg.norm(after - best, axis=1)], 1)
        )
    return estimate_contraction(found)


def _objective_met(path: Floats, objective: Objective, goal: float, first: int) -> int:
    """Return the first iteration from ``first`` at which the objective is ``goal`` or less: it only falls there."""
    low, high = first - 1, len(path) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if objective(path[[middle]])[0] <= goal else (middle, high)
    return high


def _crossed(errors: Floats, eps: float) -> float:
    """Return when the error falls below ``eps`` for good, between two iterations by its logarithm."""
    last = int(np.flatnonzero(errors >= eps)[-1])
    before, after = np.log(errors[last]), np.log(errors[last + 1])
    return last + float((before - np.log(eps)) / (before - after))


def _normal(rng: np.random.Generator, trials: int, width: int) -> Floats:
    """Return directions, uniform on the sphere."""
    drawn = rng.standard_normal((trials, width))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))


@cache
def _optimum() -> Floats:
    step, _, width, _ = _logistic()
    best = np.zeros((1, width))
    for _ in range(40 * MLR_CLEAN):
        best = step(best)
    return best


def _logistic() -> tuple[Step, Objective, int, int]:
    """Return a step of gradient descent on the digits, the objective, and how many numbers and rows there are."""
    images, classes = digits()
    features = np.concatenate([images, np.ones((len(images), 1))], axis=1).astype(np.float64)
    count, rows = features.shape
    each = np.arange(count)

    def scores(weights: Floats) -> Floats:
        found = (features @ np.ascontiguousarray(weights.T).reshape(rows, -1)).reshape(count, 10, -1)
        found -= found.max(axis=1, keepdims=True)
        return found

    def objective(weights: Floats) -> Floats:
        found = scores(weights)
        nats = np.log(np.exp(found).sum(axis=1)) - found[each, classes]
        return np.asarray(nats.mean(axis=0) + MLR_PENALTY / 2 * (weights**2).sum(axis=1))

    def step(weights: Floats) -> Floats:
        shares = scores(weights)
        np.exp(shares, out=shares)
        shares /= shares.sum(axis=1, keepdims=True)
        shares[each, classes] -= 1
        slope = (features.T @ shares.reshape(count, -1)).reshape(-1, len(weights)).T / count
        return np.asarray(weights - MLR_RATE * (slope + MLR_PENALTY * weights))

    return step, objective, rows * 10, rows


def experiments(quick: bool) -> list[Experiment]:
    """Return those on the bounds."""
    found = []
    for start in ("generic", "slowest"):
        for how in ("once", "often"):
            parameters = {"start": start, "how": how, "trials": 20 if quick else 1000}
            found.append(Experiment(f"qp-{start}-{how}", quadratic, parameters))
    for kind in KINDS:
        parameters = {"kind": kind, "trials": 2 if quick else 100}
        found.append(Experiment(f"bound-mlr-{kind}", regression, parameters, 3.0))
    return found
