"""``MasterCapacity``: the workers of a standalone Spark cluster as the nodes that there are."""

import threading
from collections.abc import Callable

import httpx

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.spark.cluster.state import find_cluster
from ebbflow.infra.spark.master_api import MasterView, get_master, new_client, states_by_host
from ebbflow.infra.spark.masters import find_master
from ebbflow.infra.spark.watch import Deadlines, HostRecord, host_records, merge_notices
from ebbflow.planners.model.capacity import Capacity, Node


class MasterCapacity:
    """A ``CapacitySource`` of the cluster behind ``url``, whatever applications run on it. Safe for several threads.

    A node is a host; the cores and memory of its workers are summed. ``hazard(losses, node_seconds)`` estimates
    losses per node-hour. Raises ``EngineUnavailableError`` when no master of this URL answers.
    """

    def __init__(
        self,
        url: str,
        *,
        hazard: Callable[[int, float], float],
        clock: Clock | None = None,
        timeout: float = 2.0,
    ) -> None:
        found = find_master(url)
        if found is None:
            raise EngineUnavailableError(
                f"no Spark master answers at {url}; check the address, and that its pages are on port 8080"
            )
        self._url, self._ui = found.url, found.ui
        self._hazard, self._clock = hazard, clock or SystemClock()
        self._client = new_client(timeout)
        self._lock = threading.Lock()
        self._last: Capacity | None = None
        self._deadlines = Deadlines()
        self._losses, self._node_seconds = 0, 0.0

    def capacity(self) -> Capacity:
        """Look now; see ``CapacitySource``. What is returned in an outage has the time of the last answer.

        Raises ``EngineUnavailableError``.
        """
        with self._lock:
            try:
                view = get_master(self._client, self._ui)
            except (httpx.HTTPError, ValueError) as error:
                if self._last is None:
                    raise EngineUnavailableError(
                        f"the master at {self._ui} does not answer: {error}"
                    ) from error
                return self._last
            self._last = self._next(view)
            return self._last

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _next(self, view: MasterView) -> Capacity:
        now, last = self._clock.now(), self._last
        state = find_cluster(self._url)
        records, network = host_records(state), state.network if state else 0.0
        nodes = worker_hosts(view, records)
        notices = merge_notices(nodes, states_by_host(view.workers), records, self._deadlines, now)
        if last is None:
            return Capacity(1, nodes, notices, now, self._hazard(0, 0.0), network=network)
        found = Capacity(last.revision, nodes, notices, now, network=network)
        usable = {node.id for node in found.usable}
        self._losses += sum(node.id not in usable for node in last.usable)
        self._node_seconds += len(last.usable) * max(0.0, now - last.at)
        revision = last.revision if found.same_nodes(last) else last.revision + 1
        hazard = self._hazard(self._losses, self._node_seconds)
        return Capacity(revision, nodes, notices, now, hazard, network=network)


def worker_hosts(view: MasterView, records: dict[str, HostRecord]) -> tuple[Node, ...]:
    """Return the hosts whose workers can be used or are leaving, sorted by id."""
    cores: dict[str, int] = {}
    memory: dict[str, int] = {}
    for worker in view.workers:
        killed = worker.host in records and records[worker.host].killed
        if worker.state in ("ALIVE", "DECOMMISSIONED") and not killed:
            cores[worker.host] = cores.get(worker.host, 0) + worker.cores
            memory[worker.host] = memory.get(worker.host, 0) + worker.memory
    found = (
        Node(
            id=records[host].node_id if host in records else host,
            cores=cores[host],
            memory=round(memory[host] / 1024, 3),
            host=host,
        )
        for host in cores
    )
    return tuple(sorted(found, key=lambda node: node.id))
