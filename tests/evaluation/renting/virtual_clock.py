"""Time that passes only when somebody waits."""

import threading
from math import isfinite

from ebbflow.planners.errors import OptionError


class VirtualClock:
    """A ``Clock`` for one thread: waiting takes no time, and nothing else moves it."""

    def __init__(self, start: float) -> None:
        if not isfinite(start):
            raise OptionError(f"start must be finite seconds since the Unix epoch; got {start}")
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass; zero or less changes nothing."""
        if seconds > 0:
            self._now += seconds

    def until(self, time: float) -> None:
        """Let time pass until ``time``. Raises ``OptionError`` for a time that is over or infinite."""
        if not self._now <= time or not isfinite(time):
            raise OptionError(f"time cannot go from {self._now} to {time} s")
        self._now = time

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Let ``timeout`` seconds pass unless ``event`` is set already; return whether it is."""
        if not event.is_set():
            self.sleep(timeout)
        return event.is_set()
