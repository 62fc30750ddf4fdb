"""A real Spark standalone cluster on this machine, whose workers come and go like spot instances."""

import atexit
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine import cgroups, processes
from ebbflow.infra.spark.cluster import daemons, options, teardown
from ebbflow.infra.spark.cluster.claim import Ports, claim, hold, lay_out, with_other_ports, with_quota
from ebbflow.infra.spark.cluster.guardian import Guardian
from ebbflow.infra.spark.cluster.state import ClusterState, NodeRecord, StateFile, find_cluster, list_clusters
from ebbflow.infra.spark.cluster.status import ClusterStatus, NodeStatus, node_status
from ebbflow.infra.spark.java import JavaInstall, find_java, spark_home
from ebbflow.infra.spark.master_api import Worker, get_workers, new_client, states_by_host
from ebbflow.infra.storage import private
from ebbflow.planners.errors import OptionError

__all__ = ["ClusterStatus", "LocalSparkCluster", "NodeStatus", "find_cluster", "list_clusters"]

_LOOPBACK = "127.0.0.1"
_POLL = 0.1  # seconds between looks at daemons that are starting
_ACKNOWLEDGE = 10.0  # seconds that the master may take to show a notice
_MORE_PORTS = 3  # times that ports are chosen anew
_DECOMMISSION = {
    "spark.decommission.enabled": "true",
    "spark.worker.cleanup.enabled": "true",
}


