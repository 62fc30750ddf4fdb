"""The micro-tasks that the driver has dispatched and not heard of again."""

from typing import Any

from ebbflow.infra.elastic.application import MicroTask
from ebbflow.infra.errors import ElasticError
from ebbflow.planners.elastic.causality import VersionClock


class Ledger:
    """Numbers tasks and completions, and keeps tasks back while none may start."""

    def __init__(self, executors: int) -> None:
        self._executors = executors
        self._next = 0
        self.clock = VersionClock()
        self.outstanding: dict[int, MicroTask] = {}
        self.open = False  # whether tasks may go out
        self._waiting: list[MicroTask] = []

    def dispatch(self, executor: int, args: Any) -> None:
        """Make a task of the present version."""
        if not 0 <= executor < self._executors:
            raise ElasticError(f"executors are 0 to {self._executors - 1}; got {executor}")
        task = MicroTask(self._next, executor, args, self.clock.version)
        self._next += 1
        self.outstanding[task.number] = task
        self._waiting.append(task)

    def complete(self, number: int) -> bool:
        """Note a completion before the driver hears of it; ``False`` if it was heard of already."""
        if self.outstanding.pop(number, None) is None:
            return False
        self.clock.complete()
        return True

    def take(self) -> list[MicroTask]:
        """Return the tasks to send now, in order."""
        if not self.open:
            return []
        taken, self._waiting = self._waiting, []
        return taken

    def again(self, executors: set[int]) -> None:
        """Send the outstanding tasks of some executors once more, as of now."""
        for number, task in self.outstanding.items():
            if task.executor in executors:
                self.outstanding[number] = MicroTask(number, task.executor, task.args, self.clock.version)
                self._waiting.append(self.outstanding[number])

    def state_dict(self) -> dict[str, Any]:
        """Return what a snapshot needs beside the queues of the workers."""
        return {
            "next": self._next,
            "version": self.clock.version,
            "outstanding": list(self.outstanding.values()),
            "waiting": list(self._waiting),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a snapshot."""
        self._next = state["next"]
        self.clock = VersionClock(state["version"])
        self.outstanding = {task.number: task for task in state["outstanding"]}
        self._waiting = list(state["waiting"])
