"""The time of a fleet: one for all its processes, whatever becomes of the machine's wall clock meanwhile."""

import threading
import time

from ebbflow.infra.clock import Clock

_LEAST = 0.5  # s by which two clocks may differ and count as one


class MachineClock:
    """Unix time as it was when the fleet began, and from then on by the kernel's count since its start.

    ``SystemClock`` is steady too, but each process takes the wall clock's word when it begins: two that began before
    and after the wall clock was set would not agree on when a node's notice runs out.
    """

    def __init__(self, offset: float) -> None:
        self.offset = offset

    @classmethod
    def begin(cls) -> "MachineClock":
        """Return a clock that agrees with the wall's now."""
        return cls(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))

    def now(self) -> float:
        """Return the present time, in seconds since the Unix epoch."""
        return self.offset + time.clock_gettime(time.CLOCK_BOOTTIME)

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds``; zero or less returns at once."""
        if seconds > 0:
            time.sleep(seconds)

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Wait for ``event`` for at most ``timeout`` seconds; return whether it is set."""
        return event.wait(max(0.0, timeout))


def shift(of: float, ours: Clock) -> float:
    """Return what to add to a time by ``ours`` to have it by a clock that shows ``of`` now, s.

    It is 0 while they agree but for half a second, and else rounded, so that a time converted twice is the same.
    """
    differ = of - ours.now()
    return 0.0 if abs(differ) < _LEAST else round(differ, 1)
