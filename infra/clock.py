"""Time is passed in: every wait of the system goes through a ``Clock``."""

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the Unix epoch, and ways to let them pass."""

    def now(self) -> float:
        """Return the present time, in seconds since the Unix epoch."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds``; zero or less returns at once."""
        ...

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Wait for ``event`` for at most ``timeout`` seconds; return whether it is set."""
        ...


class SystemClock:
    """The wall clock, made monotonic within the process so that a clock jump never moves it backwards."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)

    def wait(self, event: threading.Event, timeout: float) -> bool:
        return event.wait(max(0.0, timeout))
