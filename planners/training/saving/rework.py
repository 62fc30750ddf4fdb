"""What a perturbation of the parameters costs in iterations.

SCAR (Qiao, Aragam, Zhang, Xing, "Fault Tolerance in Iterative-Convergent Machine Learning", ICML 2019; Qiao's thesis,
CMU-CS-21-135, chapter 5 and appendix B) sees a failure as a perturbation δ of the state before a step. An update f
that brings every state closer to the optimum w* by a factor c < 1 washes it out again; the extra iterations are the
rework π. Norms may be any norm, the same one throughout; iterations count from 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, inf, isfinite, log, sqrt

import numpy as np

from ebbflow.planners.errors import OptionError


def log_aggregate(contraction: float, norms: Mapping[int, float]) -> float:
    """Return log Δ_T, with Δ_T = Σ c^(-l)·‖δ_l‖ (theorem 5.3.1), without overflow; −inf without perturbations.

    Args:
        contraction: c, in (0, 1).
        norms: (expected) norm of the perturbation before each step l; steps that are not named have none.

    Raises ``OptionError``.
    """
    from scipy.special import logsumexp

    _check_contraction(contraction)
    terms = []
    for step, norm in norms.items():
        if step < 0:
            raise OptionError(f"steps of perturbations must be >= 0; got {step}")
        if not 0 <= norm < inf:
            raise OptionError(f"norms of perturbations must be finite and >= 0; got {norm}")
        if norm > 0:
            terms.append(log(norm) - step * log(contraction))
    return float(logsumexp(terms)) if terms else -inf


def kappa(contraction: float, error: float, eps: float, aggregate: float = -inf) -> float:
    """Return κ, the iteration after which the error is surely below ``eps``: log((W + Δ_T)/ε) / log(1/c).

    Every iteration above it is ε-optimal. It is below 0 where the start is.

    Args:
        contraction: c, in (0, 1).
        error: W, the distance of the start from the optimum, > 0.
        eps: accuracy wanted, > 0, in the norm of ``error``.
        aggregate: log Δ_T of ``log_aggregate``.
    """
    _check_contraction(contraction)
    _check_positive("error", error)
    _check_positive("eps", eps)
    return float(np.logaddexp(log(error), aggregate) - log(eps)) / -log(contraction)


def rework_bound(contraction: float, error: float, norms: Mapping[int, float]) -> float:
    """Return the bound on the rework: log(1 + Δ_T/W) / log(1/c), iterations (theorem 5.3.1, equation 5.6).

    It bounds the difference of two estimates ``kappa``. Iterations counted in a run may differ by more, since the
    unperturbed run may be faster than its own estimate; what never fails is ``kappa`` of the perturbed run.

    >>> round(rework_bound(0.9, 1.0, {20: 0.3}), 3)
    11.802
    """
    _check_positive("error", error)
    return float(np.logaddexp(0.0, log_aggregate(contraction, norms) - log(error))) / -log(contraction)


def envelope(contraction: float, error: float, norms: Mapping[int, float], iterations: int) -> np.ndarray:
    """Return the bound on the error at iterations 0 to ``iterations`` (equation B.4).

    At k + 1 it is c·(the bound at k + ‖δ_k‖): c^(k+1)·(W + Σ_{l≤k} c^(-l)·‖δ_l‖).
    """
    _check_contraction(contraction)
    bound = np.empty(iterations + 1)
    bound[0] = error
    for step in range(iterations):
        bound[step + 1] = contraction * (bound[step] + norms.get(step, 0.0))
    return bound


def irreducible_error(contraction: float, norm: float) -> float:
    """Return b = c·Δ/(1 − c): no accuracy below it is reached if every step is perturbed by Δ = ``norm`` (B.1).

    Raises ``OptionError``.
    """
    _check_contraction(contraction)
    if not 0 <= norm < inf:
        raise OptionError(f"norm must be finite and >= 0; got {norm}")
    return contraction * norm / (1 - contraction)


def kappa_infinite(contraction: float, error: float, eps: float, norm: float) -> float:
    """Return the iteration after which the error is below ``eps`` if every step is perturbed by up to ``norm``.

    log((W − b)/(ε − b)) / log(1/c), with b the irreducible error; inf for ε ≤ b, however many iterations follow.
    ``error`` must exceed b.

    Raises ``OptionError``.
    """
    floor = irreducible_error(contraction, norm)
    _check_positive("eps", eps)
    if not error > floor:
        raise OptionError(f"error must exceed the irreducible error {floor:.6g}; got {error}")
    return inf if eps <= floor else log((error - floor) / (eps - floor)) / -log(contraction)


def rework_bound_infinite(contraction: float, error: float, eps: float, norm: float) -> float:
    """Return the bound on the rework if every step is perturbed: log[(1 − b/W)/(1 − b/ε)] / log(1/c) (B.2).

    inf for an ``eps`` that cannot be reached. ``error`` must exceed the irreducible error b.

    Raises ``OptionError``.
    """
    floor = irreducible_error(contraction, norm)
    _check_positive("eps", eps)
    if not error > floor:
        raise OptionError(f"error must exceed the irreducible error {floor:.6g}; got {error}")
    if eps <= floor:
        return inf
    return log((1 - floor / error) / (1 - floor / eps)) / -log(contraction)


def expected_partial_norm(norm: float, lost: float) -> float:
    """Return √p·‖δ‖, which the expected norm of a partial recovery does not exceed (theorem 5.4.2 and Jensen).

    Args:
        norm: ‖δ‖ if everything were restored.
        lost: p, the fraction of blocks lost, each equally likely.

    Raises ``OptionError``.
    """
    if not 0 <= lost <= 1:
        raise OptionError(f"lost must be a fraction from 0 to 1; got {lost}")
    if not norm >= 0:
        raise OptionError(f"norm must be >= 0; got {norm}")
    return sqrt(lost) * norm


def estimate_contraction(trajectories: Iterable[Sequence[float]], *, floor: float = 0.0) -> float:
    """Return the largest factor by which one step changed the error: c, as the theorems need it.

    A slope fitted through log errors suits a picture, but does not bound anything.

    Args:
        trajectories: errors ‖w^(k) − w*‖ of runs. After a perturbation a new trajectory begins, with the error that
            the perturbed state had, because equation 5.5 must hold from there too.
        floor: errors up to here are rounding, and are ignored.

    Raises:
        OptionError: no step to look at, or one that did not come closer.
    """
    worst = -inf
    for errors in trajectories:
        values = np.asarray(errors, float)
        before, after = values[:-1], values[1:]
        counted = (before > floor) & (after > floor)
        if counted.any():
            worst = max(worst, float(np.max(after[counted] / before[counted])))
    if worst == -inf:
        raise OptionError("trajectories must hold at least one step above the floor")
    if not worst < 1:
        raise OptionError(f"every step must come closer to the optimum; the worst factor is {worst:.6g}")
    return worst


def error_from_step(contraction: float, step: float) -> float:
    """Return the largest distance from the optimum that fits a step of norm ``step``: step/(1 − c).

    From ‖w^(k+1) − w*‖ ≤ c·‖w^(k) − w*‖ by the triangle inequality; for runs whose optimum is unknown.
    """
    _check_contraction(contraction)
    _check_positive("step", step)
    return step / (1 - contraction)


def rework_after_recovery(contraction: float, error: float, distance: float, lost: float = 1.0) -> float:
    """Return the bound on the rework of one recovery now: log(1 + √p·‖w − z‖/‖w − w*‖) / log(1/c).

    Args:
        contraction: c, in (0, 1).
        error: ‖w − w*‖ at the failure; of a clean run of T iterations c^T·W.
        distance: ‖w − z‖ between the parameters and what storage holds.
        lost: p, the fraction of blocks lost.
    """
    return rework_bound(contraction, error, {0: expected_partial_norm(distance, lost)})


def reduced_precision_norm(bits: int, norm: float) -> float:
    """Return the bound on the perturbation by a mantissa of ``bits`` bits: 2^-(bits − 1)·‖w‖ (section 5.2).

    Raises ``OptionError``.
    """
    if bits < 1:
        raise OptionError(f"bits must be >= 1; got {bits}")
    return exp(-(bits - 1) * log(2)) * norm


def _check_contraction(contraction: float) -> None:
    if not 0 < contraction < 1:
        raise OptionError(f"contraction must be between 0 and 1; got {contraction}")


def _check_positive(name: str, value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise OptionError(f"{name} must be finite and > 0; got {value}")
