"""The master: runs the driver, numbers completions, and decides who holds what (Litz, section 3.1).

One phase at a time: ``waiting`` for workers, ``installing`` executors and shards, ``running``, ``patching`` what a
dead worker held, ``draining`` and ``capturing`` a snapshot, ``gathering`` the result, ``done`` or ``failed``.
"""

import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from ebbflow.infra.elastic.actor import Actor, Now, Send
from ebbflow.infra.elastic.application import Application, Key, MicroTask
from ebbflow.infra.elastic.messages import (
    MASTER,
    Address,
    Arrived,
    AwaitFarewells,
    Capture,
    Captured,
    Depart,
    Directory,
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
    Place,
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
from ebbflow.infra.elastic.snapshot import Snapshot, SnapshotFolder
from ebbflow.infra.elastic.transport import Envelope
from ebbflow.infra.errors import ElasticError, MicroTaskError
from ebbflow.planners.elastic.causality import VersionClock
from ebbflow.planners.elastic.rebalance import Load, plan_moves

Phase = Literal[
    "waiting", "installing", "running", "patching", "draining", "capturing", "gathering", "done", "failed"
]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a job is run."""

    snapshot_every: float | None = 30.0  # seconds; None: never, a loss then starts from the beginning
    recovery: Literal["global", "partial"] = "global"
    running_every: float = 1.0  # seconds between refreshes of the running checkpoint, for partial recovery
    running_fraction: float = 0.125  # of the parameters' bytes in each refresh
    flush_every: float = 0.1  # seconds that a result waits at most for its worker to run out of tasks
    input_transfer: Literal["auto", "send", "reload"] = (
        "auto"  # auto: a leaving worker does not send its input
    )
    max_losses: int = 20  # of workers, before the job gives up
    keep: int = 2  # snapshots


@dataclass(slots=True)
class Node:
    """One worker process with its two actors."""

    name: str
    state: Literal["joining", "active", "leaving", "departing"] = "joining"
    greeted: set[Address] = field(default_factory=set)

    @property
    def worker(self) -> Address:
        return f"{self.name}/worker"

    @property
    def server(self) -> Address:
        return f"{self.name}/server"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the job."""

    time: float  # seconds, of the job's clock
    kind: str  # joined, rebalanced, left, lost, snapshot, restored, patched, started, finished
    details: dict[str, Any]


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
        forget: Callable[[Address], None] = lambda address: None,
        resume: bool = False,
    ) -> None:
        super().__init__(MASTER, send, now)
        self.application = application
        self.settings = settings
        self.phase: Phase = "waiting"
        self.error: ElasticError | None = None
        self.events: list[Event] = []
        self.values: dict[Key, Any] = {}  # the result
        self.states: dict[int, Any] = {}
        self.driver = application.driver()
        self.clock = VersionClock()
        self.nodes: dict[str, Node] = {}
        self._wanted = workers
        self._forget = forget
        self._folder = folder
        self._snapshots = SnapshotFolder(folder, settings.keep)
        self._snapshot: Snapshot | None = self._snapshots.latest() if resume else None
        self._taking: Snapshot | None = None
        self._snapshot_due = inf
        self._running_due = inf
        self._next_task = 0
        self._outstanding: dict[int, MicroTask] = {}
        self._held: list[MicroTask] = []  # dispatched while nothing may start
        self._batches: dict[Address, list[MicroTask]] = {}
        self._owner: dict[int, str] = dict.fromkeys(range(application.executors), "")
        self._places: Directory = {}
        self._sizes: dict[tuple[str, int], int] = {}
        self._moving: dict[tuple[str, int], None] = {}
        self._moved_bytes = 0
        self._move_started = 0.0
        self._unbalanced = False
        self._awaited: set[Address] = set()
        self._captured: dict[Address, Captured] = {}
        self._losses = 0
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

    # --- what the driver may ask

    @property
    def executors(self) -> int:
        return self.application.executors

    def dispatch(self, executor: int, args: Any) -> None:
        if executor not in self._owner:
            raise ElasticError(f"executors are 0 to {self.executors - 1}; got {executor}")
        task = MicroTask(self._next_task, executor, args, self.clock.version)
        self._next_task += 1
        self._outstanding[task.number] = task
        if self.phase in {"running", "patching"}:
            self._batches.setdefault(self.nodes[self._owner[executor]].worker, []).append(task)
        else:
            self._held.append(task)

    def _send_batches(self) -> None:
        batches, self._batches = self._batches, {}
        for worker, tasks in batches.items():
            self.send(worker, Run(tasks))

    # --- messages

    def receive(self, envelope: Envelope) -> None:
        """Handle a message of this epoch from a node that is not lost; joins and losses are of no epoch."""
        outside = isinstance(envelope.message, Join | Lost | Scale)
        known = envelope.sender.split("/")[0] in self.nodes
        current = envelope.epoch == self.epoch or isinstance(envelope.message, Failed)
        if not outside and not (known and current):
            return
        if self.phase not in {"done", "failed"}:
            self._handle(envelope)
            self._send_batches()

    def work(self) -> bool:
        """Do what time asks for."""
        now = self._now()
        if self.phase == "running" and not self._moving:
            if not self._outstanding:
                self._gather()
                return True
            if now >= self._snapshot_due and not self._in_state("departing"):
                self._begin_snapshot()
                return True
        if self.phase == "running" and now >= self._running_due:
            self._running_due = now + self.settings.running_every
            folder = os.path.join(self._folder, "running")
            self._tell(self._servers(), SaveRunning(folder, self.settings.running_fraction))
            return True
        return False

    def _log(self, kind: str, **details: Any) -> None:
        self.events.append(Event(self._now(), kind, details))

    def _in_state(self, *states: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.state in states]

    def _workers(self) -> list[Address]:
        return [node.worker for node in self._in_state("active", "leaving")]

    def _servers(self) -> list[Address]:
        return [node.server for node in self._in_state("active", "leaving")]

    def _tell(self, addresses: Iterable[Address], message: Any) -> None:
        for address in addresses:
            self.send(address, message)

    def _fail(self, error: ElasticError) -> None:
        self.error, self.phase = error, "failed"
        self._tell([a for node in self.nodes.values() for a in (node.worker, node.server)], Exit())

    def _failed(self, sender: Address, message: Failed) -> None:
        kind = MicroTaskError if message.application else ElasticError
        self._fail(kind(f"{sender}: {message.text}"))

    # --- completions

    def _finished(self, _: Address, message: Finished) -> None:
        for completion in message.completions:
            if self._outstanding.pop(completion.task.number, None) is None:
                continue  # reported by a worker that was given up in between
            self.clock.complete()
            if not self._drive(lambda c=completion: self.driver.complete(self, c)):  # type: ignore[misc]
                return

    def _drive(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception:
            self._fail(MicroTaskError(f"the driver raised\n{traceback.format_exc()}"))
            return False
        return True

    # --- membership

    def _join(self, _: Address, message: Join) -> None:
        if message.node not in self.nodes:
            self.nodes[message.node] = Node(message.node)
            self._greet(self.nodes[message.node])

    def _greet(self, node: Node) -> None:
        settings = {"flush_every": self.settings.flush_every}
        node.greeted.clear()
        self._tell([node.worker, node.server], Welcome(self.application, dict(self._places), settings))

    def _ready(self, sender: Address, message: Ready) -> None:
        node = self.nodes[sender.split("/")[0]]
        if message.sizes is None:
            node.greeted.add(sender)
            if node.state == "joining" and len(node.greeted) == 2:
                node.state = "active"
                self._log("joined", node=node.name)
                self._unbalanced = True
                self._start_or_rebalance()
            return
        kind = "executor" if sender == node.worker else "shard"
        self._sizes.update({(kind, item): size for item, size in message.sizes.items()})
        if sender in self._awaited:
            self._awaited.discard(sender)
            if not self._awaited:
                self._installed()

    def _scale(self, _: Address, message: Scale) -> None:
        for name in message.leaving:
            node = self.nodes.get(name)
            if node and node.state == "active":
                node.state = "leaving"
                self._unbalanced = True
            elif node and node.state == "joining":
                self._dismiss(node)
                self._expect_less()
        self._rebalance()

    def _dismiss(self, node: Node) -> None:
        self._tell([node.worker, node.server], Exit())
        del self.nodes[node.name]
        self._log("left", node=node.name)

    # --- who holds what

    def _start_or_rebalance(self) -> None:
        if self.phase == "waiting":
            if len(self._in_state("active")) >= self._wanted:
                self._restore()
        else:
            self._rebalance()

    def _loads(self, kind: str) -> list[Load]:
        owners = (
            self._owner
            if kind == "executor"
            else {q: p.server.split("/")[0] for q, p in self._places.items()}
        )
        return [Load(item, owner, self._sizes.get((kind, item), 0)) for item, owner in sorted(owners.items())]

    def _rebalance(self) -> None:
        """Start the moves that the present members ask for, unless some are under way already."""
        if self.phase != "running" or self._moving:
            return
        members = [node.name for node in self._in_state("active", "leaving")]
        leaving = [node.name for node in self._in_state("leaving")]
        if self._unbalanced and len(members) > len(leaving):
            self._unbalanced = False
            self._move_started, self._moved_bytes = self._now(), 0
            for move in plan_moves(self._loads("executor"), members, leaving):
                self._owner[move.item] = move.target
                self._moving["executor", move.item] = None
                mode = self.settings.input_transfer
                with_input = mode == "send" or (mode == "auto" and move.source not in leaving)
                target = self.nodes[move.target].worker
                self.send(self.nodes[move.source].worker, MoveExecutor(move.item, target, with_input))
            for move in plan_moves(self._loads("shard"), members, leaving):
                source = self._places[move.item]
                place = Place(self.nodes[move.target].server, source.moves + 1)
                self._places[move.item] = place
                self._moving["shard", move.item] = None
                self.send(source.server, MoveShard(move.item, place))
        if not self._moving:
            self._moved()

    def _arrived(self, _: Address, message: Arrived) -> None:
        self._moving.pop((message.kind, message.item), None)
        self._sizes[message.kind, message.item] = message.size
        self._moved_bytes += message.size
        if not self._moving:
            seconds = self._now() - self._move_started
            self._log("rebalanced", seconds=seconds, bytes=self._moved_bytes, holds=self.holds())
            self._moved()

    def _moved(self) -> None:
        if self._unbalanced and len(self._in_state("active")):
            self._rebalance()
        if self._moving:
            return
        holding = {*self._owner.values(), *(p.server.split("/")[0] for p in self._places.values())}
        for node in self._in_state("leaving"):
            if node.name not in holding:
                self._depart(node)

    def _depart(self, node: Node) -> None:
        """Let a server that owns nothing go once nobody will send it anything any more."""
        node.state = "departing"
        others = self._all_but(node)
        self.send(node.server, AwaitFarewells(others))
        self._tell(sorted(others), Depart(node.server, dict(self._places)))

    def _expect_less(self) -> None:
        """Tell departing servers that a node is gone which never had anything to send them."""
        for node in self._in_state("departing"):
            self.send(node.server, AwaitFarewells(self._all_but(node)))

    def _all_but(self, node: Node) -> frozenset[Address]:
        return frozenset({a for n in self.nodes.values() for a in (n.worker, n.server)} - {node.server})

    def holds(self) -> dict[str, tuple[int, int]]:
        """Return the number of executors and shards of each node."""
        executors = list(self._owner.values())
        servers = [place.server.split("/")[0] for place in self._places.values()]
        return {name: (executors.count(name), servers.count(name)) for name in sorted(self.nodes)}

    # --- snapshots

    def _begin_snapshot(self) -> None:
        number, folder = self._snapshots.begin()
        self._taking = Snapshot(number, folder, (), ())
        self.phase = "draining"
        self._move_started = self._now()
        self._awaited = set(self._workers())
        self._tell(sorted(self._awaited), Drain())

    def _drained(self, sender: Address, _: Drained) -> None:
        node = self.nodes[sender.split("/")[0]]
        if sender == node.server:
            self._dismiss(node)
        elif self.phase == "draining":
            self._awaited.discard(sender)
            if not self._awaited:
                assert self._taking is not None
                self.phase = "capturing"
                self._capture(self._taking.folder)

    def _capture(self, folder: str | None) -> None:
        self._captured = {}
        self._awaited = {*self._workers(), *self._servers()}
        for address in sorted(self._awaited):
            name = address.replace("/", "-") + ".bin"
            self.send(address, Capture(os.path.join(folder, name) if folder else None))

    def _captures(self, sender: Address, message: Captured) -> None:
        self._captured[sender] = message
        self._awaited.discard(sender)
        if self._awaited:
            return
        if self.phase == "capturing":
            self._end_snapshot()
        else:
            for address, captured in self._captured.items():
                if address.endswith("/server"):
                    self.values.update(
                        {k: v for part in (captured.contents or {}).values() for k, v in part.items()}
                    )
                else:
                    self.states.update(captured.contents or {})
            self.phase = "done"
            self._log("finished", tasks=self.clock.version)
            self._tell([a for node in self.nodes.values() for a in (node.worker, node.server)], Exit())

    def _end_snapshot(self) -> None:
        errors = [captured.error for captured in self._captured.values() if captured.error]
        try:
            if not errors:
                self._commit_snapshot()
        except ElasticError as error:
            errors.append(str(error))
        if errors:  # the job goes on with the snapshot before
            self._log("snapshot failed", reason=errors[0])
        self._tell([a for a in self._captured if a.endswith("/worker")], Resume())
        self._run_on()

    def _commit_snapshot(self) -> None:
        assert self._taking is not None
        files = {
            address: os.path.join(self._taking.folder, address.replace("/", "-") + ".bin")
            for address in self._captured
        }
        snapshot = Snapshot(
            self._taking.number,
            self._taking.folder,
            tuple(f for a, f in files.items() if a.endswith("/worker")),
            tuple(f for a, f in files.items() if a.endswith("/server")),
        )
        self._snapshots.commit(
            snapshot,
            {
                "driver": self.driver.state_dict(),
                "version": self.clock.version,
                "next_task": self._next_task,
                "outstanding": list(self._outstanding.values()),
                "held": self._held,
                "executors": self.executors,
                "shards": self.application.shards,
            },
        )
        self._snapshot = snapshot
        self._log("snapshot", number=snapshot.number, seconds=self._now() - self._move_started)

    def _run_on(self) -> None:
        """Let tasks start again."""
        self.phase = "running"
        now = self._now()
        self._snapshot_due = now + (self.settings.snapshot_every or inf)
        self._running_due = now if self.settings.recovery == "partial" else inf
        held, self._held = self._held, []
        for task in held:
            self._batches.setdefault(self.nodes[self._owner[task.executor]].worker, []).append(task)
        self._rebalance()

    def _gather(self) -> None:
        self.phase = "gathering"
        self._capture(None)

    # --- recovery

    def _lost(self, _: Address, message: Lost) -> None:
        node = self.nodes.pop(message.node, None)
        if node is None:
            return
        self._forget(node.worker)
        self._forget(node.server)
        self._log("lost", node=node.name, reason=message.reason)
        if node.state == "joining":
            self._expect_less()
            return
        self._losses += 1
        if self._losses > self.settings.max_losses:
            self._fail(ElasticError(f"{self._losses} workers were lost, the last one {message.reason}"))
        elif not self._in_state("active"):
            self._dissolve()
            self.phase = "waiting"
            self._wanted = 1
        elif (
            self.settings.recovery == "partial"
            and self.phase == "running"
            and not self._moving
            and not self._in_state("leaving", "departing")
        ):
            self._patch(node)
        elif self.phase != "waiting":
            self._restore()

    def _dissolve(self) -> None:
        """Start a new epoch, in which nothing of the old one counts."""
        self.epoch += 1
        self._moving, self._awaited, self._batches = {}, set(), {}
        self._taking = None
        for node in self._in_state("leaving", "departing"):
            self._dismiss(node)
        for node in self._in_state("joining"):
            self._greet(node)

    def _restore(self) -> None:
        """Put everything back to the last snapshot, or to the beginning, on the nodes that there are."""
        self._dissolve()
        snapshot = self._snapshot = self._snapshots.latest() if self._snapshot else None
        saved: dict[str, Any] = snapshot.master() if snapshot else {}
        if saved and (saved["executors"], saved["shards"]) != (self.executors, self.application.shards):
            self._fail(
                ElasticError(
                    f"the snapshot has {saved['executors']} executors and {saved['shards']} shards, "
                    f"the application {self.executors} and {self.application.shards}"
                )
            )
            return
        self.driver = self.application.driver()
        self.clock = VersionClock(saved.get("version", 0))
        self._next_task = saved.get("next_task", 0)
        self._outstanding = {task.number: task for task in saved.get("outstanding", [])}
        self._held = list(saved.get("held", []))
        if saved:
            self.driver.load_state_dict(saved["driver"])
        names = [node.name for node in self._in_state("active")]
        if not self._places:
            self._places = {q: Place("", 0) for q in range(self.application.shards)}
        for move in plan_moves(self._loads("executor"), names):
            self._owner[move.item] = move.target
        for move in plan_moves(self._loads("shard"), names):
            self._places[move.item] = Place(self.nodes[move.target].server, 0)
        self.phase = "installing"
        self._unbalanced = False
        self._move_started = self._now()
        executors, shards = (snapshot.executors, snapshot.shards) if snapshot else ((), ())
        self._install(range(self.executors), list(executors), self._places, list(shards), reset=True)

    def _install(
        self,
        executors: Iterable[int],
        executor_files: list[str],
        shards: Iterable[int],
        shard_files: list[str],
        *,
        reset: bool,
    ) -> None:
        executors, shards = list(executors), set(shards)
        initial: dict[int, dict[Key, Any]] = {q: {} for q in shards}
        for key, value in self.application.parameters().items():
            if (number := shard_of(key, self.application.shards)) in shards:
                initial[number][key] = value
        for node in self._in_state("active"):
            mine = [e for e in executors if self._owner[e] == node.name]
            parts = sorted(q for q in shards if self._places[q].server == node.server)
            places = dict(self._places)
            values = {q: initial[q] for q in parts}
            self._awaited |= {node.worker, node.server}
            worker_places = (
                places if reset else {}
            )  # otherwise workers learn of them when the servers are ready
            self.send(node.worker, Install(mine, executor_files, reset, worker_places))
            self.send(node.server, Install(parts, shard_files, reset, places, values))

    def _installed(self) -> None:
        seconds = self._now() - self._move_started
        if self.phase == "patching":
            self._tell(self._workers(), Relocated(self._dead, dict(self._places)))
            self._log("patched", seconds=seconds, holds=self.holds())
            self._run_on()
            return
        first = self.clock.version == 0 and not self._outstanding
        again = self._losses or self._snapshot
        self._log("restored" if again else "started", seconds=seconds, holds=self.holds())
        self._run_on()
        if first:
            self._drive(lambda: self.driver.start(self))

    def _patch(self, node: Node) -> None:
        """Replace only what ``node`` held (SCAR's partial recovery); everything else stays as it is.

        Shards come back as the running checkpoint has them, executors as the last snapshot has them, and tasks of
        those are dispatched again.
        """
        self.phase = "patching"
        self._move_started = self._now()
        self._dead = frozenset({node.server})
        names = [n.name for n in self._in_state("active")]
        lost = [e for e, owner in self._owner.items() if owner == node.name]
        parts = [q for q, place in self._places.items() if place.server == node.server]
        for move in plan_moves([load for load in self._loads("executor") if load.item in lost], names):
            self._owner[move.item] = move.target
        for move in plan_moves([load for load in self._loads("shard") if load.item in parts], names):
            self._places[move.item] = Place(self.nodes[move.target].server, self._places[move.item].moves + 1)
        folder = os.path.join(self._folder, "running")
        running = [path for q in parts if os.path.exists(path := path_of(folder, q))]
        files = list(self._snapshot.executors) if self._snapshot else []
        self._install(lost, files, parts, running, reset=False)
        for number, task in list(self._outstanding.items()):
            if task.executor in lost:
                again = MicroTask(number, task.executor, task.args, self.clock.version)
                self._outstanding[number] = again
                self._batches.setdefault(self.nodes[self._owner[task.executor]].worker, []).append(again)
        self._unbalanced = True
