"""What a running Spark application can count on now, and what is about to leave."""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import httpx

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import EngineLostError, EngineUnavailableError
from ebbflow.infra.spark.cluster.state import ClusterState, find_cluster
from ebbflow.infra.spark.master_api import (
    Application,
    Executor,
    MasterView,
    Worker,
    WorkerState,
    get_executors,
    get_master,
    new_client,
    states_by_host,
)
from ebbflow.infra.spark.settings import ExecutorShape
from ebbflow.planners.model import Capacity, Node, Notice, Resources
from ebbflow.planners.model.capacity import warming

_WARNING = 120.0  # seconds between notice and loss, where only the master tells of a notice (EC2's time)
_FIRST = 60.0  # seconds for the first answer: the driver loads its REST service only when it is asked
_AGAIN = 0.5  # seconds after which a driver that cannot answer yet is asked again
_DROPPED = 10.0  # seconds without executors and unknown to the master after which an application is lost
_ARRIVING = 60.0  # seconds between an application's registration and its query's claim, at most
_OURS = "ebbflow"  # the name of our applications


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


def killed(executors: Iterable[Executor], records: Mapping[str, HostRecord]) -> list[Executor]:
    """Return the executors that the driver counts on although their machine was killed."""
    return [
        e for e in executors if e.active and not e.driver and e.host in records and records[e.host].killed
    ]


def worker_nodes(
    workers: Iterable[Worker],
    records: Mapping[str, HostRecord],
    shape: ExecutorShape,
    others: int = 0,
) -> tuple[Node, ...]:
    """Return the nodes that can carry executors of ``shape``, ours or those of queries that share the cluster.

    A node is a host; its cores and memory (GiB) are those of the executors that fit it. ``others`` are cores
    that strangers' applications hold: the master does not say where, so the busiest workers are taken to
    carry them. Workers that are dead, or were killed, are out.
    """
    by_host: defaultdict[str, int] = defaultdict(int)  # executors
    left = others
    for worker in sorted(workers, key=lambda w: (-w.cores_used, w.host, w.id)):
        gone = worker.state == "DEAD" or (worker.host in records and records[worker.host].killed)
        if gone:
            continue
        taken = min(left, worker.cores_used)
        left -= taken
        fit = shape.fit(worker.cores, worker.memory)
        by_host[worker.host] += max(0, fit - ceil(taken / shape.cores))
    nodes = (
        Node(
            id=records[host].node_id if host in records else host,
            cores=count * shape.cores,
            memory=round(count * shape.usable_memory, 6),
            host=host,
        )
        for host, count in by_host.items()
        if count
    )
    return tuple(sorted(nodes, key=lambda n: n.id))


def strangers(applications: Iterable[Application], ours: Collection[str]) -> int:
    """Return the cores that applications hold which do not share by agreement.

    ``ours`` are the ids of those that do. One of our name that has just registered is about to make its claim.
    """
    return sum(
        a.cores for a in applications if a.id not in ours and not (a.name == _OURS and a.age < _ARRIVING)
    )


def cold_cores(nodes: Iterable[Node], executors: Iterable[Executor]) -> float:
    """Return how many cores of ``nodes`` have executors, if any, that have yet to warm up."""
    warm: defaultdict[str, float] = defaultdict(float)
    for one in executors:
        if one.active and one.cores:
            warm[one.host] += one.cores * (1.0 - warming(one.busy / one.cores))
    return sum(max(node.cores - warm[node.host], 0.0) for node in nodes)


