"""``LenderKeeper``: starts the memory daemons of a fleet's nodes again that have crashed.

One that has ended on purpose (a notice, ``ebbflow memory stop``) is announced no longer; one that has crashed still
is, and has no process. What it lent is void: clients have lost its slabs with their connections, and take the next
daemon's under new generations.
"""

import contextlib
import logging
import threading

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError, InfraError
from ebbflow.infra.local_fleet.provider import lending
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState, LocalNode
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.infra.machine import processes
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.planners.memory.restarts import RestartPolicy, Restarts

log = logging.getLogger(__name__)


class LenderKeeper:
    """The daemons of one fleet. ``tend`` is called by one thread.

    Args:
        file: of the fleet.
        clock: of waits.
        policy: how often, and how soon, one is started again.
    """

    def __init__(self, file: LocalFleetStateFile, clock: Clock, policy: RestartPolicy | None = None) -> None:
        self._file, self._clock = file, clock
        self._fresh = Restarts(policy or RestartPolicy())
        self._seen: dict[str, Restarts] = {}  # by node, of those that have crashed
        self._starting: dict[str, threading.Thread] = {}

    def tend(self, state: LocalFleetState) -> None:
        """Take note of daemons that have crashed, and start, in the background, those whose time has come."""
        lenders = {node.id: node for node in state.nodes if _should_lend(state, node)}
        for id_ in self._seen.keys() - lenders.keys():
            del self._seen[id_]
        if not lenders:
            return
        registry, now = MemoryRegistry(), self._clock.now()
        announced = [id_ for id_ in lenders if registry.find(lending.lender_name(state.name, id_))]
        running = {env[processes.MARK] for _, env in labels.environments(labels.below(state.uid))}
        for id_, node in lenders.items():
            seen = self._seen.get(id_, self._fresh)
            if id_ in self._starting:
                continue
            if seen.due is not None:
                if seen.due <= now:
                    self._start(state, node)
            elif (
                id_ in announced
                and labels.memory_mark(state.uid, id_) not in running
                and not seen.given_up
                # one that ends on purpose is withdrawn before its process ends
                and registry.find(lending.lender_name(state.name, id_))
            ):
                self._crashed(id_, "has crashed")

    def close(self, timeout: float) -> None:
        """Wait, each at most ``timeout`` seconds, for starts under way."""
        for thread in list(self._starting.values()):
            thread.join(timeout)

    def _crashed(self, id_: str, how: str) -> None:
        now = self._clock.now()
        seen = self._seen[id_] = self._seen.get(id_, self._fresh).crashed(now)
        if seen.due is None:
            log.error("the memory daemon of %s %s %d times; it stays down", id_, how, seen.crashes)
        else:
            log.warning("the memory daemon of %s %s; it is started in %.0f s", id_, how, seen.due - now)

    def _start(self, state: LocalFleetState, node: LocalNode) -> None:
        thread = threading.Thread(target=self._run, args=(state, node), name=f"lend-{node.id}", daemon=True)
        self._starting[node.id] = thread
        thread.start()

    def _run(self, state: LocalFleetState, node: LocalNode) -> None:
        self._seen[node.id] = self._seen.get(node.id, self._fresh).started(self._clock.now())
        try:
            lending.launch_daemon(state, node, self._file.folder, self._clock)
            log.info("the memory daemon of %s was started again", node.id)
        except Exception as error:  # a thread that dies silently would leave the node without its daemon
            if not isinstance(error, InfraError):
                log.exception("the memory daemon of %s could not be started", node.id)
            self._crashed(node.id, f"could not be started ({error})")
        finally:
            self._end_orphan(state, node)
            self._starting.pop(node.id, None)

    def _end_orphan(self, state: LocalFleetState, node: LocalNode) -> None:
        """End the daemon of a node that has gone meanwhile."""
        with contextlib.suppress(InfraError):
            current = self._file.read()
            found = current.node(node.id) if current is not None and current.uid == state.uid else None
            if found is None or found.fate:
                with contextlib.suppress(ClusterError):
                    labels.destroy(labels.memory_mark(state.uid, node.id), self._clock)
                MemoryRegistry().remove(lending.lender_name(state.name, node.id))


def _should_lend(state: LocalFleetState, node: LocalNode) -> bool:
    return node.visible and node.deadline is None and lending.lends(state, node)
