"""How fast a data-parallel job iterates: Pollux's seven-parameter model and its fit.

Pollux, OSDI 2021, section 3.2 and equations 3.4 to 3.8 of the thesis (CMU-CS-21-135). A pass over ``m`` examples a
GPU takes ``T_grad = alpha_grad + beta_grad * m`` seconds, the exchange of gradients ``T_sync``, and the two overlap
to a degree that ``gamma`` says: ``(T_grad**gamma + T_sync**gamma) ** (1 / gamma)``.

What a job's configurations were measured to take: the points that its throughput model is fitted to.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ebbflow.planners.errors import OptionError

FLOOR = 1e-8  # s, or s per unit: the least that a parameter can be
START = (0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001)
MOST_GAMMA = 10.0
GAMMA_PENALTY = 1e-3
RETROGRESSION_PENALTY = 1e-2
SQUARES = 1e4  # weight of squared errors where they stand in for their roots
PATIENT = {"ftol": 1e-13, "maxfun": 200}
FAR_BETTER = 0.2  # of the loss: what a second attempt has to reach to be taken
NODE_OVER_LOCAL = 1.1  # what crossing nodes costs at the least, as long as that was never measured

Array = NDArray[np.float64]


class ThroughputParameters(NamedTuple):
    """θ_sys of one job."""

    alpha_grad: float  # s, of a pass whatever its size
    beta_grad: float  # s per example of a GPU
    alpha_node: float  # s, to synchronize two GPUs of several nodes
    beta_node: float  # s per further GPU
    alpha_local: float  # s, to synchronize two GPUs of one node
    beta_local: float  # s per further GPU
    gamma: float  # 1: gradients and synchronization one after the other; 10: almost at the same time


class Observation(NamedTuple):
    """What one configuration was measured to take."""

    nodes: int
    gpus: int
    batch: int  # examples a GPU in one pass
    step: float  # s of a pass with synchronization
    sync: float  # s of it spent in synchronization


def gradient_time(parameters: ThroughputParameters, batch: ArrayLike) -> Array:
    """Return seconds of a pass over ``batch`` examples on each GPU, without synchronization."""
    return np.asarray(parameters.alpha_grad + parameters.beta_grad * np.asarray(batch, float))


def sync_time(parameters: ThroughputParameters, nodes: ArrayLike, gpus: ArrayLike) -> Array:
    """Return seconds of synchronization among ``gpus`` GPUs of ``nodes`` nodes."""
    nodes, gpus = np.asarray(nodes), np.asarray(gpus)
    further = np.maximum(gpus - 2, FLOOR)
    several = parameters.alpha_node + parameters.beta_node * further
    one = parameters.alpha_local + parameters.beta_local * further
    alone = FLOOR * (1.0 + further)
    return np.asarray(np.where(nodes > 1, several, np.where(gpus > 1, one, alone)))


def step_time(parameters: ThroughputParameters, nodes: ArrayLike, gpus: ArrayLike, batch: ArrayLike) -> Array:
    """Return seconds of a pass that ends with synchronization."""
    grad, sync = gradient_time(parameters, batch), sync_time(parameters, nodes, gpus)
    # the larger of the two is taken out, so that no power overflows or vanishes
    most = np.maximum(grad, sync)
    least = np.minimum(grad, sync)
    return np.asarray(most * (1.0 + (least / most) ** parameters.gamma) ** (1.0 / parameters.gamma))


def iteration_time(
    parameters: ThroughputParameters,
    nodes: ArrayLike,
    gpus: ArrayLike,
    batch: ArrayLike,
    accumulation: ArrayLike = 0,
) -> Array:
    """Return seconds of an iteration: ``accumulation`` passes, then one with synchronization.

    Arguments broadcast. ``batch`` counts examples of one GPU in one pass.
    """
    accumulated = np.asarray(accumulation) * gradient_time(parameters, batch)
    return np.asarray(accumulated + step_time(parameters, nodes, gpus, batch))


def throughput(
    parameters: ThroughputParameters,
    nodes: ArrayLike,
    gpus: ArrayLike,
    batch: ArrayLike,
    accumulation: ArrayLike = 0,
) -> Array:
    """Return examples per second."""
    total = np.asarray(gpus) * np.asarray(batch) * (np.asarray(accumulation) + 1)
    return np.asarray(total / iteration_time(parameters, nodes, gpus, batch, accumulation))


def with_spread(
    parameters: ThroughputParameters,
    batch: int,
    accumulation: int,
    slowdowns: tuple[tuple[int, float], tuple[int, float]],
) -> ThroughputParameters:
    """Return the parameters with predicted terms across nodes, for a job that was measured on one node only.

    Those terms are chosen so that an iteration on several nodes takes as many times longer than on one as predicted,
    at the present batch; for other batches they hold by the model. They are never below the fitted ones.

    Args:
        parameters: as fitted.
        batch: examples of a GPU in a pass.
        accumulation: passes before the last.
        slowdowns: two pairs of GPUs, the first of 2, and by what an iteration on them takes longer on several nodes.
    """
    syncs = []
    for gpus, slowdown in slowdowns:
        grad = float(gradient_time(parameters, batch))
        near = float(iteration_time(parameters, 1, gpus, batch, accumulation))
        step = max(near * slowdown - accumulation * grad, grad)
        left = 1.0 - (grad / step) ** parameters.gamma
        syncs.append((gpus, step * max(left, 0.0) ** (1.0 / parameters.gamma)))
    (_, two), (gpus, many) = syncs
    alpha = max(two, parameters.alpha_node)
    beta = max((many - alpha) / max(gpus - 2, 1), parameters.beta_node)
    return parameters._replace(alpha_node=alpha, beta_node=beta)


def fit(observations: Sequence[Observation]) -> ThroughputParameters:
    """Return the parameters that explain ``observations`` best.

    Least root-mean-square error of the logarithms of pass and step times, with a weak pull to ``gamma = 1`` and
    to little retrogression, by L-BFGS-B. What was never measured is believed free of cost (OSDI 2021, section
    4.1), so that a job dares to grow: the terms across nodes before it ran on two, the terms within a node before
    it ran on two GPUs of one, both betas before it had three GPUs. With one batch size seen, half of the pass is
    taken to be constant.

    The root has a kink where an error vanishes, as it does with few or noiseless observations, and the search can
    get caught there. Then a second one over squared errors is tried.

    Raises ``OptionError`` without observations and for times that cannot be.
    """
    from scipy.optimize import minimize  # takes a quarter of a second; nodes have it before they fork

    loss = _Loss(observations)
    x = np.array([START[i] for i in loss.free])
    bounds = [(1.0, MOST_GAMMA) if i == 6 else (FLOOR, None) for i in loss.free]
    found = minimize(loss, x, jac=True, bounds=bounds, method="L-BFGS-B")
    if not found.success or loss.is_stuck(found.x):
        smooth = minimize(loss.squared, x, jac=True, bounds=bounds, method="L-BFGS-B", options=PATIENT)
        if loss(smooth.x)[0] < FAR_BETTER * loss(found.x)[0]:
            found = smooth
    theta = loss.fixed.copy()
    theta[loss.free] = found.x
    fitted = ThroughputParameters(*(float(value) for value in theta))
    if not any(o.nodes > 1 for o in observations):
        fitted = fitted._replace(
            alpha_node=max(fitted.alpha_node, NODE_OVER_LOCAL * fitted.alpha_local),
            beta_node=max(fitted.beta_node, NODE_OVER_LOCAL * fitted.beta_local),
        )
    return fitted


class _Loss:
    """The loss of a fit and its gradient, over the parameters that are free."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        for o in observations:
            if o.nodes < 1 or o.gpus < o.nodes or o.batch < 1 or not 0 <= o.sync < o.step < np.inf:
                raise OptionError(
                    f"an observation needs 1 <= nodes <= gpus, batch >= 1 and 0 <= sync < step; got {o}"
                )
        if not observations:
            raise OptionError("a fit needs at least one observation; got none")
        nodes, gpus, batch, step, sync = np.array(observations, float).T
        several, local = nodes > 1, (nodes == 1) & (gpus > 1)
        further = np.maximum(gpus - 2, FLOOR)
        self.log_pass, self.log_step = np.log(step - sync), np.log(step)
        # T_grad and T_sync of every observation, one after the other: linear in the six alphas and betas
        self.count = len(batch)
        self.rows = np.zeros((6, 2 * self.count))
        self.rows[:2, : self.count] = np.ones_like(batch), batch
        self.rows[2:, self.count :] = several, several * further, local, local * further
        self.constant = np.zeros(2 * self.count)
        self.constant[self.count :] = np.where(several | local, 0.0, FLOOR * (1.0 + further))
        self.fixed = np.full(7, FLOOR)
        frozen = np.zeros(7, bool)
        if len(set(batch)) == 1:
            frozen[0] = True
            self.fixed[0] = 0.5 * float(np.mean(step - sync))
        frozen[2:4] |= not several.any()
        frozen[4:6] |= not local.any()
        frozen[[3, 5]] |= not (gpus > 2).any()
        self.free = np.flatnonzero(~frozen)
        self.errors = (0.0, 0.0)  # of passes and of steps, at the last point

    def __call__(self, x: Array) -> tuple[float, Array]:
        """Return the loss and its gradient at the free parameters ``x``."""
        return self._value(x, rooted=True)

    def squared(self, x: Array) -> tuple[float, Array]:
        """Return the same over weighted mean squares instead of their roots: smooth where errors vanish."""
        return self._value(x, rooted=False)

    def is_stuck(self, x: Array) -> bool:
        """Return whether one of the two errors vanishes and the other does not.

        A root has a kink at 0 that a search can get caught in.
        """
        self._value(x, rooted=True)
        least, most = sorted(self.errors)
        return most > 0.01 and least < 1e-3 * most

    def _value(self, x: Array, rooted: bool) -> tuple[float, Array]:
        n, theta = self.count, self.fixed.copy()
        theta[self.free] = x
        _, _, alpha_node, beta_node, alpha_local, beta_local, gamma = theta.tolist()
        times = theta[:6] @ self.rows
        times += self.constant
        logs = np.log(times)
        log_grad, log_sync = logs[:n], logs[n:]
        powered = gamma * log_grad
        total = np.logaddexp(powered, gamma * log_sync)
        weight = np.exp(powered - total)  # of T_grad in the step's logarithm; the rest is T_sync's
        log_step = total / gamma
        by_pass, by_step = log_grad - self.log_pass, log_step - self.log_step
        pass_rms, step_rms = sqrt(by_pass.dot(by_pass) / n), sqrt(by_step.dot(by_step) / n)
        self.errors = (pass_rms, step_rms)
        by_pass /= (n * pass_rms or 1.0) if rooted else 0.5 * n / SQUARES
        by_step /= (n * step_rms or 1.0) if rooted else 0.5 * n / SQUARES
        by_log = np.empty(2 * n)
        through_grad = by_step * weight
        np.add(by_pass, through_grad, out=by_log[:n])
        np.subtract(by_step, through_grad, out=by_log[n:])
        slope = np.empty(7)
        overlap = through_grad.dot(log_grad) + by_log[n:].dot(log_sync) - by_step.dot(log_step)
        by_log /= times
        slope[:6] = self.rows @ by_log
        slope[6] = overlap / gamma + 2.0 * GAMMA_PENALTY * (gamma - 1.0)
        node, local = beta_node / alpha_node, beta_local / alpha_local
        twice = 2.0 * RETROGRESSION_PENALTY
        slope[2] -= twice * node * node / alpha_node
        slope[3] += twice * node / alpha_node
        slope[4] -= twice * local * local / alpha_local
        slope[5] += twice * local / alpha_local
        penalty = GAMMA_PENALTY * (gamma - 1.0) ** 2 + RETROGRESSION_PENALTY * (node * node + local * local)
        error = pass_rms + step_rms if rooted else SQUARES * (pass_rms**2 + step_rms**2)
        return error + penalty, slope[self.free]


