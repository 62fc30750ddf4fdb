"""Queries that tasks of Airflow can end. Free of Airflow."""

import threading

from ebbflow.flows.runs.stopping import StopQuery
from ebbflow.tasks.query.feedback import Feedback
from ebbflow.tasks.query.listening import Listener
from ebbflow.tasks.query.run import PlainOrchestrator


class StoppableOrchestrator(StopQuery, PlainOrchestrator):
    """Threads of this process; ``stop`` ends the query."""

    def __init__(self, listener: Listener | None = None) -> None:
        StopQuery.__init__(self)
        PlainOrchestrator.__init__(self, listener)

    def watch(self, feedback: Feedback, stop: threading.Event) -> None:
        """See ``Orchestrator``."""
        super().watch(feedback, stop)
        self.follow(feedback)
