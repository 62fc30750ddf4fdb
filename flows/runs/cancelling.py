"""Work that ends in order when the thread that waits for it is interrupted: cancelled flow runs, tasks out of time.

Prefect's runner cancels a run by a signal, and ends the process by force 30 s later. It takes the signal for a
cancellation, not for a crash, only where Prefect's own handler is in place; and that raises in the main thread,
wherever it stands. Airflow ends tasks likewise. So the main thread waits, and the work is done in a thread of its own
that is asked to end. A signal's handler must not wait for a lock that the main thread may hold.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")

STOP_TIMEOUT = 25.0  # s to save and leave in
SAVE = 15.0  # s of them that trainings get to save in; others have to end after them
_BEGIN = 2.0  # s for a thread to begin in
_POLL = 0.2  # s: a signal's handler runs between two looks


def attended(work: Callable[[], Result], stop: Callable[[], object], timeout: float = STOP_TIMEOUT) -> Result:
    """Do ``work`` in a thread of its own and return its result, or raise what it raises.

    An interrupt, a cancellation or a termination of this thread calls ``stop``, waits ``timeout`` seconds for the
    work to end, and is then passed on.
    """
    return Attended(work, stop, timeout).wait()


class Attended(Generic[Result]):
    """``attended`` for work that other threads and signals' handlers may end, too, by ``stop``; for one use."""

    def __init__(
        self, work: Callable[[], Result], stop: Callable[[], object], timeout: float = STOP_TIMEOUT
    ) -> None:
        self._work, self._stop, self._timeout = work, stop, timeout
        # a join that is interrupted takes the thread for ended (CPython 3.11), so an event is waited for
        self._begun, self._ended = threading.Event(), threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None
        context = contextvars.copy_context()  # Prefect's or Airflow's own: which run this is
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="ebbflow-work", daemon=True
        )

    def wait(self) -> Result:
        """Do the work and return its result. Raises what it raises, or the interrupt of this thread."""
        try:
            self._thread.start()
            while not self._ended.wait(_POLL):
                pass
        except BaseException:
            self._stop()
            if self._begun.wait(_BEGIN):
                self._ended.wait(self._timeout)
            raise
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def stop(self) -> None:
        """Ask the work to end; returns at once."""
        self._stop()

    def _run(self) -> None:
        self._begun.set()
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
