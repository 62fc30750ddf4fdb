"""Flow runs that end in order when they are cancelled.

Prefect's runner cancels a run by a signal, and ends the process by force 30 s later. It takes the signal for a
cancellation, not for a crash, only where Prefect's own handler is in place; and that raises in the main thread,
wherever it stands. So the main thread waits, and the work is done in a thread of its own that is asked to end.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")

PATIENCE = 25.0  # s to save and leave in
_LOOK = 0.2  # s: a signal's handler runs between two looks


def attended(work: Callable[[], Result], stop: Callable[[], object], patience: float = PATIENCE) -> Result:
    """Do ``work`` in a thread of its own and return its result, or raise what it raises.

    An interrupt, a cancellation or a termination of this thread calls ``stop``, waits ``patience`` seconds for the
    work to end, and is then passed on.
    """
    return _Attended(work).wait(stop, patience)


class _Attended(Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        # a join that is interrupted takes the thread for ended (CPython 3.11), so an event is waited for
        self._ended = threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None
        context = contextvars.copy_context()  # Prefect's own: which run this is
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="ebbflow-work", daemon=True
        )

    def wait(self, stop: Callable[[], object], patience: float) -> Result:
        self._thread.start()
        try:
            while not self._ended.wait(_LOOK):
                pass
        except BaseException:
            stop()
            self._ended.wait(patience)
            raise
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
