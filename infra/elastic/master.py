"""The master: runs the driver, numbers completions, and decides who holds what (Litz, section 3.1).

One phase at a time: ``waiting`` for workers, ``installing`` executors and shards, ``running``, ``patching`` what a
dead worker held, ``draining`` and ``capturing`` a snapshot, ``gathering`` the result, ``done`` or ``failed``.
"""

import os
import traceback
from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import Any, Literal

from ebbflow.infra.elastic.actor import Actor, Now, Send
from ebbflow.infra.elastic.application import Application, Key, MicroTask
from ebbflow.infra.elastic.holdings import Holdings, Kind, Members, Node, node_of
from ebbflow.infra.elastic.ledger import Ledger
from ebbflow.infra.elastic.messages import (
    MASTER,
    Address,
    Arrived,
    AwaitFarewells,
    Capture,
    Captured,
    Depart,
    Drain,
    Drained,
    Exit,
    Failed,
    Finished,
    Install,
    Join,
    Lost,
    MoveExecutor,
    MoveShard,
    Ready,
    Relocated,
    Resume,
    Run,
    SaveRunning,
    Scale,
    Welcome,
)
from ebbflow.infra.elastic.running import path_of
from ebbflow.infra.elastic.server import shard_of
from ebbflow.infra.elastic.settings import Event, Settings
from ebbflow.infra.elastic.snapshot import Snapshot, SnapshotFolder, whole
from ebbflow.infra.elastic.transport import Envelope
from ebbflow.infra.errors import ElasticError, MicroTaskError

Phase = Literal[
    "waiting", "installing", "running", "patching", "draining", "capturing", "gathering", "done", "failed"
]

_LONG = 1.0  # seconds of a micro-task that a leaving worker, or a snapshot, should not have to wait for


