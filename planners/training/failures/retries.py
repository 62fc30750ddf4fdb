"""Whether a failed training run is tried again, when, and where.

What a retry can mend depends on the class of the failure (``failures.FailureClass``); blind retries, as in the
cluster studied by Jeon et al. (ATC 2019, section 4.3), spend most of their GPU time on errors of the program.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Protocol

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.failures.failures import Failure, FailureClass, FailureReason

MEMORY_FACTOR = 1.5  # more host memory for the one retry after it ran out

_FAULTS = (FailureClass.INFRASTRUCTURE, FailureClass.COMMUNICATION)
_ONCE = (FailureClass.ENGINE, FailureClass.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a run asks of its nodes, as far as a retry may change it."""

    local_batch: int | None = None  # most examples of one GPU in one pass; None: unknown
    accumulation: int = 0  # passes before the one that synchronizes
    memory: float = 1.0  # host memory, times what was requested at first
    dedicated: bool = False  # no other job on its nodes


@dataclass(frozen=True, slots=True)
class Attempt:
    """One execution that ended badly."""

    failure: Failure
    nodes: frozenset[str]  # that it ran on
    gpu_seconds: float = 0.0  # held
    useful_gpu_seconds: float = 0.0  # of them, what a checkpoint keeps
    progressed: bool = False  # the newest checkpoint moved forward
    at: float = 0.0  # s, when it ended
    suspects: frozenset[str] = frozenset()  # nodes that are to blame, where that is known


@dataclass(frozen=True, slots=True)
class Retry:
    """Start again ``after`` seconds, not on ``exclude``, from the last checkpoint."""

    reason: str
    after: float = 0.0
    exclude: frozenset[str] = frozenset()
    shape: Shape | None = None  # None: as before


@dataclass(frozen=True, slots=True)
class Requeue:
    """Resume from the last checkpoint as soon as there is capacity; not counted."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Give up."""

    reason: str


Verdict = Retry | Requeue | Stop


class Retries(Protocol):
    """What becomes of a run that failed."""

    def decide(self, history: Sequence[Attempt], shape: Shape, rng: np.random.Generator) -> Verdict:
        """Return what to do after the last attempt of ``history``, which is not empty."""
        ...