class Deadlines:
    """When hosts will be gone that the master decommissions: it tells no deadlines, so EC2's time is assumed."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}

    def of(self, hosts: Iterable[str], now: float) -> Mapping[str, float]:
        """Return the deadlines of ``hosts``, first seen now or before; a host that is not among them is forgotten."""
        self._known = {host: self._known.get(host, now + _WARNING) for host in hosts}
        return self._known


def merge_notices(
    nodes: Sequence[Node],
    states: Mapping[str, WorkerState],
    records: Mapping[str, HostRecord],
    deadlines: Deadlines,
    now: float,
) -> tuple[Notice, ...]:
    """Return the notices of ``nodes``: those in the state file, and hosts that the master decommissions."""
    told = deadlines.of((host for host, state in states.items() if state == "DECOMMISSIONED"), now)
    notices = []
    for node in nodes:
        record = records.get(node.host)
        if record is not None and record.deadline is not None:
            notices.append(Notice(node.id, record.deadline))
        elif node.host in told:
            notices.append(Notice(node.id, told[node.host]))
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

    With ``shape``, and a master that answers, capacity is the whole cluster's: what all workers carry in
    executors of that shape, less what strangers' applications hold. A share is a part of that; measured by
    the application's own executors, a smaller share would make the capacity smaller and that the next share.

    ``lost`` is called, at each look, with the executors that the driver counts on although their machine was killed,
    ``present`` with all that it tells of. Neither may take long.

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
        shape: ExecutorShape | None = None,
        lost: Callable[[Sequence[Executor]], None] = lambda _: None,
        present: Callable[[Sequence[Executor]], None] = lambda _: None,
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
        self._tell_lost, self._tell_present = lost, present
        self._memory = memory if callable(memory) else lambda _: float(memory)
        self._local = master_url == "local" or master_url.startswith("local[")
        self._clock = clock or SystemClock()
        self._client = client or new_client(timeout)
        self._lock = threading.Lock()
        self._last: Capacity | None = None
        self._shape = shape
        self._master = MasterView("", (), ())
        self._held = 0
        self._allied: frozenset[str] = frozenset()
        self._records: dict[str, HostRecord] = {}
        self._network = 0.0  # MB/s of each node's link, where the cluster is ours and limits them
        self._deadlines = Deadlines()
        self._registered = False  # whether the master has ever listed the application
        self._dropped: float | None = None  # since when it does not, and there are no executors
        self._losses = 0
        self._node_seconds = 0.0

    def ally(self, applications: frozenset[str]) -> None:
        """Say which applications, by id, share the cluster by agreement."""
        self._allied = applications

    @property
    def held(self) -> int:
        """Return the cores of the application's own executors at the last look."""
        return self._held

    @property
    def of_cluster(self) -> bool:
        """Return whether capacity is that of a cluster, whatever executors the application has."""
        return self._shape is not None and bool(self._master.workers)

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

        Raises ``EngineUnavailableError`` when it has never answered, and ``EngineLostError`` when the master no
        longer knows the application and its executors are gone: a driver that was cut off waits for ever.
        """
        with self._lock:
            try:
                executors = self._ask_first() if self._last is None else self._ask()
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

    def _ask(self, timeout: float | None = None) -> list[Executor]:
        return get_executors(self._client, self._ui, self._application, timeout)

    def _ask_first(self) -> list[Executor]:
        """Ask until there is an answer of the REST service: before it is up, something else may answer there."""
        end = self._clock.now() + _FIRST
        while True:
            try:
                return self._ask(max(1.0, end - self._clock.now()))
            except (httpx.HTTPStatusError, ValueError):
                if self._clock.now() + _AGAIN >= end:
                    raise
            self._clock.sleep(_AGAIN)

    def _next(self, executors: list[Executor]) -> Capacity:
        now = self._clock.now()
        states = self._look_at_master()
        slot = None
        if gone := killed(executors, self._records):
            self._tell_lost(gone)
        self._tell_present(executors)
        own = merge_nodes(executors, states, self._records, self._memory)
        self._held = sum(node.cores for node in own)
        self._check_dropped(bool(own), now)
        if self._local:
            nodes = self._driver_as_node(executors)
            self._held = sum(node.cores for node in nodes)
        elif self._shape is not None and self.of_cluster:
            others = strangers(self._master.applications, {self._application, *self._allied})
            nodes = worker_nodes(self._master.workers, self._records, self._shape, others)
            slot = Resources(float(self._shape.cores), self._shape.usable_memory)
        else:
            nodes = own
        notices = merge_notices(nodes, states, self._records, self._deadlines, now)
        last, cold = self._last, cold_cores(nodes, executors)
        leaving = {notice.node_id for notice in notices}
        held = float(sum(n.cores for n in own if n.id not in leaving)) if slot is not None else None
        if last is None:
            hazard = self._hazard(0, 0.0)
            return Capacity(1, nodes, notices, now, hazard, slot, None, self._network, cold, held)
        found = Capacity(last.revision, nodes, notices, now, network=self._network)
        self._node_seconds += len(last.usable) * max(0.0, now - last.at)
        self._losses += self._lost(last, found, states)
        hazard = self._hazard(self._losses, self._node_seconds)
        revision = last.revision if found.same_nodes(last) else last.revision + 1
        return Capacity(revision, nodes, notices, now, hazard, slot, None, self._network, cold, held)

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
            self._network = state.network
        if master_ui := self._master_ui or (state.master_ui if state else ""):
            with contextlib.suppress(httpx.HTTPError, ValueError):
                self._master = get_master(self._client, master_ui)
        return states_by_host(self._master.workers)

    def _check_dropped(self, executors: bool, now: float) -> None:
        """Raise ``EngineLostError`` for an application that no executor will ever be given again."""
        listed = any(one.id == self._application for one in self._master.applications)
        self._registered = self._registered or listed
        if listed or executors or not self._registered:
            self._dropped = None
        elif self._dropped is None:
            self._dropped = now
        elif now - self._dropped >= _DROPPED:
            raise EngineLostError(
                f"Spark's master {self._master_url} has dropped the application {self._application} and ended its "
                "executors: the connection between them was cut; run it again, finished stages are kept"
            )

    @staticmethod
    def _lost(last: Capacity, found: Capacity, states: Mapping[str, WorkerState]) -> int:
        """Count nodes that had been usable and no longer are, unless only their executor ended."""
        noticed = {n.node_id for n in found.notices}
        present = {n.id for n in found.nodes}
        return sum(
            node.id in noticed or (node.id not in present and states.get(node.host) != "ALIVE")
            for node in last.usable
        )
