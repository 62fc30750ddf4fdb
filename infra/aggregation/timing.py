"""How long an aggregator works for a tensor, and how often it is asked to; and what is told of it to others."""

import collections
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

WARM_UP = 10  # rounds that are not measured
MEASURED = 20  # rounds of which medians are taken (AutoPS 5.3 of its reference)


class TensorProfile(NamedTuple):
    """What was measured of a tensor.

    Args:
        execution_us: microseconds of summing and updating in a round, the median.
        iteration_us: microseconds from one update to the next, the median.
    """

    execution_us: int
    iteration_us: int


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor on an aggregator.

    Args:
        bytes: of parameters and moments.
        execution_us: microseconds that a round takes there; 0: not measured yet.
        iteration_us: microseconds between two of its updates; 0: not measured yet.
        incomplete: whether its copy is still on its way there.
        mirror: whether another aggregator answers pulls of it.
        spare: whether it is a mirror of an earlier round, which is renewed from time to time.
        round: that it is in.
        mirrored: bytes of payloads that it was sent so far as a mirror.
    """

    bytes: int
    execution_us: int = 0
    iteration_us: int = 0
    incomplete: bool = False
    mirror: bool = False
    spare: bool = False
    round: int = 0
    mirrored: int = 0

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return the tensor of its plain values; what a newer version has more is left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in body.items() if name in known})


@dataclass(slots=True)
class TensorTiming:
    """The last rounds of a tensor on an aggregator."""

    rounds: int = 0
    _spent: float = 0.0
    _ended: float | None = None
    _executions: "collections.deque[float]" = field(
        default_factory=lambda: collections.deque(maxlen=MEASURED)
    )
    _intervals: "collections.deque[float]" = field(default_factory=lambda: collections.deque(maxlen=MEASURED))

    def work(self, seconds: float) -> None:
        """Count time that was spent on the round."""
        self._spent += seconds

    def end_round(self, now: float) -> None:
        """End a round, at ``now`` by a monotonic clock."""
        self.rounds += 1
        if self.rounds > WARM_UP:
            self._executions.append(self._spent)
            if self._ended is not None:
                self._intervals.append(now - self._ended)
        self._spent, self._ended = 0.0, now

    @property
    def profile(self) -> TensorProfile | None:
        """Return what was measured, once there are enough rounds."""
        if len(self._intervals) < MEASURED:
            return None
        return TensorProfile(
            max(round(statistics.median(self._executions) * 1e6), 1),
            max(round(statistics.median(self._intervals) * 1e6), 1),
        )


def iteration_us(profiles: Iterable[TensorProfile]) -> int:
    """Return the iteration of a training, of the profiles of its tensors: their median."""
    return round(statistics.median(one.iteration_us for one in profiles))
