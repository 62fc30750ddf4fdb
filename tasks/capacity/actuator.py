"""What a loop has others do: the fleet's provider, and the killing of processes. Slow things, so not in its thread.

Everything here may be asked for twice. A target is recorded by ``FleetControl`` before anything is asked for, and
evictions find processes by marks; whatever a crash cuts off is asked for again by the next decision, since the
ledger still has the lease that is to end and the fleet still differs from its plan.

Ending by force what an app still runs on a node.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import AwsError, InfraError
from ebbflow.infra.protocols import ApplyResult, FleetControl, ReplacingFleetControl
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Target
from ebbflow.tasks.drawing.wording import plural


class Evictor(Protocol):
    """Kills what an app still runs on a node. Safe for several threads; a second call for the same is harmless."""

    def evict(self, app: str, node: str) -> bool:
        """Return once no process of ``app`` uses ``node``: true; false: it cannot be reached, wait for the lease.

        Raises an ``InfraError`` when it was tried and failed; the caller tries again later.
        """
        ...


class NodeOccupants(Protocol):
    """Which app runs on which node."""

    @property
    def app(self) -> str: ...

    @property
    def node(self) -> str: ...


class Occupancy(Protocol):
    """Nodes of this machine, whose processes carry their app's mark; ``LocalFleet`` is one."""

    def evict(self, app: str, node: str) -> bool: ...

    def occupants(self) -> Sequence[NodeOccupants]: ...


class LocalEvictor:
    """Processes of this machine, in whichever process they were started."""

    def __init__(self, fleet: Occupancy) -> None:
        self._fleet = fleet

    def evict(self, app: str, node: str) -> bool:
        """See ``Evictor``. Raises ``ClusterError``."""
        return self._fleet.evict(app, node)

    def present(self) -> Sequence[tuple[str, str]]:
        """Return (app, node) pairs of which processes live. Raises ``ClusterError``."""
        return sorted({(one.app, one.node) for one in self._fleet.occupants()})


class Remote(Protocol):
    """Stops a training's processes on a node of AWS; ``RemoteRunner`` is one."""

    def stop_torch(self, node: str, name: str) -> "RemoteOutcome": ...


class RemoteOutcome(Protocol):
    """What became of it (``infra.aws.remote.Outcome``)."""

    @property
    def status(self) -> str: ...


class RemoteEvictor:
    """Processes of AWS nodes, through Systems Manager: the node's service for the app is stopped.

    ``names`` returns the names of the services that may run for an app on any node; of none nothing is certain.
    """

    def __init__(self, runner: Remote, names: Callable[[str], Sequence[str]]) -> None:
        self._runner, self._names = runner, names

    def evict(self, app: str, node: str) -> bool:
        """See ``Evictor``. Raises ``AwsError``."""
        services = self._names(app)
        for name in services:
            outcome = self._runner.stop_torch(node, name)  # no token: a second eviction must be sent, too
            if outcome.status == "gone":
                return True  # with the machine went all that ran there
            if outcome.status == "absent":
                return False
            if outcome.status != "done":
                raise AwsError(f"{name} on {node} could not be stopped: {outcome}")
        return bool(services)


log = logging.getLogger(__name__)

_ROOM = 4096  # things that are asked for and not begun; more are asked for again by a later decision
_KEPT = 4096  # things done and not fetched
_UNSURE = "not done: the leader lease was not renewed in time, another loop may be the leader"
_EVICTING = 4  # evictions at a time: one of a node that does not answer must not delay the others


@dataclass(frozen=True, slots=True)
class EvictionResult:
    """What became of one eviction."""

    app: str
    node: str
    done: bool  # false: cannot be reached, or failed
    why: str = ""


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """What became of one thing that was asked of the fleet."""

    what: str  # for people
    applied: ApplyResult | None = None
    target: Target | None = None
    error: str = ""


Done = EvictionResult | ScaleResult
_Job = tuple[str, Callable[[], Done]]


