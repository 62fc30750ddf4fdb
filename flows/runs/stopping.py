"""What ends a query or a training from another thread: a cancelled flow run, a task of Airflow that is out of time.

Free of Prefect and Airflow. What a signal's handler calls sets a flag that only the working thread reads.
"""

import threading

from ebbflow.infra.errors import StageCancelledError
from ebbflow.tasks.query.feedback import Feedback
from ebbflow.tasks.training.listening import NullTrainingListener


class StopQuery:
    """Ends a query, whose running stages are cancelled and whose finished ones are kept; ``asked`` is then set."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._feedback: Feedback | None = None

    def follow(self, feedback: Feedback) -> None:
        """Take the feedback that the query listens to, once it has begun."""
        self._feedback = feedback
        if self.asked.is_set():
            self.stop()

    def stop(self) -> None:
        """Ask the query to end; before its first stage, it ends there."""
        self.asked.set()
        if self._feedback is not None:
            self._feedback.fail(StageCancelledError("the query was stopped; finished stages are kept"))


class StopTraining(NullTrainingListener):
    """A listener that lets another thread stop a training as Ctrl-C would: it saves and leaves.

    ``asked`` is for those who take an event instead of a listener.
    """

    def __init__(self, asked: threading.Event | None = None) -> None:
        self.asked = asked or threading.Event()
        self._told = False

    def stop(self) -> None:
        """Ask the training to save and leave."""
        self.asked.set()

    def tick(self) -> None:
        """See ``TrainingListener``."""
        if self.asked.is_set() and not self._told:
            self._told = True
            raise KeyboardInterrupt
