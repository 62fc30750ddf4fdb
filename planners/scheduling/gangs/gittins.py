"""Gittins index of attained service against a distribution of service demands (Tiresias, NSDI 2019, section 3.2)."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf, isfinite
from typing import Literal

from ebbflow.planners.errors import OptionError

Quantum = Literal["queue", "supremum"]
"""The service quantum of the index: the upper end of the job's queue, or the best of all."""

Denominator = Literal["residual", "total"]
"""What the index divides by: the expected rest within the quantum (formula), or the expected total (their code)."""


class ServiceDistribution:
    """Service demands of past jobs, GPU-s; each sample has a weight. Raises ``OptionError``."""

    def __init__(
        self,
        samples: Iterable[float],
        *,
        weights: Sequence[float] | None = None,
        denominator: Denominator = "residual",
    ) -> None:
        values = list(samples)
        if not values or not all(isfinite(value) and value > 0 for value in values):
            raise OptionError("service samples must be at least one, all finite and > 0 GPU-s")
        if denominator not in ("residual", "total"):
            raise OptionError(f"denominator must be residual or total; got {denominator!r}")
        shares = [1.0] * len(values) if weights is None else list(weights)
        if len(shares) != len(values) or not all(isfinite(share) and share > 0 for share in shares):
            raise OptionError("weights must be one for each sample, all finite and > 0")
        pairs = sorted(zip(values, shares, strict=True))
        self.denominator = denominator
        self.samples = [value for value, _ in pairs]
        self._mass = [0.0, *accumulate(share for _, share in pairs)]
        self._moment = [0.0, *accumulate(value * share for value, share in pairs)]
        self._best: dict[float, float] = {}

    def index(self, attained: float, quantum: float | None = None) -> float:
        """Return the Gittins index, 1/GPU-s, of a job with ``attained`` GPU-s.

        The chance to finish within ``quantum`` over the service that this is expected to take; the supremum over all
        quanta for ``None``. 0 for a job that outlived all samples.
        """
        if quantum is not None:
            return self._index(attained, quantum)
        start = bisect_right(self.samples, attained)
        best = self._best.get(attained)
        if best is None:
            # between two samples only the expected service grows: the supremum lies at a sample
            best = max(
                (self._index(attained, value - attained, value) for value in self.samples[start:]),
                default=0.0,
            )
            if len(self._best) < 100_000:
                self._best[attained] = best
        return best

    def _index(self, attained: float, quantum: float, until: float | None = None) -> float:
        """Return the index; ``until`` is where the quantum ends, if adding it up could round below that."""
        first = bisect_right(self.samples, attained)
        alive = self._mass[-1] - self._mass[first]
        if alive <= 0 or first == len(self.samples):
            return 0.0
        end = bisect_right(self.samples, attained + quantum if until is None else until)
        within = self._mass[end] - self._mass[first]
        spent = self._moment[end] - self._moment[first]
        if self.denominator == "residual":
            spent -= attained * within
            rest = self._mass[-1] - self._mass[end]
            spent += quantum * rest if rest > 0 else 0.0
        else:
            rest = self._mass[-1] - self._mass[end]
            spent += (attained + quantum) * rest if rest > 0 else 0.0
        return within / spent if spent > 0 else 0.0

    def mean_residual(self, attained: float) -> float:
        """Return the expected service still to come, GPU-s; infinite for a job that outlived all samples."""
        first = bisect_right(self.samples, attained)
        alive = self._mass[-1] - self._mass[first]
        if first == len(self.samples):
            return inf
        return (self._moment[-1] - self._moment[first]) / alive - attained

    @classmethod
    def censored(
        cls, finished: Sequence[float], running: Sequence[float], *, denominator: Denominator = "residual"
    ) -> "ServiceDistribution":
        """Return the Kaplan-Meier estimate from finished demands and the service that running jobs attained so far.

        Finished jobs alone are biased towards short ones. What survives the largest value is put at that value.
        """
        events = sorted([(value, 0) for value in finished] + [(value, 1) for value in running])
        at_risk, survival = len(events), 1.0
        values: list[float] = []
        weights: list[float] = []
        for value, is_censored in events:
            if not is_censored:
                values.append(value)
                weights.append(survival / at_risk)
                survival -= survival / at_risk
            at_risk -= 1
        if survival > 1e-12 and events:
            values.append(events[-1][0])
            weights.append(survival)
        return cls(values, weights=weights, denominator=denominator)
