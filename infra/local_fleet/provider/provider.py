"""Node providers: how nodes of one kind are started, looked at and ended. The supervisor and every handle use them.

Tell the training nodes that launchers run on a machine that it will be gone soon.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.ledger.address import VARIABLE
from ebbflow.infra.local_fleet.provider import network, node_memory
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.clock import shift
from ebbflow.infra.local_fleet.state.fleet_state import Identity, LocalFleetState, LocalNode
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.infra.machine import processes
from ebbflow.infra.storage import private

_MACHINE = "ebbflow.infra.local_fleet.provider.machine"
READY = "ready"  # file in a machine's directory, once it is up
RUNS = "runs"  # directory with one directory for each pool of an app, named by the pool's uid
BY = "owner"  # file in that: "pid ticks" of the launcher's process
_AGGREGATOR = "ebbflow.infra.aggregation.shared_process"
_AGGREGATOR_PID = "aggregator"  # file in a node's directory: "pid ticks" of its aggregator
_DRAINED = "drained"  # the same, once that has ended with nothing on it
_POLL = 0.02  # s between looks at a machine that starts
_START = 60.0  # s that a machine may take


@dataclass(frozen=True, slots=True)
class StartedNode:
    """A node that has come up."""

    host: str
    process: Identity | None  # that stands for the machine


class NodeProvider(Protocol):
    """Nodes of one kind. Safe for several threads; but for ``start`` also for several processes."""

    def start(self, state: LocalFleetState, pool: LocalPool, node: LocalNode) -> StartedNode:
        """Start a node and return once it is up. Raises ``ClusterError``. Only the supervisor does this."""
        ...

    def alive(self, state: LocalFleetState, node: LocalNode) -> bool:
        """Tell whether a node that was up is still there."""
        ...

    def deadline(self, state: LocalFleetState, node: LocalNode) -> float | None:
        """Return when the node will leave by the word of others than the fleet, Unix time in s."""
        ...

    def notify(self, state: LocalFleetState, node: LocalNode, deadline: float) -> None:
        """Tell what runs on a node that it will be ended; may be called again and again. Raises ``ClusterError``."""
        ...

    def pause(self, state: LocalFleetState, node: LocalNode, still: bool) -> None:
        """Stop all processes of a node, or let them continue."""
        ...

    def paused(self, node: LocalNode) -> bool:
        """Tell whether a node stands still."""
        ...

    def end(self, state: LocalFleetState, node: LocalNode) -> None:
        """End a node with all that runs on it; nothing happens when it is gone. Raises ``ClusterError``."""
        ...

    def close(self, state: LocalFleetState) -> None:
        """End what the nodes have in common, once they have gone."""
        ...


class GpuNodeProvider:
    """Nodes with slots for training processes: a process that stands for the machine, and what launchers start."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder, self._clock = folder, clock

    def start(self, state: LocalFleetState, pool: LocalPool, node: LocalNode) -> StartedNode:
        """See ``NodeProvider``. Raises ``ClusterError``."""
        folder = work(self._folder, node.id)
        (folder / READY).unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", _MACHINE, str(self._folder), state.uid, node.id]
        log = self._folder / "logs" / f"{node.id}.log"
        mark = labels.machine_mark(state.uid, node.id)
        namespace = network.connect(state, node)
        node_memory.connect(state, node)
        child = processes.spawn(command, processes.inherited(), mark, log, namespace=namespace)
        node_memory.hold(state, node.id, [child.pid])
        end = self._clock.now() + _START
        while not (folder / READY).exists():
            if child.poll() is not None:
                raise ClusterError(
                    f"the process of {node.id} exited with status {child.returncode}; {processes.tail(log)}"
                )
            if self._clock.now() > end:
                raise ClusterError(f"the process of {node.id} was not up within {_START:g} s; see {log}")
            self._clock.sleep(_POLL)
        return StartedNode(node.host or "127.0.0.1", labels.identity(child.pid))

    def alive(self, state: LocalFleetState, node: LocalNode) -> bool:
        """See ``NodeProvider``."""
        return labels.alive(node.process)

    def deadline(self, state: LocalFleetState, node: LocalNode) -> float | None:
        """Return ``None``: only the fleet ends these."""
        return None

    def notify(self, state: LocalFleetState, node: LocalNode, deadline: float) -> None:
        """Give notice to the training nodes of all launchers there, as an agent on the machine would."""

        notify_launchers(
            state.uid, node.id, deadline + shift(time.time(), self._clock)
        )  # they go by the wall's

    def pause(self, state: LocalFleetState, node: LocalNode, still: bool) -> None:
        """See ``NodeProvider``."""
        labels.send(labels.below(state.uid, node.id), signal.SIGSTOP if still else signal.SIGCONT)

    def paused(self, node: LocalNode) -> bool:
        """See ``NodeProvider``."""
        return node.process is not None and labels.stopped(node.process.pid)

    def end(self, state: LocalFleetState, node: LocalNode) -> None:
        """See ``NodeProvider``."""
        labels.destroy(labels.below(state.uid, node.id), self._clock)

    def close(self, state: LocalFleetState) -> None:
        """Do nothing: the machines have nothing in common."""


