"""GPUs over time, kept as steps: who held how many, how many there were, and what they cost."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Steps:
    """A step function of time: ``values[i]`` holds from ``times[i]`` on; 0 before."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def set(self, at: float, value: float) -> None:
        """Go to ``value`` at ``at``, which must not be before the last change."""
        if self.times and self.times[-1] == at:
            self.values[-1] = value
            if len(self.values) > 1 and self.values[-2] == value:
                self.times.pop()
                self.values.pop()
        elif (self.values[-1] if self.values else 0.0) != value:
            self.times.append(at)
            self.values.append(value)

    def at(self, time: float) -> float:
        """Return the value at ``time``."""
        position = bisect_right(self.times, time)
        return self.values[position - 1] if position else 0.0

    def integral(self, start: float, end: float) -> float:
        """Return the integral from ``start`` to ``end``."""
        total = 0.0
        for number, (time, value) in enumerate(zip(self.times, self.values, strict=True)):
            until = self.times[number + 1] if number + 1 < len(self.times) else end
            total += value * max(0.0, min(until, end) - max(time, start))
        return total

    def sampled(self, times: Sequence[float]) -> list[float]:
        """Return the values at ``times``."""
        return [self.at(time) for time in times]


@dataclass(slots=True)
class Usage:
    """GPU allocation over time, s and GPUs; ``price`` in dollars per hour for all nodes that are there."""

    apps: dict[str, Steps] = field(default_factory=dict)
    held: Steps = field(default_factory=Steps)
    capacity: Steps = field(default_factory=Steps)
    price: Steps = field(default_factory=Steps)

    def note(self, at: float, app: str, gpus: int) -> None:
        """Note that ``app`` holds ``gpus`` from now on."""
        steps = self.apps.get(app)
        if steps is None:
            steps = self.apps[app] = Steps()
        steps.set(at, gpus)

    def utilisation(self, start: float, end: float) -> float:
        """Return the share of GPU time that was held between ``start`` and ``end``."""
        there = self.capacity.integral(start, end)
        return self.held.integral(start, end) / there if there else 0.0
