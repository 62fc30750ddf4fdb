"""Runs the micro-tasks of its executors, by turns while values are on their way (Litz, sections 3.2 to 3.4)."""

import time
import traceback
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from ebbflow.infra.elastic.application import Application, Completion, Executor, Fetch, Key, MicroTask, Value
from ebbflow.infra.elastic.wire import codec
from ebbflow.infra.elastic.wire.actor import Now, RoutingActor, Send
from ebbflow.infra.elastic.wire.cache import Increments, ParameterCache, UpdateLog
from ebbflow.infra.elastic.wire.messages import (
    MASTER,
    ActorFailure,
    Address,
    Capture,
    CaptureResult,
    Depart,
    Drain,
    DrainAck,
    ExecutorContents,
    ExecutorRecord,
    Exit,
    Farewell,
    Finished,
    Install,
    MoveAck,
    MoveExecutor,
    Read,
    Ready,
    Relocated,
    Resume,
    Run,
    Update,
    UpdateAck,
    Values,
    Welcome,
)
from ebbflow.infra.elastic.wire.snapshot import attempt, find
from ebbflow.infra.elastic.worker.server import shard_of

FLUSH_EVERY = (
    0.1  # seconds that a result waits for others at most (Litz flushes when all queued tasks are finished)
)


@dataclass(slots=True)
class Context:
    """What the application sees of the runtime, in one micro-task."""

    log: UpdateLog
    version: int

    def get(self, *keys: Key) -> Fetch:
        return Fetch(keys)

    def update(self, key: Key, increment: Value) -> None:
        self.log.add(key, increment, self.version)


@dataclass(slots=True)
class Activity:
    """A micro-task that has started."""

    task: MicroTask
    coroutine: Coroutine[Fetch, list[Value], Any]
    fetch: Fetch | None = None  # what it awaits
    blocked: bool = False
    seconds: float = 0.0


@dataclass(slots=True)
class Slot:
    """One executor's place; without an executor while its contents are on their way."""

    executor: Executor | None = None
    queue: deque[MicroTask] = field(default_factory=deque)
    activity: Activity | None = None
    leaving: MoveExecutor | None = None
    unreported: int = 0  # finished micro-tasks that the master has not been told of


@dataclass(slots=True)
class Flight:
    """Increments that are not acknowledged yet, and the results that wait for that."""

    parts: dict[int, Update]  # by shard
    results: list[Completion]