class AggregatorNodeProvider(GpuNodeProvider):
    """CPU nodes, each of which serves trainings of a cluster as an aggregator, and is gone when that fails.

    A notice is the capacity loop's to act on, which drains the aggregator by the cluster's ledger.
    """

    def start(self, state: LocalFleetState, pool: LocalPool, node: LocalNode) -> StartedNode:
        """See ``NodeProvider``. Raises ``ClusterError``."""
        started = super().start(state, pool, node)
        folder = work(self._folder, node.id)
        command = [
            sys.executable, "-P", "-m", _AGGREGATOR, aggregator_name(state.name, node.id), pool.aggregation,
            started.host, str(pool.cores), node.id, str(folder / _DRAINED),
        ]  # fmt: skip
        log = self._folder / "logs" / f"{node.id}-aggregator.log"
        child = processes.spawn(
            command,
            processes.inherited(VARIABLE),
            labels.aggregator_mark(state.uid, node.id),
            log,
            namespace="" if state.network is None else state.network.namespace(node.id),
        )
        node_memory.hold(state, node.id, [child.pid])
        found = labels.identity(child.pid)
        if found is None:
            raise ClusterError(f"the aggregator of {node.id} has ended; {processes.tail(log)}")
        private.write_text(folder / _AGGREGATOR_PID, f"{found.pid} {found.ticks}")
        return started

    def alive(self, state: LocalFleetState, node: LocalNode) -> bool:
        """See ``NodeProvider``: a node whose aggregator was drained is there until it is ended."""
        folder = work(self._folder, node.id)
        if not super().alive(state, node):
            return False
        try:
            pid, ticks = map(int, (folder / _AGGREGATOR_PID).read_text().split())
        except (OSError, ValueError):
            return True  # it is being ended
        return labels.alive(Identity(pid, ticks)) or (folder / _DRAINED).exists()

    def notify(self, state: LocalFleetState, node: LocalNode, deadline: float) -> None:
        """Do nothing: the capacity loop sees the notice."""


def aggregator_name(fleet: str, node: str) -> str:
    """Return what the aggregator on a fleet's node is called."""
    return f"{fleet}.{node}"[-64:].lstrip("._-")


