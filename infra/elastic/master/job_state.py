"""What all parts of the master share: members, holdings, the driver with its tasks, and the phase of the job.

The micro-tasks that the driver has dispatched and not heard of again.
"""

import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Literal

from ebbflow.infra.elastic.application import Application, Key, MicroTask
from ebbflow.infra.elastic.master.placement import Members, PlacementTable
from ebbflow.infra.elastic.settings import Event, Settings
from ebbflow.infra.elastic.wire.actor import Actor, Now, Send
from ebbflow.infra.elastic.wire.messages import MASTER, Address, Exit, Run
from ebbflow.infra.errors import ElasticError, MicroTaskError
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
        """Make a task of the present version. Raises ``ElasticError``."""
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


Phase = Literal[
    "waiting", "installing", "running", "patching", "draining", "capturing", "gathering", "done", "failed"
]


class JobState(Actor):
    """The state of a job, and the small acts on it that several parts need.

    One phase at a time: ``waiting`` for workers, ``installing`` executors and shards, ``running``, ``patching`` what
    a dead worker held, ``draining`` and ``capturing`` a snapshot, ``gathering`` the result, ``done`` or ``failed``.
    """

    def __init__(
        self,
        application: Application,
        folder: str,
        settings: Settings,
        send: Send,
        now: Now,
        shared: bool = True,
    ) -> None:
        super().__init__(MASTER, send, now)
        self.application = application
        self.shared = shared  # whether workers can read and write in ``folder``
        self.folder = folder
        self.settings = settings
        self.phase: Phase = "waiting"
        self.error: ElasticError | None = None
        self.events: list[Event] = []
        self.values: dict[Key, Any] = {}  # the result
        self.states: dict[int, Any] = {}  # of executors, at the end
        self.driver = application.driver()
        self.nodes = Members()
        self.ledger = Ledger(application.executors)
        self.held = PlacementTable(application.executors, application.shards)
        self.awaited: set[Address] = set()  # whose answer the present phase waits for

    @property
    def executors(self) -> int:
        """How many executors there are, for the driver."""
        return self.application.executors

    @property
    def running_folder(self) -> str:
        """Where servers keep the running checkpoint."""
        return os.path.join(self.folder, "running")

    def dispatch(self, executor: int, args: Any) -> None:
        """Dispatch a micro-task, for the driver."""
        self.ledger.dispatch(executor, args)

    def holds(self) -> dict[str, tuple[int, int]]:
        """Return the number of executors and shards of each node."""
        return self.held.counts(list(self.nodes))

    def now(self) -> float:
        """Return the job's time, seconds."""
        return self._now()

    def enter(self, phase: Phase) -> None:
        """Continue to a phase; tasks may go out only in some."""
        self.phase = phase
        self.ledger.open = phase in {"running", "patching"}

    def send_tasks(self) -> None:
        """Send the tasks that may go out to who holds their executors."""
        batches: dict[Address, list[MicroTask]] = {}
        for task in self.ledger.take():
            batches.setdefault(self.nodes[self.held.owner[task.executor]].worker, []).append(task)
        for worker, tasks in batches.items():
            self.send(worker, Run(tasks))

    def broadcast(self, addresses: Iterable[Address], message: Any) -> None:
        """Send one message to several."""
        for address in addresses:
            self.send(address, message)

    def log(self, kind: str, **details: Any) -> None:
        """Write an event down."""
        self.events.append(Event(self.now(), kind, details))

    def fail(self, error: ElasticError) -> None:
        """End the job with an error."""
        self.error = error
        self.enter("failed")
        self.broadcast(self.nodes.actors(), Exit())

    def drive(self, call: Callable[..., None], *args: Any) -> None:
        """Call the driver; an error of its own ends the job."""
        try:
            call(self, *args)
        except Exception:
            self.fail(MicroTaskError(f"the driver raised\n{traceback.format_exc()}"))
