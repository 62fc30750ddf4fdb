"""Trainings without processes, in real time: a pool that keeps account of which GPU was used when, and a launcher."""

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.protocols import (
    Continue,
    Decide,
    GenerationEnd,
    Halt,
    TrainingEvent,
    TrainingJob,
    TrainingStatus,
)
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.channel.wire import Entry
from ebbflow.infra.training.launcher.journal import Journal
from ebbflow.infra.training.launcher.pool import Admit, admit_none
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.model.trainings import RunSettings

Interval = tuple[str, int, float, float]  # node, slot, from, to


@dataclass
class Machines:
    """The machines of a cluster, for all pools: which GPU was used when."""

    linger: float = 0.0  # s that processes of an ended node stay
    used: list[Interval] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)  # machines that are gone
    lock: threading.RLock = field(default_factory=threading.RLock)
    pools: "list[ToyPool]" = field(default_factory=list)

    def pool(self) -> "ToyPool":
        pool = ToyPool(self, f"pool-{len(self.pools)}")
        self.pools.append(pool)
        return pool

    def kill(self, node: str) -> None:
        """Take a machine away at once."""
        with self.lock:
            self.dead.add(node)
            for pool in self.pools:
                pool.look()

    @property
    def busy(self) -> set[tuple[str, int]]:
        """Return the GPUs in use now."""
        with self.lock:
            for pool in self.pools:
                pool.look()
            return {
                (n.name, slot)
                for p in self.pools
                for n in p.nodes.values()
                if n.off is None
                for slot in n.slots
            }


@dataclass
class _Node:
    name: str
    slots: tuple[int, ...]
    on: float
    ending: float | None = None  # when it was told to end
    off: float | None = None
    how: str = ""


class ToyPool:
    """A ``NodePool`` of machines that run nothing."""

    host = "127.0.0.1"

    def __init__(self, machines: Machines, uid: str) -> None:
        self.machines, self.uid = machines, uid
        self.nodes: dict[str, _Node] = {}

    def start(self, name: str, slots: int, entry: Entry, admit: Admit = admit_none) -> None:
        with self.machines.lock:
            self.look()
            if name in self.machines.dead:
                raise ClusterError(f"{name} is gone")
            old = self.nodes.get(name)
            assert old is None or old.off is not None or old.ending is not None
            assert len(entry.devices) == slots
            taken = {slot for node, slot in self.machines.busy if node == name}
            assert not taken & set(entry.devices), f"{name}: {entry.devices} while {taken} are in use"
            if old is not None and old.off is None:
                raise ClusterError(f"{name} is there still")
            self.nodes[name] = _Node(name, entry.devices, time.time())

    def look(self) -> None:
        with self.machines.lock:
            now = time.time()
            for node in self.nodes.values():
                if node.off is not None:
                    continue
                if node.name in self.machines.dead:
                    node.how = node.how or "killed"
                    self._off(node, now)
                elif node.ending is not None and now >= node.ending + self.machines.linger:
                    self._off(node, now)

    def _off(self, node: _Node, now: float) -> None:
        node.off = now
        self.machines.used += [(node.name, slot, node.on, now) for slot in node.slots]

    def lost(self, name: str) -> str:
        with self.machines.lock:
            self.look()
            node = self.nodes.get(name)
            return node.how if node is not None else "it was never started"

    def paused(self, name: str) -> bool:
        return False

    def end(self, name: str) -> None:
        with self.machines.lock:
            node = self.nodes.get(name)
            if node is not None and node.ending is None:
                node.ending = time.time()
                node.how = node.how or "ended by the launcher"
            self.look()

    def quiet(self, name: str) -> bool:
        with self.machines.lock:
            self.look()
            node = self.nodes.get(name)
            return node is None or node.off is not None

    def log(self, name: str) -> str:
        return ""

    def gone(self, uid: str) -> bool:
        with self.machines.lock:
            for pool in self.machines.pools:
                pool.look()
            return all(
                n.off is not None for p in self.machines.pools if p.uid == uid for n in p.nodes.values()
            )

    def close(self) -> None:
        for name in list(self.nodes):
            self.end(name)


@dataclass
class Script:
    """How trainings of a test go."""

    steps: int = 10**9
    pause: float = 0.005  # s of a step
    saving: float = 0.0  # s
    stubborn: bool = False  # does not leave when asked
    content: dict[str, Any] = field(default_factory=dict)  # of step reports
    metric: str = ""  # reported after each ten steps
    profile: dict[str, Any] = field(default_factory=dict)  # of its communication, reported after a step
    made: "list[ToyTrainer]" = field(default_factory=list)

    def trainer(self, pool: Any, **options: Any) -> "ToyTrainer":
        trainer = ToyTrainer(self, pool, options["decide"], options["on_report"], options["node_timeout"])
        self.made.append(trainer)
        return trainer


