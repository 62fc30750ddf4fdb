"""A node provider without machines, and a supervisor in a thread: what a fleet decides, without costly processes."""

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


class QuickProvider:
    """Nodes that are there at once. ``broken`` starts fail; ``gate`` holds starts up; ``up`` may be changed."""

    def __init__(self):
        self.up, self.started, self.notified, self.still = set(), [], [], set()
        self.broken = ""
        self.gate = threading.Event()
        self.gate.set()

    def start(self, state, pool, node):
        self.started.append(node.id)
        self.gate.wait(120)
        if self.broken:
            raise ClusterError(self.broken)
        self.up.add(node.id)
        return StartedNode("127.0.0.1", None)

    def alive(self, state, node):
        return node.id in self.up

    def deadline(self, state, node):
        return None

    def notify(self, state, node, deadline):
        self.notified.append((node.id, deadline))

    def pause(self, state, node, still):
        (self.still.add if still else self.still.discard)(node.id)

    def paused(self, node):
        return node.id in self.still

    def end(self, state, node):
        self.up.discard(node.id)

    def close(self, state):
        self.up.clear()


class QuickFleet:
    """A fleet of quick providers; ``fleet`` is the handle, ``again`` another one as of another process."""

    def __init__(self, folder, pools, gpus=(), name="lab", before=None):
        self.clock = SystemClock()
        self.provider = QuickProvider()
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
        providers = {"gpu": self.provider, "spark": self.provider}
        return LocalFleet(self.file, self.uid, clock or self.clock, own=providers, supervisor=self.keep)

    def keep(self):
        self.file.change(self.uid, lambda state: replace(state, supervisor=labels.own()))
        providers = {"gpu": self.provider, "spark": self.provider}
        clock = MachineClock(self.file.read().offset)
        self.supervisor = NodeSupervisor(self.file, self.uid, clock, providers, look=0.01)
        self.thread = threading.Thread(target=self.supervisor.run, daemon=True)
        self.thread.start()

    def until(self, reached, seconds=150.0):
        return self.fleet.wait(reached, seconds)

    def close(self):
        self.provider.gate.set()
        with suppress(ClusterError):
            self.fleet.down()
        self.thread.join(150)
        assert not self.thread.is_alive()


def there(state):
    """Return the ids of the nodes that have arrived, as people count."""
    return [node.id for node in state.nodes if node.visible]
