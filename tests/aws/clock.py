"""A clock that runs faster than the wall, the same in every process of the machine."""

import threading
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ScaledClock:
    """Seconds since the Unix epoch, ``speed`` of them per second of the wall.

    Implements ``ebbflow.infra.clock.Clock``. Clocks with equal fields show the same time in all processes, because
    the system's monotonic clock is one for all.
    """

    speed: float = 1.0
    epoch: float = field(default_factory=time.time)  # what it shows at ``start``
    start: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        return self.epoch + (time.monotonic() - self.start) * self.speed

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds / self.speed)

    def wait(self, event: threading.Event, timeout: float) -> bool:
        return event.wait(max(0.0, timeout) / self.speed)