def adapted(shape: Shape, failure: Failure) -> Shape | None:
    """Return the shape in which a run that lacked memory may fit; ``None`` where no change helps.

    After the GPU's memory ran out, half the examples a pass and twice the passes, so that the total batch stays;
    after the host's, half as much memory again on nodes of its own.

    >>> oom = Failure("gpu-out-of-memory", FailureClass.RESOURCE, "")
    >>> adapted(Shape(64, 0), oom)
    Shape(local_batch=32, accumulation=1, memory=1.0, dedicated=False)
    """
    if failure.reason == FailureReason.GPU_OUT_OF_MEMORY:
        if shape.local_batch is None or shape.local_batch < 2:
            return None
        smaller, passes = ceil(shape.local_batch / 2), 2 * (shape.accumulation + 1)
        return replace(shape, local_batch=smaller, accumulation=passes - 1)
    if failure.reason == FailureReason.HOST_OUT_OF_MEMORY:
        return replace(shape, memory=shape.memory * MEMORY_FACTOR, dedicated=True)
    return None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """One rule for each class of failure.

    * scheduler: at once, without limit, not counted.
    * user and data: never.
    * resource: once, in a shape that may fit; again only after a checkpoint has moved forward in it.
    * infrastructure and communication: after min(2 min · 2ⁿ, 30 min) ± 20 %, not on nodes that are to blame, until
      ``without_progress`` attempts in a row saved no progress. Where it is known who broke communication, the first
      time at once without them.
    * engine and unknown: once, on other nodes. The same signature again is the program's own fault; another one is
      treated as infrastructure.

    Raises ``OptionError`` for limits below their least.
    """

    first_delay: float = 120.0  # s
    most_delay: float = 1800.0  # s
    jitter: float = 0.2  # of the delay, either way
    without_progress: int = 5  # attempts
    most_attempts: int = 8  # counted ones
    exclusion: float = 24 * 3600.0  # s that a node to blame is not used
    wasted_factor: float = 2.0  # GPU time lost at most, times the useful GPU time,
    least_wasted: float = 3600.0  # but at least so many GPU-s
    name: str = field(default="by-class", init=False)

    def __post_init__(self) -> None:
        if not (0 <= self.first_delay <= self.most_delay and 0 <= self.jitter < 1):
            raise OptionError(
                "delays need 0 <= first_delay <= most_delay and 0 <= jitter < 1; "
                f"got {self.first_delay}, {self.most_delay}, {self.jitter}"
            )
        if self.without_progress < 1 or self.most_attempts < 1:
            raise OptionError(
                f"attempts must be >= 1; got {self.without_progress} without progress, {self.most_attempts}"
            )
        if not (self.exclusion >= 0 and self.wasted_factor >= 0 and self.least_wasted >= 0):
            raise OptionError(
                "exclusion, wasted_factor and least_wasted must be >= 0; "
                f"got {self.exclusion}, {self.wasted_factor}, {self.least_wasted}"
            )

    def decide(self, history: Sequence[Attempt], shape: Shape, rng: np.random.Generator) -> Verdict:
        """Return what to do after the last attempt of ``history``."""
        last = _last(history)
        failure = last.failure
        if failure.failure_class is FailureClass.SCHEDULER:
            return Requeue(f"{failure.reason}: restarts from the last checkpoint")
        if failure.failure_class in (FailureClass.USER, FailureClass.DATA):
            return Stop(f"{failure}; not retryable")
        counted = [a for a in history if a.failure.failure_class is not FailureClass.SCHEDULER]
        if stop := self._limits(counted):
            return stop
        if failure.failure_class is FailureClass.RESOURCE:
            return self._resource(counted, shape)
        if failure.failure_class in _ONCE:
            return self._once(counted, rng)
        return self._fault(counted, rng)

    def _limits(self, counted: Sequence[Attempt]) -> Stop | None:
        failure = counted[-1].failure
        if len(counted) >= self.most_attempts:
            return Stop(f"{failure}; this was attempt {len(counted)} of {self.most_attempts}")
        useful = sum(a.useful_gpu_seconds for a in counted)
        wasted = sum(a.gpu_seconds - a.useful_gpu_seconds for a in counted)
        cap = max(self.wasted_factor * useful, self.least_wasted)
        if wasted > cap:
            return Stop(f"{failure}; failures have cost {wasted:.0f} GPU-s, more than {cap:.0f}")
        return None

    def _resource(self, counted: Sequence[Attempt], shape: Shape) -> Verdict:
        failure = counted[-1].failure
        tried = any(a.failure.failure_class is FailureClass.RESOURCE for a in counted[:-1])
        if tried and not counted[-1].progressed:
            return Stop(f"{failure}; the smaller batch did not help either")
        smaller = adapted(shape, failure)
        if smaller is None:
            return Stop(f"{failure}; no smaller batch or larger memory is available")
        change = (
            f"{smaller.local_batch} examples a GPU in a pass, {smaller.accumulation + 1} passes"
            if smaller.local_batch != shape.local_batch
            else f"{smaller.memory:g} times the memory, on dedicated nodes"
        )
        return Retry(f"{failure.reason}: retry with {change}", shape=smaller)

    def _once(self, counted: Sequence[Attempt], rng: np.random.Generator) -> Verdict:
        last, failure = counted[-1], counted[-1].failure
        earlier = [a for a in counted[:-1] if a.failure.failure_class in _ONCE]
        if any(a.failure.signature == failure.signature for a in earlier):
            return Stop(f"{failure}; the same failure on other nodes: the program is at fault")
        if earlier:
            return self._fault(counted, rng)
        nodes = self._excluded(counted) | last.nodes
        return Retry(f"{failure.reason}: retry on other nodes", exclude=nodes)

    def _fault(self, counted: Sequence[Attempt], rng: np.random.Generator) -> Verdict:
        failure = counted[-1].failure
        streak = 0
        while streak < len(counted) and not counted[-1 - streak].progressed:
            streak += 1
        if streak >= self.without_progress:
            return Stop(f"{failure}; {streak} attempts in a row saved no progress")
        delay = min(self.first_delay * 2.0 ** max(streak - 1, 0), self.most_delay)
        delay *= 1 + self.jitter * float(rng.uniform(-1.0, 1.0))
        if failure.failure_class is FailureClass.COMMUNICATION and counted[-1].suspects and streak <= 1:
            delay = 0.0  # the suspects are excluded: there is nothing to wait for
        excluded = self._excluded(counted)
        where = f", not on {', '.join(sorted(excluded))}" if excluded else ""
        when = f"in {delay:.0f} s" if delay else "at once"
        return Retry(f"{failure.reason}: retry {when}{where}", after=delay, exclude=excluded)

    def _excluded(self, counted: Sequence[Attempt]) -> frozenset[str]:
        """Return the nodes to blame of late. Who reports a broken connection is not to blame for it.

        Nor is who reports that storage is away, which others would, too, unless that comes twice in a row.
        """
        now, found = counted[-1].at, frozenset[str]()
        before = ""
        for attempt in counted:
            reason = attempt.failure.reason
            if now - attempt.at < self.exclusion:
                found |= attempt.suspects
                stored = reason == FailureReason.STORAGE_ERROR and reason != before
                if attempt.failure.failure_class is FailureClass.INFRASTRUCTURE and not stored:
                    found |= set(attempt.failure.nodes)
            before = reason
        return found


@dataclass(frozen=True, slots=True)
class BlindRetry:
    """A fixed number of retries in the same shape, whatever failed: the baseline."""

    times: int = 3
    name: str = field(default="blind", init=False)

    def __post_init__(self) -> None:
        if self.times < 0:
            raise OptionError(f"times must be >= 0; got {self.times}")

    def decide(self, history: Sequence[Attempt], shape: Shape, rng: np.random.Generator) -> Verdict:
        """Return a retry until there were ``times``."""
        failure = _last(history).failure
        if len(history) > self.times:
            return Stop(f"{failure}; retried {self.times} times")
        return Retry(f"{failure.reason}: retry {len(history)} of {self.times}")


def _last(history: Sequence[Attempt]) -> Attempt:
    if not history:
        raise OptionError("a retry is decided after an attempt; the history is empty")
    return history[-1]
