"""Storage that is away for a moment: what needs it is tried again for a while, and the process is shown alive."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, TypeVar

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage.filesystems import is_denied
from ebbflow.infra.training.process.channel import ReportKind

FIRST_PAUSE = 0.5  # seconds before what storage has refused is tried again, doubled each time...
LONGEST_PAUSE = 10.0  # ...up to this
SIGN_OF_LIFE = 5.0  # seconds between two reports of a process that waits for storage and does nothing else

Post = Callable[[ReportKind, int, dict[str, Any]], None]
Result = TypeVar("Result")


def retried(
    work: Callable[[], Result],
    clock: Clock,
    end: float,
    say: Callable[[StorageError, float], None],
    more: Callable[[StorageError, bool], bool] = lambda error, in_time: in_time,
) -> Result:
    """Return what ``work`` does, which is tried again with growing pauses where storage refuses it.

    Args:
        work: may raise ``StorageError``.
        clock: the time.
        end: until when it is tried, seconds since the Unix epoch.
        say: told of each error, and in how many seconds comes the next try.
        more: whether there is another try, by the error and whether there is time for one.

    Raises the last try's ``StorageError``.
    """
    pause = FIRST_PAUSE
    while True:
        try:
            return work()
        except StorageError as exc:
            if not more(exc, clock.now() + pause < end):
                raise
            say(exc, pause)
        clock.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def may_pass(error: StorageError) -> bool:
    """Return whether an error may pass by itself: neither a verdict on what was read nor a missing right."""
    return type(error) is StorageError and not is_denied(error)


@contextmanager
def shown_alive(post: Post, clock: Clock, step: int, until: float = inf) -> Iterator[None]:
    """Tell the launcher now and then: a process that waits for storage must not be taken to hang.

    ``until``, seconds since the Unix epoch: from then on it is, where nothing else limits what is waited for.
    """
    over = threading.Event()

    def report() -> None:
        while clock.now() < until and not clock.wait(over, SIGN_OF_LIFE):
            post("saving", step, {})

    thread = threading.Thread(target=report, name="ebbflow-saving", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(SIGN_OF_LIFE)
