"""SQLite and ``fork``: no connection to a file may be open while a process forks.

SQLite keeps a process' locks on a file in one place, which a child inherits without the locks: what the child opens
then is not protected, and its neighbors may take the write-ahead log away from under it. So a fork waits until no
connection is in use, and closes all that are idle; parent and child open new ones. ``subprocess`` is not a fork in
this sense.

One lock for all threads of a process that write to one SQLite file.

They queue for it before they want SQLite's own.
"""

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

_gates: dict[str, threading.Lock] = {}


_making = threading.Lock()


def gate(path: Path) -> "threading.Lock":
    """Return the lock of the file at ``path``."""
    with _making:
        return _gates.setdefault(os.path.realpath(path), threading.Lock())


def forget() -> None:
    """Begin from scratch in a child: a thread that is not there may have held one."""
    global _making  # noqa: PLW0603
    _gates.clear()
    _making = threading.Lock()


_TIMEOUT = 10.0  # s that a fork waits for connections in use


class ForkParticipant(Protocol):
    """Something that holds connections to SQLite files."""

    def before_fork(self) -> None:
        """Close all idle connections."""
        ...

    def after_fork(self, *, safe: bool) -> None:
        """Begin from scratch in the child; ``safe`` is false where connections were in use during the fork."""
        ...


class _ConnectionUse:
    """How many connections are in use, and whether somebody wants to fork."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.count = 0
        self.forking = False
        self.safe = True


_uses = _ConnectionUse()
_holders: "weakref.WeakSet[ForkParticipant]" = weakref.WeakSet()


def watch(holder: ForkParticipant) -> None:
    """Tell ``holder`` of forks from now on."""
    _holders.add(holder)


@contextmanager
def in_use() -> Iterator[None]:
    """Keep other threads from forking while the block lasts."""
    uses = _uses
    with uses.condition:
        while uses.forking:
            uses.condition.wait()
        uses.count += 1
    try:
        yield
    finally:
        with uses.condition:
            uses.count -= 1
            if not uses.count:
                uses.condition.notify_all()


def _before() -> None:
    _uses.condition.acquire()
    _uses.forking = True
    end = time.monotonic() + _TIMEOUT
    while _uses.count and (left := end - time.monotonic()) > 0:
        _uses.condition.wait(left)
    _uses.safe = not _uses.count
    for holder in list(_holders):
        holder.before_fork()


def _after_in_parent() -> None:
    _uses.forking = False
    _uses.condition.notify_all()
    _uses.condition.release()


def _after_in_child() -> None:
    global _uses  # noqa: PLW0603
    safe = _uses.safe
    _uses = _ConnectionUse()  # the other threads are not here
    forget()
    for holder in list(_holders):
        holder.after_fork(safe=safe)


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
