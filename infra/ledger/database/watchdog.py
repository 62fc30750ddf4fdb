"""Ends connections on which a server has fallen silent.

PostgreSQL's own limits hold while the server lives, and the kernel's while its machine answers. A server that is
stopped or starved on a machine that answers meets neither; then only closing our end wakes the thread that waits.
"""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

_PERIOD = 0.5  # s between looks


class Watchdog:
    """Shuts down sockets that have been in use for longer than they may. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[float, int]] = {}  # until (s, monotonic) and descriptor
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    @contextmanager
    def limit(self, descriptor: int, seconds: float) -> Iterator[None]:
        """Shut the socket ``descriptor`` down if the block takes longer than ``seconds``."""
        number = next(self._numbers)
        with self._lock:
            self._watched[number] = (time.monotonic() + seconds, descriptor)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="ledger-watchdog", daemon=True)
                self._thread.start()
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                del self._watched[number]

    def _watch(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                for number, (until, descriptor) in list(self._watched.items()):
                    if until < now:
                        self._watched[number] = (float("inf"), descriptor)
                        _shut(descriptor)
                idle = not self._watched
                if idle:
                    self._wake.clear()
            if idle:
                self._wake.wait()
            else:
                time.sleep(_PERIOD)


_ours = Watchdog()


def limit(descriptor: int, seconds: float) -> AbstractContextManager[None]:
    """Shut the socket ``descriptor`` down if the block takes longer than ``seconds``."""
    return _ours.limit(descriptor, seconds)


def _renew() -> None:
    global _ours  # noqa: PLW0603
    _ours = Watchdog()  # threads do not survive a fork


os.register_at_fork(after_in_child=_renew)


def _shut(descriptor: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
        end.shutdown(socket.SHUT_RDWR)
