"""A capacity loop as a process of its own: observe, decide, guard, act; what it saw and did goes to a journal.

The decision is the simplest there is, so that a run is about everything else: a file says how many nodes are wanted.
"""

import json
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbflow.infra.aws.capacity import AwsCapacity
from ebbflow.infra.aws.clients import Clients
from ebbflow.infra.aws.fleet.fleet import SpotFleet
from ebbflow.infra.aws.fleet.state import FolderStore
from ebbflow.infra.aws.notices.feed import NoticeFeed
from ebbflow.infra.aws.notices.store import NoticeFile
from ebbflow.infra.aws.settings import Settings
from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import AwsError, EngineUnavailableError, InsufficientCapacityError, StorageError
from ebbflow.infra.storage.files import write_atomic
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.fallback import Fallback
from ebbflow.planners.fleet.limits import Limits
from ebbflow.planners.hazard import hazard
from ebbflow.planners.model.fleet import Fleet, PoolState
from ebbflow.planners.model.gangs import GangRequest
from ebbflow.tasks.fleet.gangs import end_gang, guard_gang, start_gang
from ebbflow.tasks.fleet.request import FleetRules
from ebbflow.tasks.fleet.steps import Observation, act, decide, guard, wish
from tests.aws.clock import ScaledClock

POOL = "etl"
GANG = "run-1"
LOOK = 5.0  # seconds between looks at the fleet, and at the orders
WATCH = 1.0  # seconds between looks at what is known
REPAIR = 60.0  # seconds between repairs
DRAINS = 10.0  # seconds that a node takes to drain
MOST = 23  # nodes; beside the largest pool there is no room for the larger gangs
RULES = FleetRules(Limits(nodes=MOST), fallback=Fallback(after=60.0, hold=150.0))


def spot_fleet(settings: Settings, url: str, folder: Path, clock: Clock | None = None) -> SpotFleet:
    """Return the fleet of a cluster in an emulated AWS; what it must not forget is kept in ``folder``."""
    return SpotFleet(
        settings, Clients(settings.region, url), FolderStore(folder, settings.cluster, clock), clock
    )


@dataclass(frozen=True)
class Orders:
    """What is wanted, in a file that is replaced as a whole."""

    nodes: int = 0
    on_demand: int = 0
    gang: int = 0  # nodes of a gang that is to be held; 0: none
    stop: bool = False

    def write(self, folder: Path) -> None:
        write_atomic(None, "file", str(folder / "orders.json"), json.dumps(vars(self)).encode())

    @classmethod
    def read(cls, folder: Path) -> "Orders":
        return cls(**json.loads((folder / "orders.json").read_text()))


