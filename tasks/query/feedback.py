"""The resource-feedback task: watches capacity, coalesces bursts, and wakes whoever plans on it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import EngineLostError, InfraError
from ebbflow.infra.protocols import CapacitySource
from ebbflow.planners.model import Capacity, CapacityDiff

Publish = Callable[[Capacity, str], None]


@dataclass(frozen=True, slots=True)
class FeedbackIntervals:
    """How often to look, and how long to wait for a burst to end. Seconds."""

    interval: float = 0.25
    quiet: float = 0.1  # publish once nothing has changed for this long...
    longest: float = 1.0  # ...or this long after the first change (QOOP: bursts within 1 s are one event)


class Feedback:
    """Publishes every settled change of a source's capacity.

    ``publish`` gets the new capacity and what changed since the last one published, for people. ``failed``
    gets the error that ends the watch, if any does: whoever plans on capacity must not continue without it.
    """

    def __init__(
        self,
        source: CapacitySource,
        clock: Clock,
        publish: Publish,
        pace: FeedbackIntervals | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._source = source
        self._clock = clock
        self._publish = publish
        self._pace = pace or FeedbackIntervals()
        self._failed = failed
        self._published: Capacity | None = None

    def begin(self, known: Capacity | None = None) -> Capacity:
        """Take ``known`` as published already, or look once. Raises ``EngineUnavailableError`` if nothing can
        be seen."""
        self._published = known or self._source.capacity()
        return self._published

    def run(self, stop: threading.Event) -> int:
        """Watch until ``stop`` is set; return how many changes were published.

        A source that fails is asked again at the next look: what is known stays true until then. One that
        says that the engine is lost ends the watch.
        """
        try:
            return self._run(stop)
        except Exception as error:
            if self._failed is not None:
                self._failed(error)
            raise

    def fail(self, error: Exception) -> None:
        """Have whoever plans on this capacity end with ``error``; from any thread, or from a signal's handler."""
        if self._failed is not None:
            self._failed(error)

    def _run(self, stop: threading.Event) -> int:
        if self._published is None:
            self.begin()
        changes = 0
        while not self._clock.wait(stop, self._pace.interval):
            seen = self._look()
            if seen is None or self._published is None or seen.same_nodes(self._published):
                continue
            settled = self._settle(seen, stop)
            if not stop.is_set() and not settled.same_nodes(self._published):
                change = str(CapacityDiff.between(self._published, settled))
                self._published = settled
                self._publish(settled, change)
                changes += 1
        return changes

    def _look(self) -> Capacity | None:
        try:
            return self._source.capacity()
        except EngineLostError:
            raise
        except InfraError:
            return None

    def _settle(self, seen: Capacity, stop: threading.Event) -> Capacity:
        """Wait until a burst of changes is over, within bounds, and return the newest capacity."""
        deadline = self._clock.now() + self._pace.longest
        while self._clock.now() < deadline and not self._clock.wait(stop, self._pace.quiet):
            newer = self._look() or seen
            if newer.same_nodes(seen):
                return newer
            seen = newer
        return seen