class ToyTrainer:
    """Implements ``Trainer`` in a thread: it starts nodes on a pool, counts steps, saves and leaves as asked."""

    def __init__(
        self, script: Script, pool: Any, decide: Decide, hear: Callable[[Report], None], patience: float
    ) -> None:
        self._script, self._pool, self._decide, self._hear = script, pool, decide, hear
        self._patience = patience
        self._lock = threading.RLock()
        self._events: list[TrainingEvent] = []
        self._status = TrainingStatus("starting", 0, {}, -1)
        self._target: dict[str, int] | None = None
        self._by: float | None = None
        self._stop: float | None = None
        self._cut = (0, "")
        self._closed = False
        self._over = threading.Event()
        self._step = self._saved = 0
        self._up: dict[str, int] = {}  # nodes that run, with their slots
        self._thread: threading.Thread | None = None
        # a real node waits for a launcher there, and does not end before the training does
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._silent = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.resizes: list[tuple[dict[str, int], float | None]] = []
        self.stops: list[float | None] = []

    # --- what is asked of it --------------------------------------------------------------------------------

    def launch(self, job: TrainingJob, placement: Mapping[str, int]) -> None:
        self._job, self._settings = job, job.settings or RunSettings()
        self._journal = Journal(StorageLocation(job.folder))
        self._journal.write_run(job, placement, "running", 0, self._pool.uid)
        self._note("launched")
        self._thread = threading.Thread(target=self._run, args=(dict(placement),), daemon=True)
        self._thread.start()

    def resume(self, folder: str, placement: Mapping[str, int], settings: RunSettings) -> None:
        job, _, state, _, uid = Journal(StorageLocation(folder)).read_run()
        assert state != "finished"
        assert self._pool.gone(uid)
        saved = Path(folder) / "step"
        self._step = self._saved = json.loads(saved.read_text()) if saved.exists() else 0
        self.launch(replace(job, settings=settings, folder=folder), placement)

    def resize(self, placement: Mapping[str, int], deadline: float | None = None) -> None:
        with self._lock:
            self._target, self._by = dict(placement), deadline
            self.resizes.append((dict(placement), deadline))

    def end_generation(self, number: int, reason: str) -> None:
        self._cut = (number, reason)

    def stop(self, deadline: float | None = None) -> None:
        self.stops.append(deadline)
        self._stop = time.time() + self._settings.termination_grace if deadline is None else deadline

    def status(self) -> TrainingStatus:
        with self._lock:
            return self._status

    def events(self, after: int = 0) -> Sequence[TrainingEvent]:
        with self._lock:
            return [event for event in self._events if event.number > after]

    def wait(self, timeout: float) -> TrainingStatus:
        self._over.wait(min(timeout, 0.02))
        return self.status()

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._thread.join(150)
        self._pool.close()
        self._listener.close()

    # --- its thread -----------------------------------------------------------------------------------------

    def _run(self, placement: dict[str, int]) -> None:
        halt = Halt("failed", "the toy broke")
        try:
            halt = self._generations(placement)
        finally:
            for name in list(self._up):
                self._end(name)
            self._journal.write_run(self._job, placement, halt.state, self._status.generation, self._pool.uid)
            self._stand(state=halt.state, reason=halt.reason)
            self._over.set()

    def _generations(self, placement: dict[str, int]) -> Halt:
        while True:
            end = self._generation(placement)
            answer = self._follow(end)
            if isinstance(answer, Halt) and answer.state == "waiting":
                answer = self._wait_for_nodes(answer)
            if isinstance(answer, Halt):
                return answer
            self._settings = answer.settings or self._settings
            placement = dict(answer.placement)
            if answer.then is not None and self._target is None:
                self._target = dict(answer.then)

    def _generation(self, placement: dict[str, int]) -> GenerationEnd:
        number = self._status.generation + 1
        self._stand(state="starting", generation=number, placement=placement)
        started, first = time.time(), self._saved
        self._step = self._saved
        lost: dict[str, str] = {}
        for name, slots in placement.items():
            if self._up.get(name, slots) != slots:
                self._end(name)
            if name not in self._up:
                try:
                    entry = Entry(self._silent, "00" * 32, self._job.id, name, f"{name}-{number}", "", "")
                    self._pool.start(name, slots, entry)
                    self._up[name] = slots
                except ClusterError as error:
                    lost[name] = str(error)
        for name in self._up.keys() - placement.keys():
            self._end(name)
        if not lost:
            self._note("generation", placement=placement)
            self._stand(state="running")
            self._say("started", world=sum(placement.values()), nodes=len(placement), restored=first or None)
            self._note("started", restored=first or None, world=sum(placement.values()))
            kind, reason = self._steps(number, placement, lost)
        else:
            kind, reason = "unformed", "; ".join(f"{name}: {why}" for name, why in lost.items())
        left = {name: slots for name, slots in placement.items() if name not in lost}
        ended = time.time()
        end = GenerationEnd(
            number, kind, reason, placement, left, (), tuple(lost), started, ended, first, self._step,
            self._saved, sum(placement.values()) * (ended - started),
        )  # fmt: skip
        self._stand(end=end, step=self._step)
        return end

    def _steps(self, number: int, placement: dict[str, int], lost: dict[str, str]) -> tuple[Any, str]:
        gpus, script, begun = sum(placement.values()), self._script, self._step
        while True:
            time.sleep(script.pause)
            for name in placement:
                if why := self._pool.lost(name):
                    lost[name] = why
                    self._up.pop(name, None)
                    self._note("node-lost", node=name, how=why)
            if lost:
                return "lost", ", ".join(lost.values())
            self._step += 1
            figures = {"batch": 8, "passes": 1, "gpus": gpus, "nodes": len(placement), "loss": 0.5}
            self._say("step", **{**figures, "throughput": 100.0, "goodput": 80.0, **script.content})
            if script.profile and self._step == begun + 1:
                self._say("communication", state="profiled", profile=script.profile)
            if script.metric and self._step % 10 == 0:
                self._say("metrics", metrics={script.metric: self._step / 100}, epoch=self._step // 10 - 1)
            if self._step >= script.steps:
                self._save()
                self._say("finished", saved=True)
                return "finished", "the script finished"
            if 0 < self._settings.preflight_steps <= self._step - begun:
                self._say("preflight")
                return "preflight", "the trial steps passed"
            why = self._asked(number, placement)
            if (why and not script.stubborn) or self._closed:
                time.sleep(script.saving)
                self._save()
                self._say("stopped", saved=True)
                return "stopped", why

    def _asked(self, number: int, placement: dict[str, int]) -> str:
        with self._lock:
            if self._stop is not None:
                return "stop"
            if self._cut[0] == number:
                return self._cut[1]
            if self._target == placement:
                self._target = None
            return "resize" if self._target is not None else ""

    def _follow(self, end: GenerationEnd) -> Continue | Halt:
        if self._closed:
            return Halt("stopped", "closed")
        if end.kind == "finished":
            return Halt("finished", end.reason)
        if self._stop is not None:
            return Halt("stopped", end.reason)
        with self._lock:
            if self._target is not None and end.kind in ("stopped", "lost", "unformed"):
                target, self._target = self._target, None
                for name in self._up.keys() - target.keys():
                    self._end(name)
                return Continue(target, "resize")
        return self._decide(end)

    def _wait_for_nodes(self, halt: Halt) -> Continue | Halt:
        self._stand(state="waiting", reason=halt.reason)
        self._note("waiting", reason=halt.reason)
        end = time.time() + self._patience
        while time.time() < end:
            if self._closed or self._stop is not None:
                return Halt("stopped", halt.reason)
            with self._lock:
                if self._target is not None:
                    target, self._target = self._target, None
                    return Continue(target, "resize")
            time.sleep(0.01)
        return Halt("failed", "no nodes came")

    # --- small things ---------------------------------------------------------------------------------------

    def _end(self, name: str) -> None:
        self._up.pop(name, None)
        self._pool.end(name)

    def _save(self) -> None:
        self._saved = self._step
        (Path(self._job.folder) / "step").write_text(json.dumps(self._step))
        self._say("checkpoint", uri=f"{self._job.folder}/step-{self._step}", stalled=0.0, reason="stop")

    def _say(self, kind: Any, **content: Any) -> None:
        self._hear(Report(kind, 0, time.time(), self._step, content))

    def _note(self, kind: str, **content: Any) -> None:
        with self._lock:
            number = len(self._events) + 1
            self._events.append(TrainingEvent(number, time.time(), kind, self._status.generation, content))

    def _stand(self, **changes: Any) -> None:
        with self._lock:
            self._status = replace(self._status, **changes)