def rms_log_error(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Return the root mean square of the difference of logarithms (RMSLE), 0 for a perfect prediction."""
    error: Any = np.log(np.asarray(predicted, float)) - np.log(np.asarray(measured, float))
    return float(np.sqrt(np.mean(error**2)))


WINDOW = 101  # measurements of a configuration that count: a few seconds to minutes of training


Key = tuple[int, int, int]  # nodes, GPUs, examples a GPU in one pass


class Profile(Protocol):
    """Measurements by configuration: (nodes, GPUs, batch a GPU)."""

    @property
    def observations(self) -> tuple[Observation, ...]:
        """Return one observation a configuration, in the order in which they came up."""
        ...

    def add(self, measured: Observation) -> bool:
        """Take note of a measurement; return whether that may have changed ``observations``."""
        ...


class FirstMeasurements:
    """The first measurement of each configuration: for simulations, where one is like another."""

    def __init__(self) -> None:
        self._seen: dict[Key, Observation] = {}

    @property
    def observations(self) -> tuple[Observation, ...]:
        return tuple(self._seen.values())

    def add(self, measured: Observation) -> bool:
        key = measured[:3]
        if key in self._seen:
            return False
        self._seen[key] = measured
        return True


class MedianMeasurements:
    """The median of the latest measurements of each configuration.

    Real steps are slowed down now and then: the first by caches and compilation, others by neighbors and pauses. The
    latest count, since what a node or a network gives changes.

    Raises ``OptionError``.
    """

    def __init__(self, window: int = WINDOW) -> None:
        if window < 1:
            raise OptionError(f"a window holds at least one measurement; got {window}")
        self._window = window
        self._seen: dict[
            Key, deque[tuple[float, float]]
        ] = {}  # (pass without synchronization, synchronization)

    @property
    def observations(self) -> tuple[Observation, ...]:
        found = []
        for (nodes, gpus, batch), times in self._seen.items():
            alone, sync = median(t for t, _ in times), median(t for _, t in times)
            found.append(Observation(nodes, gpus, batch, alone + sync, sync))
        return tuple(found)

    def add(self, measured: Observation) -> bool:
        """Take note of a measurement. Raises ``OptionError`` for times outside 0 <= sync < step."""
        if not 0 <= measured.sync < measured.step:
            raise OptionError(f"a measurement needs 0 <= sync < step; got {measured.sync}, {measured.step}")
        times = self._seen.setdefault(measured[:3], deque(maxlen=self._window))
        times.append((measured.step - measured.sync, measured.sync))
        return True

    def restore(self, observations: Iterable[Observation]) -> None:
        """Begin with the medians of an earlier process; each weighs like one measurement, and ages like one."""
        for observation in observations:
            self.add(observation)