class ActionExecutor:
    """Carries out what a cycle decided; ``done`` tells what became of it. For one caller.

    With ``start`` in threads; without, at once. A thing that is under way or waits is not taken a second time.
    ``may`` is asked just before each thing: a loop that was suspended must not do what it had decided before,
    when another may lead.
    """

    def __init__(
        self,
        fleet: FleetControl | None,
        evictor: Evictor | None,
        clock: Clock,
        wake: threading.Event | None = None,
        may: Callable[[], bool] = lambda: True,
    ) -> None:
        self._fleet, self._evictor, self._clock = fleet, evictor, clock
        self._may = may
        self._replaces = isinstance(fleet, ReplacingFleetControl)
        self._wake = wake
        self._queues: dict[str, queue.Queue[_Job | None]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._done: deque[Done] = deque(maxlen=_KEPT)

    def start(self) -> None:
        """Work in threads from now on: one for the fleet, whose calls keep their order, some for evictions."""
        for kind, threads in (("fleet", 1), ("evict", _EVICTING)):
            self._queues[kind] = queue.Queue(_ROOM)
            for number in range(threads):
                thread = threading.Thread(
                    target=self._run, args=(self._queues[kind],), name=f"loop-{kind}-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    # --- what can be asked for ----------------------------------------------------------------------------------

    def scale(self, targets: Sequence[Target]) -> None:
        """Apply targets, in order."""
        for target in targets:
            self._ask("fleet", f"target {target.pool}", lambda target=target: self._apply(target))  # type: ignore[misc]

    def terminate(self, nodes: Sequence[str]) -> None:
        """End nodes that are drained."""
        if nodes:
            self._ask("fleet", f"end {','.join(nodes)}", lambda: self._terminate(tuple(nodes)))

    @property
    def replaces(self) -> bool:
        """Tell whether the fleet wants to be asked for nodes in place of those that leave."""
        return self._replaces

    def replace(self, notices: Sequence[Notice]) -> None:
        """Ask for nodes in place of those that leave."""
        if notices:
            key = f"replace {','.join(notice.node_id for notice in notices)}"
            self._ask("fleet", key, lambda: self._replace(tuple(notices)))

    def repair(self) -> None:
        """Let the fleet ask again for what is planned and was not asked for."""
        if self._fleet is not None:
            self._ask("fleet", "repair", self._repair)

    def evict(self, app: str, node: str, why: str) -> None:
        """Kill what ``app`` still runs on ``node``."""
        self._ask("evict", f"evict {app} {node}", lambda: self._evict(app, node, why))

    def done(self) -> list[Done]:
        """Return, once, what has been done since the last call."""
        with self._lock:
            found = list(self._done)
            self._done.clear()
        return found

    @property
    def waiting(self) -> int:
        """Return how many things are asked for and not done."""
        with self._lock:
            return len(self._asked)

    def close(self, timeout: float) -> None:
        """Let what is under way come to its end, for ``timeout`` seconds at most; drop what has not begun."""
        for kind, waiting in self._queues.items():
            while not waiting.empty():
                try:
                    waiting.get_nowait()
                except queue.Empty:
                    break
            for thread in self._threads:
                if thread.name.startswith(f"loop-{kind}"):
                    waiting.put(None)
        end = self._clock.now() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - self._clock.now()))

    # --- how ----------------------------------------------------------------------------------------------------

    def _ask(self, kind: str, key: str, work: Callable[[], Done]) -> None:
        with self._lock:
            if key in self._asked:
                return
            self._asked.add(key)
        if not self._queues:
            self._finish(key, work)
            return
        try:
            self._queues[kind].put_nowait((key, work))
        except queue.Full:
            with self._lock:
                self._asked.discard(key)

    def _run(self, waiting: "queue.Queue[_Job | None]") -> None:
        while (job := waiting.get()) is not None:
            self._finish(*job)
            if self._wake is not None:
                self._wake.set()

    def _finish(self, key: str, work: Callable[[], Done]) -> None:
        try:
            found: Done = work() if self._may() else ScaleResult(key, error=_UNSURE)
        except Exception as error:
            # a defect in an adapter ends neither the thread nor the loop; the error is on record with the outcome
            log.exception("%s failed", key)
            found = ScaleResult(key, error=repr(error))
        with self._lock:
            self._asked.discard(key)
            self._done.append(found)

    def _apply(self, target: Target) -> Done:
        what = f"{target.pool}: {plural(target.nodes, 'node')}, {target.reason}"
        if self._fleet is None:
            return ScaleResult(what, target=target, error="there is no fleet to scale")
        try:
            return ScaleResult(what, self._fleet.apply(target), target)
        except EbbflowError as error:
            return ScaleResult(what, target=target, error=str(error))

    def _terminate(self, nodes: tuple[str, ...]) -> Done:
        assert self._fleet is not None
        what = f"end {', '.join(nodes)}, drained"
        try:
            return ScaleResult(what, self._fleet.terminate(nodes))
        except EbbflowError as error:
            return ScaleResult(what, error=str(error))

    def _replace(self, notices: tuple[Notice, ...]) -> Done:
        assert isinstance(self._fleet, ReplacingFleetControl)
        what = f"replacement nodes for {', '.join(notice.node_id for notice in notices)}"
        try:
            return ScaleResult(what, self._fleet.replace_leaving(notices))
        except EbbflowError as error:
            return ScaleResult(what, error=str(error))

    def _repair(self) -> Done:
        assert self._fleet is not None
        try:
            return ScaleResult("repair", self._fleet.repair())
        except EbbflowError as error:
            return ScaleResult("repair", error=str(error))

    def _evict(self, app: str, node: str, why: str) -> Done:
        if self._evictor is None:
            return EvictionResult(app, node, False, "this loop cannot terminate processes there")
        try:
            ended = self._evictor.evict(app, node)
        except InfraError as error:
            return EvictionResult(app, node, False, str(error))
        return EvictionResult(app, node, ended, why if ended else "the node is unreachable")
