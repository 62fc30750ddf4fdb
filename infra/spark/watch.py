"""What a running Spark application can count on now, and what is about to leave."""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import httpx

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.spark.master_api import (
    Executor,
    Worker,
    WorkerState,
    get_executors,
    get_workers,
    new_client,
    states_by_host,
)
from ebbflow.infra.spark.state import ClusterState, find_cluster
from ebbflow.planners.model import Capacity, Node, Notice

_WARNING = 120.0  # seconds between notice and loss, where only the master tells of a notice (EC2's time)
_FIRST = 30.0  # seconds for the first answer: the driver loads its REST service only when it is asked


@dataclass(frozen=True, slots=True)
class HostRecord:
    """What the local cluster's state file knows of a host, beyond what Spark tells."""

    node_id: str
    killed: bool = False
    deadline: float | None = None  # seconds since the Unix epoch


def host_records(state: ClusterState | None) -> dict[str, HostRecord]:
    """Return the local cluster's nodes by host; none for a cluster that is not ours."""
    nodes = state.nodes if state else ()
    return {n.host: HostRecord(n.id, n.phase == "killed", n.deadline) for n in nodes}


def merge_nodes(
    executors: Iterable[Executor],
    states: Mapping[str, WorkerState],
    records: Mapping[str, HostRecord],
    memory: Callable[[Executor], float],
) -> tuple[Node, ...]:
    """Return the nodes that have a live executor, sorted by id.

    A node is a host: its executors' cores and memory (GiB) are summed. The driver keeps showing an executor
    for seconds after its machine is gone, so hosts that the master calls dead, or that were killed, are out.
    """
    by_host: defaultdict[str, list[Executor]] = defaultdict(list)
    for executor in executors:
        gone = states.get(executor.host) == "DEAD" or (
            executor.host in records and records[executor.host].killed
        )
        ready = executor.active and executor.max_memory > 0  # it tells its memory a moment after it joins
        if ready and not executor.driver and not gone:
            by_host[executor.host].append(executor)
    nodes = (
        Node(
            id=records[host].node_id if host in records else host,
            cores=sum(e.cores for e in present),
            memory=round(sum(memory(e) for e in present), 6),
            host=host,
        )
        for host, present in by_host.items()
    )
    return tuple(sorted(nodes, key=lambda n: n.id))


def merge_notices(
    nodes: Sequence[Node],
    states: Mapping[str, WorkerState],
    records: Mapping[str, HostRecord],
    default: Callable[[str], float],
) -> tuple[Notice, ...]:
    """Return the notices of ``nodes``: those in the state file, and hosts that the master decommissions.

    The master knows no deadlines; ``default`` gives that of a host.
    """
    notices = []
    for node in nodes:
        record = records.get(node.host)
        if record is not None and record.deadline is not None:
            notices.append(Notice(node.id, record.deadline))
        elif states.get(node.host) == "DECOMMISSIONED":
            notices.append(Notice(node.id, default(node.host)))
    return tuple(notices)


def usable_memory(executor: Executor) -> float:
    """Return what an executor's tasks and cache share, GiB: the memory that Spark manages in its heap."""
    return executor.max_memory / 2**30