class SparkNodeProvider:
    """Workers of a Spark standalone cluster, which starts with the first of them."""

    def __init__(self, clock: Clock, timeout: float = 180.0) -> None:
        self._clock, self._timeout = clock, timeout

    def start(self, state: LocalFleetState, pool: LocalPool, node: LocalNode) -> StartedNode:
        """See ``NodeProvider``; the cluster must be there (``supervisor``)."""
        from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

        assert state.spark is not None
        cluster = LocalSparkCluster.attach(state.spark.name, self._clock)
        namespace = network.connect(state, node)
        memory = node_memory.connect(state, node)
        cluster.add(self._timeout, node_id=node.id, host=node.host, namespace=namespace, memory_group=memory)
        record = cluster.state.node(node.id)
        return StartedNode(record.host, labels.identity(record.pid))

    def alive(self, state: LocalFleetState, node: LocalNode) -> bool:
        """See ``NodeProvider``."""
        return labels.alive(node.process)

    def deadline(self, state: LocalFleetState, node: LocalNode) -> float | None:
        """Return the deadline of a notice that another process gave the worker itself."""
        from ebbflow.infra.spark.cluster.state import StateFile

        if state.spark is None:
            return None
        cluster_state = None
        with contextlib.suppress(ClusterError):
            cluster_state = StateFile.of(state.spark.name).read()
        if cluster_state is None or cluster_state.uid != state.spark.uid:
            return None
        return next((record.deadline for record in cluster_state.nodes if record.id == node.id), None)

    def notify(self, state: LocalFleetState, node: LocalNode, deadline: float) -> None:
        """Let Spark decommission the worker; it is told once."""
        from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

        known = self.deadline(state, node)
        if state.spark is not None and (known is None or abs(known - deadline) > 1.0):
            cluster = LocalSparkCluster.attach(state.spark.name, self._clock)
            cluster.notice(node.id, max(0.0, deadline - self._clock.now()))

    def pause(self, state: LocalFleetState, node: LocalNode, still: bool) -> None:
        """See ``NodeProvider``."""
        if state.spark is not None:
            mark = f"{state.spark.uid}/{node.id}"
            labels.send(mark, signal.SIGSTOP if still else signal.SIGCONT)

    def paused(self, node: LocalNode) -> bool:
        """See ``NodeProvider``."""
        return node.process is not None and labels.stopped(node.process.pid)

    def end(self, state: LocalFleetState, node: LocalNode) -> None:
        """See ``NodeProvider``."""
        from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

        if state.spark is None:
            return
        try:
            cluster = LocalSparkCluster.attach(state.spark.name, self._clock)
            known = {record.id for record in cluster.state.nodes}
        except ClusterError:  # it was stopped, and its nodes with it
            return
        if cluster.state.uid == state.spark.uid and node.id in known:
            cluster.kill(node.id)

    def close(self, state: LocalFleetState) -> None:
        """Stop the cluster."""
        from ebbflow.infra.spark.cluster import teardown
        from ebbflow.infra.spark.cluster.state import StateFile

        if state.spark is not None:
            teardown.tear_down(StateFile.of(state.spark.name), state.spark.uid, self._clock)


def work(folder: Path, node: str) -> Path:
    """Return a node's own scratch directory."""
    return folder / "work" / node


_ENTRY = "EBBFLOW_NODE_ENTRY"  # see ``infra.training.channel.wire``


_NOTICE = "notice"  # see ``infra.training.launcher.node``


def notify_launchers(fleet: str, node: str, deadline: float) -> int:
    """Tell all that are ready for it and have not been told of this deadline; return how many that were.

    One that is still importing would end by the signal: it is told at a later call.
    """
    by_mark: dict[str, dict[int, Mapping[str, str]]] = {}
    for pid, environment in labels.environments(labels.below(fleet, node)):
        if _ENTRY in environment:
            by_mark.setdefault(environment[processes.MARK], {})[pid] = environment
    told = 0
    for found in by_mark.values():
        for pid in labels.leaders(found):
            told += _notify_process(pid, _folder(found[pid]), deadline)
    return told


def _notify_process(pid: int, folder: Path | None, deadline: float) -> bool:
    if folder is None or not folder.is_dir() or not labels.catches(pid, signal.SIGTERM):
        return False
    note = folder / _NOTICE
    with contextlib.suppress(OSError, ProcessLookupError):
        if note.exists() and note.read_text() == repr(deadline):
            return False
        private.write_text(note, repr(deadline))
        os.kill(pid, signal.SIGTERM)
        return True
    return False


def _folder(environment: Mapping[str, str]) -> Path | None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return Path(json.loads(environment[_ENTRY])["folder"])
    return None
