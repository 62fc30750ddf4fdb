"""Interrupts that wait for a safe moment: one that struck between two lines could lose what has just happened."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def deferred(heard: Callable[[], None]) -> Iterator[None]:
    """Call ``heard`` at the first signal that would raise ``KeyboardInterrupt``; from the second on it is raised.

    Handlers of others are called as before. In another thread than the main one nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = 0

    def wrap(before: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        def handler(number: int, frame: FrameType | None) -> None:
            nonlocal came
            try:
                before(number, frame)
            except KeyboardInterrupt:
                came += 1
                if came > 1:
                    raise
                heard()

        return handler

    found = {number: signal.getsignal(number) for number in _SIGNALS}
    changed = {number: before for number, before in found.items() if callable(before)}
    for number, before in changed.items():
        signal.signal(number, wrap(before))
    try:
        yield
    finally:
        for number, before in changed.items():
            with suppress(ValueError):
                signal.signal(number, before)