class Journal:
    """One JSON object a line, each on disk when ``write`` returns. A line that was torn by a kill is left out."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "journal.jsonl"

    def write(self, clock: Clock, kind: str, **content: Any) -> None:
        line = json.dumps({"at": clock.now(), "pid": os.getpid(), "kind": kind, **content})
        with self._path.open("a") as file:
            file.write(f"\n{line}")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        found = []
        for line in self._path.read_text().splitlines() if self._path.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found


class Controller:
    """The loop of one cluster."""

    def __init__(self, settings: Settings, url: str, folder: Path, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        self._journal = Journal(folder)
        self._fleet = spot_fleet(settings, url, folder, clock)
        clients = Clients(settings.region, url)
        notices = NoticeFile(folder / "notices.json", clock)
        self._feed = NoticeFeed(clients, settings.notice_queue_url, notices, clock=clock)
        self._source = AwsCapacity(self._fleet, self._feed, hazard=hazard, refresh=LOOK, clock=clock)
        self._stop = threading.Event()
        self._drained: dict[str, float] = {}  # when the draining of a node began
        self._repaired = -REPAIR
        self._last: tuple[Any, ...] = ()

    def run(self) -> None:
        """Go on until the orders say to stop."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        self._attempt("start", self._feed.start)
        self._source.start()
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        while not self._stop.is_set():
            orders = Orders.read(self._folder)
            if orders.stop:
                break
            revision = self._attempt("step", lambda orders=orders: self._step(orders))
            if isinstance(revision, int):
                self._attempt("wait", lambda revision=revision: self._source.wait(revision, LOOK))
            else:
                self._clock.wait(self._stop, LOOK)
        self._stop.set()
        watcher.join()
        self._source.close()
        self._feed.close()
        self._fleet.close()
        self._journal.write(self._clock, "stopped")

    def _attempt(self, what: str, action: Any) -> Any:
        """Do something that AWS may refuse; what is refused is tried again with the next step."""
        try:
            return action()
        except (AwsError, StorageError, EngineUnavailableError) as error:
            self._journal.write(self._clock, "error", what=what, error=f"{type(error).__name__}: {error}")
            return None

    def _step(self, orders: Orders) -> int:
        self._feed.start()
        if self._clock.now() - self._repaired >= REPAIR:
            repaired = self._fleet.repair()
            self._repaired = self._clock.now()
            self._act("repair", [str(ask) for ask in repaired.asked])
        capacity = self._source.capacity()
        fleet = self._source.fleet()
        (pool,) = (pool for pool in fleet.pools if pool.name == POOL)
        self._size(fleet, pool, orders)
        self._end(pool)
        self._gang(fleet, orders)
        return capacity.revision

    def _size(self, fleet: Fleet, pool: PoolState, orders: Orders) -> None:
        seen = Observation(fleet)
        wanted = wish(seen, POOL, orders.nodes, "ordered", on_demand=orders.on_demand)
        target = decide(seen, wanted, RULES)
        same = (pool.planned, pool.on_demand) == (
            target.nodes,
            max(target.on_demand, min(pool.base, target.nodes)),
        )
        if same and set(target.drain) <= set(pool.draining):
            return
        verdict = guard(seen, target, RULES)
        applied = act(self._fleet, verdict)
        done = [*map(str, applied.asked), *(f"refused: {refusal.why}" for refusal in applied.refused)]
        self._act("apply", done, nodes=target.nodes, drain=target.drain, reason=target.reason)

    def _end(self, pool: PoolState) -> None:
        now = self._clock.now()
        self._drained = {node: self._drained.get(node, now) for node in pool.draining}
        done = [node for node, since in self._drained.items() if now - since >= DRAINS]
        if done:
            self._act("end", done)
            self._fleet.terminate(done)

    def _gang(self, fleet: Fleet, orders: Orders) -> None:
        held = any(pool.name == f"{POOL}/{GANG}" for pool in fleet.pools)
        if orders.gang and not held:
            gangs = self._fleet.gangs
            try:
                verdict = guard_gang(Observation(fleet), gangs, GangRequest(GANG, POOL, orders.gang), RULES)
                started = start_gang(gangs, verdict)
            except (InsufficientCapacityError, OptionError) as error:
                self._act("no gang", [str(error)])
                return
            self._act("gang", list(started.nodes))
            self._act("no gang", [refusal.why for refusal in started.applied.refused])
        elif held and not orders.gang:
            self._act("gang ended", [str(ask) for ask in end_gang(self._fleet.gangs, GANG).asked])

    def _watch(self) -> None:
        """Write every revision to the journal, and now and then that the queue has answered."""
        told = 0.0
        while not self._stop.is_set():
            fleet = self._attempt("look", self._source.fleet)
            if fleet is not None:
                self._see(fleet)
            heard = self._feed.status().last or 0.0
            if heard - told >= LOOK:
                told = heard
                self._journal.write(self._clock, "heard", last=heard)
            self._clock.wait(self._stop, WATCH)

    def _see(self, fleet: Fleet) -> None:
        seen: Mapping[str, Any] = {
            "nodes": [n.id for pool in fleet.pools for n in pool.nodes],
            "notices": {n.node_id: n.kind for n in fleet.notices},
            "pools": {p.name: [p.planned, p.requested, p.on_demand, list(p.draining)] for p in fleet.pools},
        }
        if (fleet.revision, seen) != self._last:
            self._last = (fleet.revision, seen)
            self._journal.write(self._clock, "seen", revision=fleet.revision, **seen)

    def _act(self, what: str, content: list[str], **more: Any) -> None:
        if content:
            self._journal.write(self._clock, "did", what=what, content=content, **more)


def main(
    environment: Mapping[str, str], settings: Settings, url: str, folder: Path, clock: ScaledClock
) -> None:
    """Run a controller in this process, which was made for it."""
    os.environ.update(environment)
    hurry(clock.speed)
    Controller(settings, url, folder, clock).run()


def hurry(speed: float) -> None:
    """Let botocore's waits between attempts pass at the clock's speed: they are the only ones without a ``Clock``."""
    from botocore.retries.standard import RetryPolicy

    delay = RetryPolicy.compute_retry_delay
    RetryPolicy.compute_retry_delay = lambda self, context: delay(self, context) / speed
