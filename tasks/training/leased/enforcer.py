"""Ends by force what an app runs on a GPU that it must release, a moment before the deadline."""

import logging
import threading
from types import TracebackType
from typing import Self

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError, InfraError
from ebbflow.tasks.apps.agent import AppAgent
from ebbflow.tasks.training.leased.nodes import FencedPool

SPARE = 0.5  # s before a deadline
_POLL = 0.2  # s between polls

log = logging.getLogger(__name__)


class LeaseEnforcer:
    """Watches one app's pools, in a thread of its own: ending a node may take its time, and the agent has to speak.

    A training is asked to leave in time by itself (``LeasedNodes``, the launcher); this is for one that does not: its
    node is ended, which costs what was not saved. It also notes when processes of ended nodes are gone.
    """

    def __init__(self, agent: AppAgent, clock: Clock) -> None:
        self._agent, self._lease_table, self._clock = agent, agent.lease_table, clock
        self._pools: list[FencedPool] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"warden-{agent.spec.id}", daemon=True)
        self.ended: list[tuple[float, str]] = []  # when (Unix s), and which node

    def watch(self, pool: FencedPool) -> None:
        """Watch a pool until it is closed, and have its uid in the app's reports."""
        with self._lock:
            self._pools.append(pool)
        self._open()

    def look(self) -> None:
        """Look once."""
        now = self._clock.now()
        late = {n: by for n, by in self._lease_table.due().items() if now >= by - SPARE}
        overdue = self._lease_table.users(late) if late else {}
        for pool in self._open():
            for user, node in overdue.items():
                if pool.node_of(user) == node:
                    self._end(pool, node)
            try:
                pool.settle()
            except InfraError as error:
                log.warning("%s: cannot determine whether nodes have ended: %s", self._lease_table.app, error)

    def _open(self) -> list[FencedPool]:
        with self._lock:
            self._pools = [pool for pool in self._pools if not pool.closed]
            found = list(self._pools)
        self._agent.update_metrics(pools=tuple(sorted(pool.uid for pool in found)))
        return found

    def _end(self, pool: FencedPool, node: str) -> None:
        log.warning("%s: its processes on %s are killed, the lease has ended", self._lease_table.app, node)
        try:
            pool.end(node)
        except ClusterError as error:  # tried again at the next look; the loop evicts it, too
            log.warning("%s: %s", self._lease_table.app, error)
            return
        self.ended.append((self._clock.now(), node))

    def _run(self) -> None:
        while not self._clock.wait(self._stop, _POLL):
            try:
                self.look()
            except Exception:
                log.exception("the lease enforcer of %s failed in a poll", self._lease_table.app)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(30.0)
