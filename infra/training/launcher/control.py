"""What others ask of a running launcher, handed to its loop."""

import threading
from collections.abc import Mapping

from ebbflow.infra.clock import Clock


class Control:
    """The latest wishes: a placement to move to, and a deadline to stop by. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._target: dict[str, int] | None = None
        self._reason = ""
        self._by: float | None = None
        self._stop: float | None = None
        self._ending = (0, "")  # a generation, and why it is to end
        self.closed = False

    def resize(self, placement: Mapping[str, int], reason: str = "resize", by: float | None = None) -> None:
        with self._lock:
            self._target, self._reason, self._by = dict(placement), reason, by
            self._changed.set()

    def end_generation(self, number: int, reason: str) -> None:
        with self._lock:
            self._ending = number, reason
            self._changed.set()

    def ending(self, number: int) -> str:
        """Return why this generation is to end; empty: nobody asked."""
        of, reason = self._ending
        return reason if of == number else ""

    def stop(self, deadline: float) -> None:
        with self._lock:
            self._stop = deadline if self._stop is None else min(self._stop, deadline)
            self._changed.set()

    def close(self) -> None:
        self.closed = True
        self._changed.set()

    @property
    def target(self) -> dict[str, int] | None:
        return self._target

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def by(self) -> float | None:
        """Return when the nodes outside ``target`` must be free, seconds since the Unix epoch; ``None``: any time."""
        return self._by

    @property
    def deadline(self) -> float | None:
        """Return when to stop, seconds since the Unix epoch; ``None``: nobody asked."""
        return self._stop

    def drop(self, placement: Mapping[str, int]) -> None:
        """Forget the wish for ``placement``, unless it has been replaced by another."""
        with self._lock:
            if self._target == dict(placement):
                self._target = None

    def pause(self, seconds: float, clock: Clock) -> None:
        """Wait ``seconds``, or until something new is asked."""
        clock.wait(self._changed, seconds)
        self._changed.clear()
