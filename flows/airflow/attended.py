"""Work that the thread which waits for it can end: tasks of Airflow are ended by a signal, or by a time limit.

Free of Airflow. A signal's handler runs in the main thread, wherever that stands, so it must not wait for a lock that
the main thread may hold: here it sets a flag that only the working thread reads.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ebbflow.infra.errors import StageCancelledError
from ebbflow.tasks.feedback import Feedback
from ebbflow.tasks.listening import Listener
from ebbflow.tasks.query import PlainOrchestrator
from ebbflow.tasks.training_listening import Silent

Result = TypeVar("Result")

_LOOK = 0.2  # seconds: a signal's handler runs between two looks


class Attended(Generic[Result]):
    """Runs ``work`` in a thread of its own. ``stop`` asks it to end; what it raises or returns, ``wait`` does.

    ``patience`` is how long, in seconds, an interrupted ``wait`` waits for the work to end before it passes the
    interrupt on.
    """

    def __init__(self, work: Callable[[], Result], stop: Callable[[], None], patience: float = 30.0) -> None:
        self._work, self._stop, self._patience = work, stop, patience
        self._ended = False
        self._result: Result | None = None
        self._error: BaseException | None = None
        context = contextvars.copy_context()  # Airflow's own: which task this is
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="ebbflow-work", daemon=True
        )

    def wait(self) -> Result:
        """Run the work to its end and return its result. Raises what it raises, or the interrupt of this thread."""
        self._thread.start()
        try:
            while not self._ended:
                self._thread.join(_LOOK)
        except BaseException:  # a time limit of Airflow's, Ctrl-C
            self.stop()
            self._thread.join(self._patience)
            raise
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def stop(self) -> None:
        """Ask the work to end, from any thread or from a signal's handler; returns at once."""
        self._stop()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._ended = True


class StoppableOrchestrator(PlainOrchestrator):
    """Threads of this process; ``stop`` ends the query, whose running stages are cancelled, and sets ``asked``."""

    def __init__(self, listener: Listener | None = None) -> None:
        super().__init__(listener)
        self.asked = threading.Event()
        self._feedback: Feedback | None = None

    def watch(self, feedback: Feedback, stop: threading.Event) -> None:
        """See ``Orchestrator``."""
        super().watch(feedback, stop)
        self._feedback = feedback
        if self.asked.is_set():
            self._end(feedback)

    def stop(self) -> None:
        """Ask the query to end; before its first stage, it ends there."""
        self.asked.set()
        if self._feedback is not None:
            self._end(self._feedback)

    def _end(self, feedback: Feedback) -> None:
        feedback.fail(StageCancelledError("the query was stopped; finished stages are kept"))


class StopTraining(Silent):
    """A listener that lets another thread stop a training as Ctrl-C would: it saves and leaves.

    ``asked`` is for those who take an event instead of a listener.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._told = False

    def stop(self) -> None:
        """Ask the training to save and leave."""
        self.asked.set()

    def tick(self) -> None:
        """See ``TrainingListener``."""
        if self.asked.is_set() and not self._told:
            self._told = True
            raise KeyboardInterrupt
