"""The skew above which a model is consolidated, learnt from finished jobs (Tiresias, NSDI 2019, section 3.4)."""

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.skew import PACK_LIMIT

SLOWED = 1.05
"""Step time spread over step time consolidated, above which a job suffered."""


class PackLimit:
    """A threshold on skew that misjudges as few as possible of the last ``memory`` jobs that ran spread."""

    def __init__(self, value: float = PACK_LIMIT, memory: int = 200) -> None:
        if not 0 < value < 1 or memory < 2:
            raise OptionError(f"value must be > 0 and < 1, memory >= 2; got {value}, {memory}")
        self.value = value
        self._jobs: deque[tuple[float, bool]] = deque(maxlen=memory)

    def learn(self, jobs: Iterable[tuple[float, float]]) -> float:
        """Take (skew, step time spread over consolidated) of finished jobs and return the new threshold.

        In the middle of the widest gap between skews with the fewest misjudged jobs; unchanged while all suffered or
        none did.
        """
        for skew, ratio in jobs:
            if not 0 <= skew <= 1 or ratio <= 0:
                raise OptionError(f"a skew must be 0 to 1 and a ratio > 0; got {skew}, {ratio}")
            self._jobs.append((skew, ratio > SLOWED))
        if len({suffered for _, suffered in self._jobs}) == 2:
            self.value = self._best()
        return self.value

    def _best(self) -> float:
        skews = sorted({skew for skew, _ in self._jobs})
        bounds = [0.0, *skews, 1.0]
        gaps = [(low, high) for low, high in pairwise(bounds) if high > low]

        def misjudged(limit: float) -> int:
            return sum((skew > limit) != suffered for skew, suffered in self._jobs)

        low, high = min(gaps, key=lambda gap: (misjudged(sum(gap) / 2), gap[0] - gap[1], gap[0]))
        return (low + high) / 2

    def consolidates(self, skew: float) -> bool:
        """Tell whether a model of this skew should be kept together."""
        return skew > self.value
