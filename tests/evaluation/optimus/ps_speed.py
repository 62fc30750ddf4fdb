"""Speed of training with parameter servers, fitted by non-negative least squares (Optimus, EuroSys 2018, 3.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import nnls

from ebbflow.planners.errors import OptionError

Mode = Literal["synchronous", "asynchronous"]


class Sample(NamedTuple):
    """One measured speed."""

    servers: int
    workers: int
    speed: float  # steps/s: of the job if synchronous, of all its workers together if not


SAMPLE_PLAN = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 4))
"""(servers, workers) to measure before scheduling: they vary apart, or their costs can't be told apart."""


@dataclass(frozen=True, slots=True)
class PsSpeed:
    """Fitted speed model.

    - synchronous: f = 1/(θ₀M/w + θ₁ + θ₂w/p + θ₃w + θ₄p), M the total batch;
    - asynchronous: f = w/(θ₀ + θ₁w/p + θ₂w + θ₃p).
    """

    mode: Mode
    theta: tuple[float, ...]  # s; θ₀ of the synchronous form: s per example
    batch: float = 1.0  # total, examples
    identifiable: bool = True  # the samples tell all coefficients apart

    def speed(self, servers: int, workers: int) -> float:
        """Return steps/s.

        Raises:
            OptionError: servers and workers differ although no sample of the fit told their costs apart.
        """
        if not self.identifiable and servers != workers:
            raise OptionError(
                f"samples with as many servers as workers say nothing about {servers} servers and {workers} workers"
            )
        time = float(np.dot(_row(self.mode, servers, workers, self.batch), self.theta))
        return (workers if self.mode == "asynchronous" else 1) / time


def _row(mode: Mode, servers: int, workers: int, batch: float) -> list[float]:
    if servers < 1 or workers < 1:
        raise OptionError(f"servers and workers must be >= 1; got {servers}, {workers}")
    if mode == "synchronous":
        return [batch / workers, 1.0, workers / servers, workers, servers]
    return [1.0, workers / servers, workers, servers]


def fit_speed(samples: Sequence[Sample], mode: Mode, batch: float = 1.0) -> PsSpeed | None:
    """Return the model of least relative error with coefficients >= 0; ``None`` with too few different samples.

    Repeated measurements of one pair count by their mean. At least as many pairs as coefficients are needed: five
    synchronous, four asynchronous.

    Raises:
        OptionError: a speed that is not positive, or a bad count.
    """
    if mode not in ("synchronous", "asynchronous"):
        raise OptionError(f"mode must be synchronous or asynchronous; got {mode!r}")
    speeds: dict[tuple[int, int], list[float]] = {}
    for servers, workers, speed in samples:
        if not 0 < speed < float("inf"):
            raise OptionError(f"a speed must be > 0 and finite; got {speed}")
        speeds.setdefault((servers, workers), []).append(speed)
    pairs = sorted(speeds)
    unknowns = 5 if mode == "synchronous" else 4
    if len(pairs) < unknowns:
        return None
    rows = np.array([_row(mode, servers, workers, batch) for servers, workers in pairs])
    means = np.array([sum(speeds[pair]) / len(speeds[pair]) for pair in pairs])
    workers_each = np.array([workers for _, workers in pairs], float)
    times = (workers_each if mode == "asynchronous" else 1.0) / means
    theta, _ = nnls(rows / times[:, None], np.ones(len(pairs)))
    columns = rows / np.abs(rows).max(axis=0)
    full = int(np.linalg.matrix_rank(columns)) == unknowns
    return PsSpeed(mode, tuple(float(value) for value in theta), batch, full)


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """A fitted model in which what was measured overrides what was fitted."""

    model: PsSpeed
    measured: dict[tuple[int, int], float]

    def __call__(self, servers: int, workers: int) -> float:
        """Return steps/s."""
        found = self.measured.get((servers, workers))
        return self.model.speed(servers, workers) if found is None else found
