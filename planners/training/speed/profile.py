"""What a job's configurations were measured to take: the points that its throughput model is fitted to."""

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Protocol

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.throughput import Observation

WINDOW = 101  # measurements of a configuration that count: a few seconds to minutes of training

Key = tuple[int, int, int]  # nodes, GPUs, examples a GPU in one pass


class Profile(Protocol):
    """Measurements by configuration: (nodes, GPUs, batch a GPU)."""

    @property
    def observations(self) -> tuple[Observation, ...]:
        """Return one observation a configuration, in the order in which they came up."""
        ...

    def add(self, measured: Observation) -> bool:
        """Take note of a measurement; tell whether that may have changed ``observations``."""
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

    Real steps are slowed down now and then: the first by caches and compilation, others by neighbours and pauses. The
    latest count, since what a node or a network gives changes.
    """

    def __init__(self, window: int = WINDOW) -> None:
        if window < 1:
            raise OptionError(f"a window holds at least one measurement; got {window}")
        self._window = window
        self._seen: dict[
            Key, deque[tuple[float, float]]
        ] = {}  # (pass without synchronisation, synchronisation)

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

    def recall(self, observations: Iterable[Observation]) -> None:
        """Begin with the medians of an earlier process; each weighs like one measurement, and ages like one."""
        for observation in observations:
            self.add(observation)
