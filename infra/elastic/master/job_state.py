"""What all parts of the master share: members, holdings, the driver with its tasks, and the phase of the job."""

import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Literal

from ebbflow.infra.elastic.application import Application, Key, MicroTask
from ebbflow.infra.elastic.master.ledger import Ledger
from ebbflow.infra.elastic.master.placement import Holdings, Members
from ebbflow.infra.elastic.settings import Event, Settings
from ebbflow.infra.elastic.wire.actor import Actor, Now, Send
from ebbflow.infra.elastic.wire.messages import MASTER, Address, Exit, Run
from ebbflow.infra.errors import ElasticError, MicroTaskError

Phase = Literal[
    "waiting", "installing", "running", "patching", "draining", "capturing", "gathering", "done", "failed"
]


class Board(Actor):
    """The state of a job, and the small acts on it that several parts need.

    One phase at a time: ``waiting`` for workers, ``installing`` executors and shards, ``running``, ``patching`` what
    a dead worker held, ``draining`` and ``capturing`` a snapshot, ``gathering`` the result, ``done`` or ``failed``.
    """

    def __init__(
        self, application: Application, folder: str, settings: Settings, send: Send, now: Now
    ) -> None:
        super().__init__(MASTER, send, now)
        self.application = application
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
        self.held = Holdings(application.executors, application.shards)
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
        """Go on to a phase; tasks may go out only in some."""
        self.phase = phase
        self.ledger.open = phase in {"running", "patching"}

    def send_tasks(self) -> None:
        """Send the tasks that may go out to who holds their executors."""
        batches: dict[Address, list[MicroTask]] = {}
        for task in self.ledger.take():
            batches.setdefault(self.nodes[self.held.owner[task.executor]].worker, []).append(task)
        for worker, tasks in batches.items():
            self.send(worker, Run(tasks))

    def tell(self, addresses: Iterable[Address], message: Any) -> None:
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
        self.tell(self.nodes.actors(), Exit())

    def drive(self, call: Callable[..., None], *args: Any) -> None:
        """Call the driver; an error of its own ends the job."""
        try:
            call(self, *args)
        except Exception:
            self.fail(MicroTaskError(f"the driver raised\n{traceback.format_exc()}"))