class Master(Actor):
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
    ) -> None:
        super().__init__(MASTER, send, now)
        self.application = application
        self.settings = settings
        self.phase: Phase = "waiting"
        self.error: ElasticError | None = None
        self.events: list[Event] = []
        self.values: dict[Key, Any] = {}  # the result
        self.states: dict[int, Any] = {}  # of executors, at the end
        self.driver = application.driver()
        self.nodes = Members()
        self.ledger = Ledger(application.executors)
        self._held = Holdings(application.executors, application.shards)
        self._wanted = workers
        self._forget = forget
        self._folder = folder
        self._snapshots = SnapshotFolder(folder, settings.keep)
        self._snapshot: Snapshot | None = self._snapshots.latest() if resume else None
        self._taking: tuple[int, str] = (0, "")  # number and folder of the snapshot that is being taken
        self._snapshot_due = inf
        self._running_due = inf
        self._moving: set[tuple[Kind, int]] = set()
        self._moved_bytes = 0
        self._unbalanced = False
        self._since = 0.0  # when the present moves, snapshot or recovery began
        self._awaited: set[Address] = set()
        self._captured: dict[Address, Captured] = {}
        self._dead: frozenset[Address] = frozenset()  # servers that are being patched over
        self._losses = 0
        self._warned = False
        self._handlers = {
            Join: self._join,
            Lost: self._lost,
            Scale: self._scale,
            Ready: self._ready,
            Finished: self._finished,
            Arrived: self._arrived,
            Drained: self._drained,
            Captured: self._captures,
            Failed: self._failed,
        }

    @property
    def executors(self) -> int:
        """How many executors there are, for the driver."""
        return self.application.executors

    def dispatch(self, executor: int, args: Any) -> None:
        """Dispatch a micro-task, for the driver."""
        self.ledger.dispatch(executor, args)

    def holds(self) -> dict[str, tuple[int, int]]:
        """Return the number of executors and shards of each node."""
        return self._held.counts(list(self.nodes))

    # --- messages and time

    def receive(self, envelope: Envelope) -> None:
        """Handle a message of this epoch from a node that is not lost; joins and losses are of no epoch."""
        outside = isinstance(envelope.message, Join | Lost | Scale)
        current = envelope.epoch == self.epoch or isinstance(envelope.message, Failed)
        if not outside and not (node_of(envelope.sender) in self.nodes and current):
            return
        if self.phase not in {"done", "failed"}:
            self._handle(envelope)
            self._send_tasks()

    def work(self) -> bool:
        """Do what time asks for."""
        now = self._now()
        if self.phase == "running" and not self._moving:
            if not self.ledger.outstanding:
                self._enter("gathering")
                self._capture(None)
                return True
            if now >= self._snapshot_due and not self.nodes.state("departing"):
                self._begin_snapshot()
                return True
        if self.phase == "running" and now >= self._running_due:
            self._running_due = now + self.settings.running_every
            folder = os.path.join(self._folder, "running")
            self._tell(self.nodes.servers(), SaveRunning(folder, self.settings.running_fraction))
            return True
        return False

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.ledger.open = phase in {"running", "patching"}

    def _send_tasks(self) -> None:
        batches: dict[Address, list[MicroTask]] = {}
        for task in self.ledger.take():
            batches.setdefault(self.nodes[self._held.owner[task.executor]].worker, []).append(task)
        for worker, tasks in batches.items():
            self.send(worker, Run(tasks))

    def _tell(self, addresses: Iterable[Address], message: Any) -> None:
        for address in addresses:
            self.send(address, message)

    def _log(self, kind: str, **details: Any) -> None:
        self.events.append(Event(self._now(), kind, details))

    def _fail(self, error: ElasticError) -> None:
        self.error = error
        self._enter("failed")
        self._tell(self.nodes.actors(), Exit())

    def _failed(self, sender: Address, message: Failed) -> None:
        kind = MicroTaskError if message.application else ElasticError
        self._fail(kind(f"{sender}: {message.text}"))

    # --- the driver

    def _finished(self, _: Address, message: Finished) -> None:
        for completion in message.completions:
            # a worker that was given up may have reported it before
            if self.ledger.complete(completion.task.number):
                if completion.seconds > _LONG and not self._warned:
                    self._warned = True
                    self._log("long task", executor=completion.task.executor, seconds=completion.seconds)
                self._drive(self.driver.complete, completion)
            if self.phase == "failed":
                return

    def _drive(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(self, *args)
        except Exception:
            self._fail(MicroTaskError(f"the driver raised\n{traceback.format_exc()}"))

    # --- membership

    def _join(self, _: Address, message: Join) -> None:
        if message.node not in self.nodes:
            self.nodes[message.node] = Node(message.node)
            self._greet()

    def _greet(self) -> None:
        """Greet those who have joined; again, if their answer was of an older epoch or their places are no more."""
        for node in self.nodes.state("joining"):
            node.greeted.clear()
            settings = {"flush_every": self.settings.flush_every}
            self._tell(node.actors, Welcome(self.application, dict(self._held.places), settings))

    def _ready(self, sender: Address, message: Ready) -> None:
        node = self.nodes[node_of(sender)]
        if message.sizes is None:
            node.greeted.add(sender)
            if node.state == "joining" and len(node.greeted) == 2:
                self._activate(node)
            return
        kind: Kind = "executor" if sender == node.worker else "shard"
        self._held.sizes.update({(kind, item): size for item, size in message.sizes.items()})
        if sender in self._awaited:
            self._awaited.discard(sender)
            if not self._awaited:
                self._installed()

    def _activate(self, node: Node) -> None:
        node.state = "active"
        self._log("joined", node=node.name)
        self._unbalanced = True
        self._start()
        self._rebalance()

    def _start(self) -> None:
        if self.phase == "waiting" and len(self.nodes.state("active")) >= self._wanted:
            self._restore()

    def _scale(self, _: Address, message: Scale) -> None:
        if self.phase == "waiting":
            self._wanted = max(1, self._wanted - len(message.leaving))
        for name in message.leaving:
            node = self.nodes.get(name)
            if node and node.state == "active":
                node.state = "leaving"
                self._unbalanced = True
            elif node and node.state == "joining":
                self._dismiss(node)
                self._expect_farewells()
        self._start()
        self._rebalance()

    def _dismiss(self, node: Node) -> None:
        self._tell(node.actors, Exit())
        del self.nodes[node.name]
        self._log("left", node=node.name)

    # --- moves

    def _rebalance(self) -> None:
        """Start the moves that the present members ask for, unless some are under way already."""
        if self.phase != "running" or self._moving:
            return
        members = [node.name for node in self.nodes.state("active", "leaving")]
        leaving = [node.name for node in self.nodes.state("leaving")]
        if self._unbalanced and len(members) > len(leaving):
            self._unbalanced = False
            self._send_tasks()  # what is on its way to an executor must reach it before the order to move
            self._since, self._moved_bytes = self._now(), 0
            for move in self._held.plan("executor", members, leaving):
                self._held.assign("executor", move)
                self._moving.add(("executor", move.item))
                mode = self.settings.input_transfer
                with_input = mode == "send" or (mode == "auto" and move.source not in leaving)
                order = MoveExecutor(move.item, self.nodes[move.target].worker, with_input)
                self.send(self.nodes[move.source].worker, order)
            for move in self._held.plan("shard", members, leaving):
                self._held.assign("shard", move)
                self._moving.add(("shard", move.item))
                self.send(self.nodes[move.source].server, MoveShard(move.item, self._held.places[move.item]))
        if not self._moving:
            self._moved()

    def _arrived(self, _: Address, message: Arrived) -> None:
        kind: Kind = "executor" if message.kind == "executor" else "shard"
        self._moving.discard((kind, message.item))
        self._held.sizes[kind, message.item] = message.size
        self._moved_bytes += message.size
        if not self._moving:
            seconds = self._now() - self._since
            self._log("rebalanced", seconds=seconds, bytes=self._moved_bytes, holds=self.holds())
            self._moved()

    def _moved(self) -> None:
        """Go on with moves that were asked for meanwhile; let nodes go that hold nothing any more."""
        if self._unbalanced and self.nodes.state("active"):
            self._rebalance()
        if not self._moving:
            for node in self.nodes.state("leaving"):
                if self.holds()[node.name] == (0, 0):
                    node.state = "departing"
                    self._expect_farewells()
                    depart = Depart(node.server, dict(self._held.places))
                    self._tell(sorted(self._all_but(node)), depart)

    def _expect_farewells(self) -> None:
        """Tell departing servers, which nobody may need any more, who has to confirm that.

        Nodes that were dismissed before have confirmed it; those that were lost while joining had nothing to send.
        """
        for node in self.nodes.state("departing"):
            self.send(node.server, AwaitFarewells(self._all_but(node)))

    def _all_but(self, node: Node) -> frozenset[Address]:
        return frozenset(self.nodes.actors()) - {node.server}

    # --- snapshots

    def _begin_snapshot(self) -> None:
        self._taking = self._snapshots.begin()
        self._since = self._now()
        self._enter("draining")
        self._awaited = set(self.nodes.workers())
        self._tell(sorted(self._awaited), Drain())

    def _drained(self, sender: Address, _: Drained) -> None:
        node = self.nodes[node_of(sender)]
        if sender == node.server:
            self._dismiss(node)
        elif self.phase == "draining":
            self._awaited.discard(sender)
            if not self._awaited:
                self._enter("capturing")
                self._capture(self._taking[1])

    def _capture(self, folder: str | None) -> None:
        self._captured = {}
        self._awaited = {*self.nodes.workers(), *self.nodes.servers()}
        for address in sorted(self._awaited):
            self.send(address, Capture(_file(folder, address) if folder else None))

    def _captures(self, sender: Address, message: Captured) -> None:
        self._captured[sender] = message
        self._awaited.discard(sender)
        if self._awaited:
            return
        if self.phase == "capturing":
            self._end_snapshot()
        else:
            self._end()

    def _end_snapshot(self) -> None:
        errors = [captured.error for captured in self._captured.values() if captured.error]
        number, folder = self._taking
        files = [_file(folder, address) for address in self._captured]
        executors = tuple(file for file in files if file.endswith("-worker.bin"))
        snapshot = Snapshot(number, folder, executors, tuple(sorted(set(files) - set(executors))))
        state = {
            "driver": self.driver.state_dict(),
            "ledger": self.ledger.state_dict(),
            "executors": self.executors,
            "shards": self.application.shards,
        }
        try:
            if not errors:
                self._snapshots.commit(snapshot, state)
                self._snapshot = snapshot
                self._log("snapshot", number=number, seconds=self._now() - self._since)
        except ElasticError as error:
            errors.append(str(error))
        if errors:  # the job goes on with the snapshot before
            self._log("snapshot failed", reason=errors[0])
        self._tell([address for address in self._captured if address.endswith("/worker")], Resume())
        self._run_on()

    def _run_on(self) -> None:
        """Let tasks start again."""
        self._enter("running")
        now = self._now()
        self._snapshot_due = now + (self.settings.snapshot_every or inf)
        self._running_due = now if self.settings.recovery == "partial" else inf
        self._rebalance()

    def _end(self) -> None:
        for address, captured in self._captured.items():
            contents = captured.contents or {}
            if address.endswith("/worker"):
                self.states.update(contents)
            else:
                for values in contents.values():
                    self.values.update(values)
        self._enter("done")
        self._log("finished", tasks=self.ledger.clock.version)
        self._tell(self.nodes.actors(), Exit())

    # --- recovery

    def _lost(self, _: Address, message: Lost) -> None:
        node = self.nodes.pop(message.node, None)
        if node is None:
            return
        for address in node.actors:
            self._forget(address)
        self._log("lost", node=node.name, reason=message.reason)
        if node.state == "joining":
            self._expect_farewells()
            return
        self._losses += 1
        calm = self.phase == "running" and not self._moving and not self.nodes.state("leaving", "departing")
        if self._losses > self.settings.max_losses:
            self._fail(ElasticError(f"{self._losses} workers were lost; the last one: {message.reason}"))
        elif not self.nodes.state("active"):
            self._dissolve()
            self._wanted = 1
            self._enter("waiting")
            self._greet()
        elif self.settings.recovery == "partial" and calm:
            self._patch(node)
        elif self.phase != "waiting":
            self._restore()

    def _dissolve(self) -> None:
        """Start a new epoch, in which nothing of the old one counts; whoever was about to leave may go."""
        self.epoch += 1
        self._moving, self._awaited = set(), set()
        for node in self.nodes.state("leaving", "departing"):
            self._dismiss(node)

    def _restore(self) -> None:
        """Put everything back to the last snapshot, or to the beginning, on the nodes that there are."""
        self._dissolve()
        snapshot = self._snapshot = self._snapshots.latest() if self._snapshot else None
        self.driver, self.ledger = self.application.driver(), Ledger(self.executors)
        self._enter("installing")
        self._since = self._now()
        if snapshot:
            saved = snapshot.master()
            shape, own = (saved["executors"], saved["shards"]), (self.executors, self.application.shards)
            if shape != own:
                text = f"the snapshot has {shape[0]} executors and {shape[1]} shards, the application {own}"
                self._fail(ElasticError(text))
                return
            self.driver.load_state_dict(saved["driver"])
            self.ledger.load_state_dict(saved["ledger"])
        names = [node.name for node in self.nodes.state("active")]
        for kind in ("executor", "shard"):
            for move in self._held.plan(kind, names):
                self._held.assign(kind, move)
        self._unbalanced = False
        files = (snapshot.executors, snapshot.shards) if snapshot else ((), ())
        self._install(self._held.owner, files[0], self._held.places, files[1], reset=True)
        self._greet()

    def _patch(self, lost: Node) -> None:
        """Replace only what ``lost`` held (SCAR's partial recovery); everything else stays as it is.

        Shards come back as the running checkpoint has them, executors as the last snapshot has them, and the tasks
        of those are dispatched again.
        """
        self._enter("patching")
        self._since = self._now()
        self._dead = frozenset({lost.server})
        names = [node.name for node in self.nodes.state("active")]
        executors, shards = self._held.items("executor", lost.name), self._held.items("shard", lost.name)
        for move in self._held.plan("executor", names, only=executors):
            self._held.assign("executor", move)
        for move in self._held.plan("shard", names, only=shards):
            self._held.assign("shard", move)
        folder = os.path.join(self._folder, "running")
        running = [path for shard in shards if whole(path := path_of(folder, shard))]
        files = self._snapshot.executors if self._snapshot else ()
        self._install(executors, files, shards, running, reset=False)
        self.ledger.again(set(executors))
        self._unbalanced = True

    def _install(
        self,
        executors: Collection[int],
        executor_files: Iterable[str],
        shards: Collection[int],
        shard_files: Iterable[str],
        *,
        reset: bool,
    ) -> None:
        initial: dict[int, dict[Key, Any]] = {shard: {} for shard in shards}
        for key, value in self.application.parameters().items():
            if (number := shard_of(key, self.application.shards)) in initial:
                initial[number][key] = value
        places = dict(self._held.places)
        for node in self.nodes.state("active"):
            mine = [e for e in self._held.items("executor", node.name) if e in executors]
            parts = [q for q in self._held.items("shard", node.name) if q in shards]
            self._awaited |= set(node.actors)
            # beside a reset, workers learn of new places only when the servers there are ready
            self.send(node.worker, Install(mine, list(executor_files), reset, places if reset else {}))
            values = {shard: initial[shard] for shard in parts}
            self.send(node.server, Install(parts, list(shard_files), reset, places, values))

    def _installed(self) -> None:
        seconds = self._now() - self._since
        if self.phase == "patching":
            self._tell(self.nodes.workers(), Relocated(self._dead, dict(self._held.places)))
            self._log("patched", seconds=seconds, holds=self.holds())
            self._run_on()
            return
        again = self._losses or self._snapshot
        self._log("restored" if again else "started", seconds=seconds, holds=self.holds())
        fresh = self.ledger.clock.version == 0 and not self.ledger.outstanding
        self._run_on()
        if fresh:
            self._drive(self.driver.start)


def _file(folder: str, address: Address) -> str:
    return os.path.join(folder, address.replace("/", "-") + ".bin")
