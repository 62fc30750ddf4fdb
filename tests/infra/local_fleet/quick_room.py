"""A machine room without machines, and a supervisor in a thread: what a fleet decides, without costly processes."""

import threading
from contextlib import suppress
from dataclasses import replace

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet import begin
from ebbflow.infra.local_fleet.fleet import LocalFleet
from ebbflow.infra.local_fleet.provider.provider import StartedNode
from ebbflow.infra.local_fleet.provider.supervisor import NodeSupervisor
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.clock import MachineClock
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile


class QuickRoom:
    """Nodes that are there at once. ``broken`` starts fail; ``gate`` holds starts up; ``up`` may be changed."""

    def __init__(self):
        self.up, self.started, self.told, self.still = set(), [], [], set()
        self.broken = ""
        self.gate = threading.Event()
        self.gate.set()

    def start(self, book, pool, node):
        self.started.append(node.id)
        self.gate.wait(30)
        if self.broken:
            raise ClusterError(self.broken)
        self.up.add(node.id)
        return StartedNode("127.0.0.1", None)

    def alive(self, book, node):
        return node.id in self.up

    def deadline(self, book, node):
        return None

    def tell(self, book, node, deadline):
        self.told.append((node.id, deadline))

    def pause(self, book, node, still):
        (self.still.add if still else self.still.discard)(node.id)

    def paused(self, node):
        return node.id in self.still

    def end(self, book, node):
        self.up.discard(node.id)

    def close(self, book):
        self.up.clear()


class QuickFleet:
    """A fleet of quick rooms; ``fleet`` is the handle, ``again`` another one as of another process."""

    def __init__(self, folder, pools, gpus=(), name="lab", before=None):
        self.clock = SystemClock()
        self.room = QuickRoom()
        self.file = LocalFleetStateFile(folder / name, self.clock)
        self.gpus, self.name = gpus, name
        self.uid = begin.claim(self.file, name, pools, gpus, True, self.clock)
        if before is not None:
            self.file.change(self.uid, before)
        self.supervisor = None
        self.thread = None
        self.fleet = self.again()
        self.fleet.repair()

    def again(self, clock=None):
        rooms = {"gpu": self.room, "spark": self.room}
        return LocalFleet(self.file, self.uid, clock or self.clock, own=rooms, supervisor=self.keep)

    def keep(self):
        self.file.change(self.uid, lambda book: replace(book, supervisor=labels.own()))
        rooms = {"gpu": self.room, "spark": self.room}
        clock = MachineClock(self.file.read().offset)
        self.supervisor = NodeSupervisor(self.file, self.uid, clock, rooms, look=0.01)
        self.thread = threading.Thread(target=self.supervisor.run, daemon=True)
        self.thread.start()

    def until(self, reached, seconds=20.0):
        return self.fleet.wait(reached, seconds)

    def close(self):
        self.room.gate.set()
        with suppress(ClusterError):
            self.fleet.down()
        self.thread.join(20)
        assert not self.thread.is_alive()


def there(book):
    """Return the ids of the nodes that have arrived, as people count."""
    return [node.id for node in book.nodes if node.visible]
