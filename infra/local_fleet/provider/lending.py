"""Nodes that lend memory besides: each has a daemon that ends with it, is killed with it, and drains at a notice."""

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet.provider import node_memory
from ebbflow.infra.local_fleet.provider.provider import (
    AggregatorNodeProvider,
    GpuNodeProvider,
    NodeProvider,
    SparkNodeProvider,
    StartedNode,
)
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState, LocalNode
from ebbflow.infra.local_fleet.state.pools import LocalPool, PoolKind
from ebbflow.infra.memory.lending import process
from ebbflow.infra.memory.registry import MemoryRegistry


def lender_name(fleet: str, node: str) -> str:
    """Return what the daemon of a fleet's node is called."""
    return f"{fleet}.{node}"[-64:].lstrip("._-")


def lends(state: LocalFleetState, node: LocalNode) -> bool:
    """Tell whether a node's pool says that it lends memory."""
    pool = state.pool(node.pool)
    return pool is not None and pool.memory_lend > 0


def launch_daemon(state: LocalFleetState, node: LocalNode, folder: Path, clock: Clock) -> None:
    """Start the daemon of a node that is up, and return once clients can find it.

    Args:
        state: of the fleet.
        node: with its host and the process that stands for it, which the daemon follows.
        folder: of the fleet.
        clock: of the wait.

    Raises ``ClusterError``, and ``MemoryTierError`` where it does not start.
    """
    pool, registry, name = state.pool(node.pool), MemoryRegistry(), lender_name(state.name, node.id)
    if pool is None or node.process is None:
        raise ClusterError(f"{node.id} has no machine whose memory could be lent")
    command = process.arguments(
        name,
        host=node.host,
        max_bytes=int(pool.memory_lend * (1 << 30)),
        follow=node.process.pid,
    )
    _, child = process.launch(
        registry,
        command,
        name,
        folder / "logs" / f"{node.id}-memory.log",
        mark=labels.memory_mark(state.uid, node.id),
        namespace="" if state.network is None else state.network.namespace(node.id),
        clock=clock,
    )
    node_memory.hold(state, node.id, [child.pid])  # before it is asked for slabs


class LendingNodeProvider:
    """Nodes of another provider, of which those whose pool says so lend memory.

    A daemon follows the process that stands for its machine, and ends with it even where no supervisor is left.

    Args:
        inner: starts and ends the nodes.
        folder: of the fleet.
        clock: of waits.
    """

    def __init__(self, inner: NodeProvider, folder: Path, clock: Clock) -> None:
        self._inner, self._folder, self._clock = inner, folder, clock

    def start(self, state: LocalFleetState, pool: LocalPool, node: LocalNode) -> StartedNode:
        """See ``NodeProvider``. Raises ``ClusterError``, and ``MemoryTierError`` where the daemon does not start."""
        started = self._inner.start(state, pool, node)
        if pool.memory_lend and started.process is not None:
            here = replace(node, host=started.host, process=started.process)
            launch_daemon(state, here, self._folder, self._clock)
        return started

    def alive(self, state: LocalFleetState, node: LocalNode) -> bool:
        """See ``NodeProvider``: a node lives without its daemon."""
        return self._inner.alive(state, node)

    def deadline(self, state: LocalFleetState, node: LocalNode) -> float | None:
        """See ``NodeProvider``."""
        return self._inner.deadline(state, node)

    def notify(self, state: LocalFleetState, node: LocalNode, deadline: float) -> None:
        """Tell what runs on a node, and drain its daemon: clients leave it at once. Raises ``ClusterError``."""
        if lends(state, node):
            labels.send(labels.memory_mark(state.uid, node.id), signal.SIGTERM)
        self._inner.notify(state, node, deadline)

    def pause(self, state: LocalFleetState, node: LocalNode, still: bool) -> None:
        """See ``NodeProvider``."""
        self._inner.pause(state, node, still)
        if lends(state, node):
            mark = labels.memory_mark(state.uid, node.id)
            labels.send(mark, signal.SIGSTOP if still else signal.SIGCONT)

    def paused(self, node: LocalNode) -> bool:
        """See ``NodeProvider``."""
        return self._inner.paused(node)

    def end(self, state: LocalFleetState, node: LocalNode) -> None:
        """See ``NodeProvider``. Raises ``ClusterError``."""
        self._inner.end(state, node)
        if lends(state, node):
            labels.destroy(labels.memory_mark(state.uid, node.id), self._clock)
            MemoryRegistry().remove(lender_name(state.name, node.id))

    def close(self, state: LocalFleetState) -> None:
        """See ``NodeProvider``; the daemons of the last nodes, which have ended, are no longer announced."""
        self._inner.close(state)
        for node in state.nodes:
            if lends(state, node):
                MemoryRegistry().remove(lender_name(state.name, node.id))


def providers(folder: Path, clock: Clock) -> Mapping[PoolKind, NodeProvider]:
    """Return the node providers of this machine, by kind of pool."""
    found: dict[PoolKind, NodeProvider] = {
        "gpu": GpuNodeProvider(folder, clock),
        "spark": SparkNodeProvider(clock),
        "cpu": AggregatorNodeProvider(folder, clock),
    }
    return {kind: LendingNodeProvider(one, folder, clock) for kind, one in found.items()}