class ExecutorWatch:
    """A ``CapacitySource`` that watches one Spark application's executors. Safe for several threads.

    Executors come from the driver's REST API at ``ui`` (``sc.uiWebUrl``). The master, asked too when
    ``master_url`` is a local cluster's or ``master_ui`` is given, tells of deaths earlier and of workers that
    are being decommissioned, which the driver still shows as active; a worker without an executor does not
    count. In local mode the driver is the only node.

    ``memory`` is what an executor offers its tasks, GiB, or how to know it; by default what Spark manages in
    its heap. ``hazard(losses, node_seconds)`` estimates losses per node-hour from what has been seen so far.
    """

    def __init__(
        self,
        ui: str,
        application: str,
        *,
        hazard: Callable[[int, float], float],
        master_url: str = "",
        master_ui: str = "",
        memory: float | Callable[[Executor], float] = usable_memory,
        clock: Clock | None = None,
        timeout: float = 2.0,
        client: httpx.Client | None = None,
    ) -> None:
        self._ui = ui
        self._application = application
        self._hazard = hazard
        self._master_url = master_url
        self._master_ui = master_ui
        self._memory = memory if callable(memory) else lambda _: float(memory)
        self._local = master_url == "local" or master_url.startswith("local[")
        self._clock = clock or SystemClock()
        self._client = client or new_client(timeout)
        self._lock = threading.Lock()
        self._last: Capacity | None = None
        self._workers: list[Worker] = []
        self._records: dict[str, HostRecord] = {}
        self._deadlines: dict[str, float] = {}  # of hosts that only the master tells about
        self._losses = 0
        self._node_seconds = 0.0

    @property
    def losses(self) -> int:
        """Return how many nodes have had a notice or vanished so far."""
        return self._losses

    @property
    def node_seconds(self) -> float:
        """Return for how long nodes have been observed, summed over nodes."""
        return self._node_seconds

    def capacity(self) -> Capacity:
        """Look now. A driver that does not answer for a moment leaves the last known capacity.

        Raises ``EngineUnavailableError`` when it has never answered.
        """
        with self._lock:
            try:
                first = _FIRST if self._last is None else None
                executors = get_executors(self._client, self._ui, self._application, first)
            except (httpx.HTTPError, ValueError) as error:
                if self._last is None:
                    raise EngineUnavailableError(
                        f"Spark application {self._application} does not answer at {self._ui} ({error}); "
                        "check that it runs with spark.ui.enabled=true"
                    ) from error
                return self._last
            self._last = self._next(executors)
            return self._last

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _next(self, executors: list[Executor]) -> Capacity:
        now = self._clock.now()
        states = self._look_at_master()
        if self._local:
            nodes = self._driver_as_node(executors)
        else:
            nodes = merge_nodes(executors, states, self._records, self._memory)
        notices = merge_notices(
            nodes, states, self._records, lambda host: self._deadlines.setdefault(host, now + _WARNING)
        )
        last = self._last
        if last is None:
            return Capacity(1, nodes, notices, now, self._hazard(0, 0.0))
        found = Capacity(last.epoch, nodes, notices, now)
        self._node_seconds += len(last.usable) * max(0.0, now - last.at)
        self._losses += self._lost(last, found, states)
        hazard = self._hazard(self._losses, self._node_seconds)
        epoch = last.epoch if found.same_nodes(last) else last.epoch + 1
        return Capacity(epoch, nodes, notices, now, hazard)

    def _driver_as_node(self, executors: Iterable[Executor]) -> tuple[Node, ...]:
        return tuple(
            Node("local", e.cores, round(self._memory(e), 6), e.host, market="on-demand")
            for e in executors
            if e.driver
        )

    def _look_at_master(self) -> Mapping[str, WorkerState]:
        """Ask the state file and the master; what does not answer keeps its last word."""
        state = find_cluster(self._master_url) if self._master_url.startswith("spark://") else None
        if state is not None:
            self._records = host_records(state)
        if master_ui := self._master_ui or (state.master_ui if state else ""):
            with contextlib.suppress(httpx.HTTPError, ValueError):
                self._workers = get_workers(self._client, master_ui)
        return states_by_host(self._workers)

    @staticmethod
    def _lost(last: Capacity, found: Capacity, states: Mapping[str, WorkerState]) -> int:
        """Count nodes that had been usable and no longer are, unless only their executor ended."""
        noticed = {n.node_id for n in found.notices}
        present = {n.id for n in found.nodes}
        return sum(
            node.id in noticed or (node.id not in present and states.get(node.host) != "ALIVE")
            for node in last.usable
        )