class LocalSparkCluster:
    """A master on 127.0.0.1 and workers that each stand for a spot node, on loopback addresses of their own.

    A cluster that is not detached ends with the process that started it, however that one ends. Use it as a
    context manager, or call ``stop``. Any process may ``attach`` to it by name.
    """

    def __init__(self, file: StateFile, uid: str, clock: Clock, guardian: Guardian | None = None) -> None:
        self._file = file
        self._uid = uid
        self._clock = clock
        self._guardian = guardian
        self._children: list[subprocess.Popen[bytes]] = []
        self._pid = os.getpid()

    @classmethod
    def start(
        cls,
        name: str = "default",
        *,
        workers: int = 3,
        cores: int = 1,
        memory: str = "2g",
        cpu_limit: bool | None = None,
        cpus: float | None = None,
        directory: Path | str | None = None,
        host: str = "",
        network: float = 0.0,
        detached: bool = False,
        master_port: int | None = None,
        ui_port: int | None = None,
        clock: Clock | None = None,
        timeout: float = 120.0,
    ) -> Self:
        """Start a cluster and wait until all its workers are registered.

        ``cores`` and ``memory`` are of each worker. ``cpu_limit`` holds workers to a fixed CPU share:
        ``None`` where the machine allows, ``True`` or fail, ``False`` not. ``cpus`` is that share, in CPUs
        of this machine for each worker; by default what the machine has for ``workers``. ``directory`` is for
        logs and scratch; by default the state file's, ``$EBBFLOW_HOME/clusters/<name>``. ``host`` is the master's
        address, by default loopback. ``network`` is what each node's link carries, MB/s each way; 0: not limited.

        Raises ``OptionError``; ``EngineUnavailableError`` without Java or Spark; ``ClusterError`` when the
        name or an asked port is taken, or a daemon does not come up within ``timeout`` seconds.
        """
        options.check(name, workers, cores, cpus)
        mebibytes = options.parse_memory(memory)
        java, home = find_java(), spark_home()
        clock = clock or SystemClock()
        file = StateFile.of(name)
        ports = (master_port, ui_port)
        state = lay_out(
            file,
            cores=cores,
            memory=mebibytes,
            directory=directory,
            host=host or _LOOPBACK,
            ports=ports,
            network=network,
        )
        state = with_quota(state, workers, cpu_limit, cpus)
        claim(file, state, clock)
        cluster = cls(file, state.uid, clock, Guardian(file, state.uid))
        atexit.register(cluster._at_exit)
        try:
            cluster._start_master(java, home, timeout, ports)
            cluster._grow([NodeRecord("", "")] * workers, java, home, timeout)
        except BaseException:
            cluster.stop()
            raise
        if detached:
            cluster._detach()
        return cluster

    @classmethod
    def attach(cls, name: str = "default", clock: Clock | None = None) -> Self:
        """Open a cluster that this or another process started. Raises ``ClusterError`` when there is none."""
        options.check(name, 0, 1)
        file = StateFile.of(name)
        state = file.read()
        if state is None:
            running = ", ".join(c.name for c in list_clusters()) or "none"
            raise ClusterError(
                f"there is no local Spark cluster {name!r} (running: {running}); "
                "start one: ebbflow local up --spark 2"
            )
        return cls(file, state.uid, clock or SystemClock())

    # --- what it is ---------------------------------------------------------------------------------------

    @property
    def state(self) -> ClusterState:
        """Return its state file's content. Raises ``ClusterError`` once it is stopped."""
        state = self._file.read()
        if state is None or state.uid != self._uid:
            raise ClusterError(f"cluster {self._file.folder.name!r} has been stopped")
        return state

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def master_url(self) -> str:
        return self.state.master_url

    @property
    def master_ui(self) -> str:
        return self.state.master_ui

    @property
    def properties(self) -> Path:
        """Return the file of Spark's properties that an application needs, the cluster's secret among them."""
        return self._file.properties

    def status(self) -> ClusterStatus:
        """Look at the processes and ask the master. Raises ``ClusterError`` once it is stopped."""
        state = self.state
        self._reap()
        alive = state.alive
        workers = {w.host: w for w in self._workers(state)} if alive else {}
        return ClusterStatus(
            name=state.name,
            master_url=state.master_url,
            master_ui=state.master_ui,
            alive=alive,
            detached=state.owner == 0,
            cap=state.cap,
            directory=state.directory,
            nodes=tuple(node_status(state, record, workers.get(record.host)) for record in state.nodes),
        )

    # --- what can happen to it ----------------------------------------------------------------------------

    def add(
        self,
        timeout: float = 120.0,
        *,
        node_id: str = "",
        host: str = "",
        namespace: str = "",
        memory_group: Path | None = None,
    ) -> str:
        """Start one more worker like the others, wait until it is registered, and return its id.

        It is called ``node_id``, or ``worker-N``, and is at ``host`` in a network namespace, or at a loopback address
        of its own. Its processes are held to the control group ``memory_group``. Raises ``ClusterError``, also for an
        id that was used before.
        """
        if not self.state.alive:
            raise ClusterError(
                f"the master of cluster {self.name!r} does not run; stop the cluster and start it again"
            )
        wanted = NodeRecord(node_id, host, namespace=namespace, memory_group=str(memory_group or ""))
        return self._grow([wanted], find_java(), spark_home(), timeout)[0]

    def notice(self, node_id: str, seconds: float = 120.0) -> float:
        """Give a node notice: Spark decommissions its worker now, and it is killed ``seconds`` from now.

        Returns the deadline, in seconds since the Unix epoch. A later notice moves it. Raises
        ``OptionError``, or ``ClusterError`` when the node is unknown or gone.
        """
        if not seconds >= 0:
            raise OptionError(f"seconds must be >= 0; got {seconds}")
        record = self._living(node_id)
        deadline = self._clock.now() + seconds
        state = self._update(lambda s: s.with_node(node_id, deadline=deadline))
        os.kill(record.pid, signal.SIGPWR)
        self._await(lambda: states_by_host(self._workers(state)).get(record.host) != "ALIVE", _ACKNOWLEDGE)
        return deadline

    def kill(self, node_id: str) -> bool:
        """Take a node away at once: all its processes, executors included, and its disk.

        Returns whether there was anything to kill. Raises ``ClusterError`` for an unknown node.
        """
        was_alive = self._carries(self.state.node(node_id))
        teardown.end_node(self._file, self.state, node_id, self._clock)
        self._reap()
        return was_alive

    def stop(self) -> None:
        """End all processes and remove everything but the logs. May be called twice."""
        atexit.unregister(self._at_exit)
        teardown.tear_down(self._file, self._uid, self._clock)
        self._reap()
        if self._guardian is not None:
            self._guardian.release()
            self._guardian = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- how ----------------------------------------------------------------------------------------------

    def _start_master(self, java: JavaInstall, home: Path, timeout: float, asked: Ports) -> None:
        """Start it; a port that was not asked for and that another has taken meanwhile is chosen anew."""
        for more in range(_MORE_PORTS, -1, -1):
            try:
                self._launch_master(java, home, timeout)
                return
            except ClusterError:
                if not more or None not in asked or not daemons.port_taken(self._log("master")):
                    raise
            self._update(lambda s: with_other_ports(s, asked))

    def _launch_master(self, java: JavaInstall, home: Path, timeout: float) -> None:
        state = self.state
        arguments = ["--host", state.host, "--port", str(state.port), "--webui-port", str(state.ui_port)]
        properties = {
            "spark.port.maxRetries": "0",  # without it, Spark would quietly take the next port
            "spark.deploy.maxExecutorRetries": "-1",  # losing executors is no reason to drop an application
        }
        command = daemons.command(java, home, daemons.MASTER, properties, self._file.properties, arguments)
        self._log("master").unlink(missing_ok=True)
        environment = daemons.environment(java, home, state.host)
        child = processes.spawn(command, environment, state.mark_of("master"), self._log("master"))
        self._children.append(child)
        self._update(lambda s: replace(s, master_pid=child.pid))
        # A worker that finds no master tries again only 5 to 15 s later, so wait for its ports, not its pages.
        self._ready("master", child, lambda: options.listens(child.pid, state.port, state.ui_port), timeout)

    def _grow(self, wanted: Sequence[NodeRecord], java: JavaInstall, home: Path, timeout: float) -> list[str]:
        """Start workers side by side, as ``wanted`` names them, and wait until the master lists them as alive."""
        ids: list[str] = []
        try:
            started = []
            for asked in wanted:
                record = self._reserve(asked)
                ids.append(record.id)
                started.append((record, self._spawn_worker(record, java, home)))
            for record, child in started:
                self._ready(record.id, child, partial(self._registered, record.host), timeout)
                self._settle(record.id)
        except BaseException:
            self._drop(ids)
            raise
        return ids

    def _drop(self, node_ids: Sequence[str]) -> None:
        """Undo the start of nodes."""
        for node_id in node_ids:
            processes.destroy(f"{self._uid}/{node_id}", [], self._clock)
            with contextlib.suppress(ClusterError):  # the cluster may have been stopped under our hands
                teardown.end_node(self._file, self.state, node_id, self._clock)
                self._update(methodcaller("without_node", node_id))

    def _reserve(self, asked: NodeRecord) -> NodeRecord:
        def change(state: ClusterState) -> ClusterState:
            number = state.started + 1
            if asked.id and any(node.id == asked.id for node in state.nodes):
                raise ClusterError(f"cluster {state.name!r} has had a node {asked.id!r} already")
            host = asked.host or options.loopback(number)
            record = replace(asked, id=asked.id or f"worker-{number}", host=host)
            return replace(state, started=number, nodes=(*state.nodes, record))

        return self._update(change).nodes[-1]

    def _spawn_worker(self, record: NodeRecord, java: JavaInstall, home: Path) -> subprocess.Popen[bytes]:
        state = self.state
        disk = teardown.scratch(state, record.id)
        private.make_folder(disk / "local")
        arguments = ["--host", record.host, "--webui-port", "0", "--work-dir", str(disk / "work")]
        arguments += ["--cores", str(state.cores), "--memory", f"{state.memory}m", state.master_url]
        command = daemons.command(java, home, daemons.WORKER, _DECOMMISSION, self._file.properties, arguments)
        environment = daemons.environment(java, home, record.host) | {"SPARK_LOCAL_DIRS": str(disk / "local")}
        self._log(record.id).unlink(missing_ok=True)
        child = processes.spawn(
            command,
            environment,
            state.mark_of(record.id),
            self._log(record.id),
            namespace=record.namespace,
        )
        self._children.append(child)
        self._update(lambda s: s.with_node(record.id, pid=child.pid))
        noted = partial(methodcaller, "with_node", record.id)
        hold(self.state, record.id, child.pid, lambda group: self._update(noted(cgroup=group)))
        return child

    def _settle(self, node_id: str) -> None:
        """Let a node that is registered count, held to its quota."""
        state = self.state
        if state.cpus is not None and (name := state.node(node_id).cgroup):
            group = Path(name)
            cgroups.create(replace(state.controller, folder=group.parent), group.name, state.cpus)
        elif state.cpus is not None:
            self._update(lambda s: replace(s, cap="no CPU cap: the group that limits memory has no CPU"))
        self._update(methodcaller("with_node", node_id, phase="up"))

    def _ready(
        self, node_id: str, child: subprocess.Popen[bytes], reached: Callable[[], bool], timeout: float
    ) -> None:
        self._await(lambda: reached() or child.poll() is not None, timeout)
        if reached():
            return
        log = self._log(node_id)
        ended = child.poll() is not None
        what = f"ended with status {child.returncode}" if ended else f"did not come up in {timeout:g} s"
        raise ClusterError(f"{node_id} {what}; {log} ends:\n{processes.tail(log)}")

    def _await(self, reached: Callable[[], bool], timeout: float) -> bool:
        end = self._clock.now() + timeout
        while not reached():
            if self._clock.now() >= end:
                return False
            self._clock.sleep(_POLL)
        return True

    def _registered(self, host: str) -> bool:
        return states_by_host(self._workers(self.state)).get(host) == "ALIVE"

    def _workers(self, state: ClusterState) -> list[Worker]:
        """Ask the master; nothing when it does not answer."""
        try:
            with new_client(timeout=2.0) as client:
                return get_workers(client, state.master_ui)
        except (httpx.HTTPError, ValueError):
            return []

    def _living(self, node_id: str) -> NodeRecord:
        record = self.state.node(node_id)
        if record.phase != "up" or not self._carries(record):
            raise ClusterError(f"node {node_id} is {'starting' if record.phase == 'starting' else 'gone'}")
        return record

    def _carries(self, record: NodeRecord) -> bool:
        return processes.carries(record.pid, f"{self._uid}/{record.id}")

    def _update(self, change: Callable[[ClusterState], ClusterState]) -> ClusterState:
        return self._file.update(self._uid, change)

    def _log(self, node_id: str) -> Path:
        return Path(self.state.directory) / f"{node_id}.log"

    def _reap(self) -> None:
        self._children = [child for child in self._children if child.poll() is None]

    def _detach(self) -> None:
        self._update(lambda s: replace(s, owner=0))
        atexit.unregister(self._at_exit)
        for child in self._children:
            child.returncode = 0  # Popen warns of children not waited for; these are meant to be left
        self._children = []
        if self._guardian is not None:
            self._guardian.detach()
            self._guardian = None

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:  # not in a forked child, which runs the same handlers
            self.stop()
