"""The master: runs the driver, numbers completions, and decides who holds what (Litz, section 3.1).

It hears messages and the passing of time, and hands on to its parts: membership, moves, snapshots and recovery.
"""

from collections.abc import Callable
from math import inf

from ebbflow.infra.elastic.application import Application
from ebbflow.infra.elastic.master.job_state import JobState
from ebbflow.infra.elastic.master.moves import Membership, Rebalancer
from ebbflow.infra.elastic.master.placement import Kind, Node, node_of
from ebbflow.infra.elastic.master.recovery import Recovery
from ebbflow.infra.elastic.master.snapshots import SnapshotCoordinator
from ebbflow.infra.elastic.registry import register
from ebbflow.infra.elastic.settings import Settings
from ebbflow.infra.elastic.wire.actor import Now, Send
from ebbflow.infra.elastic.wire.messages import (
    ActorFailure,
    Address,
    CaptureResult,
    DrainAck,
    Finished,
    Join,
    MoveAck,
    NodeLoss,
    Ready,
    SaveRunning,
    Scale,
)
from ebbflow.infra.elastic.wire.transport import Envelope
from ebbflow.infra.errors import ElasticError, MicroTaskError

_LONG = 1.0  # seconds of a micro-task that a leaving worker, or a snapshot, should not have to wait for


class Master(JobState):
    """Decides everything; told of time, messages, and nodes that join or are lost."""

    def __init__(
        self,
        application: Application,
        workers: int,
        folder: str,
        settings: Settings,
        send: Send,
        now: Now,
        forget: Callable[[Address], None],
        resume: bool = False,
        restart: bool = False,
        shared: bool = True,
    ) -> None:
        register(type(application))
        super().__init__(application, folder, settings, send, now, shared)
        self._wanted = workers
        self._forget = forget
        self._running_due = inf
        self._warned = False
        self._membership = Membership(self)
        self.moves = Rebalancer(self, self._membership)
        self._captures = SnapshotCoordinator(self, self._run_on, resume=resume, restart=restart)
        self._recovery = Recovery(self, self._membership, self.moves, self._captures, self._run_on)
        self._handlers = {
            Join: self._join,
            NodeLoss: self._lost,
            Scale: self._scale,
            Ready: self._ready,
            Finished: self._finished,
            MoveAck: self.moves.arrived,
            DrainAck: self._drained,
            CaptureResult: self._captures.captured,
            ActorFailure: self._failed,
        }

    # --- messages and time

    def receive(self, envelope: Envelope) -> None:
        """Handle a message of this revision from a node that is not lost; joins and losses are of no revision."""
        outside = isinstance(envelope.message, Join | NodeLoss | Scale)
        current = envelope.revision == self.revision or isinstance(envelope.message, ActorFailure)
        if not outside and not (node_of(envelope.sender) in self.nodes and current):
            return
        if self.phase not in {"done", "failed"}:
            self._handle(envelope)
            self.send_tasks()

    def work(self) -> bool:
        """Do what time asks for."""
        now = self.now()
        if self.phase == "running" and not self.moves.under_way:
            if not self.ledger.outstanding:
                self._captures.gather()
                return True
            if now >= self._captures.due and not self.nodes.state("departing"):
                self._captures.begin()
                return True
        if self.phase == "running" and now >= self._running_due:
            self._running_due = now + self.settings.running_every
            self.broadcast(
                self.nodes.servers(), SaveRunning(self.running_folder, self.settings.running_fraction)
            )
            return True
        return False

    def save_soon(self) -> None:
        """Take the next snapshot as soon as there can be one."""
        self._captures.due = min(self._captures.due, self.now())

    def _run_on(self) -> None:
        """Let tasks start again."""
        self.enter("running")
        now = self.now()
        self._captures.due = now + (self.settings.snapshot_every or inf)
        self._running_due = now if self.settings.recovery == "partial" else inf
        self.moves.start()

    def _failed(self, sender: Address, message: ActorFailure) -> None:
        kind = MicroTaskError if message.application else ElasticError
        self.fail(kind(f"{sender}: {message.text}"))

    def _finished(self, _: Address, message: Finished) -> None:
        for completion in message.completions:
            # a worker that was given up may have reported it before
            if self.ledger.complete(completion.task.number):
                if completion.seconds > _LONG and not self._warned:
                    self._warned = True
                    self.log("long task", executor=completion.task.executor, seconds=completion.seconds)
                self.drive(self.driver.complete, completion)
            if self.phase == "failed":
                return

    # --- who is here

    def _join(self, _: Address, message: Join) -> None:
        if message.node not in self.nodes:
            self.nodes[message.node] = Node(message.node)
            self._membership.welcome_joined()

    def _ready(self, sender: Address, message: Ready) -> None:
        node = self.nodes[node_of(sender)]
        if message.sizes is None:
            if self._membership.answered(node, sender):
                self.moves.wanted = True
                self._start()
                self.moves.start()
            return
        kind: Kind = "executor" if sender == node.worker else "shard"
        self.held.sizes.update({(kind, item): size for item, size in message.sizes.items()})
        self._recovery.installed(sender)

    def _start(self) -> None:
        if self.phase == "waiting" and len(self.nodes.state("active")) >= self._wanted:
            self._recovery.restore()

    def _scale(self, _: Address, message: Scale) -> None:
        if self.phase == "waiting":
            self._wanted = max(1, self._wanted - len(message.leaving))
        for name in message.leaving:
            node = self.nodes.get(name)
            if node and node.state == "active":
                node.state = "leaving"
                self.moves.wanted = True
            elif node and node.state == "joining":
                self._membership.dismiss(node)
                self._membership.expect_farewells()
        self._start()
        self.moves.start()

    def _drained(self, sender: Address, _: DrainAck) -> None:
        node = self.nodes[node_of(sender)]
        if sender == node.server:
            self._membership.dismiss(node)  # a departing one to which all have said farewell
        else:
            self._captures.drained(sender)

    def _lost(self, _: Address, message: NodeLoss) -> None:
        node = self.nodes.pop(message.node, None)
        if node is None:
            return
        for address in node.actors:
            self._forget(address)
        self.log("lost", node=node.name, reason=message.reason)
        if node.state == "joining":
            self._membership.expect_farewells()
            return
        self._recovery.losses += 1
        settled = not self.moves.under_way and not self.nodes.state("leaving", "departing")
        if self._recovery.losses > self.settings.max_losses:
            lost = f"{self._recovery.losses} workers were lost; the last one: {message.reason}"
            self.fail(ElasticError(lost))
        elif not self.nodes.state("active"):
            self._recovery.dissolve()
            self._wanted = 1
            self.enter("waiting")
            self._membership.welcome_joined()
        elif self.settings.recovery == "partial" and self.phase == "running" and settled:
            self._recovery.patch(node)
        elif self.phase != "waiting":
            self._recovery.restore()
