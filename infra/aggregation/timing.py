"""How long an aggregator works for a tensor, and how often it is asked to: what trainings are measured by."""

import collections
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

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