class Worker(RoutingActor):
    """One process's executors, cache and update log."""

    def __init__(self, address: Address, send: Send, now: Now, flush_every: float = FLUSH_EVERY) -> None:
        super().__init__(address, send, now)
        self._flush_every = flush_every
        self._application: Application
        self._log = UpdateLog(lambda _key, first, second: first + second, isolated=False)
        self.slots: dict[int, Slot] = {}
        self.cache = ParameterCache()
        self._reading: dict[Key, int] = {}  # keys asked for, with the largest version asked
        self._results: list[Completion] = []
        self._oldest = inf  # when the first of them came
        self._flight: Flight | None = None
        self._flushes = 0
        self._draining: Literal["no", "draining", "paused"] = "no"
        self._handlers = {
            Welcome: self._welcome,
            Run: self._run,
            Values: self._values,
            UpdateAck: self._applied,
            MoveExecutor: self._move,
            ExecutorContents: self._contents,
            Depart: self._depart,
            Drain: self._drain,
            Capture: self._capture,
            Resume: self._resume,
            Install: self._install,
            Relocated: self._relocated,
            Exit: self._exit,
        }

    def _welcome(self, _: Address, message: Welcome) -> None:
        self._application = message.application
        self._log = UpdateLog(self._application.combine, self._application.isolated)
        self._flush_every = message.settings.get("flush_every", self._flush_every)
        self.directory = dict(message.directory)
        self.send(MASTER, Ready())

    def _exit(self, _: Address, __: Exit) -> None:
        self._forget_all()
        self.done = True

    def _run(self, _: Address, message: Run) -> None:
        for task in message.tasks:
            self.slots.setdefault(task.executor, Slot()).queue.append(task)

    # --- micro-tasks

    def work(self) -> bool:
        """Continue with the runnable micro-task that was dispatched first, then send what is due."""
        best: tuple[float, Slot | None] = (inf, None)
        for slot in self.slots.values():
            if (number := self._runnable(slot)) < best[0]:
                best = (number, slot)
        if best[1] is not None:
            self._advance(best[1])
        return self._settle() or best[1] is not None

    def wait(self) -> float:
        return max(0.0, min(1.0, self._oldest + self._flush_every - self._now()))

    def _runnable(self, slot: Slot) -> float:
        """Return the number of the micro-task that could continue or start here; infinity if none can."""
        if slot.activity:
            return inf if slot.activity.blocked else slot.activity.task.number
        if slot.executor and slot.queue and not slot.leaving and self._draining == "no":
            return slot.queue[0].number
        return inf

    def _advance(self, slot: Slot) -> None:
        activity = slot.activity
        if activity is None:
            assert slot.executor is not None
            task = slot.queue.popleft()
            context = Context(self._log, task.version)
            activity = slot.activity = Activity(task, slot.executor.run(context, task.args))
        try:
            self._step(slot, activity)
        except Exception:
            text = (
                f"micro-task {activity.task.args!r} of executor {activity.task.executor} raised\n"
                + traceback.format_exc()
            )
            self.send(MASTER, ActorFailure(text, application=True))
            slot.activity = None

    def _step(self, slot: Slot, activity: Activity) -> None:
        version = activity.task.version
        while True:
            answer: Any = None
            if activity.fetch:
                if missing := self.cache.missing(activity.fetch.keys, version):
                    self._ask(missing, version)
                    activity.blocked = True
                    return
                answer = [self.cache.value(key) for key in activity.fetch.keys]
            start = time.perf_counter()
            try:
                fetch = activity.coroutine.send(answer)
            except StopIteration as stop:
                activity.seconds += time.perf_counter() - start
                self._finish(slot, activity, stop.value)
                return
            activity.seconds += time.perf_counter() - start
            if not isinstance(fetch, Fetch):
                raise TypeError(f"run() may await nothing but context.get(); it awaited {fetch!r}")
            activity.fetch = fetch

    def _finish(self, slot: Slot, activity: Activity, result: Any) -> None:
        slot.activity = None
        slot.unreported += 1
        self._results.append(Completion(activity.task, result, activity.seconds))
        self._oldest = min(self._oldest, self._now())

    # --- parameters

    def _ask(self, keys: list[Key], version: int) -> None:
        wanted: dict[int, list[Key]] = {}
        for key in keys:
            if self._reading.get(key, -1) < version:  # else the answer that is on its way will do
                self._reading[key] = version
                wanted.setdefault(shard_of(key, self._application.shards), []).append(key)
        for shard, some in wanted.items():
            self.send(self.directory[shard].server, Read(shard, some, version, self.address))

    def _values(self, _: Address, message: Values) -> None:
        self.learn(message.shard, message.place)
        for key, value in message.values.items():
            self.cache.store(key, value, message.version)
            if self._reading.get(key, inf) <= message.version:
                del self._reading[key]
        for slot in self.slots.values():
            activity = slot.activity
            if activity and activity.blocked and activity.fetch:
                activity.blocked = bool(self.cache.missing(activity.fetch.keys, activity.task.version))

    def _flush(self) -> None:
        increments = self._log.take()
        if not self._application.isolated:
            self.cache.fold(increments, self._application.combine)
        shards: dict[int, Increments] = {}
        for (key, version), increment in increments.items():
            shards.setdefault(shard_of(key, self._application.shards), {})[key, version] = increment
        self._flushes += 1
        parts = {shard: Update(shard, self._flushes, some, self.address) for shard, some in shards.items()}
        self._flight = Flight(parts, self._results)
        self._results, self._oldest = [], inf
        for shard, update in parts.items():
            self.send(self.directory[shard].server, update)
        self._land()

    def _applied(self, _: Address, message: UpdateAck) -> None:
        self.learn(message.shard, message.place)
        if self._flight and message.number == self._flushes:
            self._flight.parts.pop(message.shard, None)
            self._land()

    def _land(self) -> None:
        """Report results once all increments that they may have made are applied."""
        if self._flight and not self._flight.parts:
            results, self._flight = self._flight.results, None
            for completion in results:
                self.slots[completion.task.executor].unreported -= 1
            if results:
                self.send(MASTER, Finished(results))

    def _settle(self) -> bool:
        """Flush, hand over and report what is due; return whether anything was."""
        acted = False
        idle = all(not slot.activity and self._runnable(slot) == inf for slot in self.slots.values())
        if self._flight is None and (self._results or (idle and self._log)):
            handing_over = any(s.leaving and s.unreported and not s.activity for s in self.slots.values())
            if idle or handing_over or self._now() >= self._oldest + self._flush_every:
                self._flush()
                acted = True
        for number, slot in list(self.slots.items()):
            if slot.leaving and slot.executor and not slot.activity and not slot.unreported:
                self._hand_over(number, slot)
                acted = True
        if (
            self._draining == "draining"
            and idle
            and not self._results
            and not self._log
            and self._flight is None
        ):
            self._draining = "paused"
            self.send(MASTER, DrainAck())
            acted = True
        return acted

    # --- moves

    def _move(self, _: Address, message: MoveExecutor) -> None:
        self.slots.setdefault(message.executor, Slot()).leaving = message

    def _hand_over(self, number: int, slot: Slot) -> None:
        assert slot.leaving is not None
        assert slot.executor is not None
        data = slot.executor.input_state() if slot.leaving.with_input else None
        record = ExecutorRecord(slot.executor.state_dict(), list(slot.queue), data)
        self.send(slot.leaving.target, ExecutorContents(number, record))
        del self.slots[number]

    def _contents(self, _: Address, message: ExecutorContents) -> None:
        record = message.record
        slot = self.slots.setdefault(message.executor, Slot())
        slot.executor = self._make(message.executor, record)
        slot.queue = deque([*record.queue, *slot.queue])
        size = codec.size(codec.encode((record.state, record.input)))
        self.send(MASTER, MoveAck("executor", message.executor, size))

    def _make(self, number: int, record: ExecutorRecord) -> Executor:
        executor = self._application.executor(number)
        if record.input is None:
            executor.load_input()
        else:
            executor.set_input(record.input)
        if record.state is not None:
            executor.load_state_dict(record.state)
        return executor

    def _depart(self, _: Address, message: Depart) -> None:
        self.learn_all(message.directory)
        self.send(message.server, Farewell())

    # --- snapshots and recovery

    def _drain(self, _: Address, __: Drain) -> None:
        self._draining = "draining"

    def _resume(self, _: Address, __: Resume) -> None:
        self._draining = "no"

    def _capture(self, _: Address, message: Capture) -> None:
        if message.path is None and not message.records:
            states = {n: slot.executor.state_dict() for n, slot in self.slots.items() if slot.executor}
            self.send(MASTER, CaptureResult(sorted(states), states))
            return
        records = {
            number: ExecutorRecord(slot.executor.state_dict(), list(slot.queue))
            for number, slot in self.slots.items()
            if slot.executor
        }
        if message.path is None:
            self.send(MASTER, CaptureResult(sorted(records), records))
            return
        self.send(MASTER, CaptureResult(sorted(records), None, attempt(message.path, records)))

    def _install(self, _: Address, message: Install) -> None:
        inputs = {n: slot.executor.input_state() for n, slot in self.slots.items() if slot.executor}
        if message.reset:
            self._forget_all()
            self.directory = {}
        found = find(message.files, message.items) if message.contents is None else message.contents
        for number in message.items:
            record = found.get(number) or ExecutorRecord(None, [])
            record.input = inputs.get(number)
            slot = self.slots.setdefault(number, Slot())
            slot.executor = self._make(number, record)
            if message.reset:
                slot.queue = deque(record.queue)
        self.learn_all(message.directory)
        sizes = {
            number: codec.size(codec.encode(slot.executor.state_dict()))
            for number in message.items
            if (slot := self.slots[number]).executor
        }
        self.send(MASTER, Ready(sizes))

    def _forget_all(self) -> None:
        for slot in self.slots.values():
            if slot.activity:
                slot.activity.coroutine.close()
        self.slots = {}
        self.cache.clear()
        self._log = UpdateLog(self._application.combine, self._application.isolated)
        self._reading = {}
        self._results, self._oldest, self._flight = [], inf, None
        self._draining = "no"

    def _relocated(self, _: Address, message: Relocated) -> None:
        """Send again all that is not answered: what went through the dead servers may be lost.

        A server that had it all the same answers a read twice, and knows an update by its number.
        """
        self.learn_all(message.directory)
        if self._flight:
            for shard, update in self._flight.parts.items():
                self.send(self.directory[shard].server, update)
        reading, self._reading = self._reading, {}
        for key, version in reading.items():
            self._ask([key], version)
