"""What ends a query or a training from another thread: tasks of Airflow are ended by a signal, or by a time limit.

Free of Airflow. What a signal's handler calls sets a flag that only the working thread reads.
"""

import threading

from ebbflow.infra.errors import StageCancelledError
from ebbflow.tasks.feedback import Feedback
from ebbflow.tasks.listening import Listener
from ebbflow.tasks.query import PlainOrchestrator
from ebbflow.tasks.training_listening import Silent


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
